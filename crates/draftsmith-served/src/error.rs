//! The error type of this crate. Each message names the server, key or file.

use draftsmith_data::DataError;
use draftsmith_files::FileError;

/// An error in the server settings, a request or the journal.
#[derive(Debug, thiserror::Error)]
pub enum ServedError {
    /// The server that a command measures or certifies has failed.
    #[error("{problem}")]
    Server {
        /// The server's address, the failure and a hint, without the bearer token.
        problem: String,
        /// The HTTP status, if it is the problem.
        status: Option<u16>,
    },
    /// A thread that sends requests panicked.
    #[error("a request thread panicked")]
    Panicked,
    /// The listener asked to stop.
    #[error("stopped")]
    Interrupted,
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] FileError),
    /// The token ids of a response cannot be decoded to text.
    #[error(transparent)]
    Text(#[from] DataError),
    /// Any other problem. The message names the key or prompt.
    #[error("{0}")]
    Invalid(String),
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = ServedError> = std::result::Result<T, E>;

impl ServedError {
    /// Names a key of the recipe, and what is wrong with its value.
    pub(crate) fn setting(key: &str, problem: impl std::fmt::Display) -> Self {
        Self::Invalid(format!("key `{key}` {problem}"))
    }
}
