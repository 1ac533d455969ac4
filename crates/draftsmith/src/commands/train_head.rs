//! `train-head`: an acceptance head from built data, into `checkpoints/<recipe>/head/`.
//!
//! With `[head.sweep]`, every head of the sweep into `checkpoints/<recipe>/sweep/NAME/`, those of
//! one mixing ratio side by side, and the best of them into `head/`, where the other stages look
//! for one. A head that is there already is not trained again, whatever is trained beside it: each
//! is what it would be alone.
//!
//! `train-adapter` has the head of an adapter trained here too, into the directory `head/` of the
//! adapter.

mod drafter;
mod sweep;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use draftsmith_data::{Provenance, ResponseRow, hash_bytes};
use draftsmith_files::write_whole;
use draftsmith_model::{AcceptanceHeadConfig, AdapterConfig};
use draftsmith_theory::HeadScores;
use draftsmith_train::{
    HeadData, HeadLabels, HeadTraining, Section, Stint, TrainedHead, train_heads,
};
use serde::Serialize;
use serde_json::json;

use self::drafter::HeadDrafter;
pub(crate) use self::sweep::SweptHead;
use crate::built_data::built_rows;
use crate::commands::training::{EpochProgress, Resumable, StepsLeft};
use crate::console::{Console, Interrupted};
use crate::device::require_dtype;
use crate::devices::note_idle_devices;
use crate::recipe::Recipe;
use crate::rollouts::TrainingRollouts;
use crate::table::render_sweep_table;
use crate::workspace::Workspace;

/// What was trained, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct Trained {
    /// The head's directory.
    pub(crate) head_dir: PathBuf,
    /// Whether it was there already, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: HeadScores,
    /// Labelled tokens a second while it was trained, beside others if it was; null where it was
    /// kept.
    pub(crate) labels_per_second: Option<f64>,
    /// Every head of a sweep, of which this one is the best; null without a sweep.
    pub(crate) sweep: Option<Vec<SweptHead>>,
}

/// Runs the stage on one device or several.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    steps_left: &mut StepsLeft,
    console: &Console,
) -> Result<Trained> {
    let devices = workspace.devices();
    let training = recipe.head.as_ref().context(
        "the recipe has no section `[head]`: it says how the acceptance head is trained",
    )?;
    let section = Section::Head;
    devices.iter().try_for_each(|device| require_dtype(device, section, training.dtype))?;
    let num_batches = training.optimizer.gradient_accumulation;
    note_idle_devices(console, "train-head", section, devices, num_batches);
    let draft_dir = recipe.need_draft("train-head")?;
    let data_dir = recipe.data_dir();
    let (rows, provenance) = built_rows(recipe)?;
    let draft_hash = workspace.draft_hash()?.context("there is a draft")?.to_owned();
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
    let drafter = HeadDrafter::Draft;
    let stage = Stage { recipe, workspace, drafter, draft_hash, rows: &rows, provenance, console };
    let mut heads = Vec::new();
    for pass in training.passes() {
        heads.extend(stage.pass(pass, steps_left)?);
    }
    let trained = match training.sweep {
        Some(_) => sweep::finish(recipe, workspace, heads, console)?,
        None => heads.remove(0).trained(None),
    };
    report(&trained, console)?;
    Ok(trained)
}

/// Trains the head of the adapter in `adapter_dir`, which is there, as the recipe's
/// `[adapter_head]` says.
///
/// # Errors
/// If labels cannot be had, training fails, or it was interrupted.
pub(super) fn of_adapter(
    recipe: &Recipe,
    settings: &HeadTraining,
    adapter_dir: &Path,
    (rows, provenance): (&[ResponseRow], &Provenance),
    workspace: &Workspace,
    steps_left: &mut StepsLeft,
    console: &Console,
) -> Result<Trained> {
    let devices = workspace.devices();
    let (section, num_batches) = (Section::AdapterHead, settings.optimizer.gradient_accumulation);
    devices.iter().try_for_each(|device| require_dtype(device, section, settings.dtype))?;
    note_idle_devices(console, "train-adapter", section, devices, num_batches);
    let config = AdapterConfig::from_dir(adapter_dir)?;
    let draft_hash = workspace.adapter_hash(adapter_dir, &config)?;
    let stage = Stage {
        recipe,
        workspace,
        drafter: HeadDrafter::Adapter { dir: adapter_dir, exit_layer: config.exit_layer },
        // Labels come from rollouts of the adapter, whoever drafted the data's.
        provenance: Provenance { draft: Some(draft_hash.clone()), ..provenance.clone() },
        draft_hash,
        rows,
        console,
    };
    let mut heads = stage.pass(vec![settings.clone()], steps_left)?;
    Ok(heads.remove(0).trained(None))
}

/// What every pass over the data needs.
struct Stage<'a> {
    recipe: &'a Recipe,
    workspace: &'a Workspace,
    drafter: HeadDrafter<'a>,
    draft_hash: String,
    rows: &'a [ResponseRow],
    /// Of the data, with the hash of what drafted the labels.
    provenance: Provenance,
    console: &'a Console,
}

/// A head that is to be there.
struct Planned {
    settings: HeadTraining,
    dir: PathBuf,
    fingerprint: String,
}

/// A head that is there.
struct Done {
    planned: Planned,
    scores: HeadScores,
    best_epoch: usize,
    /// None where it was kept.
    speed: Option<Speed>,
}

/// How long a head took, beside those that were trained with it.
#[derive(Debug, Clone, Copy)]
struct Speed {
    seconds: f64,
    labels_per_second: f64,
}

impl Done {
    fn trained(self, sweep: Option<Vec<SweptHead>>) -> Trained {
        Trained {
            head_dir: self.planned.dir,
            kept: self.speed.is_none(),
            scores: self.scores,
            labels_per_second: self.speed.map(|speed| speed.labels_per_second),
            sweep,
        }
    }
}

impl Stage<'_> {
    /// Trains what is missing of heads that share a mixing ratio, side by side.
    fn pass(&self, heads: Vec<HeadTraining>, steps_left: &mut StepsLeft) -> Result<Vec<Done>> {
        let mut done: Vec<Option<Done>> = Vec::with_capacity(heads.len());
        let mut missing: Vec<(usize, Planned)> = Vec::new();
        let num_heads = heads.len();
        for (place, settings) in heads.into_iter().enumerate() {
            let planned = self.planned(settings)?;
            match finished(&planned.dir, &planned.fingerprint) {
                Some(Finished { scores, best_epoch }) => {
                    if num_heads == 1 {
                        self.note(format!("`{}` is there, {KEPT}", planned.dir.display()));
                    }
                    done.push(Some(Done { planned, scores, best_epoch, speed: None }));
                }
                None => {
                    done.push(None);
                    missing.push((place, planned));
                }
            }
        }
        let num_kept = num_heads - missing.len();
        if num_heads > 1 && num_kept > 0 {
            self.note(format!("{num_kept} heads of the sweep are there, {KEPT}"));
        }
        for (place, head) in self.train(missing, steps_left)? {
            done[place] = Some(head);
        }
        Ok(done.into_iter().flatten().collect())
    }

    fn planned(&self, settings: HeadTraining) -> Result<Planned> {
        let dir = match self.drafter.is_swept(self.recipe) {
            true => self.recipe.sweep_dir().join(settings.name()),
            false => self.drafter.head_dir(self.recipe),
        };
        // Heads of a sweep and alone have the same fingerprint: they have the same weights.
        let fingerprint = fingerprint(&settings, self.recipe.seed, &self.provenance)?;
        Ok(Planned { settings, dir, fingerprint })
    }

    fn train(
        &self,
        missing: Vec<(usize, Planned)>,
        steps_left: &mut StepsLeft,
    ) -> Result<Vec<(usize, Done)>> {
        let Some((_, first)) = missing.first() else { return Ok(Vec::new()) };
        let heads: Vec<HeadTraining> =
            missing.iter().map(|(_, head)| head.settings.clone()).collect();
        let fingerprints: Vec<&str> =
            missing.iter().map(|(_, head)| head.fingerprint.as_str()).collect();
        let training_dir = self.drafter.training_dir(self.recipe);
        let training_dir = match self.drafter.is_swept(self.recipe) {
            true => training_dir.join(format!("r{}", first.settings.mixing_ratio)),
            false => training_dir,
        };
        if heads.len() > 1 {
            self.note(format!(
                "{} heads in one pass, with a mixing ratio of {}; what is told of its epochs is \
                 of the first that is still trained, now `{}`",
                heads.len(),
                first.settings.mixing_ratio,
                first.settings.name(),
            ));
        }
        let rollouts = self.rollouts(&first.settings)?;
        let recorded = rollouts.as_ref().map(TrainingRollouts::recorded);
        let head_data = HeadData { rows: self.rows, rollouts: recorded };
        let dtype = first.settings.dtype;
        let frozen = self.drafter.load(self.workspace, dtype)?;
        let (console, command, rows) = (self.console, self.drafter.command(), self.rows);
        let resumable =
            Resumable::find(console, command, training_dir, &fingerprints.join("\n"), rows)?;
        let num_epochs = first.settings.optimizer.num_epochs;
        let progress = EpochProgress::new(console, command, &["KL", "AUROC", "ECE"], num_epochs);
        let data = (rows, &self.provenance);
        let trained = resumable.train(steps_left, progress, data, |stint| {
            let stint = Stint { more_devices: self.workspace.devices()[1..].to_vec(), ..stint };
            train_heads(frozen, head_data, &heads, self.recipe.seed, stint)
        })?;
        let Some(trained) = trained else {
            return Err(Interrupted.into());
        };
        let is_interrupted = trained.iter().any(|head| head.interrupted);
        let mut done = Vec::with_capacity(missing.len());
        for ((place, planned), trained) in missing.into_iter().zip(trained) {
            done.push((place, self.write(planned, trained, is_interrupted)?));
        }
        if is_interrupted {
            if let [(_, head)] = done.as_slice() {
                tell(&head.planned.dir, &head.scores, console)?;
            }
            return Err(Interrupted.into());
        }
        resumable.discard()?;
        Ok(done)
    }

    /// The rollouts that heads are trained on, where their labels are of those.
    fn rollouts(&self, settings: &HeadTraining) -> Result<Option<TrainingRollouts>> {
        match settings.labels {
            HeadLabels::Rollouts => TrainingRollouts::read_or_record(
                self.recipe,
                self.drafter.adapter_dir(),
                self.rows,
                &self.provenance,
                settings.rollout_length,
                self.workspace,
                self.console,
            )
            .map(Some),
            HeadLabels::Sampled | HeadLabels::Overlap | HeadLabels::Greedy => Ok(None),
        }
    }

    /// Writes a head. Of an interrupted pass, none is taken for a finished one, though it may have
    /// come to its own end: the pass is gone on with as a whole.
    fn write(
        &self,
        planned: Planned,
        mut trained: TrainedHead,
        is_interrupted: bool,
    ) -> Result<Done> {
        trained.config.draft_hash = Some(self.draft_hash.clone());
        trained.config.target_hash = Some(self.provenance.target.clone());
        if !is_interrupted {
            let fingerprint = json!(planned.fingerprint);
            trained.config.training.insert("fingerprint".to_owned(), fingerprint);
        }
        self.workspace.forget(&planned.dir);
        trained.head.write_dir(&planned.dir, &trained.config)?;
        self.recipe.write_beside(&planned.dir)?;
        write_whole(
            &planned.dir.join(SCORES),
            format!("{}\n", serde_json::to_string_pretty(&trained.scores)?),
        )?;
        let (seconds, labels_per_second) =
            (trained.duration.as_secs_f64(), trained.labels_per_second());
        Ok(Done {
            planned,
            scores: trained.scores,
            best_epoch: trained.best_epoch,
            speed: Some(Speed { seconds, labels_per_second }),
        })
    }

    fn note(&self, text: String) {
        self.console.note(format!("{}: {text}", self.drafter.command()));
    }
}

const KEPT: &str = "trained with these settings on this data";
const SCORES: &str = "scores.json";

fn report(trained: &Trained, console: &Console) -> Result<()> {
    console.document(trained)?;
    if let Some(rows) = &trained.sweep {
        console.text(render_sweep_table(rows, console.width(), console.colour()))?;
    }
    tell(&trained.head_dir, &trained.scores, console)
}

pub(super) fn tell(head_dir: &Path, scores: &HeadScores, console: &Console) -> Result<()> {
    console.text(format!(
        "head: {}\nvalidation over {} labels: KL {:.4}, BCE {:.4}, AUROC {}, Brier {:.4}, ECE {:.4} \
         (mean label {:.3}, mean prediction {:.3})\n",
        head_dir.display(),
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

/// What a head that was trained to its end says of itself.
struct Finished {
    scores: HeadScores,
    best_epoch: usize,
}

/// That of a head with the same fingerprint.
fn finished(dir: &Path, fingerprint: &str) -> Option<Finished> {
    let config = AcceptanceHeadConfig::from_dir(dir).ok()?;
    let same = config.training.get("fingerprint").is_some_and(|found| found == fingerprint);
    if !same || !dir.join("model.safetensors").is_file() {
        return None;
    }
    let scores = serde_json::from_slice(&std::fs::read(dir.join(SCORES)).ok()?).ok()?;
    let best_epoch = usize::try_from(config.training.get("best_epoch")?.as_u64()?).ok()?;
    Some(Finished { scores, best_epoch })
}
