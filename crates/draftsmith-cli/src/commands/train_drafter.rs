//! `train-drafter`: trains the drafters that read the target's hidden states on built data, and
//! writes them to `checkpoints/<recipe>/<drafter>/`. Their heads go into the subdirectory `head/`.

use anyhow::Result;
use draftsmith_theory::DrafterId;
use draftsmith_tune::training::{DrafterOutcome, train_drafters};

use super::train_head::print_head;
use crate::commands::StageJob;

/// Runs the stage train-drafter on one or several devices.
pub(crate) fn run(job: StageJob<'_>, asked: Option<DrafterId>) -> Result<Vec<DrafterOutcome>> {
    let StageJob { recipe, workspace, console } = job;
    let outcomes = train_drafters(recipe, asked, workspace, console)?;
    for outcome in &outcomes {
        console.text(format!("{}\n", outcome.text()))?;
        outcome.head.iter().try_for_each(|head| print_head(head, console))?;
    }
    console.document(&outcomes)?;
    Ok(outcomes)
}
