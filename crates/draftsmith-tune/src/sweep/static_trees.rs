//! Finds the best static tree of a drafter by replay. Shapes of every depth grow along the recordings, and each
//! is replayed with a chain as long as the tree is deep.

use std::collections::HashSet;

use anyhow::{Context, Result};
use draftsmith_theory::{
    FixedLengthConfig, Recordings, StopRuleConfig, TheoryError, TimedCounts, TreeShape,
    seconds_per_token,
};
use rayon::prelude::*;

use crate::costs::Costs;

/// A static tree with its replayed costs.
#[derive(Debug, Clone, PartialEq)]
pub struct JudgedTree {
    /// The tree.
    pub shape: TreeShape,
    /// The costs by response.
    pub spent: Vec<TimedCounts>,
    /// Modelled seconds per token.
    pub seconds_per_token: f64,
}

/// The rule with chains as long as a static shape is deep.
pub fn rule_of(shape: TreeShape) -> FixedLengthConfig {
    FixedLengthConfig { candidate_length: shape.depth().unwrap_or(1) }
}

/// The costs of a static tree along recordings, by response.
///
/// # Errors
/// If ranks were not recorded, or the costs have no price of the drafter.
pub fn replay_tree(
    shape: TreeShape,
    recordings: &Recordings,
    costs: &Costs,
) -> Result<Vec<TimedCounts>, TheoryError> {
    let forward_seconds = costs.forward_seconds(&costs.rounds)?;
    let rule = StopRuleConfig::from(rule_of(shape));
    recordings.replay_tree(shape, &rule, forward_seconds, &costs.rounds)
}

/// Replays all trees that grow along the recordings; of the same depth, smaller ones first.
///
/// # Errors
/// If ranks were not recorded, or the costs have no price of the drafter.
pub fn judge_trees(recordings: &Recordings, costs: &Costs) -> Result<Vec<JudgedTree>> {
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

/// The tree with the fewest seconds per token; the first among equals.
///
/// # Errors
/// If there are no trees.
pub fn fastest_tree(judged: &[JudgedTree]) -> Result<&JudgedTree> {
    let by_time = |one: &&JudgedTree, other: &&JudgedTree| {
        one.seconds_per_token.total_cmp(&other.seconds_per_token)
    };
    judged.iter().min_by(by_time).context(
        "no static tree grows along these recordings: the drafter never has the target's token among \
         its most probable, or its ranks were not recorded; hint: run `draftsmith record` again",
    )
}
