//! What is wrong with a prompt record.

use std::path::Path;

use serde_json::Value;

use crate::error::{DataError, Place};

/// What is wrong with a record, before its place is known.
#[derive(Debug)]
pub(super) enum Problem {
    /// In no known form; what was found.
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

/// What a value is called.
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
