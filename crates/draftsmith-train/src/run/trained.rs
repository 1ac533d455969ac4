//! The result of a training, and the record of it in an export's `config.json`.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::data::RowCounts;
use crate::run::progress::{EpochScores, MemberProgress};

/// A trained head or adapter.
#[derive(Debug)]
pub struct Trained<M, C, S> {
    /// The weights after the epoch with the best validation score.
    pub model: M,
    /// Its configuration. `training` records the settings, the seed, the rows and the scores of every
    /// epoch. The caller, which knows the files, adds the hashes of models.
    pub config: C,
    /// The validation scores of that epoch.
    pub scores: S,
    /// The number of that epoch, counted from 1.
    pub best_epoch: usize,
    /// Every validated epoch.
    pub epochs: Vec<EpochScores<S>>,
    /// Whether training was stopped before the end of its last epoch.
    pub interrupted: bool,
    /// The number of rows on each side of the split.
    pub rows: RowCounts,
    /// Labels (for a head) or tokens (for an adapter) trained on, over all epochs.
    pub num_supervised: usize,
    /// Optimizer steps.
    pub num_steps: usize,
    /// Total time, including validation, earlier runs and other members.
    pub duration: Duration,
}

/// How the training of a member ended.
pub(crate) struct Outcome<S> {
    pub(crate) progress: MemberProgress<S>,
    /// The index of the best epoch in `progress.epochs`.
    pub(crate) best: usize,
    /// Whether training was stopped while this member was still being trained.
    pub(crate) interrupted: bool,
    pub(crate) rows: RowCounts,
    /// The time of the whole training so far.
    pub(crate) duration: Duration,
}

impl<M, C, S: Copy + Serialize> Trained<M, C, S> {
    /// Computes labels or tokens per second of total time.
    pub fn supervised_per_second(&self) -> f64 {
        self.num_supervised as f64 / self.duration.as_secs_f64()
    }

    pub(crate) fn new((model, config): (M, C), outcome: Outcome<S>) -> Self {
        let Outcome { progress, best, interrupted, rows, duration } = outcome;
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

    /// Builds the record of the training for `config.json`: the settings except the keys `in_config`, and the results,
    /// with `num_supervised` as the key of that number. It has no times, so that the same training writes the same
    /// file.
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
