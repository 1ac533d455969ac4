//! `train-adapter`: self-draft adapters from built data, into `checkpoints/<recipe>/adapter/`, one
//! for each exit layer; those that are missing are trained together. With `[adapter_head]`, then an
//! acceptance head for each, one after another, into the directory `head/` of the adapter.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_data::{Provenance, ResponseRow, hash_bytes};
use draftsmith_files::write_whole;
use draftsmith_model::{AdapterArchitecture, AdapterConfig};
use draftsmith_train::{
    AdapterScores, AdapterTraining, ExitLayers, Section, Stint, TrainedAdapter, train_adapters,
};
use serde::Serialize;
use serde_json::json;

use crate::built_data::built_rows;
use crate::commands::train_head;
use crate::commands::training::{EpochProgress, Resumable, StepsLeft};
use crate::console::{Console, Interrupted};
use crate::device::require_dtype;
use crate::devices::note_idle_devices;
use crate::exports::found_adapter_head;
use crate::recipe::Recipe;
use crate::workspace::Workspace;

/// What was trained, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct Trained {
    /// The adapter's directory.
    pub(crate) adapter_dir: PathBuf,
    /// The target's layers that run before it.
    pub(crate) exit_layer: usize,
    /// What it is made of.
    pub(crate) architecture: AdapterArchitecture,
    /// Its parameters.
    pub(crate) num_parameters: usize,
    /// Whether it was there already, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: AdapterScores,
    /// Supervised tokens a second while it was trained; null where it was kept.
    pub(crate) tokens_per_second: Option<f64>,
    /// Its acceptance head; null where the recipe has none.
    pub(crate) head: Option<train_head::Trained>,
}

/// Runs the stage on one device or several.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    steps_left: &mut StepsLeft,
    console: &Console,
) -> Result<Vec<Trained>> {
    let devices = workspace.devices();
    let training = recipe
        .adapter
        .as_ref()
        .context("the recipe has no section `[adapter]`: it says how adapters are trained")?;
    let section = Section::Adapter;
    devices.iter().try_for_each(|device| require_dtype(device, section, training.dtype))?;
    let num_batches = training.optimizer.gradient_accumulation;
    note_idle_devices(console, "train-adapter", section, devices, num_batches);
    let (rows, provenance) = built_rows(recipe)?;
    let target_dir = &recipe.models.target;
    let target_hash = workspace.target_hash()?;
    if provenance.target != target_hash {
        bail!(
            "the data in `{}` was built with another target (hash {}) than `{}` (hash \
             {target_hash}): build it again",
            recipe.data_dir().display(),
            provenance.target,
            target_dir.display()
        );
    }
    let dirs = recipe.adapter_dirs();
    let mut kept = Vec::new();
    let mut missing = Vec::new();
    for (exit_layer, adapter_dir) in dirs.clone() {
        let fingerprint = fingerprint(training, exit_layer, recipe.seed, &provenance)?;
        match finished(&adapter_dir, &fingerprint) {
            Some((config, scores)) => {
                console.note(format!(
                    "train-adapter: `{}` is there, trained with these settings on this data",
                    adapter_dir.display()
                ));
                kept.push(Trained {
                    adapter_dir,
                    exit_layer,
                    architecture: config.architecture,
                    num_parameters: config.num_parameters(),
                    kept: true,
                    scores,
                    tokens_per_second: None,
                    head: None,
                });
            }
            None => missing.push(Missing { exit_layer, adapter_dir, fingerprint }),
        }
    }
    let mut all = kept;
    if !missing.is_empty() {
        let pass = Pass { recipe, training, workspace, rows: &rows, provenance: &provenance };
        all.extend(pass.train(&missing, steps_left, console)?);
    }
    all.sort_by_key(|trained| dirs.iter().position(|(layer, _)| *layer == trained.exit_layer));
    if let Some(settings) = &recipe.adapter_head {
        for trained in &mut all {
            let (dir, data) = (&trained.adapter_dir, (rows.as_slice(), &provenance));
            console.note(format!(
                "train-adapter: an acceptance head for the adapter behind layer {}",
                trained.exit_layer
            ));
            let head = train_head::of_adapter(
                recipe, settings, dir, data, workspace, steps_left, console,
            )?;
            trained.head = Some(head);
        }
    }
    all.iter().try_for_each(|trained| tell(trained, console))?;
    console.document(&all)?;
    Ok(all)
}

/// An adapter that is to be trained.
struct Missing {
    exit_layer: usize,
    adapter_dir: PathBuf,
    fingerprint: String,
}

/// Adapters that are trained side by side, of one pass of the target over the data.
struct Pass<'a> {
    recipe: &'a Recipe,
    training: &'a AdapterTraining,
    workspace: &'a Workspace,
    rows: &'a [ResponseRow],
    provenance: &'a Provenance,
}

impl Pass<'_> {
    fn train(
        &self,
        missing: &[Missing],
        steps_left: &mut StepsLeft,
        console: &Console,
    ) -> Result<Vec<Trained>> {
        let exit_layers: Vec<usize> = missing.iter().map(|adapter| adapter.exit_layer).collect();
        console.note(format!("train-adapter: {}", behind(&exit_layers)));
        let checkpoint_dir = self.recipe.adapter_root().with_file_name("adapter-training");
        let fingerprints: Vec<&str> =
            missing.iter().map(|adapter| adapter.fingerprint.as_str()).collect();
        let fingerprint = fingerprints.join("\n");
        let resumable =
            Resumable::find(console, "train-adapter", checkpoint_dir, &fingerprint, self.rows)?;
        let num_epochs = self.training.optimizer.num_epochs;
        let told = &["cross-entropy", "agreement", "overlap"];
        let progress = EpochProgress::new(console, "train-adapter", told, num_epochs);
        let training =
            AdapterTraining { exit_layer: ExitLayers::Many(exit_layers), ..self.training.clone() };
        let data = (self.rows, self.provenance);
        let target = self.workspace.target_in(self.training.dtype)?;
        let trained = resumable.train(steps_left, progress, data, |stint| {
            let stint = Stint { more_devices: self.workspace.devices()[1..].to_vec(), ..stint };
            train_adapters(target, self.rows, &training, self.recipe.seed, stint)
        })?;
        let Some(trained) = trained else {
            return Err(Interrupted.into());
        };
        let is_interrupted = trained.iter().any(|adapter| adapter.interrupted);
        let written = missing.iter().zip(trained);
        let written =
            written.map(|(missing, trained)| self.write(missing, trained, is_interrupted));
        let written = written.collect::<Result<Vec<_>>>()?;
        if is_interrupted {
            return Err(Interrupted.into());
        }
        resumable.discard()?;
        Ok(written)
    }

    /// Writes an adapter. Of an interrupted pass, none is taken for a finished one, though it may
    /// have come to its own end: the pass is gone on with as a whole.
    fn write(
        &self,
        missing: &Missing,
        mut trained: TrainedAdapter,
        is_interrupted: bool,
    ) -> Result<Trained> {
        let Missing { exit_layer, adapter_dir, fingerprint } = missing;
        trained.config.target_hash = Some(self.provenance.target.clone());
        if !is_interrupted {
            trained.config.training.insert("fingerprint".to_owned(), json!(fingerprint));
        }
        self.workspace.forget(adapter_dir);
        remove_head(adapter_dir)?;
        trained.adapter.write_dir(adapter_dir, &trained.config)?;
        self.recipe.write_beside(adapter_dir)?;
        write_whole(
            &adapter_dir.join("scores.json"),
            format!("{}\n", serde_json::to_string_pretty(&trained.scores)?),
        )?;
        Ok(Trained {
            adapter_dir: adapter_dir.clone(),
            exit_layer: *exit_layer,
            architecture: trained.config.architecture,
            num_parameters: trained.config.num_parameters(),
            kept: false,
            tokens_per_second: Some(trained.tokens_per_second()),
            head: None,
            scores: trained.scores,
        })
    }
}

/// Removes the head of the adapter that was in `dir`: it knows nothing of the one that is to come.
fn remove_head(dir: &Path) -> Result<()> {
    let Some(head_dir) = found_adapter_head(dir) else { return Ok(()) };
    std::fs::remove_dir_all(&head_dir)
        .with_context(|| format!("cannot remove `{}`", head_dir.display()))
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

fn tell(trained: &Trained, console: &Console) -> Result<()> {
    let scores = &trained.scores;
    console.text(format!(
        "adapter behind layer {}: {}\n{}, {} parameters\nvalidation over {} tokens: cross-entropy {:.4} (the target's \
         own {:.4}), agreement {:.4}, overlap {:.4}\n",
        trained.exit_layer,
        trained.adapter_dir.display(),
        trained.architecture,
        trained.num_parameters,
        scores.num_tokens,
        scores.cross_entropy,
        scores.target_entropy,
        scores.agreement,
        scores.overlap,
    ))?;
    let head = trained.head.as_ref();
    head.map_or(Ok(()), |head| train_head::tell(&head.head_dir, &head.scores, console))
}

/// What an adapter depends on: its settings, the seed, and everything its data depends on.
fn fingerprint(
    training: &AdapterTraining,
    exit_layer: usize,
    seed: u64,
    provenance: &Provenance,
) -> Result<String> {
    let mut settings = serde_json::to_value(training)?;
    // One adapter does not depend on which others are trained beside it.
    settings["exit_layer"] = json!(exit_layer);
    let all = json!({ "adapter": settings, "seed": seed, "data": provenance });
    Ok(hash_bytes(serde_json::to_string(&all)?.as_bytes()))
}

/// Config and scores of an adapter that was trained to its end with the same fingerprint.
fn finished(dir: &Path, fingerprint: &str) -> Option<(AdapterConfig, AdapterScores)> {
    let config = AdapterConfig::from_dir(dir).ok()?;
    let same = config.training.get("fingerprint").is_some_and(|found| found == fingerprint);
    if !same || !dir.join("model.safetensors").is_file() {
        return None;
    }
    let scores = serde_json::from_slice(&std::fs::read(dir.join("scores.json")).ok()?).ok()?;
    Some((config, scores))
}
