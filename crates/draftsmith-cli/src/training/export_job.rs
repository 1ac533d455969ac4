//! Trains and writes exports, which are heads and adapters. Exports trained together share a run that can be
//! resumed, and each is written with its scores and provenance.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use draftsmith_data::{DataSet, Provenance, ResponseRow, hash_bytes, write_shard};
use draftsmith_files::{in_bytes, write_whole};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, Eagle3, Eagle3Config, ModelError,
};
use draftsmith_theory::DrafterId;
use draftsmith_train::renderer::{Interrupter, Listener};
use draftsmith_train::{
    Ending, FeatureDir, Resumption, TrainError, Trained, TrainingRun, TrainingSize, discard,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::progress::EpochProgress;
use crate::console::{Console, dashboard};
use draftsmith_recipe::Recipe;
use draftsmith_recipe::built_data::trained_on;
use draftsmith_recipe::exports::{TRAINED_ON, found_adapter_head};
use draftsmith_recipe::watch::{Interrupted, Watch};
use draftsmith_recipe::workspace::Workspace;

/// The file of an export's scores.
pub(crate) const SCORES: &str = "scores.json";

/// The file beside the state for a batch whose loss was not finite.
const NOT_FINITE: &str = "not-finite.parquet";

/// Why notes say that an export is kept.
pub(crate) const KEPT: &str = "trained with these settings on this data";

/// An export to find or train.
#[derive(Debug)]
pub(crate) struct Planned {
    /// The drafter.
    pub(crate) id: DrafterId,
    pub(crate) dir: PathBuf,
    /// A hash of everything that it depends on.
    pub(crate) fingerprint: String,
}

/// An export on disk.
#[derive(Debug)]
pub(crate) struct Exported<C, S> {
    pub(crate) dir: PathBuf,
    pub(crate) config: C,
    pub(crate) scores: S,
    pub(crate) best_epoch: usize,
    /// How fast it was trained; `None` if it was kept.
    pub(crate) speed: Option<Speed>,
}

/// The time of the run that trained an export, possibly together with others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Speed {
    pub(crate) seconds: f64,
    /// Labels per second for a head, tokens per second for an adapter.
    pub(crate) supervised_per_second: f64,
}

/// The `config.json` of a kind of export.
pub(crate) trait ExportConfig: Sized {
    type Model;

    /// Returns the record of its training, to read or extend it.
    fn training(&mut self) -> &mut Map<String, Value>;

    /// Sets the hashes of the models that it belongs to. The target's is unknown if it is served.
    fn set_hashes(&mut self, draft: Option<String>, target: Option<String>);

    /// Writes the config and the model's weights.
    fn write(&self, model: &Self::Model, dir: &Path) -> Result<(), ModelError>;
}

impl ExportConfig for AcceptanceHeadConfig {
    type Model = AcceptanceHead;

    fn training(&mut self) -> &mut Map<String, Value> {
        &mut self.training
    }

    fn set_hashes(&mut self, draft: Option<String>, target: Option<String>) {
        (self.draft_hash, self.target_hash) = (draft, target);
    }

    fn write(&self, model: &AcceptanceHead, dir: &Path) -> Result<(), ModelError> {
        model.write_dir(dir, self)
    }
}

impl ExportConfig for AdapterConfig {
    type Model = Adapter;

    fn training(&mut self) -> &mut Map<String, Value> {
        &mut self.training
    }

    fn set_hashes(&mut self, _: Option<String>, target: Option<String>) {
        self.target_hash = target;
    }

    fn write(&self, model: &Adapter, dir: &Path) -> Result<(), ModelError> {
        model.write_dir(dir, self)
    }
}

impl ExportConfig for Eagle3Config {
    type Model = Eagle3;

    fn training(&mut self) -> &mut Map<String, Value> {
        &mut self.training
    }

    fn set_hashes(&mut self, _: Option<String>, target: Option<String>) {
        self.target_hash = target;
    }

    fn write(&self, model: &Eagle3, dir: &Path) -> Result<(), ModelError> {
        model.write_dir(dir, self)
    }
}

impl Planned {
    /// Reads the export, if it exists and its training with this fingerprint finished.
    pub(crate) fn found<C: ExportConfig, S: DeserializeOwned>(
        &self,
        read: impl FnOnce(&Path) -> Result<C, ModelError>,
    ) -> Option<Exported<C, S>> {
        let mut config = read(&self.dir).ok()?;
        let training = config.training();
        let is_same = training.get("fingerprint").is_some_and(|found| *found == self.fingerprint);
        if !is_same || !self.dir.join("model.safetensors").is_file() {
            return None;
        }
        let best_epoch = usize::try_from(training.get("best_epoch")?.as_u64()?).ok()?;
        let scores = serde_json::from_slice(&std::fs::read(self.dir.join(SCORES)).ok()?).ok()?;
        Some(Exported { dir: self.dir.clone(), config, scores, best_epoch, speed: None })
    }
}

/// The context of a training: recipe, data and what to show and resume.
pub(crate) struct ExportJob<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) workspace: &'a Workspace,
    pub(crate) console: &'a Console,
    /// The command, for notes.
    pub(crate) command: &'static str,
    pub(crate) data: &'a DataSet,
    /// The data's provenance, with the hash of the labels' drafter.
    pub(crate) provenance: &'a Provenance,
    /// The directory of the training's state.
    pub(crate) training_dir: PathBuf,
    /// The validation scores to show after each epoch.
    pub(crate) shown: &'static [&'static str],
    /// The name of the frozen model in caches of its hidden states beside the data.
    pub(crate) feature_name: String,
    /// Everything that those states depend on besides tokens.
    pub(crate) feature_models: String,
}

/// The exports that a job wrote.
pub(crate) struct Written<C, S> {
    pub(crate) exports: Vec<Exported<C, S>>,
    /// Whether training was interrupted. The exports then are the best so far, and none counts as finished.
    pub(crate) interrupted: bool,
}

impl ExportJob<'_> {
    /// Calls `train` to train all of `planned`, in order, in a run that resumes an earlier one, and writes the
    /// exports.
    ///
    /// # Errors
    /// If training fails, or was interrupted before the first epoch ended.
    pub(crate) fn run<C, S>(
        &self,
        planned: &[Planned],
        train: impl FnOnce(TrainingRun<'_>) -> Result<Ending<Vec<Trained<C::Model, C, S>>>, TrainError>,
    ) -> Result<Written<C, S>>
    where
        C: ExportConfig,
        S: Copy + Serialize,
    {
        let fingerprints: Vec<&str> =
            planned.iter().map(|export| export.fingerprint.as_str()).collect();
        let fingerprint = hash_bytes(fingerprints.join("\n").as_bytes());
        let num_steps_before = self.num_steps_before(&fingerprint)?;
        let ending = self.train(&fingerprint, train)?;
        let num_steps = match &ending {
            Ending::Finished(trained) => trained.iter().map(|one| one.num_steps).max().unwrap_or(0),
            Ending::Stopped { num_steps, num_planned_steps, .. } => {
                let dir = self.training_dir.display();
                self.note(&format!(
                    "stopped after step {num_steps} of {num_planned_steps}; its state is in `{dir}`"
                ));
                *num_steps
            }
        };
        let num_taken = num_steps.saturating_sub(num_steps_before);
        let left = self.console.steps_left().map(|left| left.saturating_sub(num_taken));
        self.console.limit_steps(left);
        let trained = ending.best().ok_or(Interrupted)?;
        let interrupted = trained.iter().any(|one| one.interrupted);
        let exports = planned.iter().zip(trained);
        let exports = exports.map(|(planned, one)| self.write(planned, one, interrupted));
        let exports = exports.collect::<Result<Vec<_>>>()?;
        if !interrupted {
            // The exports are written, so the state and the batch of an earlier failure are obsolete.
            discard(&self.training_dir)?;
            let _ = std::fs::remove_file(self.training_dir.join(NOT_FINITE));
        }
        Ok(Written { exports, interrupted })
    }

    /// Calls `train` with a run that is shown on the dashboard or as lines.
    fn train<T>(
        &self,
        fingerprint: &str,
        train: impl FnOnce(TrainingRun<'_>) -> Result<T, TrainError>,
    ) -> Result<T> {
        let interrupter = Interrupter::new();
        let (dir, notify) = (self.recipe.data_dir(), |text: String| self.note(&text));
        let (name, models) = (self.feature_name.clone(), self.feature_models.clone());
        let features = FeatureDir { dir: &dir, name, models, notify: &notify };
        let train = |listener: Box<dyn Listener + '_>| {
            let trained = train(TrainingRun {
                max_steps: self.console.steps_left(),
                listener,
                should_stop: Box::new(|| {
                    self.console.is_interrupted() || interrupter.should_stop()
                }),
                begins: Box::new(|size| self.note_size(size)),
                features: Some(features),
                more_devices: self.workspace.models.more_devices(),
                ..TrainingRun::new(&self.training_dir, fingerprint)
            });
            trained.map_err(|error| self.explain(error))
        };
        if dashboard::is_wanted(self.console) {
            return dashboard::watched(self.console, &interrupter, train);
        }
        train(Box::new(EpochProgress::new(self.console, self.command, self.shown)))
    }

    /// Notes a line that begins with the command.
    fn note(&self, text: &str) {
        self.console.note(format!("{}: {text}", self.command));
    }

    /// Returns the number of steps of an earlier run that this one resumes, and notes what was found.
    fn num_steps_before(&self, fingerprint: &str) -> Result<usize> {
        Ok(match Resumption::find(&self.training_dir, fingerprint)? {
            Resumption::Nothing => 0,
            Resumption::After(num_steps) => {
                self.note(&format!("resuming after step {num_steps}"));
                num_steps
            }
            Resumption::Other => {
                let dir = self.training_dir.display();
                self.note(&format!(
                    "the state in `{dir}` is of other settings or data; starting over"
                ));
                0
            }
        })
    }

    /// Converts the training's error. If a loss was not finite, saves the rows of its batch for inspection.
    fn explain(&self, error: TrainError) -> anyhow::Error {
        let TrainError::NotFinite { row_ids, .. } = &error else { return error.into() };
        let rows = self.data.rows.iter().filter(|row| row_ids.contains(&row.id));
        let batch: Vec<ResponseRow> = rows.cloned().collect();
        let path = self.training_dir.join(NOT_FINITE);
        match write_shard(&path, &batch, self.provenance, None) {
            Ok(()) => anyhow!("{error}; the rows are saved in `{}`", path.display()),
            Err(unsaved) => anyhow!("{error}; the rows could not be saved: {unsaved}"),
        }
    }

    /// Notes the size of the training.
    fn note_size(&self, size: TrainingSize) {
        let lengths =
            self.data.rows.iter().map(|row| row.prompt_ids.len() + row.response_ids.len());
        self.note(&format!(
            "{} rows with {} tokens, {} steps; {} weights, at most {} on disk",
            self.data.rows.len(),
            lengths.sum::<usize>(),
            size.num_steps,
            size.num_weights,
            in_bytes(size.num_bytes)
        ));
    }

    fn write<C: ExportConfig, S: Copy + Serialize>(
        &self,
        planned: &Planned,
        trained: Trained<C::Model, C, S>,
        interrupted: bool,
    ) -> Result<Exported<C, S>> {
        let Planned { id, dir, fingerprint } = planned;
        let speed = Speed {
            seconds: trained.duration.as_secs_f64(),
            supervised_per_second: trained.supervised_per_second(),
        };
        let Trained { model, mut config, scores, best_epoch, .. } = trained;
        let Provenance { target, draft, served_model, .. } = self.provenance;
        config.set_hashes(draft.clone(), served_model.is_none().then(|| target.clone()));
        config.training().insert(TRAINED_ON.to_owned(), trained_on(self.data));
        if !interrupted {
            config.training().insert("fingerprint".to_owned(), json!(fingerprint));
        }
        self.workspace.artifacts.forget(dir);
        remove_head(dir)?;
        config.write(&model, dir)?;
        self.recipe.write_of(*id, dir)?;
        let scores_text = serde_json::to_string_pretty(&scores)?;
        write_whole(&dir.join(SCORES), format!("{scores_text}\n"))?;
        Ok(Exported { dir: dir.clone(), config, scores, best_epoch, speed: Some(speed) })
    }
}

/// Removes the head of the old adapter in `dir`, if there is one. It does not fit the new adapter.
fn remove_head(dir: &Path) -> Result<()> {
    let Some(head_dir) = found_adapter_head(dir) else { return Ok(()) };
    std::fs::remove_dir_all(&head_dir)
        .with_context(|| format!("cannot remove `{}`", head_dir.display()))
}
