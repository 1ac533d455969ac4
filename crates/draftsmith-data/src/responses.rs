//! Response shards on disk, `responses-00000.parquet` and on: rows in, rows out, with their
//! provenance in the key-value metadata.
//!
//! `responses/row.rs` holds what a row is, `responses/schema.rs` the columns; `responses/write.rs` and
//! `responses/read.rs` turn rows into columns and back. Equal rows and provenance give equal bytes.

mod read;
mod row;
mod schema;
mod write;

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::error::DataError;
use crate::provenance::Provenance;

pub use read::{read_provenance, read_shard};
pub use row::{DraftColumns, FinishReason, ResponseRow, round_stored};
pub use write::write_shard;

/// What a shard's file name begins and ends with.
const SHARD_PREFIX: &str = "responses-";
const SHARD_SUFFIX: &str = ".parquet";

/// The path of a directory's shard `index`: `responses-00003.parquet` for 3.
#[must_use]
pub fn shard_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("{SHARD_PREFIX}{index:05}{SHARD_SUFFIX}"))
}

/// The paths of a directory's shards, by index.
///
/// # Errors
/// If the directory cannot be read or holds none.
pub fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let read_error = |e| DataError::io("read", dir, e);
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path();
        if let Some(index) = shard_index(&path) {
            shards.push((index, path));
        }
    }
    if shards.is_empty() {
        return Err(DataError::NoShards { path: dir.to_path_buf() });
    }
    shards.sort();
    Ok(shards.into_iter().map(|(_, path)| path).collect())
}

fn shard_index(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(SHARD_PREFIX)?.strip_suffix(SHARD_SUFFIX)?.parse().ok()
}

/// Reads all shards of a directory, in the order of their indices. With `vocab_size`, the rows are
/// for a model of so many tokens.
///
/// # Errors
/// If there is none, one cannot be read (see [`read_shard`]), or their provenances differ.
pub fn read_dir(
    dir: &Path,
    vocab_size: Option<usize>,
) -> Result<(Vec<ResponseRow>, Provenance), DataError> {
    let paths = shard_paths(dir)?;
    let first = read_provenance(&paths[0])?;
    for path in &paths[1..] {
        if let Some(difference) = first.difference(&read_provenance(path)?) {
            let (first, second) = (paths[0].clone(), path.clone());
            return Err(DataError::ProvenanceDiffers { first, second, difference });
        }
    }
    let shards: Vec<_> = paths.par_iter().map(|path| read_shard(path, vocab_size)).collect();
    let mut rows = Vec::new();
    for shard in shards {
        rows.extend(shard?.0);
    }
    Ok((rows, first))
}

#[cfg(test)]
mod tests;
