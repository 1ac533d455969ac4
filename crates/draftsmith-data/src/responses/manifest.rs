//! What was written of each shard, so that a byte that changes later is found: its number of rows, its
//! size and its BLAKE3.
//!
//! Processes that build one directory together know nothing of each other, so each writes a record
//! beside every shard of its own (`.responses-00003.json`), and whoever finds all shards there puts the
//! records together (`manifest.json`), which several may do at once: each writes the same bytes, and
//! only then takes records away. A record that is there is newer than the manifest's.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use draftsmith_files::{remove_abandoned, write_whole};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::read::read_shard;
use super::{SHARD_PREFIX, shard_name, shard_path};
use crate::error::DataError;

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";
const RECORD_SUFFIX: &str = ".json";

/// What was written of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardRecord {
    /// The file's name.
    name: String,
    num_rows: usize,
    num_bytes: u64,
    /// Of the whole file, as hex.
    blake3: String,
}

/// The records of all shards, in their order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    num_shards: usize,
    num_rows: usize,
    num_bytes: u64,
    shards: Vec<ShardRecord>,
}

/// What was written of the shards of a directory, by index.
#[derive(Debug, Default)]
pub(super) struct Records(BTreeMap<String, ShardRecord>);

impl ShardRecord {
    /// The record of a shard as it is now.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn of(path: &Path, index: usize, num_rows: usize) -> Result<Self, DataError> {
        let (blake3, num_bytes) = blake3_file(path)?;
        Ok(Self { name: shard_name(index), num_rows, num_bytes, blake3 })
    }

    /// Writes the record beside its shard.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn write(&self, dir: &Path, index: usize) -> Result<(), DataError> {
        Ok(write_whole(&dir.join(record_name(index)), to_json(self))?)
    }
}

impl Records {
    /// Reads the records of a directory, which may have none.
    ///
    /// # Errors
    /// If there is one that cannot be read or is not what was written.
    pub(super) fn read(dir: &Path) -> Result<Self, DataError> {
        // Records first: one that is taken away meanwhile is in the manifest, which is read after it.
        let mut newer = Vec::new();
        for path in record_paths(dir)? {
            newer.extend(read_json::<ShardRecord>(&path)?);
        }
        let manifest: Option<Manifest> = read_json(&dir.join(MANIFEST))?;
        let older = manifest.into_iter().flat_map(|manifest| manifest.shards);
        let all = older.chain(newer).map(|record| (record.name.clone(), record));
        Ok(Self(all.collect()))
    }

    /// Checks that a shard is what was written; nothing where there is no record of it.
    ///
    /// # Errors
    /// If it is not, or cannot be read.
    pub(super) fn check(&self, path: &Path, index: usize) -> Result<bool, DataError> {
        let Some(record) = self.0.get(&shard_name(index)) else { return Ok(false) };
        let (blake3, num_bytes) = blake3_file(path)?;
        if (&record.blake3, record.num_bytes) == (&blake3, num_bytes) {
            return Ok(true);
        }
        let problem = if record.num_bytes == num_bytes {
            format!("hashes to BLAKE3 {blake3}, and what was written to {}", record.blake3)
        } else {
            format!("has {num_bytes} bytes, and {} were written", record.num_bytes)
        };
        Err(DataError::CorruptShard { path: path.to_path_buf(), problem })
    }
}

/// Puts the records of a directory's shards, which are all there, together in one manifest, and takes
/// away what was left beside them. A shard without a record is read as a whole to make one.
///
/// # Errors
/// If a shard without a record is broken, or the manifest cannot be written.
pub fn write_manifest(dir: &Path, num_shards: usize) -> Result<(), DataError> {
    let Records(records) = Records::read(dir)?;
    let record = |index: usize| -> Result<ShardRecord, DataError> {
        if let Some(record) = records.get(&shard_name(index)) {
            return Ok(record.clone());
        }
        let path = shard_path(dir, index);
        let (rows, _) = read_shard(&path, None)?;
        ShardRecord::of(&path, index, rows.len())
    };
    let shards: Vec<ShardRecord> =
        (0..num_shards).into_par_iter().map(record).collect::<Result<_, _>>()?;
    let manifest = Manifest {
        num_shards,
        num_rows: shards.iter().map(|record| record.num_rows).sum(),
        num_bytes: shards.iter().map(|record| record.num_bytes).sum(),
        shards,
    };
    let (path, text) = (dir.join(MANIFEST), to_json(&manifest));
    if std::fs::read_to_string(&path).ok().as_ref() != Some(&text) {
        write_whole(&path, text)?;
    }
    for path in record_paths(dir)? {
        // Whoever else finds all shards there may have taken it.
        let _ = std::fs::remove_file(path);
    }
    remove_abandoned(dir);
    Ok(())
}

/// Forgets what was written of all shards, because it cannot be read: whole shards are recorded anew.
///
/// # Errors
/// If a file of it cannot be removed.
pub fn forget_manifest(dir: &Path) -> Result<(), DataError> {
    for path in record_paths(dir)?.into_iter().chain([dir.join(MANIFEST)]) {
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(DataError::io("remove", &path, error));
        }
    }
    Ok(())
}

/// The name of the record beside shard `index`: `.responses-00003.json` for 3.
#[must_use]
pub fn record_name(index: usize) -> String {
    format!(".{SHARD_PREFIX}{index:05}{RECORD_SUFFIX}")
}

/// Whether a file or object of this name is a record beside a shard.
#[must_use]
pub fn is_record_name(name: &str) -> bool {
    let rest = name.strip_prefix('.').and_then(|rest| rest.strip_prefix(SHARD_PREFIX));
    rest.is_some_and(|rest| rest.ends_with(RECORD_SUFFIX))
}

/// The records beside shards.
fn record_paths(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let read_error = |e| DataError::io("read", dir, e);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read_error)? {
        let name = entry.map_err(read_error)?.file_name();
        if name.to_str().is_some_and(is_record_name) {
            paths.push(dir.join(name));
        }
    }
    Ok(paths)
}

fn to_json(value: &impl Serialize) -> String {
    let text = serde_json::to_string_pretty(value).expect("names and numbers are JSON");
    text + "\n"
}

/// What a file says; none if there is none.
fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>, DataError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| {
            let problem = format!("cannot be read: {error}");
            DataError::CorruptManifest { path: path.to_path_buf(), problem }
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", path, error)),
    }
}

/// The BLAKE3 of a file's bytes and their number, in constant memory.
fn blake3_file(path: &Path) -> Result<(String, u64), DataError> {
    let read_error = |e| DataError::io("read", path, e);
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path).map_err(read_error)?).map_err(read_error)?;
    Ok((hasher.finalize().to_hex().to_string(), hasher.count()))
}
