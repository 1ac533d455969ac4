//! The errors of this crate. Each message names the server, key or file, and says what to do.

use draftsmith_data::DataError;
use draftsmith_files::FileError;

/// An error of servers' settings, requests or the journal.
#[derive(Debug, thiserror::Error)]
pub enum ServedError {
    /// A key of `[data.server]` has an invalid value.
    #[error("key `{key}` {problem}")]
    Setting {
        /// The key, dotted.
        key: &'static str,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A request brought no response after all retries.
    #[error("prompt `{id}`: {problem}; earlier responses are kept")]
    NoResponse {
        /// The row's id.
        id: String,
        /// The server's address, what it did, and a hint, without the bearer token.
        problem: String,
    },
    /// The journal lacks a response.
    #[error("the journal has no response to `{id}`")]
    NotRequested {
        /// The row's id.
        id: String,
    },
    /// A server that is timed cannot be used.
    #[error("{problem}")]
    Server {
        /// Its address, what it did, and a hint, without the bearer token.
        problem: String,
        /// The status of its answer, if that is the problem.
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
    /// A response cannot be decoded.
    #[error(transparent)]
    Text(#[from] DataError),
}
