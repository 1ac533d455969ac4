//! Searches the static tree of a drafter whose shape the recipe leaves open.

use anyhow::Result;
use draftsmith_theory::{Counts, Spending, TreeShape};
use serde::Serialize;

use super::Baseline;
use crate::judging::over;
use crate::sweep::static_trees::{fastest_tree, judge_trees};
use crate::tuning::TunedTree;

/// A tree that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct TriedTree {
    pub(crate) shape: TreeShape,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

impl Baseline<'_> {
    /// The fastest static tree, and all that were tried. `models` is the hash of the models.
    ///
    /// # Errors
    /// If no tree grows along the recordings.
    pub(super) fn best_tree(&self, models: String) -> Result<(TunedTree, Vec<TriedTree>)> {
        let judged = judge_trees(self.recordings, self.costs)?;
        let best = fastest_tree(&judged)?;
        let num_prompts = self.recordings.responses.len();
        let all: Vec<usize> = (0..num_prompts).collect();
        let gain = |spent: &[Spending]| over(&self.fixed_spent, spent, &all);
        let tried = judged.iter().map(|it| TriedTree { shape: it.shape, gain: gain(&it.spent) });
        let counts: Counts = best.spent.iter().map(|spent| spent.counts).sum();
        let tuned = TunedTree {
            drafter: self.recordings.drafter,
            dtype: self.dtype,
            shape: best.shape,
            num_tried: judged.len(),
            num_prompts,
            cost_source: self.cost_source,
            speedup: self.plain_seconds() / best.seconds_per_token,
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            best_fixed_length: self.fixed_length,
            expected_gain: self.gain(&best.spent),
            models,
        };
        Ok((tuned, tried.collect()))
    }
}
