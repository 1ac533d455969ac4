//! Training and writing of exports, which are acceptance heads and drafters. Exports that are
//! trained together share one resumable run. Each is written with its scores and provenance.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use draftsmith_data::{Provenance, ResponseRow, hash_bytes, write_shard};
use draftsmith_files::{in_bytes, read_bytes, write_json};
use draftsmith_theory::DrafterId;
use draftsmith_train::{
    Ending, ExportStamp, FeatureDir, Resumption, StatesSource, TrainError, TrainedExport,
    TrainingRun, TrainingSize, discard,
};
use serde_json::{Map, Value, json};

use super::TrainingStage;
use draftsmith_recipe::built_data::trained_on;
use draftsmith_recipe::exports::TRAINED_ON;
use draftsmith_recipe::{Interrupted, found_adapter_head};

/// The name of the file with an export's scores.
pub(super) const SCORES: &str = "scores.json";

/// The name of the file, beside the training state, for a batch whose loss was not finite.
const NOT_FINITE: &str = "not-finite.parquet";

/// The reason in messages for keeping an export.
pub(super) const KEPT: &str = "trained with these settings on this data";

/// An export to find or train.
#[derive(Debug)]
pub(super) struct Planned {
    /// The name of the drafter.
    pub(super) id: DrafterId,
    pub(super) dir: PathBuf,
    /// A hash of everything that the export depends on.
    pub(super) fingerprint: String,
}

/// An export on disk.
#[derive(Debug)]
pub(super) struct Exported {
    pub(super) dir: PathBuf,
    /// The object `training` in the export's `config.json`.
    pub(super) training: Map<String, Value>,
    /// The validation scores of the best epoch.
    pub(super) scores: Value,
    pub(super) best_epoch: usize,
    /// The speed of the training; `None` if the export was kept.
    pub(super) speed: Option<Speed>,
}

/// The time and speed of the run that trained an export, possibly together with others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Speed {
    pub(super) seconds: f64,
    /// The labels per second for a head, or tokens per second for a drafter.
    pub(super) supervised_per_second: f64,
}

impl Planned {
    /// Reads the existing export; `None` unless a training with the same fingerprint has finished
    /// it.
    pub(super) fn found(&self) -> Option<Exported> {
        let read = |name: &str| read_bytes(self.dir.join(name)).ok();
        let mut config: Map<String, Value> = serde_json::from_slice(&read("config.json")?).ok()?;
        let Some(Value::Object(training)) = config.remove("training") else { return None };
        let is_same = training.get("fingerprint").is_some_and(|found| *found == self.fingerprint);
        if !is_same || !self.dir.join("model.safetensors").is_file() {
            return None;
        }
        let best_epoch = usize::try_from(training.get("best_epoch")?.as_u64()?).ok()?;
        let scores = serde_json::from_slice(&read(SCORES)?).ok()?;
        Some(Exported { dir: self.dir.clone(), training, scores, best_epoch, speed: None })
    }
}

/// The inputs of a training: recipe, data, progress display and state directory.
pub(super) struct ExportJob<'a> {
    pub(super) stage: TrainingStage<'a>,
    /// The data's provenance. Its `draft` is the hash of the drafter that the labels are for.
    pub(super) provenance: &'a Provenance,
    /// The directory of the training state.
    pub(super) training_dir: PathBuf,
    /// The validation scores to show after each epoch.
    pub(super) shown: &'static [&'static str],
    /// The name of the frozen model in the file names of its cached hidden states, beside the data.
    pub(super) feature_name: String,
    /// A text that identifies everything except tokens that those hidden states depend on.
    pub(super) feature_models: String,
    /// What gives the hidden states, if servers run the target; `None` if the frozen model does.
    pub(super) source: Option<&'a dyn StatesSource>,
}

/// The exports that a training wrote.
pub(super) struct WrittenExports {
    pub(super) exports: Vec<Exported>,
    /// Whether the training was interrupted. The exports are then the best so far, and none counts
    /// as finished.
    pub(super) interrupted: bool,
}

impl ExportJob<'_> {
    /// Calls `train` to train all exports in `planned`, and writes them. `train` must return them
    /// in the same order. The run resumes an earlier interrupted run with the same fingerprints.
    ///
    /// # Errors
    /// If the training fails, or is interrupted before the end of the first epoch.
    pub(super) fn run(
        &self,
        planned: &[Planned],
        train: impl FnOnce(TrainingRun<'_>) -> Result<Ending<Vec<TrainedExport>>, TrainError>,
    ) -> Result<WrittenExports> {
        let fingerprints: Vec<&str> =
            planned.iter().map(|export| export.fingerprint.as_str()).collect();
        let fingerprint = hash_bytes(fingerprints.join("\n").as_bytes());
        let num_steps_before = self.num_steps_before(&fingerprint)?;
        let ending = self.train(&fingerprint, train)?;
        let num_steps = match &ending {
            Ending::Finished(trained) => trained.iter().map(|one| one.num_steps).max().unwrap_or(0),
            Ending::Stopped { num_steps, num_planned_steps, .. } => {
                let dir = self.training_dir.display();
                self.stage.note(&format!(
                    "stopped after step {num_steps} of {num_planned_steps}; its state is in `{dir}`"
                ));
                *num_steps
            }
        };
        let num_taken = num_steps.saturating_sub(num_steps_before);
        let watch = self.stage.watch;
        watch.limit_steps(watch.steps_left().map(|left| left.saturating_sub(num_taken)));
        let trained = ending.best().ok_or(Interrupted)?;
        let interrupted = trained.iter().any(|one| one.interrupted);
        let exports = planned.iter().zip(trained);
        let exports = exports.map(|(planned, one)| self.write(planned, one, interrupted));
        let exports = exports.collect::<Result<Vec<_>>>()?;
        if !interrupted {
            // The training state and the saved batch of an earlier failure are no longer needed.
            discard(&self.training_dir)?;
            let _ = std::fs::remove_file(self.training_dir.join(NOT_FINITE));
        }
        Ok(WrittenExports { exports, interrupted })
    }

    /// Calls `train` with a run whose progress is shown to the user.
    fn train<T>(
        &self,
        fingerprint: &str,
        train: impl FnOnce(TrainingRun<'_>) -> Result<T, TrainError>,
    ) -> Result<T> {
        let TrainingStage { recipe, workspace, watch, command, .. } = self.stage;
        let (dir, notify) = (recipe.data_dir(), |text: String| self.stage.note(&text));
        let (name, models) = (self.feature_name.clone(), self.feature_models.clone());
        let features = FeatureDir { dir: &dir, name, models, notify: &notify, source: self.source };
        let (mut train, mut trained) = (Some(train), None);
        watch.shows(command, self.shown, &mut |listener, should_stop| {
            let train = train.take().context("a training is shown once")?;
            let done = train(TrainingRun {
                max_steps: watch.steps_left(),
                listener,
                should_stop: Box::new(should_stop),
                begins: Box::new(|size| self.note_size(size)),
                features: Some(features.clone()),
                more_devices: workspace.models.more_devices(),
                ..TrainingRun::new(&self.training_dir, fingerprint)
            });
            trained = Some(done.map_err(|error| self.explain(error))?);
            Ok(())
        })?;
        trained.context("the training was shown")
    }

    /// Returns the number of steps of the earlier run that this run resumes, or 0. Tells the user
    /// about it.
    fn num_steps_before(&self, fingerprint: &str) -> Result<usize> {
        Ok(match Resumption::find(&self.training_dir, fingerprint)? {
            Resumption::Nothing => 0,
            Resumption::After(num_steps) => {
                self.stage.note(&format!("resuming after step {num_steps}"));
                num_steps
            }
            Resumption::Other => {
                let dir = self.training_dir.display();
                self.stage.note(&format!(
                    "the state in `{dir}` is of other settings or data; starting over"
                ));
                0
            }
        })
    }

    /// Converts an error of the training. If a loss was not finite, saves the rows of its batch for
    /// inspection.
    fn explain(&self, error: TrainError) -> anyhow::Error {
        let row_ids = match &error {
            TrainError::NotFinite { row_ids, .. } => row_ids,
            TrainError::Stopped => return Interrupted.into(),
            _ => return error.into(),
        };
        let rows = self.stage.data.rows.iter().filter(|row| row_ids.contains(&row.id));
        let batch: Vec<ResponseRow> = rows.cloned().collect();
        let path = self.training_dir.join(NOT_FINITE);
        match write_shard(&path, &batch, self.provenance, None) {
            Ok(()) => anyhow!("{error}; the rows are saved in `{}`", path.display()),
            Err(unsaved) => anyhow!("{error}; the rows could not be saved: {unsaved}"),
        }
    }

    /// Shows the user the size of the training.
    fn note_size(&self, size: TrainingSize) {
        let rows = &self.stage.data.rows;
        let lengths = rows.iter().map(|row| row.prompt_ids.len() + row.response_ids.len());
        self.stage.note(&format!(
            "{} rows with {} tokens, {} steps; {} weights, at most {} on disk",
            rows.len(),
            lengths.sum::<usize>(),
            size.num_steps,
            size.num_weights,
            in_bytes(size.num_bytes)
        ));
    }

    fn write(
        &self,
        planned: &Planned,
        trained: TrainedExport,
        interrupted: bool,
    ) -> Result<Exported> {
        let TrainingStage { recipe, workspace, data, .. } = self.stage;
        let Planned { id, dir, fingerprint } = planned;
        let speed = Speed {
            seconds: trained.duration.as_secs_f64(),
            supervised_per_second: trained.supervised_per_second,
        };
        let (scores, best_epoch) = (trained.scores.clone(), trained.best_epoch);
        let Provenance { target, draft, served_model, .. } = self.provenance;
        let mut keys = vec![(TRAINED_ON, trained_on(data))];
        if !interrupted {
            keys.push(("fingerprint", json!(fingerprint)));
        }
        let stamp = ExportStamp {
            draft_hash: draft.clone(),
            target_hash: served_model.is_none().then(|| target.clone()),
            keys,
        };
        workspace.artifacts.forget(dir);
        remove_head(dir)?;
        let training = trained.write(dir, stamp)?;
        recipe.write_of(*id, dir)?;
        write_json(&dir.join(SCORES), &scores)?;
        Ok(Exported { dir: dir.clone(), training, scores, best_epoch, speed: Some(speed) })
    }
}

/// Deletes the acceptance head of the old adapter in `dir`, if any, because it does not fit the new
/// adapter.
fn remove_head(dir: &Path) -> Result<()> {
    let Some(head_dir) = found_adapter_head(dir) else { return Ok(()) };
    std::fs::remove_dir_all(&head_dir)
        .with_context(|| format!("cannot remove `{}`", head_dir.display()))
}
