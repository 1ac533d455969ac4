//! The shards of a directory as one data set, identified by the hash of its rows.
//!
//! Missing, copied, renamed or surplus shards and repeated rows are refused. Only this module lists
//! shards.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use draftsmith_files::{hash_bytes, paths_in};
use rayon::prelude::*;

use super::hash::hash_rows;
use super::manifest::{self, ShardRecord, ShardRecords};
use super::row::ResponseRow;
use super::shard::{ShardPlace, read_header, read_shard};
use super::{shard_index, shard_name, shard_path};
use crate::columns::bad_provenance;
use crate::error::{DataError, Result};
use crate::provenance::Provenance;

/// The number of missing shards that an error names.
const MAX_NAMED: usize = 3;

/// The shards of a directory, with equal provenance.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardSet {
    /// The directory.
    pub dir: PathBuf,
    /// The provenance of all shards.
    pub provenance: Provenance,
    /// The number of shards when all are built.
    pub count: usize,
    /// The paths of the shards that exist, by index.
    pub present: BTreeMap<usize, PathBuf>,
}

/// The rows of a directory's shards.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSet {
    /// The rows, shard by shard.
    pub rows: Vec<ResponseRow>,
    /// The provenance of all shards.
    pub provenance: Provenance,
    /// The SHA-256 of the rows and their order, as hex.
    pub hash: String,
    /// The number of shards when all are built.
    pub num_shards_planned: usize,
    /// The paths of the read shards, each with the number of rows up to the end of that shard.
    shards: Vec<(PathBuf, usize)>,
}

/// The treatment of a directory in which shards are missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Incomplete {
    /// Missing shards are an error.
    #[default]
    Refused,
    /// Missing shards are allowed, and the others are read.
    Allowed,
}

impl ShardSet {
    /// Finds the shards of a directory and reads their metadata, not their rows.
    ///
    /// # Errors
    /// If the directory cannot be read or holds no shards, or if a shard is malformed, a copy of
    /// another, surplus, or has a different provenance.
    pub fn find(dir: &Path) -> Result<Self> {
        Self::find_among(dir, |_| true)
    }

    /// Finds shards as [`Self::find`] does, but ignores those whose index is not `wanted`.
    ///
    /// # Errors
    /// As for [`Self::find`].
    pub fn find_among(dir: &Path, wanted: impl Fn(usize) -> bool) -> Result<Self> {
        let mut found = shard_files(dir)?.into_iter().filter(|(index, _)| wanted(*index));
        let first = found.next().ok_or_else(|| {
            let dir = dir.display();
            DataError::NoShards(format!(
                "`{dir}` holds no `responses-*.parquet`: run build-data first"
            ))
        })?;
        let (provenance, position) = shard_header(&first)?;
        let mut present = BTreeMap::from([first.clone()]);
        for file in found {
            let (other, other_position) = shard_header(&file)?;
            if let Some(difference) = provenance.differences(&other).into_iter().next() {
                return Err(manifest::provenance_differs(
                    &first.1,
                    &file.1,
                    &difference.to_string(),
                ));
            }
            if other_position.count != position.count {
                let problem = format!(
                    "is one of {} shards, and `{}` one of {}",
                    other_position.count,
                    shard_name(first.0),
                    position.count
                );
                return Err(wrong_shard(&file.1, &problem));
            }
            present.insert(file.0, file.1);
        }
        Ok(Self { dir: dir.to_path_buf(), provenance, count: position.count, present })
    }

    /// Checks that no shard is missing.
    fn check_complete(&self) -> Result<()> {
        let num_missing = self.count - self.present.len();
        if num_missing == 0 {
            return Ok(());
        }
        // The count is untrusted, so do not collect all missing indices.
        let missing = (0..self.count).filter(|index| !self.present.contains_key(index));
        let named: Vec<String> =
            missing.take(MAX_NAMED).map(|index| format!("`{}`", shard_name(index))).collect();
        let mut missing = named.join(", ");
        if num_missing > named.len() {
            missing += &format!(" and {} more", num_missing - named.len());
        }
        let (path, count) = (self.dir.display(), self.count);
        let message = format!("`{path}` is incomplete: of {count} shards it lacks {missing}");
        Err(DataError::MissingShards(message))
    }

    /// Reads the rows of the shards.
    ///
    /// # Errors
    /// If a shard cannot be read (see [`read_shard`]) or has changed since it was written, or two
    /// rows have the same id.
    pub fn read(self) -> Result<DataSet> {
        let records = ShardRecords::read(&self.dir)?;
        let read = |(index, path): &(usize, PathBuf)| {
            records.check(path, *index)?;
            let (rows, _) = read_shard(path, None)?;
            let hash = hash_rows(&rows);
            Ok((rows, hash))
        };
        let files: Vec<(usize, PathBuf)> = self.present.into_iter().collect();
        let read: Vec<Result<_>> = files.par_iter().map(read).collect();
        let (mut rows, mut shards, mut hashes) = (Vec::new(), Vec::new(), Vec::new());
        for ((_, path), read) in files.into_iter().zip(read) {
            let (of_shard, hash) = read?;
            rows.extend(of_shard);
            shards.push((path, rows.len()));
            hashes.push(hash);
        }
        let data = DataSet {
            rows,
            hash: hash_bytes(hashes.join("\n").as_bytes()),
            num_shards_planned: self.count,
            provenance: self.provenance,
            shards,
        };
        data.check_ids()?;
        Ok(data)
    }
}

impl DataSet {
    /// Returns the number of shards that were read.
    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }

    /// Checks that all tokens are in a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// If a token is outside the vocabulary. The error names the first one and its file
    /// ([`ResponseRow::check_ids`]).
    pub fn check_tokens(&self, vocab_size: usize) -> Result<()> {
        for (at, row) in self.rows.iter().enumerate() {
            let known = row.check_ids(vocab_size);
            known.map_err(|source| DataError::row_in_file(self.path_of(at), &source))?;
        }
        Ok(())
    }

    /// Checks that no two rows have the same id.
    fn check_ids(&self) -> Result<()> {
        let mut seen = HashMap::with_capacity(self.rows.len());
        for (at, row) in self.rows.iter().enumerate() {
            if let Some(before) = seen.insert(row.id.as_str(), at) {
                let [first, second] = [before, at].map(|at| self.path_of(at).display());
                return Err(DataError::invalid(format!(
                    "row `{}` is in `{first}` and again in `{second}`; remove the duplicate and run build-data again",
                    row.id
                )));
            }
        }
        Ok(())
    }

    /// Returns the path of a row's shard.
    fn path_of(&self, row: usize) -> &Path {
        let shard = self.shards.partition_point(|(_, end)| *end <= row);
        &self.shards[shard].0
    }
}

/// Reads all shards of a directory, in the order of their indices.
///
/// # Errors
/// As for [`ShardSet::find`] and [`ShardSet::read`], and if shards are missing, unless `incomplete`
/// allows that.
pub fn read_dir(dir: &Path, incomplete: Incomplete) -> Result<DataSet> {
    let shards = ShardSet::find(dir)?;
    if incomplete == Incomplete::Refused {
        shards.check_complete()?;
    }
    shards.read()
}

/// Finds the shards of a directory that are malformed, have changed since they were written, or are
/// not what their name claims. A shard without a record is read in full.
///
/// # Errors
/// If the directory, its manifest or a record cannot be read.
pub fn broken_shards(dir: &Path) -> Result<Vec<(usize, DataError)>> {
    let records = ShardRecords::read(dir)?;
    let files = shard_files(dir)?;
    let check = |file: &(usize, PathBuf)| {
        shard_header(file)?;
        let (index, path) = file;
        if !records.check(path, *index)? {
            read_shard(path, None)?;
        }
        Ok(())
    };
    let broken = files.par_iter().filter_map(|file| Some((file.0, check(file).err()?)));
    Ok(broken.collect())
}

/// Writes the manifest of a directory that holds all its shards, and removes the records next to
/// them. A shard without a record is read in full.
///
/// # Errors
/// If a shard without a record is malformed, or the manifest cannot be written.
pub fn write_manifest(dir: &Path, num_shards: usize) -> Result<()> {
    let records = ShardRecords::read(dir)?;
    let record = |index: usize| -> Result<ShardRecord> {
        if let Some(record) = records.of_shard(index) {
            return Ok(record.clone());
        }
        let path = shard_path(dir, index);
        let (rows, provenance) = read_shard(&path, None)?;
        ShardRecord::of(&path, index, rows.len(), &provenance)
    };
    let shards = (0..num_shards).into_par_iter().map(record).collect::<Result<_, _>>()?;
    manifest::write(dir, shards)
}

/// Finds the files of a directory that are named like shards, in the order of their indices.
fn shard_files(dir: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let paths = paths_in(dir)?.into_iter();
    let mut files: Vec<_> = paths.filter_map(|path| Some((shard_index(&path)?, path))).collect();
    files.sort();
    Ok(files)
}

fn wrong_shard(path: &Path, problem: &str) -> DataError {
    let path = path.display();
    DataError::invalid(format!("`{path}` {problem}; remove it and run build-data again"))
}

/// Reads a shard's provenance and position. Fails if the position contradicts the file name.
fn shard_header((index, path): &(usize, PathBuf)) -> Result<(Provenance, ShardPlace)> {
    let wrong = |problem: String| Err(wrong_shard(path, &problem));
    let name = shard_name(*index);
    if path.file_name().is_some_and(|found| *found != *name) {
        return wrong(format!("is named like shard {index}, whose name is `{name}`"));
    }
    let header = read_header(path)?;
    let Some(position) = header.position else {
        return Err(bad_provenance(path, "there is no `draftsmith.shard` with its position"));
    };
    if position.index != *index {
        return wrong(format!("is a copy of `{}`", shard_name(position.index)));
    }
    if position.index >= position.count {
        return wrong(format!("is surplus: there are {} shards", position.count));
    }
    Ok((header.provenance, position))
}
