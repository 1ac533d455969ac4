//! Counters and scores of a training, for the run and for each member.
//!
//! They are saved as TOML, which preserves every f64 exactly; serde_json can change the last digit. All
//! numbers that a step or validation changes belong here, so that training resumes exactly.

use std::time::Duration;

use draftsmith_theory::HeadScores;
use serde::{Deserialize, Serialize};

/// The results of one epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpochScores<S = HeadScores> {
    /// The epoch, counted from 1.
    pub epoch: usize,
    /// The number of optimizer steps from the start of training to the end of this epoch.
    pub num_steps: usize,
    /// The mean training loss of the epoch's batches, each computed before the step that uses it.
    pub training_loss: f64,
    /// The scores on the validation rows at the end of the epoch.
    pub validation: S,
}

/// The progress that all members of a training share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunProgress {
    /// The number of the current epoch, counted from 1. At the end of training it is the number of
    /// epochs plus 1.
    pub(crate) epoch: usize,
    /// The number of optimizer steps in the current epoch.
    pub(crate) epoch_steps: usize,
    /// The number of optimizer steps in all epochs.
    pub(crate) num_steps: usize,
    /// The total time, including validation and earlier runs.
    pub(crate) duration: Duration,
}

impl Default for RunProgress {
    fn default() -> Self {
        Self { epoch: 1, epoch_steps: 0, num_steps: 0, duration: Duration::ZERO }
    }
}

/// The progress of one member, without its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemberProgress<S> {
    /// The sum of the member's batch losses in the current epoch.
    pub(crate) loss_sum: f64,
    pub(crate) num_losses: usize,
    /// The number of the member's optimizer steps.
    pub(crate) num_steps: usize,
    /// The number of supervised positions that the member was trained on.
    pub(crate) num_supervised: usize,
    /// The index of the best epoch in `epochs`.
    pub(crate) best: Option<usize>,
    pub(crate) epochs: Vec<EpochScores<S>>,
}

impl<S> MemberProgress<S> {
    /// Computes the member's mean loss in the current epoch.
    pub(crate) fn training_loss(&self) -> f64 {
        self.loss_sum / self.num_losses as f64
    }

    /// Returns whether none of the last `patience` epochs improved on the best one before them.
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
