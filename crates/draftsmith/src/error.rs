//! The error of everything here.

use std::path::PathBuf;

use draftsmith_data::DataError;
use draftsmith_decode::DecodeError;
use draftsmith_files::{FileError, JsonError};
use draftsmith_model::ModelError;
use draftsmith_theory::TheoryError;

/// Why something cannot be loaded, decoded or recorded. Messages name the file and say what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model's, a head's or an adapter's file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tokenizer, a chat template, or Parquet.
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
    /// A drafter that does not fit its target, or a model that cannot be downloaded.
    #[error("{0:#}")]
    Drafter(#[from] anyhow::Error),
    /// A head where a drafter is expected.
    #[error(
        "`{0}` holds an acceptance head; hint: give its drafter, and the head by `Drafter::with_head`"
    )]
    NotADrafter(PathBuf),
    /// A head for prompt lookup.
    #[error("the head in `{0}` needs a drafter with a model, and prompt lookup has none")]
    HeadOfLookup(PathBuf),
    /// A rule that reads a head, for a drafter without one.
    #[error(
        "the stop rule reads an acceptance head; hint: give the drafter one by `Drafter::with_head`"
    )]
    NoHead,
    /// Something that only drafters with a model can do.
    #[error("there is nothing to record; hint: give the generator a drafter with a model")]
    NoSteps,
}
