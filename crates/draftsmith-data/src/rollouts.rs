//! Rollouts on disk, in `rollouts-<drafter>-<set>-<decoding>.parquet`. They hold the candidates
//! that a drafter proposes along each response and after each rejection, so that stop rules can be
//! replayed without a model.
//!
//! This module reads and writes files. `rollouts/row.rs` defines a row, `rollouts/validate.rs` the
//! rules between rows, and `rollouts/provenance.rs` the provenance. Equal rows and provenance give
//! equal bytes.
//!
//! Numbers are `f64` and never rounded, because a stop rule compares signals with thresholds and a
//! replay must take the same decisions as the original run.

mod provenance;
mod row;
mod validate;

use std::path::{Path, PathBuf};

use draftsmith_files::paths_in;

pub use self::provenance::{RolloutHead, RolloutProvenance};
use self::row::COLUMNS;
pub use self::row::{RolloutCandidates, RolloutRow};
use self::validate::validate_file;
pub use self::validate::validate_rollouts;
use crate::columns::{bad_provenance, entries, open, read_rows, write_rows};
use crate::error::{DataError, Result};

/// The beginning and the end of a rollouts file's name.
const FILE_PREFIX: &str = "rollouts-";
const FILE_SUFFIX: &str = ".parquet";

/// Returns the path in `dir` of the rollouts of one drafter on one prompt set, such as
/// `rollouts-draft-validation-greedy.parquet`. `decoding` is `greedy` or `sampled`.
pub fn rollouts_path(dir: &Path, drafter: &str, set: &str, decoding: &str) -> PathBuf {
    dir.join(format!("{FILE_PREFIX}{drafter}-{set}-{decoding}{FILE_SUFFIX}"))
}

/// Finds a directory's rollouts files and returns their paths, sorted by name. There may be none.
///
/// # Errors
/// If the directory cannot be read.
pub fn rollouts_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(paths_in(dir)?.into_iter().filter(|path| is_rollouts_path(path)).collect())
}

/// Returns whether a file is named like a rollouts file.
pub fn is_rollouts_path(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX))
}

/// Writes rows as one rollouts file, whole or not at all.
///
/// # Errors
/// If rows are invalid ([`validate_rollouts`]), contradict the provenance, or the file cannot be
/// written. The provenance must name a drafter. Predictions of acceptance must be present if and
/// only if the provenance names a head. Candidates must continue to an end token or to their limit.
///
/// [`validate_rollouts`]: crate::validate_rollouts
pub fn write_rollouts(
    path: &Path,
    rows: &[RolloutRow],
    provenance: &RolloutProvenance,
) -> Result<()> {
    provenance.validate().map_err(|problem| bad_provenance(path, &problem))?;
    validate_file(rows, provenance)?;
    write_rows(path, &COLUMNS, provenance.to_entries(), rows)
}

/// Reads a rollouts file: its rows, in order, and their provenance. Unknown columns are ignored.
/// With `vocab_size`, every token must be in a vocabulary of that size.
///
/// # Errors
/// If the file cannot be read or is malformed, lacks a column or its provenance, or holds rows that
/// are invalid (see [`validate_rollouts`] and [`RolloutRow::check_ids`]) or contradict its
/// provenance (see [`write_rollouts`]).
///
/// [`validate_rollouts`]: crate::validate_rollouts
pub fn read_rollouts(
    path: &Path,
    vocab_size: Option<usize>,
) -> Result<(Vec<RolloutRow>, RolloutProvenance)> {
    let builder = open(path)?;
    let provenance = parse_provenance(path, entries(&builder))?;
    let rows = read_rows(path, builder, &COLUMNS)?;
    let known = |size| rows.iter().try_for_each(|row: &RolloutRow| row.check_ids(size));
    let checked = validate_file(&rows, &provenance);
    let checked = checked.and_then(|()| vocab_size.map_or(Ok(()), known));
    checked.map_err(|source| DataError::row_in_file(path, &source))?;
    Ok((rows, provenance))
}

/// Reads only the provenance of a rollouts file.
///
/// # Errors
/// If the file cannot be read or is malformed, or its provenance is missing or malformed.
pub fn read_rollout_provenance(path: &Path) -> Result<RolloutProvenance> {
    parse_provenance(path, entries(&open(path)?))
}

fn parse_provenance<'a>(
    path: &Path,
    entries: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<RolloutProvenance> {
    let read = RolloutProvenance::from_entries(entries);
    read.and_then(|read| read.validate().map(|()| read)).map_err(|e| bad_provenance(path, &e))
}

#[cfg(test)]
mod tests;
