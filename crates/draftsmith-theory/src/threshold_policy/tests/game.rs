//! The decision process played out candidate by candidate, to check the solved policy against.

use crate::{Bounds, CostModel, Draws, Observation, enumerate};

/// The decision process itself, candidate by candidate, for two levels whose weights may depend on
/// the levels before.
pub(super) struct Game<'a> {
    pub(super) probs: [f64; 2],
    pub(super) weights: &'a dyn Fn(&[usize]) -> [f64; 2],
    pub(super) num_unpredicted: usize,
    pub(super) costs: CostModel,
    pub(super) bounds: Bounds,
}

impl Game<'_> {
    /// Draws candidates until `continues`, asked about the predicted levels, says no; returns all
    /// levels drawn.
    pub(super) fn draft(
        &self,
        mut drawn: Vec<usize>,
        continues: &mut dyn FnMut(&[usize]) -> bool,
        draws: &mut impl Draws,
    ) -> Vec<usize> {
        while drawn.len() < self.bounds.max {
            let decides = drawn.len() >= self.bounds.min;
            if decides && !continues(&drawn[..drawn.len() - self.num_unpredicted]) {
                break;
            }
            drawn.push(draws.categorical(&(self.weights)(&drawn)));
        }
        drawn
    }

    /// Expected seconds of a round over expected tokens of a round.
    pub(super) fn seconds_per_token(&self, mut continues: impl FnMut(&[usize]) -> bool) -> f64 {
        let (mut mean_seconds, mut mean_tokens) = (0.0, 0.0);
        let rounds = enumerate(|draws| {
            let drawn = self.draft(Vec::new(), &mut continues, draws);
            let accepted = drawn.iter().take_while(|&&level| draws.bernoulli(self.probs[level]));
            (accepted.count() + 1, drawn.len())
        });
        for ((tokens, num_candidates), prob) in rounds {
            let counts = Observation {
                num_draft_forwards: num_candidates,
                num_target_forwards: 1,
                num_verified_rows: num_candidates + 1,
                seconds: 1.0,
            };
            mean_seconds += prob * self.costs.seconds(&counts);
            mean_tokens += prob * tokens as f64;
        }
        mean_seconds / mean_tokens
    }

    /// The least seconds per token over every map from predicted levels to {stop, continue}, and
    /// such a map, as bits by the node a path of levels leads to in a binary tree.
    pub(super) fn best_of_all_maps(&self) -> (f64, u32) {
        let num_nodes = (1 << (self.bounds.max - self.num_unpredicted)) - 1;
        let seconds =
            |map: u32| self.seconds_per_token(|predicted| map >> node(predicted) & 1 == 1);
        let maps = (0..1 << num_nodes).map(|map| (seconds(map), map));
        maps.min_by(|(found, _), (other, _)| found.total_cmp(other)).expect("there are maps")
    }

    pub(super) fn product(&self, predicted: &[usize]) -> f64 {
        predicted.iter().map(|&level| self.probs[level]).product()
    }
}

pub(super) fn node(predicted: &[usize]) -> usize {
    predicted.iter().fold(1, |node, level| 2 * node + level) - 1
}
