//! The error of a file operation.

use std::io::Error;
use std::path::{Path, PathBuf};

/// An I/O error, with the operation and the path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{path}`: {source}")]
pub struct FileError {
    /// The operation, such as `create` or `write`.
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The system's error.
    pub source: Error,
}

impl FileError {
    /// Wraps an I/O error.
    pub fn new(action: &'static str, path: &Path, source: Error) -> Self {
        Self { action, path: path.to_path_buf(), source }
    }
}
