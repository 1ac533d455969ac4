//! How far a training is, in numbers: of the run, and of each of its members.
//!
//! They are kept as TOML, which reads every number as it was written; serde_json rounds some in
//! their last digit.

use std::time::Duration;

use draftsmith_theory::HeadScores;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// How one epoch went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpochScores<S = HeadScores> {
    /// Its number, counted from 1.
    pub epoch: usize,
    /// Optimizer steps taken by its end, since training began.
    pub num_steps: usize,
    /// Mean of its batches' training losses, each taken before the step that it leads to.
    pub training_loss: f64,
    /// The scores on the validation rows at its end.
    pub validation: S,
}

/// How far a training is: all that its members have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunProgress {
    /// The epoch that is being run, counted from 1; one above the last when all are.
    pub(crate) epoch: usize,
    /// Optimizer steps taken in it.
    pub(crate) epoch_steps: usize,
    /// Optimizer steps taken.
    pub(crate) num_steps: usize,
    /// Time in all, validation included.
    #[serde(deserialize_with = "read_seconds")]
    pub(crate) seconds: f64,
}

/// Seconds that can be a time.
fn read_seconds<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let seconds = f64::deserialize(from)?;
    let time = Duration::try_from_secs_f64(seconds);
    time.map(|_| seconds).map_err(|error| D::Error::custom(format!("{seconds} s: {error}")))
}

impl Default for RunProgress {
    fn default() -> Self {
        Self { epoch: 1, epoch_steps: 0, num_steps: 0, seconds: 0.0 }
    }
}

/// How far a member is: all but its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemberProgress<S> {
    /// The sum and the number of its losses in the epoch so far.
    pub(crate) loss_sum: f64,
    pub(crate) num_losses: usize,
    /// Optimizer steps taken.
    pub(crate) num_steps: usize,
    /// Positions trained on.
    pub(crate) num_supervised: usize,
    /// The place in `epochs` of the one with the best scores so far.
    pub(crate) best: Option<usize>,
    pub(crate) epochs: Vec<EpochScores<S>>,
}

impl<S> MemberProgress<S> {
    /// The mean of the epoch's losses so far.
    pub(crate) fn training_loss(&self) -> f64 {
        self.loss_sum / self.num_losses as f64
    }

    /// Whether the last `patience` epochs were no better than the best before them; without one,
    /// never.
    pub(crate) fn is_out_of_patience(&self, patience: Option<usize>) -> bool {
        let (Some(patience), Some(best)) = (patience, self.best) else { return false };
        self.epochs.len() - 1 - best >= patience
    }
}

impl<S> Default for MemberProgress<S> {
    fn default() -> Self {
        Self {
            loss_sum: 0.0,
            num_losses: 0,
            num_steps: 0,
            num_supervised: 0,
            best: None,
            epochs: Vec::new(),
        }
    }
}
