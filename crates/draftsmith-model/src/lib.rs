//! Decoder language models, their KV cache, acceptance heads, self-draft adapters, and their
//! weight files.
//!
//! The lowest crate with tensors. It knows nothing of datasets, prompts or decoding loops, and
//! chooses no device: callers pass one.

mod acceptance_head;
mod adapter;
mod buckets;
mod causal_lm;
mod config;
mod decoder;
mod draft_model;
mod draft_vocabulary;
mod drafter;
mod error;
#[cfg(test)]
mod fixtures;
mod following;
mod kv_cache;
mod packed;
mod placed;
mod precision;
mod rope;
mod rows;
mod spec;
mod token_tree;
pub mod vectors;
mod weights;

pub use acceptance_head::{
    AcceptanceHead, AcceptanceHeadConfig, DrawnCandidate, HeadFeatures, HeadForm, HeadInput,
    HeadReads,
};
pub use adapter::{Adapter, AdapterArchitecture, AdapterConfig, KANGAROO_ROPE_THETA};
pub use buckets::Lengths;
pub use causal_lm::CausalLm;
pub use config::{Architecture, ModelConfig};
pub use decoder::soft_capped;
pub use draft_vocabulary::{DraftVocabulary, narrowed};
pub use drafter::{CandidateRows, DrafterModel};
pub use error::ModelError;
pub use kv_cache::KvCache;
pub use rows::{Rows, Run};

pub use spec::{
    Activation, AttentionSpec, DecoderSpec, MlpSpec, ModelShape, NormForm, NormSpec, RopeConfig,
    RopeScaling, WindowSpec,
};
pub use weights::{
    NamedTensor, WEIGHT_NAMES, WeightDtype, WeightReader, check_finite, hash_first_layers,
    hash_model_dir, read_id_lists, read_metadata, weight_files, write_id_lists, write_safetensors,
};
