//! The errors of this crate. Each message names the file and the line, key or column, and says what
//! to do about it. Callers pass finished text, so this module uses no other module of the crate.

use std::fmt;
use std::path::Path;

use draftsmith_files::FileError;

/// An error of reading or writing prompts, tokenizers, chat templates, response files or rollouts.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file, or a line of one, is not JSON.
    #[error("{0}")]
    NotJson(String),
    /// A file has changed since it was written.
    #[error("{0}")]
    CorruptShard(String),
    /// The manifest, or a record next to a shard, is malformed.
    #[error("{0}")]
    CorruptManifest(String),
    /// A directory lacks some of its shards.
    #[error("{0}")]
    MissingShards(String),
    /// A directory holds no response shards.
    #[error("{0}")]
    NoShards(String),
    /// Any other problem. The message names the file, row or column.
    #[error("{0}")]
    Invalid(String),
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = DataError> = std::result::Result<T, E>;

impl DataError {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    /// Adds the action and the file to an I/O error.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        FileError::new(action, path, source).into()
    }

    /// Names the file of a template or tokenizer, and the failed action such as `encode`.
    pub(crate) fn text(path: &Path, action: &str, problem: &str) -> Self {
        Self::Invalid(format!("`{}`: cannot {action}: {problem}", path.display()))
    }

    /// Adds the file to the error of a row.
    pub(crate) fn row_in_file(path: &Path, source: &Self) -> Self {
        Self::Invalid(format!("`{}`: {source}; build the data again", path.display()))
    }

    /// Names the line and the column in bytes, both from 1; the column is 0 if the text ends too early.
    pub(crate) fn not_json(path: &Path, line: usize, column: usize, problem: &str) -> Self {
        let path = path.display();
        Self::NotJson(format!(
            "`{path}`, line {line}, column {column}: not JSON: {problem}; fix or remove that line"
        ))
    }

    /// Creates the error for invalid JSON in a text that begins at `line` and `column` of the file,
    /// both from 1. It names the position in the file.
    pub(crate) fn json(
        path: &Path,
        line: usize,
        column: usize,
        source: &serde_json::Error,
    ) -> Self {
        let message = source.to_string();
        let problem =
            message.rsplit_once(" at line ").map_or(message.as_str(), |(problem, _)| problem);
        let is_first = source.line() <= 1;
        let column = if is_first { source.column() + column - 1 } else { source.column() };
        Self::not_json(path, line + source.line().saturating_sub(1), column, problem)
    }
}

/// The position of a record in a prompt file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordPosition {
    /// The line on which the record begins, from 1.
    Line(usize),
    /// An element of a JSON array.
    Item {
        /// The line on which the element begins, from 1.
        line: usize,
        /// The element's number in the array, from 1.
        item: usize,
    },
    /// A row of a table, from 0.
    Row(usize),
}

impl fmt::Display for RecordPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Item { line, item } => write!(f, "line {line} (item {item})"),
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}
