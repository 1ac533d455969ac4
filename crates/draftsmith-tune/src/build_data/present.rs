//! Examination of existing shards before a build.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_data::{
    DataError, MANIFEST, Provenance, ShardSet, broken_shards, forget_manifest, has_shards,
};
use draftsmith_files::read_bytes;
use serde::Deserialize;

use super::DamagedShards;
use draftsmith_recipe::{Watch, changes_text};

/// Returns the indices of the shards that exist and are intact. Damaged shards are left out if they
/// are to be rebuilt.
///
/// # Errors
/// If a damaged shard is not to be rebuilt or is not one of `num_shards`, or if shards were built
/// with other settings.
pub(super) fn present_shards(
    dir: &Path,
    provenance: &Provenance,
    num_shards: usize,
    damaged: DamagedShards,
    watch: &dyn Watch,
) -> Result<BTreeSet<usize>> {
    if !has_shards(dir) {
        // A manifest without shards describes deleted ones.
        if dir.is_dir() {
            forget_manifest(dir)?;
        }
        return Ok(BTreeSet::new());
    }
    let repairs = damaged == DamagedShards::Rebuilt;
    let broken = match broken_shards(dir) {
        Err(error @ DataError::CorruptManifest(_)) if repairs => {
            watch.note(format!("{error}; it is written again"));
            forget_manifest(dir)?;
            broken_shards(dir)?
        }
        broken => broken?,
    };
    // A shard with an index beyond the last shard cannot be rebuilt.
    let is_beyond = broken.iter().any(|(index, _)| *index >= num_shards);
    if !broken.is_empty() && (is_beyond || !repairs) {
        let num_more = broken.len() - 1;
        let more =
            if num_more > 0 { format!("; and {num_more} more are broken") } else { String::new() };
        let error = &broken[0].1;
        let error = match error {
            DataError::CorruptShard(_) => error.to_string(),
            error => format!("{error}; hint: use `--repair` to build it again"),
        };
        bail!("{error}{more}");
    }
    let broken: BTreeSet<usize> = broken
        .into_iter()
        .map(|(index, error)| {
            watch.note(format!("{error}; it is built again"));
            index
        })
        .collect();
    match ShardSet::find_among(dir, |index| !broken.contains(&index)) {
        Ok(shards) => {
            compare(dir, &shards, provenance, num_shards)?;
            Ok(shards.present.into_keys().collect())
        }
        Err(DataError::NoShards(_)) => Ok(BTreeSet::new()),
        Err(error) => Err(error.into()),
    }
}

/// Checks that existing shards belong to the data to be built.
fn compare(
    dir: &Path,
    shards: &ShardSet,
    provenance: &Provenance,
    num_shards: usize,
) -> Result<()> {
    let differences = shards.provenance.differences(provenance);
    ensure!(
        differences.is_empty(),
        "the data in `{}` was built with {}; hint: delete the Parquet files there, or give the \
         recipe another `name`",
        dir.display(),
        changes_text(&differences)
    );
    ensure!(
        shards.count == num_shards,
        "the data in `{}` has {} shards, but these prompts give {num_shards}; hint: delete the \
         Parquet files there",
        dir.display(),
        shards.count
    );
    Ok(())
}

/// Reads the number of rows from the manifest.
///
/// # Errors
/// If the manifest cannot be read.
pub(super) fn num_rows(dir: &Path) -> Result<u64> {
    #[derive(Deserialize)]
    struct PresentCounts {
        num_rows: u64,
    }
    let path = dir.join(MANIFEST);
    let cannot = || format!("cannot read `{}`", path.display());
    let text = read_bytes(&path).with_context(cannot)?;
    Ok(serde_json::from_slice::<PresentCounts>(&text).with_context(cannot)?.num_rows)
}
