//! `tune`: finds the stop rule that is best for each drafter at the costs of this machine.

pub(crate) mod servers;
mod show;

use std::time::Duration;

use anyhow::Result;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_recipe::{GivenCosts, Recipe};
use draftsmith_report::render_head_race;
use draftsmith_tune::heads::choose_head;
use draftsmith_tune::tuner::{Tuning, tune_for_draft_model, tune_within};

use crate::console::Console;

/// Runs the stage.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<Tuning>> {
    run_within(recipe, workspace, None, console)
}

/// Runs the stage with a time limit for all measurements of costs together, if one is given.
pub(crate) fn run_within(
    recipe: &Recipe,
    workspace: &Workspace,
    time_limit: Option<Duration>,
    console: &Console,
) -> Result<Vec<Tuning>> {
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

/// Runs the stage for runtimes that run adapters as separate draft models, at `costs` or else at those that
/// the recipe gives.
pub(crate) fn run_for_draft_model(
    recipe: &Recipe,
    workspace: &Workspace,
    costs: Option<&GivenCosts>,
    console: &Console,
) -> Result<()> {
    let tunings = tune_for_draft_model(recipe, workspace, costs, console)?;
    for tuning in &tunings {
        console.text(show::draft_model(tuning)?)?;
    }
    console.document(&tunings)
}
