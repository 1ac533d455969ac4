//! The error of reading or writing a file.

use std::io::Error;
use std::path::{Path, PathBuf};

/// A file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{path}`: {source}")]
pub struct FileError {
    /// What was being done: `create`, `read` or `write`.
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// What the system said.
    pub source: Error,
}

impl FileError {
    pub(crate) fn new(action: &'static str, path: &Path, source: Error) -> Self {
        Self { action, path: path.to_path_buf(), source }
    }
}
