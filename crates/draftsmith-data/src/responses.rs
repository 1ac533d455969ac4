//! Response shards on disk, `responses-00000.parquet` and on: rows in, rows out, with their
//! provenance and their place in the key-value metadata.
//!
//! `responses/row.rs` holds what a row is, `responses/schema.rs` the columns, `responses/header.rs`
//! the metadata; `responses/write.rs` and `responses/read.rs` turn rows into columns and back, and
//! `responses/directory.rs` reads the shards of a directory as one data set, which
//! `responses/hash.rs` gives its hash; `responses/manifest.rs` knows what was written of each shard, and
//! `responses/broken.rs` finds those that are not that. Equal rows, provenance and place give equal bytes.

mod broken;
mod directory;
mod hash;
mod header;
mod manifest;
mod read;
mod row;
mod schema;
mod write;

use std::path::{Path, PathBuf};

pub use broken::broken_shards;
pub use directory::{DataSet, Incomplete, ShardSet, read_dir};
pub use header::ShardPlace;
pub use manifest::{MANIFEST, forget_manifest, is_record_name, record_name, write_manifest};
pub use read::read_shard;
pub use row::{DraftColumns, FinishReason, ResponseRow, round_stored};
pub use write::write_shard;

/// What a shard's file name begins and ends with.
const SHARD_PREFIX: &str = "responses-";
const SHARD_SUFFIX: &str = ".parquet";

/// The path of a directory's shard `index`: `responses-00003.parquet` for 3.
#[must_use]
pub fn shard_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(shard_name(index))
}

/// Whether a directory holds files that are named like shards.
#[must_use]
pub fn has_shards(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| shard_index(&path).is_some())
}

/// The name of shard `index`: `responses-00003.parquet` for 3.
#[must_use]
pub fn shard_name(index: usize) -> String {
    format!("{SHARD_PREFIX}{index:05}{SHARD_SUFFIX}")
}

fn shard_index(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(SHARD_PREFIX)?.strip_suffix(SHARD_SUFFIX)?.parse().ok()
}

#[cfg(test)]
mod tests;
