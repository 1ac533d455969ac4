//! `train-adapter`: trains self-draft adapters on built data, one for each exit layer, into
//! `checkpoints/<recipe>/adapter/`. Missing adapters are trained together. With `[adapter_head]`, each then
//! gets an acceptance head in its directory `head/`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_data::{DataSet, Provenance};
use draftsmith_model::{AdapterArchitecture, AdapterConfig};
use draftsmith_train::{AdapterScores, AdapterTraining, ExitLayers, Section, train_adapters};
use serde::Serialize;
use serde_json::json;

use crate::built_data::{built_data, fingerprint};
use crate::console::{Console, Interrupted};
use crate::devices::check_devices;
use crate::exports::adapter_head_dir;
use crate::recipe::Recipe;
use crate::training::export_job::{ExportJob, Exported, KEPT, Planned};
use crate::training::head_outcome::HeadOutcome;
use crate::training::heads::HeadTrainer;
use crate::workspace::Workspace;

const COMMAND: &str = "train-adapter";

/// An adapter in the document of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct AdapterOutcome {
    pub(crate) adapter_dir: PathBuf,
    /// The number of the target's layers that run before it.
    pub(crate) exit_layer: usize,
    pub(crate) architecture: AdapterArchitecture,
    pub(crate) num_parameters: usize,
    /// The size of the draft vocabulary; null if it has all tokens.
    pub(crate) draft_vocabulary: Option<usize>,
    /// The share of the validation rows' response tokens in the draft vocabulary.
    pub(crate) vocabulary_coverage: Option<f64>,
    /// Whether the adapter existed, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: AdapterScores,
    /// Supervised tokens per second of its training; null if it was kept.
    pub(crate) tokens_per_second: Option<f64>,
    /// Its acceptance head; null if the recipe has none.
    pub(crate) head: Option<HeadOutcome>,
}

/// Runs the stage on one device or several.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<AdapterOutcome>> {
    let settings = recipe
        .adapter
        .as_ref()
        .context("the recipe has no section `[adapter]`: it says how adapters are trained")?;
    let (section, optimizer) = (Section::Adapter, &settings.optimizer);
    check_devices(console, COMMAND, section, &workspace.devices, settings.dtype, optimizer)?;
    let data = built_data(recipe, workspace, workspace.target_shape()?.vocab_size)?;
    let stage = Stage { recipe, settings, workspace, data: &data, console };
    let mut outcomes = stage.adapters()?;
    if recipe.adapter_head.is_some() {
        for outcome in &mut outcomes {
            console.note(format!(
                "{COMMAND}: an acceptance head for the adapter behind layer {}",
                outcome.exit_layer
            ));
            outcome.head = stage.head(&outcome.adapter_dir)?;
        }
    }
    outcomes.iter().try_for_each(|outcome| outcome.tell(console))?;
    console.document(&outcomes)?;
    Ok(outcomes)
}

struct Stage<'a> {
    recipe: &'a Recipe,
    settings: &'a AdapterTraining,
    workspace: &'a Workspace,
    data: &'a DataSet,
    console: &'a Console,
}

impl Stage<'_> {
    /// The adapters of all exit layers. Missing ones are trained side by side, in one pass of the target over
    /// the data.
    fn adapters(&self) -> Result<Vec<AdapterOutcome>> {
        let mut outcomes = Vec::new();
        let (mut exit_layers, mut missing) = (Vec::new(), Vec::new());
        for (exit_layer, dir) in self.recipe.adapter_dirs() {
            let planned = Planned { fingerprint: self.fingerprint(exit_layer)?, dir };
            let Some(found) = planned.found(AdapterConfig::from_dir) else {
                exit_layers.push(exit_layer);
                missing.push(planned);
                continue;
            };
            self.console.note(format!("{COMMAND}: `{}` is there, {KEPT}", planned.dir.display()));
            outcomes.push(AdapterOutcome::of(found));
        }
        outcomes.extend(self.train(&missing, exit_layers)?);
        let dirs = self.recipe.adapter_dirs();
        outcomes.sort_by_key(|outcome| dirs.iter().position(|(n, _)| *n == outcome.exit_layer));
        Ok(outcomes)
    }

    fn train(&self, missing: &[Planned], exit_layers: Vec<usize>) -> Result<Vec<AdapterOutcome>> {
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        let settings = self.settings;
        let target = self.workspace.target_of_adapters(settings.dtype)?;
        self.console.note(format!("{COMMAND}: {}", behind(&exit_layers)));
        let job = ExportJob {
            recipe: self.recipe,
            workspace: self.workspace,
            console: self.console,
            command: COMMAND,
            data: self.data,
            provenance: &self.data.provenance,
            training_dir: self.recipe.adapter_root().with_file_name("adapter-training"),
            num_epochs: settings.optimizer.num_epochs,
            shown: &["cross-entropy", "agreement", "overlap"],
            feature_name: "target".to_owned(),
            feature_models: format!("{} {}", self.workspace.target_hash()?, settings.dtype.name()),
        };
        let settings =
            AdapterTraining { exit_layer: ExitLayers::Many(exit_layers), ..settings.clone() };
        let written = job.run(missing, |run| {
            train_adapters(target, &self.data.rows, &settings, self.recipe.seed, run)
        })?;
        if written.interrupted {
            return Err(Interrupted.into());
        }
        Ok(written.exports.into_iter().map(AdapterOutcome::of).collect())
    }

    /// The hash of everything that an adapter depends on: its settings, the seed, and its data.
    fn fingerprint(&self, exit_layer: usize) -> Result<String> {
        let mut settings = serde_json::to_value(self.settings)?;
        // An adapter does not depend on those that are trained beside it.
        settings["exit_layer"] = json!(exit_layer);
        let mut settings = json!({ "adapter": settings, "seed": self.recipe.seed });
        if self.data.provenance.served_model.is_some() {
            // Served data have only the name of the target.
            settings["layers"] = json!(self.workspace.target_hash()?);
        }
        fingerprint(settings, self.data, &self.data.provenance)
    }

    /// The head of the adapter in `dir`, if the recipe's `[adapter_head]` asks for one.
    fn head(&self, dir: &Path) -> Result<Option<HeadOutcome>> {
        let Self { recipe, workspace, data, console, .. } = *self;
        let Some(settings) = &recipe.adapter_head else { return Ok(None) };
        let (section, optimizer) = (Section::AdapterHead, &settings.optimizer);
        check_devices(console, COMMAND, section, &workspace.devices, settings.dtype, optimizer)?;
        let config = AdapterConfig::from_dir(dir)?;
        let states = recipe.adapter_root().with_file_name("adapter-head-training");
        let trainer = HeadTrainer {
            recipe,
            workspace,
            command: COMMAND,
            adapter: Some((dir, config.exit_layer)),
            head_dir: adapter_head_dir(dir),
            training_dir: states.join(format!("exit-{}", config.exit_layer)),
            is_swept: false,
            data,
            // Labels come from rollouts of the adapter, not of the data's draft.
            provenance: Provenance {
                draft: Some(workspace.adapter_hash(dir, &config)?),
                ..data.provenance.clone()
            },
            console,
        };
        let head = trainer.pass(std::slice::from_ref(settings))?.pop();
        Ok(head.map(|head| HeadOutcome::of(head, None)))
    }
}

impl AdapterOutcome {
    fn of(adapter: Exported<AdapterConfig, AdapterScores>) -> Self {
        Self {
            adapter_dir: adapter.dir,
            exit_layer: adapter.config.exit_layer,
            architecture: adapter.config.architecture,
            num_parameters: adapter.config.num_parameters(),
            draft_vocabulary: adapter.config.draft_vocabulary.as_ref().map(|all| all.ids().len()),
            vocabulary_coverage: adapter.config.vocabulary_coverage(),
            kept: adapter.speed.is_none(),
            scores: adapter.scores,
            tokens_per_second: adapter.speed.map(|speed| speed.supervised_per_second),
            head: None,
        }
    }

    /// Prints its scores and those of its head.
    fn tell(&self, console: &Console) -> Result<()> {
        let scores = &self.scores;
        let vocabulary = match (self.draft_vocabulary, self.vocabulary_coverage) {
            (Some(size), Some(coverage)) => format!(
                ", drafting {size} tokens: {:.1} % of the validation responses', to which the scores \
                 are limited",
                coverage * 100.0
            ),
            _ => String::new(),
        };
        console.text(format!(
            "adapter behind layer {}: {}\n{}, {} parameters{vocabulary}\nvalidation over {} tokens: \
             cross-entropy {:.4} (the target's own {:.4}), agreement {:.4}, overlap {:.4}\n",
            self.exit_layer,
            self.adapter_dir.display(),
            self.architecture,
            self.num_parameters,
            scores.num_tokens,
            scores.cross_entropy,
            scores.target_entropy,
            scores.agreement,
            scores.overlap,
        ))?;
        self.head.as_ref().map_or(Ok(()), |head| head.print(console))
    }
}

/// `behind layer 2`, or `behind layers 1 and 3, in one pass`.
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
