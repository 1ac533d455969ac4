//! `replay`: computes the speed of every stop rule on the test prompts from recorded rollouts,
//! without models.

use anyhow::Result;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_report::{Replay, render_predictions, render_replay_table};
use draftsmith_tune::replay::replay;

use crate::console::Console;

/// Runs the stage replay.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Replay> {
    let replay = replay(recipe, workspace, console)?;
    console.text(render_predictions(&replay.predictions))?;
    console.text(render_replay_table(&replay.groups, console.width(), console.colour()))?;
    console.document(&replay)?;
    Ok(replay)
}
