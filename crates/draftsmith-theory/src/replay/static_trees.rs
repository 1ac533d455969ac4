//! Static trees along recorded responses.
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

use super::{RecordedPlace, Recording, Recordings};
use crate::trace::RoundCounts;
use crate::tree::TreePosition;
use crate::{Counts, RoundCosts, StopRuleConfig, TheoryError, TimedCounts, TreeShape};

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
