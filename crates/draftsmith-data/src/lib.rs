//! Prompts, chat templates, tokenizers and the Parquet rows that heads and adapters are trained on.
//!
//! Everything that comes from or goes to a file and is not a model: prompt sets in their published
//! forms, the text side of a checkpoint directory (`tokenizer.json`, the chat template), and the
//! response shards and rollouts with the provenance in their metadata. It sees token ids and
//! numbers, never tensors or weights.

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
mod tokenizer;
mod values;

pub use caught::{caught, is_panic_caught};
pub use chat_format::ChatFormat;
pub use chat_template::{ChatTemplate, Message};
pub use draftsmith_files::{hash_bytes, hash_file};
pub use error::{DataError, Place};
pub use prompts::{
    ContentHash, GivenTokens, LengthBounds, Malformed, Prompt, Prompts, SourceWeight, SplitRange,
    Turn,
};
pub use provenance::{Difference, PromptFile, Provenance, is_no_penalty, no_penalty};
pub use responses::{
    DataSet, DraftColumns, FinishReason, Incomplete, MANIFEST, ResponseRow, ShardPlace, ShardSet,
    broken_shards, forget_manifest, has_shards, is_record_name, read_dir, read_shard, record_name,
    round_stored, shard_name, shard_path, write_manifest, write_shard,
};
pub use rollouts::{
    RolloutCandidates, RolloutDecoding, RolloutHead, RolloutProvenance, RolloutRow,
    is_rollouts_path, read_rollout_provenance, read_rollouts, rollouts_path, rollouts_paths,
    validate_rollouts, write_rollouts,
};
pub use tokenizer::{StopStrings, TextStream, TextTokenizer};
