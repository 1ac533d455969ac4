//! A record of a prompt file before its keys are read, and a problem of one.

use std::path::Path;

use serde_json::Value;

use crate::error::{DataError, Place};

/// The most bytes of a record: two million tokens, more than any model reads.
pub(super) const MOST_BYTES: usize = 8 << 20;

/// A record of a prompt file.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) place: Place,
    pub(super) value: Value,
    /// A key of a prompt whose value cannot be read, and why.
    pub(super) unread: Option<(&'static str, String)>,
}

/// A problem of a record whose place is not known yet.
#[derive(Debug)]
pub(super) enum Problem {
    /// In no known form, with what was found.
    Unknown(String),
    /// A key's value cannot be used.
    Key { key: String, problem: String },
}

impl Problem {
    pub(super) fn key(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Key { key: key.into(), problem: problem.into() }
    }

    pub(super) fn at(self, path: &Path, place: Place) -> DataError {
        let path = path.to_path_buf();
        match self {
            Self::Unknown(found) => DataError::UnknownRecord { path, place, found },
            Self::Key { key, problem } => DataError::BadRecord { path, place, key, problem },
        }
    }
}

/// A value's kind in messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
