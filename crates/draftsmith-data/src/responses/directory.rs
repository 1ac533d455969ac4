//! The shards of a directory as one data set: all of them, each once and in its place, and a hash of
//! their rows that whoever uses them is named by.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use draftsmith_files::hash_bytes;
use rayon::prelude::*;

use super::hash::hash_rows;
use super::header::ShardPlace;
use super::manifest::Records;
use super::read::{read_header, read_shard};
use super::row::ResponseRow;
use super::{shard_index, shard_name};
use crate::columns::bad_provenance;
use crate::error::DataError;
use crate::provenance::Provenance;

/// Of missing shards so many are named.
const MISSING_TOLD: usize = 3;

/// The shards that are in a directory, none of which contradicts another.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardSet {
    /// The directory.
    pub dir: PathBuf,
    /// Where the rows of all of them came from.
    pub provenance: Provenance,
    /// The number of shards when all are built.
    pub count: usize,
    /// Those that are there, by index.
    pub present: BTreeMap<usize, PathBuf>,
}

/// The rows of a directory's shards.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSet {
    /// The rows, shard by shard.
    pub rows: Vec<ResponseRow>,
    /// What they depend on.
    pub provenance: Provenance,
    /// The SHA-256 of the rows, as hex: other rows, or more of them, have another.
    pub hash: String,
    /// Shards when all are built.
    pub num_shards_planned: usize,
    /// The shards that were read, each with the number of rows up to its end.
    shards: Vec<(PathBuf, usize)>,
}

/// What is to be done where shards are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incomplete {
    /// They are an error.
    Refused,
    /// Those that are there are taken.
    Allowed,
}

impl ShardSet {
    /// Finds the shards of a directory and reads what their metadata says, not their rows.
    ///
    /// # Errors
    /// If the directory cannot be read or holds none; if one is not whole, or is not what its name
    /// says: a copy of another, one too many, or of other data.
    pub fn find(dir: &Path) -> Result<Self, DataError> {
        Self::find_among(dir, |_| true)
    }

    /// The same of those shards alone that are `wanted`, by index: others may be anything.
    ///
    /// # Errors
    /// As there.
    pub fn find_among(dir: &Path, wanted: impl Fn(usize) -> bool) -> Result<Self, DataError> {
        let mut found = shard_files(dir)?.into_iter().filter(|(index, _)| wanted(*index));
        let first = found.next().ok_or_else(|| DataError::NoShards { path: dir.to_path_buf() })?;
        let (provenance, place) = shard_header(&first)?;
        let mut present = BTreeMap::from([first.clone()]);
        for file in found {
            let (other, other_place) = shard_header(&file)?;
            if let Some(difference) = provenance.differences(&other).into_iter().next() {
                let (first, second, difference) = (first.1, file.1, difference.to_string());
                return Err(DataError::ProvenanceDiffers { first, second, difference });
            }
            if other_place.count != place.count {
                let problem = format!(
                    "is one of {} shards, and `{}` one of {}",
                    other_place.count,
                    shard_name(first.0),
                    place.count
                );
                return Err(DataError::WrongShard { path: file.1, problem });
            }
            present.insert(file.0, file.1);
        }
        Ok(Self { dir: dir.to_path_buf(), provenance, count: place.count, present })
    }

    /// Checks that none is missing.
    fn check_complete(&self) -> Result<(), DataError> {
        let num_missing = self.count - self.present.len();
        if num_missing == 0 {
            return Ok(());
        }
        // A file may lie about the count, so that no list of so many is made.
        let missing = (0..self.count).filter(|index| !self.present.contains_key(index));
        let first = missing.take(MISSING_TOLD).map(shard_name).collect();
        Err(DataError::MissingShards {
            path: self.dir.clone(),
            count: self.count,
            num_missing,
            first,
        })
    }

    /// Reads the rows.
    ///
    /// # Errors
    /// If a shard cannot be read (see [`read_shard`]) or is not what was written, or two rows have one id.
    pub fn read(self) -> Result<DataSet, DataError> {
        let records = Records::read(&self.dir)?;
        let read = |(index, path): &(usize, PathBuf)| {
            records.check(path, *index)?;
            let (rows, _) = read_shard(path, None)?;
            let hash = hash_rows(&rows);
            Ok((rows, hash))
        };
        let files: Vec<(usize, PathBuf)> = self.present.into_iter().collect();
        let read: Vec<Result<_, DataError>> = files.par_iter().map(read).collect();
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
    /// Shards that were read.
    #[must_use]
    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }

    /// Checks that a model of so many tokens knows all tokens.
    ///
    /// # Errors
    /// The first that it does not know, and its file ([`ResponseRow::check_ids`]).
    pub fn check_tokens(&self, vocab_size: usize) -> Result<(), DataError> {
        for (at, row) in self.rows.iter().enumerate() {
            let known = row.check_ids(vocab_size);
            known.map_err(|source| DataError::row_in_file(self.path_of(at), source))?;
        }
        Ok(())
    }

    /// Checks that no two rows have one id.
    fn check_ids(&self) -> Result<(), DataError> {
        let mut seen = HashMap::with_capacity(self.rows.len());
        for (at, row) in self.rows.iter().enumerate() {
            if let Some(before) = seen.insert(row.id.as_str(), at) {
                let [first, second] = [before, at].map(|at| self.path_of(at).to_path_buf());
                return Err(DataError::DuplicateRow { first, second, id: row.id.clone() });
            }
        }
        Ok(())
    }

    /// The shard of a row.
    fn path_of(&self, row: usize) -> &Path {
        let shard = self.shards.partition_point(|(_, end)| *end <= row);
        &self.shards[shard].0
    }
}

/// Reads all shards of a directory, in the order of their indices.
///
/// # Errors
/// As [`ShardSet::find`] and [`ShardSet::read`]; and if shards are missing, unless that is allowed.
pub fn read_dir(dir: &Path, incomplete: Incomplete) -> Result<DataSet, DataError> {
    let shards = ShardSet::find(dir)?;
    if incomplete == Incomplete::Refused {
        shards.check_complete()?;
    }
    shards.read()
}

/// The files of a directory that are named like shards, by index.
pub(super) fn shard_files(dir: &Path) -> Result<Vec<(usize, PathBuf)>, DataError> {
    let read_error = |e| DataError::io("read", dir, e);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path();
        if let Some(index) = shard_index(&path) {
            files.push((index, path));
        }
    }
    files.sort();
    Ok(files)
}

/// What a shard says of itself, if that is what its name says.
pub(super) fn shard_header(
    (index, path): &(usize, PathBuf),
) -> Result<(Provenance, ShardPlace), DataError> {
    let wrong = |problem| Err(DataError::WrongShard { path: path.clone(), problem });
    let name = shard_name(*index);
    if path.file_name().is_some_and(|found| *found != *name) {
        return wrong(format!("is named like shard {index}, which is `{name}`"));
    }
    let header = read_header(path)?;
    let Some(place) = header.place else {
        return Err(bad_provenance(path, "there is no `draftsmith.shard`, which says its place"));
    };
    if place.index != *index {
        return wrong(format!("holds the rows of `{}`: it is a copy", shard_name(place.index)));
    }
    if place.index >= place.count {
        return wrong(format!("is one too many: there are {} shards", place.count));
    }
    Ok((header.provenance, place))
}
