//! Which static tree of a drafter is best, by replay: shapes grow along what was recorded, as deep as
//! each of some depths, and each is replayed with a chain as long as it is deep.

use std::collections::HashSet;

use anyhow::{Context, Result};
use draftsmith_theory::{
    FixedLengthConfig, Recordings, StopRuleConfig, TheoryError, TimedCounts, TreeShape,
    seconds_per_token,
};
use rayon::prelude::*;

use crate::costs::Costs;

/// A static tree as replay judges it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JudgedTree {
    pub(crate) shape: TreeShape,
    /// What it takes along the recordings, of each response.
    pub(crate) spent: Vec<TimedCounts>,
    /// Modelled seconds a token.
    pub(crate) seconds_per_token: f64,
}

/// The rule of rounds whose chains are as long as a static shape is deep.
pub(crate) fn rule_of(shape: TreeShape) -> FixedLengthConfig {
    FixedLengthConfig { candidate_length: shape.depth().unwrap_or(1) }
}

/// What a static tree takes along recordings, of each response.
///
/// # Errors
/// If ranks were not recorded, or the costs have no price for the drafter.
pub(crate) fn replay_tree(
    shape: TreeShape,
    recordings: &Recordings,
    costs: &Costs,
) -> Result<Vec<TimedCounts>, TheoryError> {
    let forward_seconds = costs.forward_seconds(&costs.rounds)?;
    let rule = StopRuleConfig::from(rule_of(shape));
    recordings.replay_tree(shape, &rule, forward_seconds, &costs.rounds)
}

/// Replays all that grow along the recordings, the smaller before the larger that go as deep.
///
/// # Errors
/// If ranks were not recorded, or the costs have no price for the drafter.
pub(crate) fn judge_trees(recordings: &Recordings, costs: &Costs) -> Result<Vec<JudgedTree>> {
    let judge = |shape: TreeShape| -> Result<JudgedTree, TheoryError> {
        let spent = replay_tree(shape, recordings, costs)?;
        Ok(JudgedTree { shape, seconds_per_token: seconds_per_token(&spent), spent })
    };
    let depths = 1..=recordings.max_length;
    let mut tried: Vec<TreeShape> =
        depths.flat_map(|depth| recordings.likely_shapes(depth)).collect();
    let mut seen = HashSet::new();
    tried.retain(|shape| seen.insert(*shape));
    Ok(tried.into_par_iter().map(judge).collect::<Result<_, _>>()?)
}

/// The one that takes the fewest seconds a token; the first of equals.
///
/// # Errors
/// If there is none.
pub(crate) fn fastest_tree(judged: &[JudgedTree]) -> Result<&JudgedTree> {
    let by_time = |one: &&JudgedTree, other: &&JudgedTree| {
        one.seconds_per_token.total_cmp(&other.seconds_per_token)
    };
    judged.iter().min_by(by_time).context(
        "no static tree grows along these recordings: the drafter never has the target's token among \
         its most probable, or its ranks were not recorded; hint: run `draftsmith record` again",
    )
}
