//! Static trees along recorded responses: their replay, and shapes that grow by the responses' paths.
//!
//! The nodes that a round with a static tree reads and proposes depend only on its shape and the length
//! of its chain, which is the recorded chain; rules see only the chain. In greedy decoding the target
//! follows the child that is the response's token as long as there is one. The child's index is the
//! token's rank among the drafter's tokens, which is recorded. So the replay of a static tree is exact,
//! count for count, under every rule that can be replayed on chains, if the drafter's vocabulary has at
//! least as many tokens as a node has children.
//!
//! Sampled trees are not replayed. Verifying drawn siblings needs the residual distributions, which are
//! not recorded. With the most probable tokens as children the chain is greedy too, but the recorded
//! chain of a sampled response was drawn.
//!
//! Shapes grow node by node. From every position of a response, the ranks of the next tokens form a path.
//! The expected tokens per round of a shape are 1 plus the sum of its paths' shares of positions, so the
//! most frequent path adds most. Medusa grows shapes likewise by its heads' accuracies, assumed independent (Cai et al. 2024),
//! and Sequoia by the acceptance rate of each rank, assumed equal at all positions (Chen et al. 2024).
//! We count whole paths. A shape holds a child only together with the siblings before it.

use std::collections::HashMap;

use super::{RecordedPlace, Recording, Recordings};
use crate::trace::RoundCounts;
use crate::tree::TreePosition;
use crate::{
    Counts, MAX_CHILDREN, RoundCosts, StopRuleConfig, TheoryError, TimedCounts, TreeShape,
};

impl Recordings {
    /// Replays a static tree whose chain ends by a rule: counts and modelled seconds of each response, in
    /// order. `forward_seconds` gives the time of a draft forward by its number of nodes. Look-ups are
    /// ignored.
    ///
    /// # Errors
    /// As [`replay`](Self::replay), and if the shape is not static or no ranks were recorded.
    pub fn replay_tree(
        &self,
        shape: TreeShape,
        config: &StopRuleConfig,
        forward_seconds: impl Fn(usize) -> f64,
        costs: &RoundCosts,
    ) -> Result<Vec<TimedCounts>, TheoryError> {
        let mut rule = self.rule(config)?;
        let tree = StaticTree::new(shape)?;
        if !self.has_ranks() {
            return Err(TheoryError::NoRanksRecorded);
        }
        let mut candidates = Vec::with_capacity(self.max_length);
        let replay = |response: &Recording| {
            let mut run = TimedCounts { counts: Counts::default(), seconds: 0.0 };
            rule.begin_sequence();
            while run.counts.num_tokens < response.places.len() {
                let TimedCounts { counts, seconds } = &mut run;
                let chain = self.draft_round(response, *counts, &mut *rule, &mut candidates);
                let round = tree.around(chain, &response.places[counts.num_tokens..]);
                let read = (0..round.num_draft_forwards).map(|depth| tree.num_read(depth));
                *seconds += read.map(&forward_seconds).sum::<f64>();
                *seconds += costs.verify_seconds(round.num_drafted + 1);
                counts.add_round(round);
                rule.end_round(round.end());
            }
            run
        };
        Ok(self.responses.iter().map(replay).collect())
    }

    /// Whether all response tokens have recorded ranks, which the replay of static trees needs.
    pub fn has_ranks(&self) -> bool {
        let mut places = self.responses.iter().flat_map(|response| response.places.iter());
        places.all(|place| place.draft_rank.is_some())
    }
}

/// A static shape with a chain that may be longer than the shape.
struct StaticTree {
    shape: TreeShape,
    /// The numbers of children of its nodes, by level.
    levels: Vec<Vec<u8>>,
    /// The number of the chain's nodes in the shape.
    num_of_chain: usize,
}

impl StaticTree {
    fn new(shape: TreeShape) -> Result<Self, TheoryError> {
        let levels = shape.levels();
        let levels = levels.ok_or_else(|| TheoryError::NoStaticTree(shape.to_string()))?;
        let child = |at: &TreePosition| (shape.width(*at) > 0).then(|| shape.child(*at, 0));
        let num_of_chain = std::iter::successors(Some(TreePosition::ROOT), child).count() - 1;
        Ok(Self { shape, levels, num_of_chain })
    }

    /// The number of nodes that the forward after `depth` tokens of the chain reads; the first forward
    /// reads the sequence.
    fn num_read(&self, depth: usize) -> usize {
        let of_shape = self
            .levels
            .get(depth)
            .map_or(0, |level| level.iter().filter(|count| **count > 0).count());
        // The forward reads the chain's last node even if the shape ends there.
        of_shape + usize::from(depth >= self.num_of_chain)
    }

    /// The number of nodes of a tree with this chain, including the chain.
    fn num_nodes(&self, chain_len: usize) -> usize {
        let of_shape = self.levels.iter().take(chain_len).flatten().copied().map(usize::from);
        of_shape.sum::<usize>() + chain_len.saturating_sub(self.num_of_chain)
    }

    /// The counts of a round with a tree around `chain`; `places` is the rest of the response.
    fn around(&self, chain: RoundCounts, places: &[RecordedPlace]) -> RoundCounts {
        let chain_len = chain.num_drafted;
        let num_accepted = self.num_accepted(chain_len, places);
        RoundCounts {
            num_drafted: self.num_nodes(chain_len),
            num_draft_forwards: chain.num_draft_forwards,
            num_accepted,
            num_kept: (num_accepted + 1).min(places.len()),
        }
    }

    /// The number of accepted nodes.
    fn num_accepted(&self, chain_len: usize, places: &[RecordedPlace]) -> usize {
        let (mut at, mut is_chain, mut num_accepted) = (TreePosition::ROOT, true, 0);
        let ranks = places.iter().take(chain_len).map_while(|recorded| recorded.draft_rank);
        for rank in ranks.map(|rank| rank as usize) {
            is_chain &= rank == 0;
            if !is_chain && rank >= self.shape.width(at) {
                break;
            }
            at = self.shape.child(at, rank);
            num_accepted += 1;
        }
        num_accepted
    }
}

/// The number of positions from which responses follow each path.
type PathCounts = HashMap<Vec<u8>, usize>;

impl Recordings {
    /// Shapes of 1, 2, … nodes and at most `max_depth`. Each adds to the previous one the most frequent
    /// path that may be added. Empty if no response token is among the drafter's, or if ranks were not
    /// recorded.
    pub fn likely_shapes(&self, max_depth: usize) -> Vec<TreeShape> {
        let mut counted = PathCounts::new();
        self.responses.iter().for_each(|response| count(response, max_depth, &mut counted));
        let of = |path: Vec<u8>| counted.get(&path).map(|count| (*count, path));
        let mut open: Vec<(usize, Vec<u8>)> = of(vec![0]).into_iter().collect();
        let (mut paths, mut shapes) = (Vec::new(), Vec::new());
        // Among equals, the first that could be added.
        while let Some(best) = (0..open.len()).rev().max_by_key(|at| open[*at].0) {
            let (_, path) = open.remove(best);
            let mut sibling = path.clone();
            if let Some(rank) = sibling.last_mut() {
                *rank += 1;
            }
            let child = [&path[..], &[0]].concat();
            open.extend([sibling, child].into_iter().filter_map(of));
            paths.push(path);
            match TreeShape::of_paths(&paths) {
                Ok(shape) => shapes.push(shape),
                // The shape is full.
                Err(_) => break,
            }
        }
        shapes
    }
}

/// Counts the paths of up to `max_depth` from each position of a response.
fn count(response: &Recording, max_depth: usize, counted: &mut PathCounts) {
    for start in 0..response.places.len() {
        // The last token within the limit has no candidate.
        let room = response.limit - start - 1;
        let places = response.places[start..].iter().take(room.min(max_depth));
        let ranks = places.map_while(|place| place.draft_rank.filter(|rank| *rank < MAX_CHILDREN));
        let path: Vec<u8> = ranks.map(|rank| rank as u8).collect();
        for depth in 1..=path.len() {
            *counted.entry(path[..depth].to_vec()).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::test_recordings::random;

    /// Responses with tokens of these ranks.
    fn ranked(responses: &[&[u32]]) -> Recordings {
        let any = random(1, 1, 0.5);
        let place = any.responses[0].places[0].clone();
        let of_response = |ranks: &&[u32]| {
            let places = ranks.iter().map(|rank| {
                let mut place = place.clone();
                place.draft_rank = Some(*rank);
                place
            });
            Recording::new(vec![1], places.collect(), ranks.len() + 1)
        };
        Recordings { responses: responses.iter().map(of_response).collect(), ..any }
    }

    fn texts(shapes: &[TreeShape]) -> Vec<String> {
        shapes.iter().map(TreeShape::to_string).collect()
    }

    #[test]
    fn the_most_frequent_path_comes_next() {
        let recordings = ranked(&[&[0, 0, 1, 0], &[0, 1, 0], &[2, 0], &[64, 1]]);
        // By positions: 6 of rank 0, 3 of rank 1, 1 of rank 2; after rank 0 twice 1 and once 0; after
        // rank 1 twice 0; after rank 2 once 0.
        let found = texts(&recordings.likely_shapes(2));
        assert_eq!(
            found,
            ["1", "2", "2-0.1", "2-1.1", "2-2.1", "3-2.1", "3-2.1.1"].map(str::to_owned)
        );
        assert_eq!(texts(&recordings.likely_shapes(1)), ["1", "2", "3"]);
    }

    #[test]
    fn shapes_respect_the_maximum_depth_and_number_of_nodes() {
        let recordings = random(2, 60, 0.6);
        for max_depth in 1..=8 {
            let shapes = recordings.likely_shapes(max_depth);
            assert!(
                shapes.iter().all(|shape| shape.depth().is_some_and(|depth| depth <= max_depth))
            );
            assert!(shapes.windows(2).all(|two| two[0] != two[1]) && shapes.len() <= 64);
        }
        assert_eq!(recordings.likely_shapes(8).len(), 64);
        let mut unranked = recordings.clone();
        for response in &mut unranked.responses {
            for place in std::sync::Arc::make_mut(&mut response.places) {
                place.draft_rank = None;
            }
        }
        assert_eq!(unranked.likely_shapes(8), []);
        // The last token within the limit has no candidate.
        let mut full = ranked(&[&[0, 0, 0]]);
        full.responses[0].limit = 3;
        assert_eq!(texts(&full.likely_shapes(8)), ["1", "1-1"]);
    }
}
