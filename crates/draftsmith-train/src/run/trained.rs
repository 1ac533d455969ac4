//! The result of a training, and the record of it in an export's `config.json`.

use std::path::Path;
use std::time::Duration;

use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, CausalLm, DraftConfig, DraftForm, DraftNetwork,
    DraftVocabulary, ModelError, WeightDtype,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::data::RowCounts;
use crate::run::progress::{EpochScores, MemberProgress};

/// A trained head or adapter.
#[derive(Debug)]
pub struct Trained<M, C, S> {
    /// The weights after the epoch with the best validation score.
    pub model: M,
    /// The configuration for `config.json`. Its key `training` records the settings, the seed, the
    /// rows and the scores of every epoch. The caller adds the hashes of models, since only the
    /// caller knows their files.
    pub config: C,
    /// The validation scores of the best epoch.
    pub scores: S,
    /// The number of the best epoch, counted from 1.
    pub best_epoch: usize,
    /// The scores of every validated epoch.
    pub epochs: Vec<EpochScores<S>>,
    /// Whether training was stopped before the end of its last epoch.
    pub interrupted: bool,
    /// The number of rows on each side of the split.
    pub rows: RowCounts,
    /// The number of labels (for a head) or tokens (for a drafter) trained on, over all epochs.
    pub num_supervised: usize,
    /// The number of optimizer steps.
    pub num_steps: usize,
    /// The total time, including validation, earlier runs and the other models trained in the same
    /// run.
    pub duration: Duration,
}

/// The end of a member's training: its progress and best epoch.
pub(crate) struct Outcome<S> {
    pub(crate) progress: MemberProgress<S>,
    /// The index of the best epoch in `progress.epochs`.
    pub(crate) best: usize,
    /// Whether training was stopped while this member was still being trained.
    pub(crate) interrupted: bool,
    pub(crate) rows: RowCounts,
    /// The total time of the training so far.
    pub(crate) duration: Duration,
}

impl<M, C, S: Clone + Serialize> Trained<M, C, S> {
    /// Computes the number of labels or tokens trained on per second of total time.
    pub fn supervised_per_second(&self) -> f64 {
        self.num_supervised as f64 / self.duration.as_secs_f64()
    }

    pub(crate) fn new((model, config): (M, C), outcome: Outcome<S>) -> Self {
        let Outcome { progress, best, interrupted, rows, duration } = outcome;
        let EpochScores { epoch: best_epoch, validation: scores, .. } =
            progress.epochs[best].clone();
        let MemberProgress { epochs, num_supervised, num_steps, .. } = progress;
        Self {
            model,
            config,
            scores,
            best_epoch,
            epochs,
            interrupted,
            rows,
            num_supervised,
            num_steps,
            duration,
        }
    }

    /// Builds the record of the training for `config.json`: the settings, except the keys in
    /// `in_config`, and the results. `num_supervised` is the key for the number of supervised
    /// positions. The record contains no times, so that the same training writes the same file.
    pub(crate) fn record(
        &self,
        settings: &impl Serialize,
        in_config: &[&str],
        num_supervised: &str,
        seed: u64,
    ) -> Map<String, Value> {
        let Value::Object(settings) = json!(settings) else {
            unreachable!("a struct serialises to an object")
        };
        let settings = settings.into_iter().filter(|(key, _)| !in_config.contains(&key.as_str()));
        let outcome = [
            ("seed", json!(seed)),
            ("num_training_rows", json!(self.rows.num_training)),
            ("num_validation_rows", json!(self.rows.num_validation)),
            (num_supervised, json!(self.num_supervised)),
            ("num_steps", json!(self.num_steps)),
            ("interrupted", json!(self.interrupted)),
            ("best_epoch", json!(self.best_epoch)),
            ("validation", json!(self.scores)),
            ("epochs", json!(self.epochs)),
        ];
        settings.chain(outcome.map(|(key, value)| (key.to_owned(), value))).collect()
    }
}

/// The keys of a trained module's `config.json` that tell how it was trained.
#[derive(Debug)]
pub struct ExportRecord<'a> {
    /// The record of the training.
    pub training: &'a mut Map<String, Value>,
    /// The hash of the target; `None` if it is unknown because the target runs on a server.
    pub target_hash: &'a mut Option<String>,
}

/// The `config.json` of a trained module of the type `M`.
pub trait ExportConfig<M>: Clone {
    /// Returns the record of the training, so that it can be set.
    fn record(&mut self) -> ExportRecord<'_>;

    /// Sets the hash of the draft model, for a module that belongs to one.
    fn set_draft_hash(&mut self, _hash: Option<String>) {}

    /// Sets the type of the stored weights, and the tokens that a drafter may draft if these are not
    /// all. By default, a module has no such settings.
    #[must_use]
    fn stored_as(self, _dtype: WeightDtype, _vocabulary: Option<&DraftVocabulary>) -> Self {
        self
    }

    /// Adds tokens to the draft vocabulary of a network, which begins with its own.
    fn widened(&mut self, network: M, _vocabulary: &DraftVocabulary, _target: &CausalLm) -> M {
        network
    }

    /// Writes the configuration and the weights into a directory.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn write(&self, model: &M, dir: &Path) -> Result<(), ModelError>;
}

impl ExportConfig<AcceptanceHead> for AcceptanceHeadConfig {
    fn record(&mut self) -> ExportRecord<'_> {
        ExportRecord { training: &mut self.training, target_hash: &mut self.target_hash }
    }

    fn set_draft_hash(&mut self, hash: Option<String>) {
        self.draft_hash = hash;
    }

    fn write(&self, model: &AcceptanceHead, dir: &Path) -> Result<(), ModelError> {
        model.write_dir(dir, self)
    }
}

impl<F: DraftForm> ExportConfig<DraftNetwork<F>> for DraftConfig<F> {
    fn record(&mut self) -> ExportRecord<'_> {
        ExportRecord { training: &mut self.training, target_hash: &mut self.target_hash }
    }

    fn stored_as(self, dtype: WeightDtype, vocabulary: Option<&DraftVocabulary>) -> Self {
        Self { dtype, draft_vocabulary: vocabulary.cloned(), ..self }
    }

    fn widened(
        &mut self,
        network: DraftNetwork<F>,
        vocabulary: &DraftVocabulary,
        target: &CausalLm,
    ) -> DraftNetwork<F> {
        self.draft_vocabulary = Some(vocabulary.clone());
        network.widened(vocabulary, target)
    }

    fn write(&self, model: &DraftNetwork<F>, dir: &Path) -> Result<(), ModelError> {
        model.write_dir(dir, self)
    }
}

/// A function that writes a trained module into a directory, with the given hashes and keys added.
/// It returns the record of the training.
type WriteExport = Box<dyn FnOnce(&Path, ExportStamp) -> Result<Map<String, Value>, ModelError>>;

/// Metadata that an export gets besides the results of its training.
#[derive(Debug, Clone, Default)]
pub struct ExportStamp {
    /// The hash of the draft model, if the module belongs to one.
    pub draft_hash: Option<String>,
    /// The hash of the target; `None` if it is unknown because the target runs on a server.
    pub target_hash: Option<String>,
    /// Further keys for the record of the training.
    pub keys: Vec<(&'static str, Value)>,
}

/// The result of a training, for any type of trained module.
pub struct TrainedExport {
    write: WriteExport,
    /// The validation scores of the best epoch.
    pub scores: Value,
    /// The number of that epoch, counted from 1.
    pub best_epoch: usize,
    /// Whether training was stopped before its end.
    pub interrupted: bool,
    /// The number of optimizer steps.
    pub num_steps: usize,
    /// The number of labels or tokens trained on per second of total time.
    pub supervised_per_second: f64,
    /// The total time, including validation, earlier runs and the other models trained in the same
    /// run.
    pub duration: Duration,
}

impl TrainedExport {
    /// Writes `config.json` and the weights into a directory, and returns the record of the training.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(self, dir: &Path, stamp: ExportStamp) -> Result<Map<String, Value>, ModelError> {
        (self.write)(dir, stamp)
    }
}

impl<M: 'static, C: ExportConfig<M> + 'static, S: Clone + Serialize> From<Trained<M, C, S>>
    for TrainedExport
{
    fn from(trained: Trained<M, C, S>) -> Self {
        let supervised_per_second = trained.supervised_per_second();
        let Trained { model, mut config, scores, best_epoch, interrupted, .. } = trained;
        let (num_steps, duration) = (trained.num_steps, trained.duration);
        let write = move |dir: &Path, stamp: ExportStamp| {
            config.set_draft_hash(stamp.draft_hash);
            let ExportRecord { training, target_hash } = config.record();
            *target_hash = stamp.target_hash;
            training.extend(stamp.keys.into_iter().map(|(key, value)| (key.to_owned(), value)));
            config.write(&model, dir)?;
            Ok(std::mem::take(config.record().training))
        };
        Self {
            write: Box::new(write),
            scores: json!(scores),
            best_epoch,
            interrupted,
            num_steps,
            supervised_per_second,
            duration,
        }
    }
}
