//! What costs are measured on: which prompts, and with rounds of which lengths.

use anyhow::Result;
use draftsmith_theory::{Recordings, SignalNeeds};

use crate::console::Console;
use crate::costs::Costs;
use crate::prompts::spread;
use crate::recipe::Recipe;
use crate::rollouts::validation_prompts;
use crate::sweep::{best_of_each, cheapest};
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

/// The lengths of rounds under the rule that looks at the draft and is best for the costs.
pub(super) fn lengths_under(recordings: &Recordings, costs: &Costs) -> Result<Vec<usize>> {
    let mut choices = best_of_each(recordings, costs)?;
    choices.retain(|choice| choice.config.needs() != SignalNeeds::default());
    Ok(recordings.round_lengths(&cheapest(&choices)?.config)?)
}
