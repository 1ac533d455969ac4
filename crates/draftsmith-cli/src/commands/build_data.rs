//! `build-data`: turns prompts into labelled responses.

use anyhow::Result;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_tune::build_data::{BuiltData, DamagedShards, build_data};

use crate::console::Console;

/// Runs the stage build-data.
pub(crate) fn run(
    recipe: &Recipe,
    damaged: DamagedShards,
    workspace: &Workspace,
    console: &Console,
) -> Result<BuiltData> {
    let built = build_data(recipe, damaged, workspace, console)?;
    console.document(&built)?;
    Ok(built)
}

#[cfg(test)]
mod tests;
