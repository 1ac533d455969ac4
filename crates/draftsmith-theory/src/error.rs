//! Errors about settings, measurements and recordings.
//!
//! They come from outside the program, so bad values are errors. A slice of the wrong length is a
//! bug in the caller and panics instead.

/// An invalid setting, or measurements that do not determine the answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TheoryError {
    /// A text that does not name a stop rule with its setting.
    #[error("`{text}` does not name a stop rule with its setting: {problem}")]
    NamedRule {
        /// The text.
        text: String,
        /// The reason why the text is invalid.
        problem: String,
    },
    /// Any other invalid value, with the whole message.
    #[error("{0}")]
    Invalid(String),
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = TheoryError> = std::result::Result<T, E>;

impl TheoryError {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(message.into())
    }

    /// Returns an error with this message unless the condition `holds`.
    pub(crate) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self::Invalid(message())) }
    }

    /// Checks that a setting is in its range.
    pub(crate) fn check(
        is_valid: bool,
        name: &'static str,
        range: &'static str,
        value: f64,
    ) -> Result<(), Self> {
        Self::ensure(is_valid, || format!("{name} must {range}, not `{value}`"))
    }
}
