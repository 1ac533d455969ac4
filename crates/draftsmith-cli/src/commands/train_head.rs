//! `train-head`: trains an acceptance head, or a sweep of several, on built data, and writes it to
//! `checkpoints/<recipe>/<drafter>/head/`.

use anyhow::Result;
use draftsmith_report::render_sweep_table;
use draftsmith_theory::DrafterId;
use draftsmith_tune::training::{HeadOutcome, train_head};

use crate::commands::StageJob;
use crate::console::Console;

/// Runs the stage train-head on one or several devices.
pub(crate) fn run(job: StageJob<'_>, asked: Option<DrafterId>) -> Result<HeadOutcome> {
    let StageJob { recipe, workspace, console } = job;
    let outcome = train_head(recipe, asked, workspace, console)?;
    console.document(&outcome)?;
    if let Some(rows) = &outcome.sweep {
        console.text(render_sweep_table(rows, console.width(), console.colour()))?;
    }
    print_head(&outcome, console)?;
    Ok(outcome)
}

/// Prints a head's scores.
pub(super) fn print_head(outcome: &HeadOutcome, console: &Console) -> Result<()> {
    console.text(format!("{}\n", outcome.text()))?;
    let Some(text) = outcome.over_online_text() else { return Ok(()) };
    console.paragraph(&text)
}
