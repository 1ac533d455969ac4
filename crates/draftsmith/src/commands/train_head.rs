//! `train-head`: an acceptance head from built data, into `checkpoints/<recipe>/head/`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::{Provenance, hash_bytes};
use draftsmith_model::{AcceptanceHeadConfig, CausalLm};
use draftsmith_theory::HeadScores;
use draftsmith_train::{HeadData, HeadLabels, HeadTraining, train_heads};
use serde::Serialize;
use serde_json::json;

use crate::commands::training::{EpochProgress, Resumable, StepsLeft, built_rows};
use crate::console::{Console, Interrupted};
use crate::device::require_dtype;
use crate::pair::hash_dir;
use crate::recipe::{Recipe, write_text};
use crate::rollouts::TrainingRollouts;

/// What was trained, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct Trained {
    /// The head's directory.
    pub(crate) head_dir: PathBuf,
    /// Whether it was there already, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: HeadScores,
    /// Labelled tokens a second while it was trained; null where it was kept.
    pub(crate) labels_per_second: Option<f64>,
}

/// Runs the stage.
pub(crate) fn run(
    recipe: &Recipe,
    device: &Device,
    steps_left: &mut StepsLeft,
    console: &Console,
) -> Result<Trained> {
    let training = recipe.head.as_ref().context(
        "the recipe has no section `[head]`: it says how the acceptance head is trained",
    )?;
    require_dtype(device, "head", training.dtype)?;
    let draft_dir = recipe.need_draft("train-head")?;
    let data_dir = recipe.data_dir();
    let (rows, provenance) = built_rows(recipe)?;
    let draft_hash = hash_dir(draft_dir)?;
    match &provenance.draft {
        Some(hash) if *hash == draft_hash => {}
        Some(hash) => bail!(
            "the data in `{}` was labelled with another draft (hash {hash}) than `{}` \
             (hash {draft_hash}): build it again",
            data_dir.display(),
            draft_dir.display()
        ),
        None => bail!(
            "the data in `{}` was built without a draft, so there is nothing to learn from; \
             hint: set `models.draft`, delete the directory and build it again",
            data_dir.display()
        ),
    }
    let head_dir = recipe.head_dir();
    let fingerprint = fingerprint(training, recipe.seed, &provenance)?;
    if let Some(scores) = finished(&head_dir, &fingerprint) {
        console.note(format!(
            "train-head: `{}` is there, trained with these settings on this data",
            head_dir.display()
        ));
        let kept = Trained { head_dir, kept: true, scores, labels_per_second: None };
        report(&kept, console)?;
        return Ok(kept);
    }

    let rollouts = match training.labels {
        HeadLabels::Rollouts => {
            let length = training.rollout_length;
            Some(TrainingRollouts::read_or_record(
                recipe,
                &rows,
                &provenance,
                length,
                device,
                console,
            )?)
        }
        HeadLabels::Sampled | HeadLabels::Overlap | HeadLabels::Greedy => None,
    };
    let data =
        HeadData { rows: &rows, rollouts: rollouts.as_ref().map(TrainingRollouts::recorded) };
    let draft = CausalLm::from_model_dir_in(draft_dir, training.dtype, device)?;
    let checkpoint_dir = head_dir.with_file_name("head-training");
    let resumable = Resumable::find(console, "train-head", checkpoint_dir, &fingerprint, &rows)?;
    let progress =
        EpochProgress::new(console, "train-head", &["KL", "AUROC", "ECE"], training.num_epochs);
    let trained = resumable.train(steps_left, progress, (&rows, &provenance), |stint| {
        train_heads(&draft, data, std::slice::from_ref(training), recipe.seed, stint)
    })?;
    let Some(mut trained) = trained.and_then(|mut heads| heads.pop()) else {
        return Err(Interrupted.into());
    };
    trained.config.draft_hash = Some(draft_hash);
    trained.config.target_hash = Some(provenance.target.clone());
    // An interrupted head is kept, but not taken for a finished one.
    if !trained.interrupted {
        trained.config.training.insert("fingerprint".to_owned(), json!(fingerprint));
    }
    trained.head.write_dir(&head_dir, &trained.config)?;
    recipe.write_beside(&head_dir)?;
    write_text(
        &head_dir.join("scores.json"),
        &format!("{}\n", serde_json::to_string_pretty(&trained.scores)?),
    )?;
    let done = Trained {
        head_dir,
        kept: false,
        scores: trained.scores,
        labels_per_second: Some(trained.labels_per_second()),
    };
    report(&done, console)?;
    if trained.interrupted {
        return Err(Interrupted.into());
    }
    resumable.discard()?;
    Ok(done)
}

fn report(trained: &Trained, console: &Console) -> Result<()> {
    let scores = &trained.scores;
    console.document(trained)?;
    console.text(format!(
        "head: {}\nvalidation over {} labels: KL {:.4}, BCE {:.4}, AUROC {}, Brier {:.4}, ECE {:.4} \
         (mean label {:.3}, mean prediction {:.3})\n",
        trained.head_dir.display(),
        scores.num_labels,
        scores.kl,
        scores.bce,
        scores.auroc.map_or_else(|| "-".to_owned(), |auroc| format!("{auroc:.4}")),
        scores.brier,
        scores.ece,
        scores.mean_label,
        scores.mean_predicted,
    ))
}

/// What the head depends on: its settings, the seed, and everything its data depends on.
fn fingerprint(training: &HeadTraining, seed: u64, provenance: &Provenance) -> Result<String> {
    let all = json!({ "head": training, "seed": seed, "data": provenance });
    Ok(hash_bytes(serde_json::to_string(&all)?.as_bytes()))
}

/// The scores of a head that was trained to its end with the same fingerprint.
fn finished(dir: &Path, fingerprint: &str) -> Option<HeadScores> {
    let config = AcceptanceHeadConfig::from_dir(dir).ok()?;
    let same = config.training.get("fingerprint").is_some_and(|found| found == fingerprint);
    if !same || !dir.join("model.safetensors").is_file() {
        return None;
    }
    serde_json::from_slice(&std::fs::read(dir.join("scores.json")).ok()?).ok()
}
