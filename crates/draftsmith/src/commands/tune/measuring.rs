//! What costs are measured on.

use anyhow::Result;

use crate::console::Console;
use crate::prompts::spread;
use crate::recipe::Recipe;
use crate::rollouts::validation_prompts;
use crate::workspace::Workspace;

/// Prompts that costs are measured on.
const NUM_COST_PROMPTS: usize = 4;

/// The prompts that costs are measured on.
pub(super) fn cost_prompts(
    recipe: &Recipe,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<Vec<u32>>> {
    let prompts = validation_prompts(recipe, workspace, console)?;
    let prompts = spread(prompts, Some(NUM_COST_PROMPTS));
    Ok(prompts.into_iter().map(|(_, ids)| ids).collect())
}
