//! `server states`: says how to start a server that gives a target's hidden states, and proves them.

use anyhow::Result;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_report::wrapped;
use draftsmith_tune::served_states::examine;

use crate::console::Console;

/// Runs the command.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<()> {
    let command = examine(recipe, workspace, None, console)?.command;
    console.text(format!("Start the server by\n{command}\n"))?;
    if !recipe.data_dir().exists() {
        let hint =
            "There is no data yet. Once `build-data` has built it, this command proves the states.";
        console.text(wrapped(hint, console.width()).join("\n") + "\n")?;
        return console.document(&examine(recipe, workspace, None, console)?);
    }
    let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
    let outcome = examine(recipe, workspace, Some(&data.rows), console)?;
    if let Some(examined) = &outcome.examined {
        console.text(wrapped(&examined.text(), console.width()).join("\n") + "\n")?;
    }
    console.document(&outcome)
}
