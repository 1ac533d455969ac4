//! Rollouts on disk, `rollouts-<drafter>-<set>-<decoding>.parquet`: what a drafter proposes along
//! responses and where it departs from them, so that stop rules can be replayed without any model.
//!
//! `rollouts/row.rs` says what a row is, `rollouts/provenance.rs` where a file came from, and
//! `rollouts/validate.rs` which rules rows keep together; `rollouts/schema.rs` names the columns,
//! `rollouts/write.rs` and `rollouts/read.rs` turn rows into columns and back. Equal rows and
//! provenance give equal bytes.
//!
//! Numbers are `f64` and never rounded: a stop rule compares signals with thresholds, and a replay
//! decides as the run did, bit for bit.

mod provenance;
mod read;
mod row;
mod schema;
mod validate;
mod write;

use std::path::{Path, PathBuf};

use crate::error::DataError;

pub use provenance::{RolloutDecoding, RolloutHead, RolloutProvenance};
pub use read::{read_rollout_provenance, read_rollouts};
pub use row::{RolloutCandidates, RolloutRow};
pub use validate::validate_rollouts;
pub use write::write_rollouts;

/// What a rollouts file's name begins and ends with.
const FILE_PREFIX: &str = "rollouts-";
const FILE_SUFFIX: &str = ".parquet";

/// The path of a directory's rollouts of one drafter and one prompt set under one decoding:
/// `rollouts-draft-validation-greedy.parquet`.
#[must_use]
pub fn rollouts_path(dir: &Path, drafter: &str, set: &str, decoding: RolloutDecoding) -> PathBuf {
    dir.join(format!("{FILE_PREFIX}{drafter}-{set}-{decoding}{FILE_SUFFIX}"))
}

/// The paths of a directory's rollouts files, by name; none is no error.
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

/// Whether a file has a rollouts file's name.
#[must_use]
pub fn is_rollouts_path(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(FILE_PREFIX) && name.ends_with(FILE_SUFFIX))
}

#[cfg(test)]
mod tests;
