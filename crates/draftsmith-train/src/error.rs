//! What can go wrong while training: every message names the setting, the row or the file, and
//! tells what to do.

use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::Tensor;
use draftsmith_data::DataError;
use draftsmith_files::{FileError, NoRoom};
use draftsmith_model::ModelError;

use crate::section::Section;

/// An error of training.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting is out of its range.
    #[error("`{section}.{key}` is {value}, expected {expected}")]
    Setting {
        /// The recipe's section.
        section: Section,
        /// The key in it.
        key: &'static str,
        /// Its value.
        value: String,
        /// The values it may have.
        expected: &'static str,
    },
    /// A training's state does not fit the disk.
    #[error(transparent)]
    Room(#[from] NoRoom),
    /// A setting is where it was before sections had a table `optimizer`.
    #[error("`{section}.{old}` has moved; hint: write `{section}.optimizer.{new}`")]
    MovedKey {
        /// The recipe's section.
        section: Section,
        /// The key in it.
        old: &'static str,
        /// The key in its table `optimizer`.
        new: &'static str,
    },
    /// A row has no columns of a draft.
    #[error(
        "row `{id}` has no draft columns: the data was built without a drafter; \
         give `models.draft` and build it again"
    )]
    NoDraftColumns {
        /// The row.
        id: String,
    },
    /// A row is not what the data format promises, or has a token that the model does not know.
    #[error(transparent)]
    Row(#[from] DataError),
    /// What was recorded is not of the responses.
    #[error("row `{id}`: of the rollouts to learn from, {problem}; record them again")]
    Rollouts {
        /// The row.
        id: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// One side of the split has nothing to learn or to measure.
    #[error(
        "{num_training} rows for training and {num_validation} for validation have labels, of \
         {num_rows} in all ({num_unusable} are empty or begin past the draft's context of \
         {context} tokens), with `{section}.optimizer.validation_fraction` = {validation_fraction} and \
         `{section}.mixing_ratio` = {mixing_ratio}: each side needs one; build more data"
    )]
    TooFewRows {
        /// The recipe's section: the head of a draft or of an adapter.
        section: Section,
        /// Rows given.
        num_rows: usize,
        /// Rows that have no position inside the draft's context.
        num_unusable: usize,
        /// Training rows that have a label, in the epoch that has fewest.
        num_training: usize,
        /// Validation rows that have a label.
        num_validation: usize,
        /// Longest sequence of the draft, in tokens.
        context: usize,
        /// The share of conversations that was to be held out.
        validation_fraction: f64,
        /// The share of positions without a label.
        mixing_ratio: f64,
    },
    /// One side of the split has nothing for an adapter to learn or to measure.
    #[error(
        "{num_training} rows for training and {num_validation} for validation, of {num_rows} in \
         all ({num_unusable} have no response within {max_len} tokens), with \
         `adapter.optimizer.validation_fraction` = {validation_fraction}: each side needs one; build more data"
    )]
    TooFewResponses {
        /// Rows given.
        num_rows: usize,
        /// Rows without a response, or whose response begins past `max_len`.
        num_unusable: usize,
        /// Training rows.
        num_training: usize,
        /// Validation rows.
        num_validation: usize,
        /// The longest sequence, in tokens: `adapter.max_len` or the target's context.
        max_len: usize,
        /// The share of conversations that was to be held out.
        validation_fraction: f64,
    },
    /// The target has no layer behind an exit.
    #[error(
        "`adapter.exit_layer` is {exit_layer}, but the target has {num_layers} layers: expected 1 to \
         {}",
        num_layers.saturating_sub(1)
    )]
    ExitLayer {
        /// The layers before the adapter.
        exit_layer: usize,
        /// The target's layers.
        num_layers: usize,
    },
    /// The adapter does not fit the target.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A loss, a gradient or a prediction is NaN or infinite.
    #[error(
        "the {what} is not finite in epoch {epoch}, at rows {}: the learning rate may be too \
         high (`{section}.optimizer.learning_rate`), or the {frozen}'s hidden states are broken there",
        quoted(.row_ids)
    )]
    NotFinite {
        /// `training loss`, `gradient` or `prediction`, and of which member if there are several.
        what: String,
        /// The epoch, counted from 1.
        epoch: usize,
        /// The rows of the batch.
        row_ids: Vec<String>,
        /// The recipe's section.
        section: Section,
        /// The frozen model: `draft` or `target`.
        frozen: &'static str,
    },
    /// The directory of checkpoints cannot be used.
    #[error("cannot {action} `{path}`: {source}")]
    CheckpointDir {
        /// What was being done: `create`, `read`, `clear`.
        action: &'static str,
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A run cannot resume from a training's state.
    #[error(
        "cannot resume from `{path}`: {problem}; hint: delete the directory `checkpoint` that it is in, \
         and training begins anew"
    )]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The device failed to deliver a result.
    #[error("the device failed: {0}")]
    Device(String),
    /// burn-train stopped: a checkpoint could not be written, or a metric not be computed.
    #[error("training stopped: {0}")]
    Learner(Arc<burn_train::TrainingError>),
}

fn quoted(ids: &[String]) -> String {
    ids.iter().map(|id| format!("`{id}`")).collect::<Vec<_>>().join(", ")
}

/// Copies a tensor from its device: waits for it.
pub(crate) fn to_host<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, TrainError> {
    let data = tensor.try_into_data().map_err(|e| TrainError::Device(e.to_string()))?;
    data.try_into_vec().map_err(|e| TrainError::Device(format!("{e:?}")))
}
