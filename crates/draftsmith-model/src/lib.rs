//! Decoder language models with their KV cache, acceptance heads, self-draft adapters, EAGLE-3
//! drafters, block drafters, Medusa's heads, and their weight files.
//!
//! This is the lowest crate with tensors. It knows nothing of datasets, prompts or decoding loops,
//! and chooses no device: callers pass one.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use draftsmith_model::CausalLm;
//! # fn main() -> Result<(), draftsmith_model::ModelError> {
//! # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoints/tiny/target").as_ref();
//! let device = Device::flex(); // the CPU
//! let model = CausalLm::from_model_dir(dir, &device)?;
//! let ids = Tensor::<2, Int>::from_ints([[0, 17, 42]], &device);
//! let logits = model.lm_head(model.hidden_states(ids));
//! assert_eq!(logits.dims(), [1, 3, model.shape().vocab_size]);
//! # Ok(())
//! # }
//! ```
//!
//! Decoding uses [`CausalLm::forward_layers`] with a [`KvCache`] instead.
//! [`AcceptanceHead::from_dir`] and [`Adapter::from_dir`] load trained heads and adapters.

mod acceptance_head;
mod adapter;
mod block_drafter;
mod buckets;
mod causal_lm;
mod config;
mod decoder;
mod draft_model;
mod draft_vocabulary;
mod drafter;
mod eagle;
mod eagle3;
mod error;
#[cfg(test)]
mod fixtures;
mod following;
mod frozen;
mod gguf;
mod kv_cache;
mod medusa;
mod packed;
mod placed;
mod precision;
mod rope;
mod rows;
mod self_draft;
mod spec;
mod state_network;
mod token_tree;
mod trained_with;
pub mod vectors;
mod weights;

pub use acceptance_head::{
    AcceptanceHead, AcceptanceHeadConfig, DrawnCandidate, HeadFeatures, HeadForm, HeadInput,
    HeadReads,
};
pub use adapter::{Adapter, AdapterArchitecture, AdapterConfig, AdapterForm, KANGAROO_ROPE_THETA};
pub use block_drafter::{
    BlockDrafter, BlockDrafterConfig, BlockForm, BlockStart, ConfidenceHead, ConfidenceWeights,
    copy_distance,
};
pub use buckets::Lengths;
pub use causal_lm::CausalLm;
pub use config::{Architecture, ModelConfig};
pub use decoder::soft_capped;
pub use draft_vocabulary::{DraftVocabulary, narrowed};
pub use drafter::{CandidateRows, DrafterModel};
pub use eagle::{Eagle, EagleConfig, EagleForm};
pub use eagle3::{Eagle3, Eagle3Config, Eagle3Form, NUM_TARGET_STATES, StateNorms};
pub use error::{ModelError, read_json};
pub use gguf::{Gguf, GgufTensor, is_gguf};
pub use kv_cache::KvCache;
pub use medusa::{Medusa, MedusaConfig};
pub use rows::Rows;
pub use self_draft::config::{DraftConfig, VOCABULARY_COVERAGE};
pub use self_draft::faults::{DraftFault, DraftFaultKind};
pub use self_draft::files::DraftFiles;
pub use self_draft::keys::DrafterDir;
pub use self_draft::{DraftForm, DraftNetwork, uniform_matrix};

pub use spec::{
    Activation, AttentionSpec, DecoderSpec, MlpSpec, ModelShape, NormForm, NormSpec, RopeConfig,
    RopeScaling, SessionFaults, WindowSpec,
};
pub use state_network::{CachedNetwork, StateNetwork, StepNetwork, UnrolledInputs};
pub use trained_with::{check_trained_with, hash_export};
pub use weights::{
    NamedTensor, WEIGHT_NAMES, WeightDtype, WeightReader, check_finite, config_file,
    end_weight_files, hash_first_layers, hash_model_dir, read_id_lists, read_metadata, text_dir,
    weight_files, write_id_lists, write_network, write_safetensors, write_with_ids,
};
