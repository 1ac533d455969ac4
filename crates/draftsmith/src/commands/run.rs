//! `run`: checks the recipe, then runs all stages in order. A stage whose output exists is skipped.

mod next;
mod preflight;

use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::json;

use crate::commands::build_data::Building;
use crate::commands::{build_data, evaluate, record, replay, train_adapter, train_head, tune};
use crate::console::Console;
use crate::device::on_pool;
use crate::recipe::Recipe;
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
    let begun = Instant::now();
    on_pool(|| preflight::check(recipe, workspace, console))?;
    // Each stage sees only the flags of this one; their own documents would be several on stdout.
    let quiet_stages = console.without_output();
    let built = match recipe.data {
        Some(_) => Some(build_data::run(recipe, Building::ALL, workspace, &quiet_stages)?),
        None => None,
    };
    let head = match recipe.head {
        Some(_) => Some(train_head::run(recipe, workspace, &quiet_stages)?),
        None => None,
    };
    let adapters = match recipe.adapter {
        Some(_) => Some(train_adapter::run(recipe, workspace, &quiet_stages)?),
        None => None,
    };
    let recorded = match recipe.tune {
        Some(_) => Some(on_pool(|| record::run(recipe, workspace, &quiet_stages))?),
        None => None,
    };
    let (tuned, replayed) = match recipe.tune {
        Some(_) => {
            // Measuring costs takes at most a third of the time up to its end.
            let time_limit = Some(begun.elapsed() / 2);
            let tuned = on_pool(|| tune::run_within(recipe, workspace, time_limit, &quiet_stages))?;
            (Some(tuned), Some(replay::run(recipe, workspace, &quiet_stages)?))
        }
        None => (None, None),
    };
    let evaluation = match recipe.evaluate {
        Some(_) if recipe.target_elsewhere().is_some() => {
            console.note("evaluate: skipped, because servers run the target");
            None
        }
        Some(_) => Some(on_pool(|| evaluate::run(recipe, workspace, &quiet_stages))?),
        None => None,
    };
    if let Some(evaluation) = &evaluation {
        console.text(evaluation.text(console))?;
        console.text(next::commands(recipe))?;
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
