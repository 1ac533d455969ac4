//! What comes of a training, and what its export's `config.json` records of that.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::data::batches::RowCounts;
use crate::run::progress::{EpochScores, MemberProgress};

/// What was trained, a head or an adapter, and how it came about.
#[derive(Debug)]
pub struct Trained<M, C, S> {
    /// The weights after the epoch with the best score on the validation rows.
    pub model: M,
    /// Its shape. `training` records the settings, the seed, the rows and every epoch's scores;
    /// hashes of models are left to the caller, who knows the files.
    pub config: C,
    /// Its scores on the validation rows.
    pub scores: S,
    /// The epoch it is from, counted from 1.
    pub best_epoch: usize,
    /// Every epoch that was validated, in order.
    pub epochs: Vec<EpochScores<S>>,
    /// Whether it was stopped before the end of its last epoch.
    pub interrupted: bool,
    /// What became of the rows.
    pub rows: RowCounts,
    /// Labels of a head, or tokens of an adapter, that were trained on, over all epochs.
    pub num_supervised: usize,
    /// Optimizer steps taken.
    pub num_steps: usize,
    /// Time in all, validation and earlier runs included, and what was trained beside it.
    pub duration: Duration,
}

impl<M, C, S: Copy + Serialize> Trained<M, C, S> {
    /// Labels or tokens a second, validation's time included.
    pub fn supervised_per_second(&self) -> f64 {
        self.num_supervised as f64 / self.duration.as_secs_f64()
    }

    /// The model of the epoch at place `best` in `progress`.
    pub(crate) fn new(
        (model, config): (M, C),
        rows: RowCounts,
        progress: MemberProgress<S>,
        best: usize,
        interrupted: bool,
        duration: Duration,
    ) -> Self {
        let EpochScores { epoch: best_epoch, validation: scores, .. } = progress.epochs[best];
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

    /// What `config.json` keeps of the training: the settings but for those that the config has
    /// itself, and the outcome, in which what it is supervised by has a name. No times: the same
    /// training gives the same file.
    pub(crate) fn record(
        &self,
        settings: &impl Serialize,
        in_config: &[&str],
        num_supervised: &str,
        seed: u64,
    ) -> Map<String, Value> {
        let settings = match json!(settings) {
            Value::Object(settings) => settings,
            other => unreachable!("a struct serialises to an object: {other}"),
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
