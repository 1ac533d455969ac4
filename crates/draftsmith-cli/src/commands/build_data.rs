//! `build-data`: turns prompts into labelled responses.

use anyhow::Result;
use draftsmith_tune::build_data::{BuiltData, DamagedShards, build_data};

use crate::commands::StageJob;

/// Runs the stage build-data.
pub(crate) fn run(job: StageJob<'_>, damaged: DamagedShards) -> Result<BuiltData> {
    let StageJob { recipe, workspace, console } = job;
    let built = build_data(recipe, damaged, workspace, console)?;
    console.document(&built)?;
    Ok(built)
}

#[cfg(test)]
mod tests;
