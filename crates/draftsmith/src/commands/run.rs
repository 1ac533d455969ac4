//! `run`: runs all stages of the recipe in order. A stage whose output exists is skipped.

use anyhow::{Result, bail};
use serde_json::json;

use crate::commands::build_data::Building;
use crate::commands::{build_data, evaluate, record, replay, train_adapter, train_head, tune};
use crate::console::Console;
use crate::recipe::Recipe;
use crate::table::render_table;
use crate::workspace::Workspace;

/// Runs the command, with one workspace for all stages. Prints the table of results and the report's path.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<()> {
    let trains = recipe.head.is_some() || recipe.adapter.is_some();
    if recipe.data.is_none() && !trains && recipe.evaluate.is_none() {
        bail!(
            "the recipe has no stage; hint: give it a section `[data]`, `[head]`, `[adapter]` or \
             `[evaluate]`"
        );
    }
    // Stages print nothing, so that stdout holds one JSON document.
    let stages = &console.without_output();
    let built = recipe.data.as_ref();
    let built = built.map(|_| build_data::run(recipe, Building::ALL, workspace, stages));
    let built = built.transpose()?;
    let head = recipe.head.as_ref();
    let head = head.map(|_| train_head::run(recipe, workspace, stages)).transpose()?;
    let adapters = recipe.adapter.as_ref();
    let adapters = adapters.map(|_| train_adapter::run(recipe, workspace, stages));
    let adapters = adapters.transpose()?;
    let (mut recorded, mut tuned, mut replayed) = (None, None, None);
    if recipe.tune.is_some() {
        recorded = Some(record::run(recipe, workspace, stages)?);
        tuned = Some(tune::run(recipe, workspace, stages)?);
        replayed = Some(replay::run(recipe, workspace, stages)?);
    }
    let evaluation = match recipe.evaluate {
        Some(_) if recipe.target_elsewhere().is_some() => {
            console.note("evaluate: skipped, because servers run the target");
            None
        }
        Some(_) => Some(evaluate::run(recipe, workspace, stages)?),
        None => None,
    };
    if let Some(evaluation) = &evaluation {
        console.text(render_table(&evaluation.rows, console.width(), console.colour()))?;
        console.text(format!("report: {}\n", evaluation.report.display()))?;
    }
    console.document(&json!({
        "build_data": built,
        "train_head": head,
        "train_adapter": adapters,
        "record": recorded,
        "tune": tuned,
        "replay": replayed,
        "evaluate": evaluation,
    }))
}
