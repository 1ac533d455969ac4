//! A record of a prompt file before its keys are read, and the problems that a record can have.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{DataError, RecordPosition};

/// The known forms of prompt records, for messages.
pub(super) const PROMPT_FORMS: &str = "`turns` (Spec-Bench), `question`/`answer` (GSM8K), `prompt` (HumanEval and others), \
     `instruction`/`input`/`output` (Alpaca), `conversations` (ShareGPT) or `messages` (chat)";

/// The maximum size of a record in bytes, about two million tokens, more than any model reads.
pub(super) const MAX_BYTES: usize = 8 << 20;

/// A record of a prompt file.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) position: RecordPosition,
    pub(super) value: Value,
    /// A key of a prompt whose value cannot be read, with the reason; `None` if there is none.
    pub(super) unread: Option<(&'static str, String)>,
}

/// A problem of a record whose position is not known yet.
#[derive(Debug)]
pub(super) enum Problem {
    /// The record exceeds a limit.
    Large(String),
    /// The record is in no known form. The text says what was found.
    Unknown(String),
    /// A key's value cannot be used.
    Key { key: String, problem: String },
}

/// The result of reading a part of a record.
pub(super) type Result<T, E = Problem> = std::result::Result<T, E>;

/// The keys of a record.
pub(super) type Keys = Map<String, Value>;

impl Problem {
    pub(super) fn key(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Key { key: key.into(), problem: problem.into() }
    }

    /// Creates the problem of a record with more than [`MAX_BYTES`].
    pub(super) fn long() -> Self {
        Self::Large(format!("has more than {} MB", MAX_BYTES >> 20))
    }

    pub(super) fn at(self, path: &Path, position: RecordPosition) -> DataError {
        let problem = match self {
            Self::Large(problem) => {
                format!("the record {problem}, too much for a prompt; shorten or remove it")
            }
            Self::Unknown(found) => {
                format!("the record has {found}, but a prompt needs {PROMPT_FORMS}")
            }
            Self::Key { key, problem } => format!("key `{key}` {problem}"),
        };
        DataError::invalid(format!("`{}`, {position}: {problem}", path.display()))
    }
}

/// Names the type of a JSON value, for messages.
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
