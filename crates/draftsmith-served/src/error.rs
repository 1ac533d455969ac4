//! The error type of this crate. Each message names the server, key or file.

use draftsmith_data::DataError;
use draftsmith_files::FileError;

/// An error in the server settings, a request or the journal.
#[derive(Debug, thiserror::Error)]
pub enum ServedError {
    /// A key of `[data.server]` has an invalid value.
    #[error("key `{key}` {problem}")]
    Setting {
        /// The full name of the key, such as `data.server.urls`.
        key: &'static str,
        /// The problem, and the expected value.
        problem: String,
    },
    /// A request got no usable response after all retries.
    #[error("prompt `{id}`: {problem}; earlier responses are kept")]
    NoResponse {
        /// The id of the row whose prompt was sent.
        id: String,
        /// The server's address, the failure and a hint, without the bearer token.
        problem: String,
    },
    /// A request got no usable hidden states after all retries.
    #[error("row `{id}`: {problem}")]
    NoStates {
        /// The id of the row.
        id: String,
        /// The server's address, the failure and a hint, without the bearer token.
        problem: String,
    },
    /// The journal has no response to a prompt.
    #[error("the journal has no response to `{id}`")]
    NotRequested {
        /// The id of the prompt's row.
        id: String,
    },
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
}
