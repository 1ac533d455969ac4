//! `evaluate`: measures the decoding speed under each drafter and stop rule on prompts.

use anyhow::Result;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::watch::Interrupted;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_report::render_evaluation;
use draftsmith_tune::evaluate::{Evaluation, evaluate};

use crate::console::Console;

/// Runs the stage.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Evaluation> {
    let evaluation = evaluate(recipe, workspace, console)?;
    console.text(text(&evaluation, console))?;
    console.document(&evaluation.rows)?;
    if evaluation.is_partial { Err(Interrupted.into()) } else { Ok(evaluation) }
}

/// The conclusion, the tables of rows and the report's path, as a terminal shows them.
pub(crate) fn text(evaluation: &Evaluation, console: &Console) -> String {
    let Evaluation { rows, report, conclusion, .. } = evaluation;
    render_evaluation(rows, conclusion, report, console.width(), console.colour())
}
