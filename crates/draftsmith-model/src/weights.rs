//! Weight files: reads safetensors and PyTorch files, single or sharded, and GGUF files, tensor by
//! tensor; writes safetensors atomically.
//!
//! `files` finds the files, `header`, `torch` and `gguf` find the tensors in them, `read` reads and hashes,
//! and `write` writes files and verifies exports. Models decide which tensors they have.

mod files;
mod gguf;
mod header;
mod quantised;
mod read;
mod stored;
#[cfg(test)]
mod tests;
mod torch;
mod write;

pub use files::{WEIGHT_NAMES, config_file, end_weight_files, text_dir, weight_files};
pub use header::read_metadata;
pub(crate) use quantised::{BLOCK, GROUP, QuantBlock, QuantType, Scales};
pub use read::{WeightReader, check_finite, hash_first_layers, hash_model_dir, read_id_lists};
pub(crate) use stored::{StoredFormat, StoredRows};
pub use write::{
    NamedTensor, WeightDtype, write_id_lists, write_network, write_safetensors, write_with_ids,
};
pub(crate) use write::{check_weights, write_config, write_torch};
