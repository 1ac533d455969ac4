//! Errors of models, heads and weight files. Every message names the file and the key or tensor,
//! and says what to do.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use draftsmith_files::{FileError, JsonError, parse_json, parse_json_value, read_file};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// An error while reading, checking or writing a model, a head or a weight file.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A malformed JSON file.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// A key of a drafter's `config.json` that changes what it computes, or may do so.
    #[error(
        "`{path}`: key `{key}` {problem}; hint: `ignored_keys = [\"{key}\"]` in the drafter's table of a recipe \
         reads the drafter without it"
    )]
    RefusedKey {
        /// The file.
        path: PathBuf,
        /// The key, dotted.
        key: String,
        /// The problem with the value.
        problem: String,
    },
    /// A tensor whose shape contradicts config.json.
    #[error("{0}")]
    Shape(String),
    /// A tensor of a type that cannot be read.
    #[error("{0}")]
    Dtype(String),
    /// The device failed to return a result.
    #[error("the device failed: {0}")]
    Device(String),
    /// Any other problem. The message names the file and the key or tensor.
    #[error("{0}")]
    Invalid(String),
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = ModelError> = std::result::Result<T, E>;

impl ModelError {
    /// Names a key of a JSON file, dotted, what is wrong with its value, and the expected values.
    pub(crate) fn config(path: &Path, key: &str, problem: impl Display) -> Self {
        Self::Invalid(format!("`{}`: key `{key}` {problem}", path.display()))
    }

    /// Describes a malformed or truncated safetensors file.
    pub(crate) fn safetensors(path: &Path, problem: impl Display) -> Self {
        let path = path.display();
        Self::Invalid(format!(
            "`{path}` is not a valid safetensors file: {problem}; download or export it again"
        ))
    }

    /// Describes a malformed or truncated GGUF file.
    pub(crate) fn gguf(path: &Path, problem: impl Display) -> Self {
        let path = path.display();
        Self::Invalid(format!(
            "`{path}` cannot be read as GGUF: {problem}; hint: give a GGUF file of version 3, or \
             download or convert it again"
        ))
    }

    /// Wraps an I/O error with the action and the file.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        FileError::new(action, path, source).into()
    }
}

/// Reads a JSON file.
///
/// # Errors
/// If the file cannot be read, or does not have `T`'s form.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    Ok(parse_json(path, &read_file(path)?)?)
}

/// Reads a key of a JSON file; `None` if it is absent or null.
///
/// # Errors
/// If the file cannot be read, or the value does not have `T`'s form.
pub(crate) fn read_json_key<T: DeserializeOwned>(path: &Path, key: &str) -> Result<Option<T>> {
    json_key(path, &read_json(path)?, key)
}

/// Reads one of the `keys` of a JSON file, as [`read_json_key`] does.
pub(crate) fn json_key<T: DeserializeOwned>(
    path: &Path,
    keys: &Map<String, Value>,
    key: &str,
) -> Result<Option<T>> {
    Ok(parse_json_value(path, key, keys.get(key).cloned().unwrap_or_default())?)
}
