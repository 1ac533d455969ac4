//! `server states`: says how to start a server that gives a target's hidden states, and proves them.

use anyhow::Result;
use draftsmith_recipe::built_data::built_data;
use draftsmith_tune::served_states::{ExaminedStates, examine, how_to_serve};

use crate::commands::StageJob;

/// How a server is started on several GPUs.
const SEVERAL_GPUS: &str = "On several GPUs, add `--tensor-parallel-size N` for the N that serve, and keep another one for the training: \
     `CUDA_VISIBLE_DEVICES` names the server's, `--device cuda:I` the training's.";

/// Runs the command.
pub(crate) fn run(job: StageJob<'_>) -> Result<()> {
    let StageJob { recipe, workspace, console } = job;
    let mut outcome = how_to_serve(recipe, workspace)?;
    console.text(format!("Start the server by\n{}\n", outcome.command))?;
    console.paragraph(SEVERAL_GPUS)?;
    if let Some(problem) = &outcome.problem {
        console.paragraph(problem)?;
    }
    if recipe.data_dir().exists() {
        let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
        outcome.examined = Some(examine(recipe, workspace, &data.rows, console)?);
    }
    let text = outcome.examined.as_ref().map_or_else(
        || {
            "There is no data yet. Once `build-data` has built it, this command proves the states."
                .to_owned()
        },
        ExaminedStates::text,
    );
    console.paragraph(&text)?;
    console.document(&outcome)
}
