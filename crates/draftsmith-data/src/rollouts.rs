//! Rollouts on disk, `rollouts-<drafter>-<set>-<decoding>.parquet`: what a drafter proposes along
//! each response and where it departs from it, so that stop rules can be replayed without a model.
//!
//! `rollouts/row.rs` defines a row, `rollouts/validate.rs` the rules between rows,
//! `rollouts/provenance.rs` the provenance, and `rollouts/file.rs` reads and writes files. Equal rows
//! and provenance give equal bytes.
//!
//! Numbers are `f64` and never rounded: a stop rule compares signals with thresholds, and a replay
//! must take the same decisions as the original run.

mod file;
mod provenance;
mod row;
mod validate;

use std::path::{Path, PathBuf};

use crate::error::DataError;

pub use file::{read_rollout_provenance, read_rollouts, write_rollouts};
pub use provenance::{RolloutDecoding, RolloutHead, RolloutProvenance};
pub use row::{RolloutCandidates, RolloutRow};
pub use validate::validate_rollouts;

/// The beginning and the end of a rollouts file's name.
const FILE_PREFIX: &str = "rollouts-";
const FILE_SUFFIX: &str = ".parquet";

/// The path in `dir` of the rollouts of one drafter on one prompt set with one decoding:
/// `rollouts-draft-validation-greedy.parquet`.
#[must_use]
pub fn rollouts_path(dir: &Path, drafter: &str, set: &str, decoding: RolloutDecoding) -> PathBuf {
    dir.join(format!("{FILE_PREFIX}{drafter}-{set}-{decoding}{FILE_SUFFIX}"))
}

/// The paths of a directory's rollouts files, sorted by name. There may be none.
///
/// # Errors
/// If the directory cannot be read.
pub fn rollouts_paths(dir: &Path) -> Result<Vec<PathBuf>, DataError> {
    let read_error = |e| DataError::io("read", dir, e);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path();
        if is_rollouts_path(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Whether a file is named like a rollouts file.
#[must_use]
pub fn is_rollouts_path(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX))
}

#[cfg(test)]
mod tests;
