//! Records of each shard as it was written. The number of rows, the size and the BLAKE3 reveal
//! later changes. The hash of the settings keeps shards of different settings from becoming one
//! data set.
//!
//! A record is written next to every shard as it is built (`.responses-00003.json`), so that a
//! build that was killed can check its shards. Once all shards exist, the records are collected in
//! `manifest.json` and then removed. So a record that still exists is newer than the manifest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_files::{
    hash_bytes, if_present, open_regular, paths_in, read_bytes, read_text, remove_abandoned,
    write_whole,
};
use serde::{Deserialize, Serialize};

use super::{SHARD_PREFIX, shard_name};
use crate::error::{DataError, Result};
use crate::provenance::Provenance;

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
const RECORD_SUFFIX: &str = ".json";

/// A record of one shard as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardRecord {
    /// The file's name.
    name: String,
    num_rows: usize,
    num_bytes: u64,
    /// The hash of the whole file, as hex.
    blake3: String,
    /// The hash of the shard's provenance, as hex.
    settings: String,
}

/// The content of `manifest.json`: totals and the records of all shards, in order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    num_shards: usize,
    num_rows: usize,
    num_bytes: u64,
    shards: Vec<ShardRecord>,
}

/// The records of a directory's shards, by file name.
#[derive(Debug, Default)]
pub(super) struct ShardRecords(BTreeMap<String, ShardRecord>);

impl ShardRecord {
    /// Creates the record of a shard in its current state.
    ///
    /// # Errors
    /// If the shard cannot be read.
    pub(super) fn of(
        path: &Path,
        index: usize,
        num_rows: usize,
        provenance: &Provenance,
    ) -> Result<Self> {
        let (blake3, num_bytes) = blake3_file(path)?;
        let settings = hash_bytes(to_json(provenance).as_bytes());
        Ok(Self { name: shard_name(index), num_rows, num_bytes, blake3, settings })
    }

    /// Writes the record next to its shard.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write(&self, dir: &Path, index: usize) -> Result<()> {
        Ok(write_whole(&dir.join(record_name(index)), to_json(self))?)
    }
}

impl ShardRecords {
    /// Reads the records of a directory, which may have none.
    ///
    /// # Errors
    /// If a record or the manifest cannot be read or is malformed.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let mut newer = Vec::new();
        for path in record_paths(dir)? {
            newer.extend(read_json::<ShardRecord>(&path)?);
        }
        let manifest: Option<Manifest> = read_json(&dir.join(MANIFEST))?;
        let older = manifest.into_iter().flat_map(|manifest| manifest.shards);
        let all = older.chain(newer).map(|record| (record.name.clone(), record));
        Ok(Self(all.collect()))
    }

    /// Returns the record of shard `index`, if there is one.
    pub(super) fn of_shard(&self, index: usize) -> Option<&ShardRecord> {
        self.0.get(&shard_name(index))
    }

    /// Checks that a shard has not changed since it was written. Returns false if it has no record.
    ///
    /// # Errors
    /// If the shard has changed or cannot be read.
    pub(super) fn check(&self, path: &Path, index: usize) -> Result<bool> {
        let Some(record) = self.of_shard(index) else { return Ok(false) };
        let (blake3, num_bytes) = blake3_file(path)?;
        if (&record.blake3, record.num_bytes) == (&blake3, num_bytes) {
            return Ok(true);
        }
        let problem = if record.num_bytes == num_bytes {
            format!("hashes to BLAKE3 {blake3}, but {} was written", record.blake3)
        } else {
            format!("has {num_bytes} bytes, but {} were written", record.num_bytes)
        };
        Err(DataError::CorruptShard(format!(
            "`{}` {problem}: it has changed since it was written; hint: `draftsmith build-data --repair` builds it again",
            path.display()
        )))
    }
}

pub(super) fn provenance_differs(first: &Path, second: &Path, difference: &str) -> DataError {
    DataError::invalid(format!(
        "`{}` and `{}` were built with different settings: {difference}; keep shards of different runs in different \
         directories",
        first.display(),
        second.display()
    ))
}

/// Writes the records of all shards as the manifest, if it changed, then removes the records and
/// abandoned temporary files.
///
/// # Errors
/// If shards were built with different settings, or the manifest cannot be written.
pub(super) fn write(dir: &Path, shards: Vec<ShardRecord>) -> Result<()> {
    if let Some(other) = shards.iter().find(|shard| shard.settings != shards[0].settings) {
        let [first, second] = [&shards[0], other].map(|shard| dir.join(&shard.name));
        return Err(provenance_differs(&first, &second, "their provenance differs"));
    }
    let manifest = Manifest {
        num_shards: shards.len(),
        num_rows: shards.iter().map(|record| record.num_rows).sum(),
        num_bytes: shards.iter().map(|record| record.num_bytes).sum(),
        shards,
    };
    let (path, text) = (dir.join(MANIFEST), to_json(&manifest));
    if read_text(&path).ok().as_ref() != Some(&text) {
        write_whole(&path, text)?;
    }
    for path in record_paths(dir)? {
        // A record that could not be removed is harmless, because it equals the manifest's.
        let _ = std::fs::remove_file(path);
    }
    remove_abandoned(dir);
    Ok(())
}

/// Removes the manifest and all records, for example if one is malformed. Shards that are valid get
/// new records.
///
/// # Errors
/// If a file cannot be removed.
pub fn forget_manifest(dir: &Path) -> Result<()> {
    for path in record_paths(dir)?.into_iter().chain([dir.join(MANIFEST)]) {
        if_present(std::fs::remove_file(&path)).map_err(|e| DataError::io("remove", &path, e))?;
    }
    Ok(())
}

/// Returns the file name of the record of shard `index`: `.responses-00003.json` for 3.
fn record_name(index: usize) -> String {
    format!(".{SHARD_PREFIX}{index:05}{RECORD_SUFFIX}")
}

/// Returns whether a file with this name is the record of a shard.
fn is_record_name(name: &str) -> bool {
    let rest = name.strip_prefix('.').and_then(|rest| rest.strip_prefix(SHARD_PREFIX));
    rest.is_some_and(|rest| rest.ends_with(RECORD_SUFFIX))
}

/// Finds the paths of all records in a directory.
fn record_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    let is_record = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(is_record_name)
    };
    Ok(paths_in(dir)?.into_iter().filter(is_record).collect())
}

fn to_json(value: &impl Serialize) -> String {
    let text = serde_json::to_string_pretty(value).expect("names and numbers are JSON");
    text + "\n"
}

/// Parses a JSON file; `None` if the file does not exist.
fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>> {
    let bytes = if_present(read_bytes(path)).map_err(|e| DataError::io("read", path, e))?;
    let value = bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose();
    value.map_err(|error| {
        DataError::CorruptManifest(format!(
            "`{}` cannot be read: {error}; hint: `draftsmith build-data --repair` writes it again",
            path.display()
        ))
    })
}

/// Computes the BLAKE3 of a file, as hex, and its size in bytes, in constant memory.
fn blake3_file(path: &Path) -> Result<(String, u64)> {
    let read_error = |e| DataError::io("read", path, e);
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(open_regular(path).map_err(read_error)?).map_err(read_error)?;
    Ok((hasher.finalize().to_hex().to_string(), hasher.count()))
}
