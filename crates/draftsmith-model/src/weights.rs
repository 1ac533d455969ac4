//! Weight files: reading safetensors, one file or a sharded index, tensor by tensor; writing them
//! whole or not at all.
//!
//! `weights/read.rs` reads and hashes, `weights/write.rs` writes, `weights/checksum.rs` holds exports
//! to what was written. Which tensors a model has, and
//! under which names, is each model's business.

mod checksum;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use checksum::{check_weights, write_config};
pub use read::{WeightReader, hash_model_dir, read_metadata, weight_files};
pub(crate) use write::pretty;
pub use write::{NamedTensor, WeightDtype, write_safetensors};
