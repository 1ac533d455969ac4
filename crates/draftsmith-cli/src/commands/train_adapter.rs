//! `train-adapter`: trains self-draft adapters and EAGLE-3 drafters on built data, into
//! `checkpoints/<recipe>/<drafter>/`. Missing ones whose settings let them share a pass are trained together. One with
//! a table `head` then gets an acceptance head in its directory `head/`.

mod eagle3;

use anyhow::{Context, Result, bail};
use draftsmith_data::{DataSet, Provenance};
use draftsmith_model::{AdapterConfig, WeightDtype};
use draftsmith_theory::DrafterId;
use draftsmith_train::{AdapterTraining, Eagle3Training, ExitLayers, Section, train_adapters};
use serde::Serialize;
use serde_json::json;

use crate::console::Console;
use crate::devices::check_devices;
use crate::training::adapter_outcome::AdapterOutcome;
use crate::training::eagle3_outcome::Eagle3Outcome;
use crate::training::export_job::{ExportJob, KEPT, Planned};
use crate::training::head_outcome::HeadOutcome;
use crate::training::heads::HeadTrainer;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::built_data::{built_data, fingerprint};
use draftsmith_recipe::kinds::adapter::exit_layer;
use draftsmith_recipe::kinds::loaded::check_known;
use draftsmith_recipe::watch::Interrupted;
use draftsmith_recipe::workspace::Workspace;

const COMMAND: &str = "train-adapter";

/// What was trained, in the document of `--json`.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    Adapter(AdapterOutcome),
    Eagle3(Eagle3Outcome),
}

impl Outcome {
    fn drafter(&self) -> DrafterId {
        match self {
            Self::Adapter(outcome) => outcome.drafter,
            Self::Eagle3(outcome) => outcome.drafter,
        }
    }

    fn print(&self, console: &Console) -> Result<()> {
        match self {
            Self::Adapter(outcome) => outcome.print(console),
            Self::Eagle3(outcome) => outcome.print(console),
        }
    }
}

/// Runs the stage on one device or several.
pub(crate) fn run(
    recipe: &Recipe,
    asked: Option<DrafterId>,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<Outcome>> {
    let ids = recipe.trained_self_drafts().into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    if let Some(asked) = asked {
        check_known(&ids, asked, "adapter to train")?;
    } else if ids.is_empty() {
        bail!(
            "the recipe trains no adapter; hint: add a table `[drafters.NAME]` with `kind = \"adapter\"` and its \
             `exit_layer`, or with `kind = \"eagle3\"`"
        );
    }
    let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
    let inputs = Inputs { recipe, workspace, data: &data, console };
    let mut outcomes = Vec::new();
    let is_asked = |id| asked.is_none_or(|asked| asked == id);
    for pass in passes(recipe.trained_adapters(), is_asked, share_pass) {
        let settings = pass[0].1;
        let (section, optimizer) = (Section::Adapter, &settings.optimizer);
        check_devices(console, COMMAND, section, &workspace.models, settings.dtype, optimizer)?;
        let ids: Vec<DrafterId> = pass.iter().map(|(id, _)| *id).collect();
        let stage = TrainingStage { inputs, settings };
        outcomes.extend(stage.adapters(&ids)?);
    }
    for outcome in &mut outcomes {
        outcome.head = inputs.head(outcome.drafter)?;
    }
    let mut outcomes: Vec<Outcome> = outcomes.into_iter().map(Outcome::Adapter).collect();
    for pass in passes(recipe.trained_eagle3(), is_asked, Eagle3Training::shares_pass_with) {
        for mut trained in eagle3::train(inputs, &pass)? {
            trained.head = inputs.head(trained.drafter)?;
            outcomes.push(Outcome::Eagle3(trained));
        }
    }
    outcomes.sort_by_key(|outcome| ids.iter().position(|id| *id == outcome.drafter()));
    outcomes.iter().try_for_each(|outcome| outcome.print(console))?;
    console.document(&outcomes)?;
    Ok(outcomes)
}

/// Drafters that are trained, and their settings.
type Trained<'a, T> = Vec<(DrafterId, &'a T)>;

/// Groups those of `trained` that are asked for into passes over the data.
fn passes<'a, T>(
    trained: Trained<'a, T>,
    is_asked: impl Fn(DrafterId) -> bool,
    share_pass: impl Fn(&T, &T) -> bool,
) -> Vec<Trained<'a, T>> {
    let mut passes: Vec<Trained<'a, T>> = Vec::new();
    for (id, settings) in trained.into_iter().filter(|(id, _)| is_asked(*id)) {
        match passes.iter_mut().find(|pass| share_pass(pass[0].1, settings)) {
            Some(pass) => pass.push((id, settings)),
            None => passes.push(vec![(id, settings)]),
        }
    }
    passes
}

/// Returns whether two adapters' settings differ at most in the exit layer.
fn share_pass(one: &AdapterTraining, other: &AdapterTraining) -> bool {
    AdapterTraining { exit_layer: other.exit_layer.clone(), ..one.clone() } == *other
}

/// What all self-drafts are trained from.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    recipe: &'a Recipe,
    workspace: &'a Workspace,
    data: &'a DataSet,
    console: &'a Console,
}

impl<'a> Inputs<'a> {
    /// Sets up a training, whose state has the name of the drafter `first`.
    fn job(
        self,
        first: DrafterId,
        dtype: WeightDtype,
        shown: &'static [&'static str],
    ) -> Result<ExportJob<'a>> {
        let Self { recipe, workspace, data, console } = self;
        Ok(ExportJob {
            recipe,
            workspace,
            console,
            command: COMMAND,
            data,
            provenance: &data.provenance,
            training_dir: recipe.checkpoint_dir().join(format!("{first}-training")),
            shown,
            feature_name: "target".to_owned(),
            feature_models: format!("{} {}", workspace.models.target_hash()?, dtype.name()),
        })
    }

    /// Finds or trains the acceptance head of a self-draft. `None` if the recipe trains none.
    fn head(self, id: DrafterId) -> Result<Option<HeadOutcome>> {
        let Inputs { recipe, workspace, data, console } = self;
        let drafter = recipe.drafters.get(id).context("the recipe has the drafter")?;
        let Some(settings) = drafter.head_training() else { return Ok(None) };
        console.note(format!("{COMMAND}: an acceptance head for `{id}`"));
        let (section, optimizer) = (Section::AdapterHead, &settings.optimizer);
        check_devices(console, COMMAND, section, &workspace.models, settings.dtype, optimizer)?;
        let hash = drafter.kind.weights_hash(&recipe.loading(id, workspace))?;
        let trainer = HeadTrainer {
            recipe,
            workspace,
            command: COMMAND,
            id,
            training_dir: recipe.head_training_dir(id),
            is_swept: false,
            data,
            // Labels come from rollouts of the self-draft, not of the data's draft.
            provenance: Provenance { draft: Some(hash), ..data.provenance.clone() },
            console,
        };
        let Some(head) = trainer.pass(std::slice::from_ref(settings))?.pop() else {
            return Ok(None);
        };
        let mut outcome = HeadOutcome::of(head, None);
        outcome.over_online = trainer.over_online(settings, &outcome.head_dir)?;
        Ok(Some(outcome))
    }

    /// Hashes everything that the training of a self-draft of this kind depends on.
    fn fingerprint(self, kind: &str, settings: impl Serialize) -> Result<String> {
        let Self { recipe, workspace, data, .. } = self;
        let mut settings = json!({ (kind): settings, "seed": recipe.seed });
        if data.provenance.served_model.is_some() {
            // Served data have only the name of the target.
            settings["layers"] = json!(workspace.models.target_hash()?);
        }
        fingerprint(settings, data, &data.provenance)
    }
}

/// What adapters with equal settings are trained from.
struct TrainingStage<'a> {
    inputs: Inputs<'a>,
    settings: &'a AdapterTraining,
}

impl TrainingStage<'_> {
    /// Finds the adapters that exist, trains the missing ones, and returns the outcomes of all.
    fn adapters(&self, ids: &[DrafterId]) -> Result<Vec<AdapterOutcome>> {
        let Inputs { recipe, console, .. } = self.inputs;
        let mut outcomes = Vec::new();
        let (mut exit_layers, mut missing) = (Vec::new(), Vec::new());
        for id in ids {
            let training = recipe.drafters.get(*id).and_then(|it| it.kind.adapter());
            let exit_layer = exit_layer(training.context("it is trained")?);
            let (id, dir) = (*id, recipe.export_dir(*id));
            let planned = Planned { id, fingerprint: self.fingerprint(exit_layer)?, dir };
            let Some(found) = planned.found(AdapterConfig::from_dir) else {
                exit_layers.push(exit_layer);
                missing.push(planned);
                continue;
            };
            console.note(format!("{COMMAND}: `{}` is there, {KEPT}", planned.dir.display()));
            outcomes.push(AdapterOutcome::of(id, found));
        }
        outcomes.extend(self.train(&missing, exit_layers)?);
        Ok(outcomes)
    }

    /// Trains adapters behind these layers, in one pass over the data.
    fn train(&self, missing: &[Planned], exit_layers: Vec<usize>) -> Result<Vec<AdapterOutcome>> {
        let Some(first) = missing.first() else { return Ok(Vec::new()) };
        let settings = self.settings;
        let Inputs { recipe, workspace, data, console } = self.inputs;
        let target = workspace.models.target_of_adapters(settings.dtype)?;
        console.note(format!("{COMMAND}: {}", behind(&exit_layers)));
        let shown = &["cross-entropy", "agreement", "overlap"];
        let job = self.inputs.job(first.id, settings.dtype, shown)?;
        let settings =
            AdapterTraining { exit_layer: ExitLayers::Many(exit_layers), ..settings.clone() };
        let written = job
            .run(missing, |run| train_adapters(target, &data.rows, &settings, recipe.seed, run))?;
        if written.interrupted {
            return Err(Interrupted.into());
        }
        let outcomes = missing.iter().zip(written.exports);
        Ok(outcomes.map(|(planned, export)| AdapterOutcome::of(planned.id, export)).collect())
    }

    /// Hashes everything that an adapter's training depends on. Adapters trained in the same pass are not part of
    /// it.
    fn fingerprint(&self, exit_layer: usize) -> Result<String> {
        let mut settings = serde_json::to_value(self.settings)?;
        // An adapter does not depend on those that are trained beside it.
        settings["exit_layer"] = json!(exit_layer);
        self.inputs.fingerprint("adapter", settings)
    }
}

/// Names the exit layers: `behind layer 2`, or `behind layers 1 and 3, in one pass`.
fn behind(exit_layers: &[usize]) -> String {
    let names: Vec<String> = exit_layers.iter().map(ToString::to_string).collect();
    match names.as_slice() {
        [only] => format!("behind layer {only}"),
        [before @ .., last] => {
            format!("behind layers {} and {last}, in one pass", before.join(", "))
        }
        [] => String::new(),
    }
}
