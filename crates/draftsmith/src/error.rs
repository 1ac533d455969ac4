//! The error type of this crate.

use std::path::PathBuf;

use draftsmith_data::DataError;
use draftsmith_decode::DecodeError;
use draftsmith_files::{FileError, JsonError};
use draftsmith_model::ModelError;
use draftsmith_theory::TheoryError;

/// An error while loading, decoding or recording. Messages name the file and suggest a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error in a file of a model, head or adapter.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An error in a tokenizer, a chat template or a Parquet file.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A prompt that does not fit, or a model that fails.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A setting outside its range.
    #[error(transparent)]
    Setting(#[from] TheoryError),
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A JSON file with another form than expected.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// A tokenizer of another model.
    #[error(
        "`{path}` has {known} tokens, but the model has embeddings for {embedded}: the tokenizer does not \
         belong to this model"
    )]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's number of tokens.
        known: usize,
        /// The model's number of embeddings.
        embedded: usize,
    },
    /// A drafter that does not fit its target, or a failed download.
    #[error("{0:#}")]
    Drafter(#[from] anyhow::Error),
    /// A directory with an acceptance head, where a drafter is expected.
    #[error(
        "`{0}` holds an acceptance head; hint: give its drafter, and the head by `Drafter::with_head`"
    )]
    NotADrafter(PathBuf),
    /// An acceptance head for a drafter that cannot have one, such as prompt lookup.
    #[error("the head in `{0}` needs a drafter with a model, and prompt lookup has none")]
    HeadOfLookup(PathBuf),
    /// A stop rule that reads an acceptance head, for a drafter without one.
    #[error(
        "the stop rule reads an acceptance head; hint: give the drafter one by `Drafter::with_head`"
    )]
    NoHead,
    /// An operation that needs a drafter with a model.
    #[error("there is nothing to record; hint: give the generator a drafter with a model")]
    NoSteps,
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
