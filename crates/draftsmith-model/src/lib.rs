//! Llama-architecture models, their KV cache, acceptance heads, self-draft adapters, and their
//! weight files.
//!
//! The base of everything that computes with tensors. It knows nothing of datasets, prompts or
//! decoding loops, and picks no device: callers hand one in.

mod acceptance_head;
mod adapter;
mod config;
mod drafter;
mod error;
mod kv_cache;
mod llama;
mod packed;
mod precision;
mod rows;
pub mod vectors;
mod weights;

pub use acceptance_head::{
    AcceptanceHead, AcceptanceHeadConfig, DrawnCandidate, HeadFeatures, HeadForm, HeadInput,
    HeadReads, LAST_POSITION,
};
pub use adapter::{Adapter, AdapterArchitecture, AdapterConfig};
pub use config::{LlamaConfig, RopeConfig, RopeScaling};
pub use drafter::{CandidateRows, DrafterModel};
pub use error::ModelError;
pub use kv_cache::KvCache;
pub use llama::CausalLm;
pub use rows::{Rows, Run};
pub use weights::{
    NamedTensor, WeightDtype, WeightReader, hash_model_dir, read_metadata, write_safetensors,
};
