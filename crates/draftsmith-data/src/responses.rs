//! Response shards on disk, named `responses-00000.parquet` and so on.
//!
//! `responses/row.rs` defines a row and `responses/shard.rs` reads and writes one shard.
//! `responses/directory.rs` reads the shards of a directory as one data set, and
//! `responses/hash.rs` computes its hash. `responses/manifest.rs` records the size and hash of each
//! shard as written. A shard holds the responses to a fixed run of 32 prompts, so a killed job
//! resumes at the first missing shard. Equal rows, provenance and position give files with equal
//! bytes.

mod directory;
mod hash;
mod manifest;
mod row;
mod shard;

use std::path::{Path, PathBuf};

use draftsmith_files::paths_in;

pub use directory::{DataSet, Incomplete, ShardSet, broken_shards, read_dir, write_manifest};
pub use manifest::{MANIFEST, forget_manifest};
pub use row::{DraftColumns, FinishReason, ResponseRow, round_stored};
pub use shard::{ShardPlace, read_shard, write_shard};

/// The beginning and the end of a shard's file name.
const SHARD_PREFIX: &str = "responses-";
const SHARD_SUFFIX: &str = ".parquet";

/// Returns the path of shard `index` in a directory, which ends in `responses-00003.parquet` for 3.
pub fn shard_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(shard_name(index))
}

/// Returns whether a directory holds files that are named like shards.
pub fn has_shards(dir: &Path) -> bool {
    paths_in(dir).is_ok_and(|paths| paths.iter().any(|path| shard_index(path).is_some()))
}

/// Returns the file name of shard `index`: `responses-00003.parquet` for 3.
pub fn shard_name(index: usize) -> String {
    format!("{SHARD_PREFIX}{index:05}{SHARD_SUFFIX}")
}

fn shard_index(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(SHARD_PREFIX)?.strip_suffix(SHARD_SUFFIX)?.parse().ok()
}

#[cfg(test)]
mod tests;
