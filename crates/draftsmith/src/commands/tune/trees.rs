//! Static trees whose shapes a recipe leaves to `tune`.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Counts, Recordings, TimedCounts, TreeShape, seconds_per_token};
use serde::Serialize;

use crate::costs::Costs;
use crate::results::CostSource;
use crate::statistics::shown_interval;
use crate::sweep::per_token;
use crate::sweep::static_trees::{fastest_tree, judge_trees};
use crate::tuning::TunedTree;

/// A tree that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct TriedTree {
    pub(crate) shape: TreeShape,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

/// What trees are tuned on.
pub(super) struct TreeTuning<'a> {
    pub(super) recordings: &'a Recordings,
    pub(super) costs: &'a Costs,
    pub(super) cost_source: CostSource,
    /// The hash of the models, and the dtype they compute in.
    pub(super) models: String,
    pub(super) dtype: WeightDtype,
    pub(super) seed: u64,
    /// The drafter's best fixed length, and what chains of it cost on each response.
    pub(super) fixed: (usize, Vec<TimedCounts>),
}

impl TreeTuning<'_> {
    /// The drafter's fastest static tree, and all that were tried.
    ///
    /// # Errors
    /// If none grows along the recordings.
    pub(super) fn best(self) -> Result<(TunedTree, Vec<TriedTree>)> {
        let Self { recordings, costs, seed, .. } = self;
        let judged = judge_trees(recordings, costs)?;
        let best = fastest_tree(&judged)?;
        let gain_of = |spent: &[TimedCounts], some: &[usize]| {
            per_token(&self.fixed.1, some) / per_token(spent, some) - 1.0
        };
        let num_prompts = recordings.responses.len();
        let all: Vec<usize> = (0..num_prompts).collect();
        let tried =
            judged.iter().map(|it| TriedTree { shape: it.shape, gain: gain_of(&it.spent, &all) });
        let spent = &best.spent;
        let counts: Counts = spent.iter().map(|spent| spent.counts).sum();
        let plain = seconds_per_token(&recordings.plain(&costs.rounds));
        let tuned = TunedTree {
            drafter: recordings.drafter,
            dtype: self.dtype,
            shape: best.shape,
            num_tried: judged.len(),
            num_prompts,
            cost_source: self.cost_source,
            speedup: plain / best.seconds_per_token,
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            best_fixed_length: self.fixed.0,
            expected_gain: shown_interval(num_prompts, seed, |some| gain_of(spent, some)),
            models: self.models,
        };
        Ok((tuned, tried.collect()))
    }
}
