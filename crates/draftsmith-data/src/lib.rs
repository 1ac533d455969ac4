//! Prompts, chat templates, tokenizers, and the Parquet rows that heads and adapters train on.
//!
//! This crate reads and writes every file that is not a model: prompt sets in their published
//! forms, the text side of a checkpoint directory (`tokenizer.json` and the chat template), and
//! response shards and rollouts with the provenance in their metadata. It handles token ids and
//! numbers, never tensors or weights. Files are untrusted: a malformed file causes an error and
//! nothing worse.
//!
//! ```
//! use draftsmith_data::{ChatFormat, Message, TextTokenizer};
//! # fn main() -> Result<(), draftsmith_data::DataError> {
//! # let dir: &std::path::Path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny/target").as_ref();
//! let tokenizer = TextTokenizer::from_model_dir(dir)?;
//! let format = ChatFormat::choose(dir, None)?; // the model's own template
//! let ids = tokenizer.encode_chat(&format, &[Message::user("What is 2 + 2?")])?;
//! assert!(tokenizer.decode(&ids, false)?.ends_with("What is 2 + 2?\n<|assistant|>\n"));
//! # Ok(())
//! # }
//! ```
//!
//! [`Prompts`] reads prompt files and [`read_dir`] reads a data set of [`ResponseRow`]s.
//! [`read_rollouts`] reads the candidates that a drafter proposes along such responses.

mod caught;
mod chat_format;
mod chat_template;
mod columns;
mod error;
#[cfg(test)]
mod peak;
mod prompts;
mod provenance;
mod responses;
mod rollouts;
mod text_files;
mod tokenizer;
mod tokenizer_config;

pub use caught::{caught, is_panic_caught};
pub use chat_format::ChatFormat;
pub use chat_template::{ChatTemplate, Message};
pub use draftsmith_files::{hash_bytes, hash_file};
pub use error::{DataError, RecordPosition};
pub use prompts::{
    ContentHash, GivenTokens, LengthBounds, Malformed, Prompt, Prompts, SourceWeight, SplitRange,
    Turn, missing_answer, source_of,
};
pub use provenance::{FieldDifference, PromptFile, Provenance, is_no_penalty, no_penalty};
pub use responses::{
    DataSet, DraftColumns, FinishReason, Incomplete, MANIFEST, ResponseRow, ShardPlace, ShardSet,
    broken_shards, forget_manifest, has_shards, read_dir, read_shard, round_stored, shard_name,
    shard_path, write_manifest, write_shard,
};
pub use rollouts::{
    RolloutCandidates, RolloutHead, RolloutProvenance, RolloutRow, is_rollouts_path,
    read_rollout_provenance, read_rollouts, rollouts_path, rollouts_paths, validate_rollouts,
    write_rollouts,
};
pub use text_files::TextFiles;
pub use tokenizer::{StopStrings, TextStream, TextTokenizer};
