//! `evaluate`: measures the decoding speed on prompts, for each drafter and stop rule.

use anyhow::Result;
use draftsmith_recipe::Interrupted;
use draftsmith_report::{render_evaluation, render_papers};
use draftsmith_tune::evaluate::{Evaluation, evaluate, evaluate_unless_finished};

use crate::commands::StageJob;
use crate::console::Console;

/// Runs the stage evaluate.
pub(crate) fn run(job: StageJob<'_>) -> Result<Evaluation> {
    let StageJob { recipe, workspace, console } = job;
    shown(evaluate(recipe, workspace, console)?, console)
}

/// Runs the stage evaluate, unless it was finished with the same recipe, models and prompts.
pub(crate) fn run_once(job: StageJob<'_>) -> Result<Evaluation> {
    let StageJob { recipe, workspace, console } = job;
    shown(evaluate_unless_finished(recipe, workspace, true, console)?, console)
}

fn shown(evaluation: Evaluation, console: &Console) -> Result<Evaluation> {
    console.text(text(&evaluation, console))?;
    console.document(&evaluation.rows)?;
    if evaluation.is_partial { Err(Interrupted.into()) } else { Ok(evaluation) }
}

/// Formats an evaluation for a terminal: the conclusion, the tables of rows, the report's path and
/// the papers' tables.
pub(crate) fn text(evaluation: &Evaluation, console: &Console) -> String {
    let Evaluation { rows, report, conclusion, papers, .. } = evaluation;
    let (width, colour) = (console.width(), console.colour());
    let text = render_evaluation(rows, conclusion, report, width, colour);
    match render_papers(papers, width) {
        papers if papers.is_empty() => text,
        papers => format!("{text}\n{papers}"),
    }
}
