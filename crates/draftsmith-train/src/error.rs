//! Errors of training. Each message names the setting, row or file, and says what to do about it.

use std::path::Path;

use burn::tensor::Tensor;
use draftsmith_data::DataError;
use draftsmith_files::{FileError, NoRoom};
use draftsmith_model::ModelError;

/// An error of training.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The disk is too small for the training's state or its hidden states.
    #[error(transparent)]
    Room(#[from] NoRoom),
    /// A row is invalid, or has a token outside the model's vocabulary.
    #[error(transparent)]
    Row(#[from] DataError),
    /// There are too few rows to train and to validate.
    #[error(
        "{num_training} rows for training and {num_validation} for validation have labels, of \
         {num_rows} in all ({num_unusable} have no response within {max_len} tokens), with \
         `{section}.optimizer.validation_fraction` = {validation_fraction}{}: at least one of each is \
         necessary; hint: build more data",
        mixing_ratio.map(|ratio| format!(" and `{section}.mixing_ratio` = {ratio}")).unwrap_or_default()
    )]
    TooFewRows {
        /// The recipe's section.
        section: Section,
        /// The number of rows in the input.
        num_rows: usize,
        /// The number of rows without a response within `max_len` tokens.
        num_unusable: usize,
        /// The number of training rows with a label, in the epoch that has the fewest.
        num_training: usize,
        /// The number of validation rows with a label.
        num_validation: usize,
        /// The longest sequence, in tokens: the frozen model's context or `adapter.max_len`.
        max_len: usize,
        /// The fraction of conversations held out.
        validation_fraction: f64,
        /// The fraction of positions without a label in the training of a head; `None` for other
        /// trainings.
        mixing_ratio: Option<f64>,
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
        /// The number that is not finite: `training loss`, `gradient` or `prediction`. If several
        /// models are trained side by side, the name of the model is included.
        what: String,
        /// The epoch, counted from 1.
        epoch: usize,
        /// The ids of the batch's rows.
        row_ids: Vec<String>,
        /// The recipe's section.
        section: Section,
        /// The frozen model: `draft` or `target`.
        frozen: &'static str,
    },
    /// A file or directory cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A server's hidden states cannot be had, or are not the target's.
    #[error("{0}")]
    States(String),
    /// The caller asked to stop before the training began.
    #[error("stopped")]
    Stopped,
    /// The device failed to deliver a result.
    #[error("the device failed: {0}")]
    Device(String),
    /// Any other problem. The message names the setting, row or file.
    #[error("{0}")]
    Invalid(String),
}

impl TrainError {
    /// Describes the rollouts for training of a row.
    pub(crate) fn rollouts(id: &str, problem: &str) -> Self {
        Self::Invalid(format!(
            "row `{id}`: among the rollouts for training, {problem}; hint: record them again"
        ))
    }

    /// Builds the error for a setting that is out of range.
    pub fn setting(
        section: Section,
        key: &'static str,
        value: impl std::fmt::Display,
        expected: &'static str,
    ) -> Self {
        Self::Invalid(format!("`{section}.{key}` is {value}, expected {expected}"))
    }
}

/// The name of a recipe's table, used in messages: `head`, or the kind of a drafter.
pub type Section = &'static str;

fn quoted(ids: &[String]) -> String {
    ids.iter().map(|id| format!("`{id}`")).collect::<Vec<_>>().join(", ")
}

/// Wraps an I/O error with the operation and the path, for `map_err`.
pub(crate) fn file_error<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(std::io::Error) -> TrainError + 'a {
    move |source| FileError::new(action, path, source).into()
}

/// Copies a tensor from its device, waiting for pending work.
pub(crate) fn to_host<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, TrainError> {
    let data = tensor.try_into_data().map_err(|e| TrainError::Device(e.to_string()))?;
    data.try_into_vec().map_err(|e| TrainError::Device(format!("{e:?}")))
}
