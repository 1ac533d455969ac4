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
    /// Too few rows have a label for training or for validation.
    #[error("{0}")]
    TooFewRows(String),
    /// The adapter does not fit the target.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The loss, the gradient or a prediction is not finite.
    #[error("{message}")]
    NotFinite {
        /// The whole message.
        message: String,
        /// The ids of the batch's rows.
        row_ids: Vec<String>,
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

/// The result type of this crate's functions.
pub(crate) type Result<T, E = TrainError> = std::result::Result<T, E>;

impl TrainError {
    /// Counts the rows for training (of the epoch that has the fewest), for validation, without a
    /// response within `max_len` tokens, and in all. `settings` are the recipe's keys that decide.
    pub(crate) fn too_few_rows(
        [training, validation, unusable, all]: [usize; 4],
        max_len: usize,
        settings: &str,
    ) -> Self {
        Self::TooFewRows(format!(
            "{training} rows for training and {validation} for validation have labels, of {all} in all ({unusable} have \
             no response within {max_len} tokens), with {settings}: at least one of each is necessary; hint: build \
             more data"
        ))
    }

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

/// Wraps an I/O error with the operation and the path, for `map_err`.
pub(crate) fn file_error<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(std::io::Error) -> TrainError + 'a {
    move |source| FileError::new(action, path, source).into()
}

/// Copies a tensor from its device, waiting for pending work.
pub(crate) fn to_host<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>> {
    let data = tensor.try_into_data().map_err(|e| TrainError::Device(e.to_string()))?;
    data.try_into_vec().map_err(|e| TrainError::Device(format!("{e:?}")))
}
