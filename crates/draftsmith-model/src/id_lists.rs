//! Lists of token ids in a safetensors file, as 64-bit integers.

use std::path::Path;

use crate::error::ModelError;
use crate::weights::{NamedIds, WeightDtype, WeightReader, write_with_ids};

/// Writes named lists of ids and metadata, atomically.
///
/// # Errors
/// If the file cannot be written.
pub fn write_id_lists(
    path: &Path,
    lists: &[(&str, &[u32])],
    metadata: &[(String, String)],
) -> Result<(), ModelError> {
    let lists: Vec<NamedIds<'_>> = lists.iter().map(|(name, ids)| NamedIds { name, ids }).collect();
    write_with_ids(path, &[], &lists, WeightDtype::F32, metadata).map(drop)
}

/// Reads the lists with these names, of ids below `vocab_size`.
///
/// # Errors
/// If the file is missing or broken, lacks a list, contains anything else, or an id is out of
/// range.
pub fn read_id_lists<const N: usize>(
    path: &Path,
    names: [&str; N],
    vocab_size: usize,
) -> Result<[Vec<u32>; N], ModelError> {
    let mut reader = WeightReader::open_file(path)?;
    let mut lists: [Vec<u32>; N] = std::array::from_fn(|_| Vec::new());
    for (list, name) in lists.iter_mut().zip(names) {
        let len = reader.shape(name).and_then(|shape| shape.first().copied());
        *list = reader.take_ids(name, len.unwrap_or(0), vocab_size)?;
    }
    reader.finish()?;
    Ok(lists)
}
