//! Examines the shards that exist before building, and writes the manifest once all exist.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_data::{
    DataError, MANIFEST, Provenance, ShardSet, broken_shards, forget_manifest, has_shards,
    shard_path, write_manifest,
};
use serde::Deserialize;

use super::Building;
use crate::console::Console;
use draftsmith_recipe::built_data::changes_text;

/// The shards of this process that exist and are intact.
///
/// # Errors
/// If a shard is damaged or misnamed and is not to be repaired, or if shards of any process were built
/// with other settings.
pub(super) fn present_shards(
    dir: &Path,
    provenance: &Provenance,
    num_shards: usize,
    building: Building,
    console: &Console,
) -> Result<BTreeSet<usize>> {
    if !has_shards(dir) {
        // The manifest of deleted shards does not apply to new ones.
        if dir.is_dir() {
            forget_manifest(dir)?;
        }
        return Ok(BTreeSet::new());
    }
    let is_own = |index: usize| building.shard.builds(index);
    let broken = match broken_shards(dir, is_own) {
        Err(error @ DataError::CorruptManifest { .. }) if building.repairs => {
            console.note(format!("{error}; it is written again"));
            forget_manifest(dir)?;
            broken_shards(dir, is_own)?
        }
        broken => broken?,
    };
    // A shard beyond the last one cannot be built again.
    let is_beyond = broken.iter().any(|(index, _)| *index >= num_shards);
    if !broken.is_empty() && (is_beyond || !building.repairs) {
        let num_more = broken.len() - 1;
        let more =
            if num_more > 0 { format!("; and {num_more} more are broken") } else { String::new() };
        let error = &broken[0].1;
        let error = match error {
            DataError::CorruptShard { .. } => error.to_string(),
            error => format!("{error}; hint: use `--repair` to build it again"),
        };
        bail!("{error}{more}");
    }
    let broken: BTreeSet<usize> = broken
        .into_iter()
        .map(|(index, error)| {
            console.note(format!("{error}; it is built again"));
            index
        })
        .collect();
    // Other processes' shards may be missing or damaged. One that can be read suffices to compare settings.
    let whole = |index: usize| is_own(index) && !broken.contains(&index);
    let own = match ShardSet::find_among(dir, whole) {
        Ok(own) => {
            compare(dir, &own, provenance, num_shards)?;
            own.present.into_keys().collect()
        }
        Err(DataError::NoShards { .. }) => BTreeSet::new(),
        Err(error) => return Err(error.into()),
    };
    if building.shard.is_part() {
        let mut others = (0..num_shards).filter(|index| !is_own(*index));
        let readable =
            others.find_map(|other| ShardSet::find_among(dir, |index| index == other).ok());
        readable.map_or(Ok(()), |other| compare(dir, &other, provenance, num_shards))?;
    }
    Ok(own)
}

/// Checks that shards belong to the data that is to be built.
fn compare(
    dir: &Path,
    shards: &ShardSet,
    provenance: &Provenance,
    num_shards: usize,
) -> Result<()> {
    let differences = shards.provenance.differences(provenance);
    if !differences.is_empty() {
        bail!(
            "the data in `{}` was built with {}; hint: delete the Parquet files there, or give the \
             recipe another `name`",
            dir.display(),
            changes_text(&differences)
        );
    }
    if shards.count != num_shards {
        bail!(
            "the data in `{}` has {} shards, but these prompts give {num_shards}; hint: delete the \
             Parquet files there",
            dir.display(),
            shards.count
        );
    }
    Ok(())
}

/// The number of rows that the manifest counts.
///
/// # Errors
/// If it cannot be read.
pub(super) fn num_rows(dir: &Path) -> Result<u64> {
    #[derive(Deserialize)]
    struct Counts {
        num_rows: u64,
    }
    let path = dir.join(MANIFEST);
    let cannot = || format!("cannot read `{}`", path.display());
    let text = std::fs::read(&path).with_context(cannot)?;
    Ok(serde_json::from_slice::<Counts>(&text).with_context(cannot)?.num_rows)
}

/// The number of shards that other processes have yet to build. If there are none, writes the manifest.
///
/// # Errors
/// If it cannot be written.
pub(super) fn finish(dir: &Path, num_shards: usize) -> Result<usize> {
    let is_missing = |index: &usize| !shard_path(dir, *index).exists();
    let num_left = (0..num_shards).filter(is_missing).count();
    if num_left == 0 {
        write_manifest(dir, num_shards)?;
    }
    Ok(num_left)
}
