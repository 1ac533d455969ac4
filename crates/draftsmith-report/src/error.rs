//! The errors of this crate.

use std::path::PathBuf;

use draftsmith_files::{FileError, JsonError};

/// An error of reading or showing results.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file is not a `results.json`.
    #[error(
        "`{path}` is not a list of result rows; hint: run `draftsmith evaluate` to write it again"
    )]
    NotRows {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: JsonError,
    },
    /// A recipe describes a table of a paper that results cannot fill.
    #[error("the paper's table `{title}`: {what}")]
    PaperTable {
        /// The title of the table.
        title: String,
        /// The problem.
        what: String,
    },
    /// A page's template does not fit its data, which is a bug.
    #[error("the page's template does not fit its data")]
    Template(#[from] minijinja::Error),
    /// Results cannot be written as JSON, which is a bug.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = ReportError> = std::result::Result<T, E>;
