//! `train-adapter`: self-draft adapters from built data, into `checkpoints/<recipe>/adapter/`, one for
//! each exit layer.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::{Provenance, ResponseRow, hash_bytes};
use draftsmith_model::{AdapterConfig, CausalLm};
use draftsmith_train::{AdapterScores, AdapterTraining, Interrupter, train_adapter};
use serde::Serialize;
use serde_json::json;

use crate::commands::training::{EpochProgress, Resumable, StepsLeft, Watch, built_rows};
use crate::console::{Console, Interrupted};
use crate::pair::hash_dir;
use crate::recipe::{Recipe, write_text};

/// What was trained, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct Trained {
    /// The adapter's directory.
    pub(crate) adapter_dir: PathBuf,
    /// The target's layers that run before it.
    pub(crate) exit_layer: usize,
    /// Whether it was there already, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: AdapterScores,
    /// Supervised tokens a second while it was trained; null where it was kept.
    pub(crate) tokens_per_second: Option<f64>,
}

/// Runs the stage.
pub(crate) fn run(
    recipe: &Recipe,
    device: &Device,
    steps_left: &mut StepsLeft,
    console: &Console,
) -> Result<Vec<Trained>> {
    let training = recipe
        .adapter
        .as_ref()
        .context("the recipe has no section `[adapter]`: it says how adapters are trained")?;
    let (rows, provenance) = built_rows(recipe)?;
    let target_dir = &recipe.models.target;
    let target_hash = hash_dir(target_dir)?;
    if provenance.target != target_hash {
        bail!(
            "the data in `{}` was built with another target (hash {}) than `{}` (hash \
             {target_hash}): build it again",
            recipe.data_dir().display(),
            provenance.target,
            target_dir.display()
        );
    }
    let mut target = None;
    let mut all = Vec::new();
    for (exit_layer, adapter_dir) in recipe.adapter_dirs() {
        let fingerprint = fingerprint(training, exit_layer, recipe.seed, &provenance)?;
        let trained = match finished(&adapter_dir, &fingerprint) {
            Some(scores) => {
                console.note(format!(
                    "train-adapter: `{}` is there, trained with these settings on this data",
                    adapter_dir.display()
                ));
                Trained { adapter_dir, exit_layer, kept: true, scores, tokens_per_second: None }
            }
            None => {
                let target = match &target {
                    Some(target) => target,
                    None => target.insert(CausalLm::from_model_dir(target_dir, device)?),
                };
                let provenance = &provenance;
                let one = One { recipe, training, target, provenance, exit_layer };
                one.train(&rows, &adapter_dir, &fingerprint, steps_left, console)?
            }
        };
        tell(&trained, console)?;
        all.push(trained);
    }
    console.document(&all)?;
    Ok(all)
}

/// One adapter to be trained.
struct One<'a> {
    recipe: &'a Recipe,
    training: &'a AdapterTraining,
    target: &'a CausalLm,
    provenance: &'a Provenance,
    exit_layer: usize,
}

impl One<'_> {
    fn train(
        &self,
        rows: &[ResponseRow],
        adapter_dir: &Path,
        fingerprint: &str,
        steps_left: &mut StepsLeft,
        console: &Console,
    ) -> Result<Trained> {
        console.note(format!("train-adapter: exit layer {}", self.exit_layer));
        let checkpoint_dir = self
            .recipe
            .adapter_root()
            .with_file_name(format!("adapter-training-{}", self.exit_layer));
        let resumable =
            Resumable::find(console, "train-adapter", checkpoint_dir, fingerprint, rows)?;
        let interrupter = Interrupter::new();
        let watch = Watch::start(console, &interrupter);
        let told = &["cross-entropy", "agreement", "overlap"];
        let renderer = EpochProgress::new(console, "train-adapter", told, self.training.num_epochs);
        let ending = train_adapter(
            self.target,
            rows,
            self.training,
            self.exit_layer,
            self.recipe.seed,
            resumable.stint(*steps_left, renderer, interrupter),
        );
        drop(watch);
        let ending = ending.map_err(|error| resumable.explain(error, rows, self.provenance))?;
        let Some(mut trained) = resumable.end(ending, steps_left)? else {
            return Err(Interrupted.into());
        };
        trained.config.target_hash = Some(self.provenance.target.clone());
        // An interrupted adapter is kept, but not taken for a finished one.
        if !trained.interrupted {
            trained.config.training.insert("fingerprint".to_owned(), json!(fingerprint));
        }
        trained.adapter.write_dir(adapter_dir, &trained.config)?;
        self.recipe.write_beside(adapter_dir)?;
        write_text(
            &adapter_dir.join("scores.json"),
            &format!("{}\n", serde_json::to_string_pretty(&trained.scores)?),
        )?;
        if trained.interrupted {
            return Err(Interrupted.into());
        }
        resumable.discard()?;
        Ok(Trained {
            adapter_dir: adapter_dir.to_path_buf(),
            exit_layer: self.exit_layer,
            kept: false,
            tokens_per_second: Some(trained.tokens_per_second()),
            scores: trained.scores,
        })
    }
}

fn tell(trained: &Trained, console: &Console) -> Result<()> {
    let scores = &trained.scores;
    console.text(format!(
        "adapter behind layer {}: {}\nvalidation over {} tokens: cross-entropy {:.4} (the target's \
         own {:.4}), agreement {:.4}, overlap {:.4}\n",
        trained.exit_layer,
        trained.adapter_dir.display(),
        scores.num_tokens,
        scores.cross_entropy,
        scores.target_entropy,
        scores.agreement,
        scores.overlap,
    ))
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

/// The scores of an adapter that was trained to its end with the same fingerprint.
fn finished(dir: &Path, fingerprint: &str) -> Option<AdapterScores> {
    let config = AdapterConfig::from_dir(dir).ok()?;
    let same = config.training.get("fingerprint").is_some_and(|found| found == fingerprint);
    if !same || !dir.join("model.safetensors").is_file() {
        return None;
    }
    serde_json::from_slice(&std::fs::read(dir.join("scores.json")).ok()?).ok()
}
