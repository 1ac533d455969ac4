//! `tune`: finds the best stop rule for each drafter at the costs of this machine.

pub(crate) mod servers;
mod show;

use std::time::Duration;

use anyhow::Result;
use draftsmith_report::render_head_race;
use draftsmith_tune::heads::choose_head;
use draftsmith_tune::tuner::{Tuning, tune_within};

use crate::commands::StageJob;

/// Runs the stage tune.
pub(crate) fn run(job: StageJob<'_>) -> Result<Vec<Tuning>> {
    run_within(job, None)
}

/// Runs the stage tune. A time limit covers all cost measurements together; `None` means no limit.
pub(crate) fn run_within(job: StageJob<'_>, time_limit: Option<Duration>) -> Result<Vec<Tuning>> {
    let StageJob { recipe, workspace, console } = job;
    if let Some(race) = choose_head(recipe, workspace, time_limit, console)? {
        console.text(render_head_race(&race, console.width(), console.colour()))?;
    }
    let tunings = tune_within(recipe, workspace, time_limit, console)?;
    for tuning in &tunings {
        console.text(show::tuning(tuning, console.width())?)?;
    }
    console.document(&tunings)?;
    Ok(tunings)
}
