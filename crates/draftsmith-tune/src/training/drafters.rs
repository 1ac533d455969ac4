//! Training of the drafters that read the target's hidden states, and then of their heads. Missing
//! drafters of the same kind are trained together if their settings allow one pass over the data.

use anyhow::{Context, Result, bail};
use draftsmith_data::Provenance;
use draftsmith_recipe::built_data::{built_data, fingerprint};
use draftsmith_recipe::kinds::KindTraining;
use draftsmith_recipe::{DrafterRecipe, Interrupted, Recipe, Workspace, check_known, names_text};
use draftsmith_theory::DrafterId;
use serde_json::json;

use super::export_job::{ExportJob, Exported, KEPT, Planned};
use super::head_trainer::HeadTrainer;
use super::outcomes::{DrafterOutcome, HeadOutcome};
use super::{TrainingStage, TrainingWatch, check_dtype};
use crate::served_states::StatesServer;
use draftsmith_train::{LessonSettings, StatesSource};

/// The command's name in messages.
const COMMAND: &str = "train-drafter";

/// Trains the recipe's missing drafters, or only the drafter `asked`, on one or several devices.
/// For a drafter with a table `head`, also trains an acceptance head in the drafter's directory.
///
/// # Errors
/// If the recipe trains no such drafter, data is missing, training fails, or it is interrupted.
pub fn train_drafters(
    recipe: &Recipe,
    asked: Option<DrafterId>,
    workspace: &Workspace,
    watch: &dyn TrainingWatch,
) -> Result<Vec<DrafterOutcome>> {
    let has_head = |(_, it): &(DrafterId, &DrafterRecipe)| {
        it.kind.path().is_some() && it.head_training().is_some()
    };
    for (id, _) in recipe.drafters.iter().filter(has_head) {
        watch.line(&format!(
            "{COMMAND}: no head is trained for `{id}`, because its `path` names a finished drafter; hint: remove its \
             table `head`, or train the drafter with this recipe"
        ));
    }
    let all = recipe.trained_self_drafts();
    let ids: Vec<DrafterId> = all.iter().map(|(id, _)| *id).collect();
    if let Some(asked) = asked {
        check_known(&ids, asked, "drafter to train")?;
    } else if ids.is_empty() {
        bail!(
            "the recipe trains no drafter; hint: add a table `[drafters.NAME]` with `kind = \"adapter\"` and its \
             `exit_layer`, or with `kind = \"eagle3\"`"
        );
    }
    let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
    let stage = TrainingStage { recipe, workspace, data: &data, watch, command: COMMAND };
    let mut outcomes = Vec::new();
    for pass in stage.passes(asked) {
        outcomes.extend(stage.pass(&pass)?);
    }
    for outcome in &mut outcomes {
        outcome.head = stage.head(outcome.drafter)?;
    }
    outcomes.sort_by_key(|outcome| ids.iter().position(|id| *id == outcome.drafter));
    Ok(outcomes)
}

/// A drafter to train.
struct Trainee<'a> {
    id: DrafterId,
    drafter: &'a DrafterRecipe,
    training: &'a dyn KindTraining,
}

impl Trainee<'_> {
    /// Returns the name of the drafter's kind.
    fn kind(&self) -> &'static str {
        self.drafter.kind.entry().name
    }
}

impl<'a> TrainingStage<'a> {
    /// Groups the requested drafters into passes over the data.
    fn passes(self, asked: Option<DrafterId>) -> Vec<Vec<Trainee<'a>>> {
        let mut passes: Vec<Vec<Trainee<'a>>> = Vec::new();
        for (id, drafter) in self.recipe.drafters.iter() {
            let Some(training) = drafter.kind.training() else { continue };
            if asked.is_some_and(|asked| asked != id) {
                continue;
            }
            let one = Trainee { id, drafter, training };
            let shares = |pass: &&mut Vec<Trainee<'a>>| {
                pass[0].kind() == one.kind() && pass[0].training.pass() == training.pass()
            };
            match passes.iter_mut().find(shares) {
                Some(pass) => pass.push(one),
                None => passes.push(vec![one]),
            }
        }
        passes
    }

    /// Finds the existing drafters of a pass, trains the missing ones together, and returns the
    /// outcomes of all.
    fn pass(self, pass: &[Trainee<'a>]) -> Result<Vec<DrafterOutcome>> {
        let Self { recipe, workspace, watch, .. } = self;
        let models = &workspace.models;
        let num_layers = models.target_shape()?.num_layers;
        let (mut outcomes, mut missing, mut planned) = (Vec::new(), Vec::new(), Vec::new());
        for one in pass {
            let (id, dir) = (one.id, recipe.export_dir(one.id));
            let plan = Planned { id, fingerprint: self.fingerprint(one)?, dir };
            let found = plan.found().and_then(|found| self.outcome(one, found, num_layers).ok());
            match found {
                Some(outcome) => {
                    self.note(&format!("`{}` is there, {KEPT}", plan.dir.display()));
                    outcomes.push(outcome);
                }
                None => {
                    missing.push(one);
                    planned.push(plan);
                }
            }
        }
        let Some(first) = missing.first() else { return Ok(outcomes) };
        let training = first.training;
        let LessonSettings { dtype, optimizer, .. } = training.lessons();
        check_dtype(workspace, first.kind(), dtype)?;
        self.note_idle_devices(first.kind(), &optimizer);
        let target = models.target_of_adapters(dtype)?;
        let names: Vec<String> = missing.iter().map(|one| format!("`{}`", one.id)).collect();
        let together = if names.len() > 1 { ", in one pass" } else { "" };
        let text = first.drafter.kind.entry().export.as_ref().map_or("", |it| it.text);
        self.note(&format!("{} ({text}){together}", names_text(&names)));
        let open = || StatesServer::of_recipe(recipe, workspace, dtype, watch);
        let source = training.is_served().then(open).transpose()?;
        let source = source.as_ref().map(|source| source as &dyn StatesSource);
        let job = ExportJob { source, ..self.job(first)? };
        let all: Vec<&dyn KindTraining> = missing.iter().map(|one| one.training).collect();
        let (rows, seed) = (&self.data.rows, recipe.seed);
        let written = job.run(&planned, |run| training.train(&all, target, rows, seed, run))?;
        if written.interrupted {
            return Err(Interrupted.into());
        }
        for (one, export) in missing.iter().zip(written.exports) {
            outcomes.push(self.outcome(one, export, num_layers)?);
        }
        Ok(outcomes)
    }

    fn outcome(
        self,
        one: &Trainee<'_>,
        export: Exported,
        num_layers: usize,
    ) -> Result<DrafterOutcome> {
        let text = one.training.describe(&export.dir, num_layers, &export.scores)?;
        if let Some(advice) = &text.advice {
            self.note(&format!("`{}`: {advice}", one.id));
        }
        Ok(DrafterOutcome::new((one.id, one.kind()), export, text))
    }

    /// Sets up a training whose state directory is named after the drafter `first`.
    fn job(self, first: &Trainee<'_>) -> Result<ExportJob<'a>> {
        let Self { recipe, workspace, data, .. } = self;
        let dtype = first.training.lessons().dtype.name();
        // States from servers do not depend on the type in which the training computes.
        let from = match &workspace.models.served_as {
            Some(name) if first.training.is_served() => format!("served as {name}"),
            _ => dtype.to_owned(),
        };
        Ok(ExportJob {
            stage: self,
            provenance: &data.provenance,
            training_dir: recipe.checkpoint_dir().join(format!("{}-training", first.id)),
            shown: first.training.shown(),
            feature_name: "target".to_owned(),
            feature_models: format!("{} {from}", workspace.models.target_hash()?),
            source: None,
        })
    }

    /// Finds or trains the acceptance head of a drafter; `None` if the recipe trains no head for
    /// it.
    fn head(self, id: DrafterId) -> Result<Option<HeadOutcome>> {
        let Self { recipe, workspace, data, .. } = self;
        let drafter = recipe.drafters.get(id).context("the recipe has the drafter")?;
        let Some(settings) = drafter.head_training() else { return Ok(None) };
        self.note(&format!("an acceptance head for `{id}`"));
        check_dtype(workspace, "head", settings.dtype)?;
        self.note_idle_devices("head", &settings.optimizer);
        let hash = drafter.kind.weights_hash(&recipe.loading(id, workspace))?;
        // The labels come from rollouts of this drafter, not from the draft model of the data.
        let provenance = Provenance { draft: Some(hash), ..data.provenance.clone() };
        let trainer = HeadTrainer { stage: self, id, is_swept: false, provenance };
        let Some(head) = trainer.pass(std::slice::from_ref(settings))?.pop() else {
            return Ok(None);
        };
        let mut outcome = HeadOutcome::of(head, None)?;
        // Servers would give the states for the comparison again, and may be off by now.
        if !outcome.kept || recipe.states_server().is_none() {
            outcome.over_online = trainer.over_online(settings, &outcome.head_dir)?;
        }
        Ok(Some(outcome))
    }

    /// Hashes everything that a drafter's training depends on. It does not depend on other drafters
    /// in the same pass.
    fn fingerprint(self, one: &Trainee<'_>) -> Result<String> {
        let Self { recipe, workspace, data, .. } = self;
        let mut settings = json!({ (one.kind()): one.training.settings(), "seed": recipe.seed });
        if data.provenance.served_model.is_some() {
            // Data from servers records only the target's name, so the hash of its weights is
            // added.
            settings["layers"] = json!(workspace.models.target_hash()?);
        }
        fingerprint(settings, data, &data.provenance)
    }
}
