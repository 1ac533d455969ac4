//! `replay`: computes the speed of every stop rule on the test prompts from recorded rollouts,
//! without models.

use anyhow::Result;
use draftsmith_report::{Replay, render_predictions, render_replay_table};
use draftsmith_tune::replay::replay;

use crate::commands::StageJob;

/// Runs the stage replay.
pub(crate) fn run(job: StageJob<'_>) -> Result<Replay> {
    let StageJob { recipe, workspace, console } = job;
    let replay = replay(recipe, workspace, console)?;
    console.text(render_predictions(&replay.predictions))?;
    console.text(render_replay_table(&replay.groups, console.width(), console.colour()))?;
    console.document(&replay)?;
    Ok(replay)
}
