//! What costs are measured on, where they are not given.

use anyhow::Result;
use draftsmith_theory::DrafterId;

use crate::console::Console;
use crate::costs::{Costs, Measurement};
use crate::decoders::Decoders;
use crate::prompts::spread;
use crate::recipe::Recipe;
use crate::results::CostSource;
use crate::rollouts::validation_prompts;
use crate::workspace::Workspace;

/// Prompts that costs are measured on.
const NUM_COST_PROMPTS: usize = 4;

/// What is measured here: the models, and the prompts that costs are measured on.
pub(super) struct Measuring<'m> {
    pub(super) decoders: Decoders<'m>,
    pub(super) prompts: Vec<Vec<u32>>,
}

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

/// The costs that are given for a drafter, or else those that `measure` finds here.
pub(super) fn given_or_measured(
    given: &[Costs],
    drafter: Option<DrafterId>,
    measure: impl FnOnce() -> Result<Measurement>,
) -> Result<(CostSource, Measurement)> {
    match given.iter().find(|costs| drafter == Some(costs.drafter)) {
        Some(costs) => Ok((CostSource::Given, Measurement::given(costs.clone()))),
        None => Ok((CostSource::Machine, measure()?)),
    }
}
