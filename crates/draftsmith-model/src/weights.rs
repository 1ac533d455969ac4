//! Weight files: reading safetensors and PyTorch's, one file or a sharded index, tensor by tensor;
//! writing safetensors, whole or not at all.
//!
//! `weights/files.rs` finds the files, `weights/header.rs` and `weights/torch.rs` find the tensors in
//! them, `weights/read.rs` reads and hashes, `weights/write.rs` writes, `weights/checksum.rs` holds
//! exports to what was written. Which tensors a model has, and under which names, is each model's
//! business.

mod checksum;
mod files;
mod header;
mod read;
mod stored;
#[cfg(test)]
mod tests;
mod torch;
mod write;

pub(crate) use checksum::{check_weights, write_config};
pub use files::{WEIGHT_NAMES, weight_files};
pub use header::read_metadata;
pub use read::{WeightReader, hash_first_layers, hash_model_dir};
pub(crate) use stored::StoredRows;
pub(crate) use torch::write_torch;
#[cfg(test)]
pub(crate) use write::pretty;
pub(crate) use write::write_json;
pub(crate) use write::{NamedIds, write_with_ids};
pub use write::{NamedTensor, WeightDtype, write_safetensors};
