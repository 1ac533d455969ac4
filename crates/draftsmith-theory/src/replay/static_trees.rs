//! Static trees along recorded responses.
//!
//! What is read and proposed of a static tree follows from its shape and from the length of its chain,
//! which is the one that was recorded; rules see the chain alone. Greedy, the target walks from what
//! stands to the child that is the response's token as long as there is one, and which child that is, is
//! the token's rank among the drafter's: that is recorded along the response. So a static tree is
//! replayed count for count under every rule that its drafter's chains are replayed under, as long as
//! the drafter knows as many tokens as a node of the shape has children.
//!
//! Sampled trees are not replayed. Children that are drawn are tried one after the other against what
//! those before leave of both distributions, of which nothing is recorded; and where children are the
//! most probable tokens, so is the chain, while what was recorded beside a sampled response was drawn.

use super::{RecordedPlace, Recording, Recordings, Spending};
use crate::trace::RoundCounts;
use crate::tree::{Level, Place};
use crate::{Counts, RoundCosts, StopRuleConfig, TheoryError, TreeShape};

impl Recordings {
    /// What a static tree takes whose chain ends by a rule, of each response, in order.
    /// `forward_seconds` are those of a forward of the drafter that reads so many nodes. What is looked
    /// up first is none of a tree's.
    ///
    /// # Errors
    /// As [`replay`](Self::replay), and if the shape is not static or no ranks were recorded.
    pub fn replay_tree(
        &self,
        shape: TreeShape,
        config: &StopRuleConfig,
        forward_seconds: impl Fn(usize) -> f64,
        costs: &RoundCosts,
    ) -> Result<Vec<Spending>, TheoryError> {
        let mut rule = self.rule(config)?;
        let tree = StaticTree::new(shape)?;
        if !self.has_ranks() {
            return Err(TheoryError::NoRanksRecorded);
        }
        let mut candidates = Vec::with_capacity(self.max_length);
        let replay = |response: &Recording| {
            let mut spending = Spending { counts: Counts::default(), seconds: 0.0 };
            rule.begin_sequence();
            while spending.counts.num_tokens < response.places.len() {
                let Spending { counts, seconds } = &mut spending;
                let chain = self.draft_round(response, *counts, &mut *rule, &mut candidates);
                let round = tree.around(chain, &response.places[counts.num_tokens..]);
                let read = (0..round.num_draft_forwards).map(|depth| tree.num_read(depth));
                *seconds += read.map(&forward_seconds).sum::<f64>();
                *seconds += costs.verify_seconds(round.num_drafted + 1);
                counts.add_round(round);
                rule.end_round(round.end());
            }
            spending
        };
        Ok(self.responses.iter().map(replay).collect())
    }

    /// Whether the ranks of all responses' tokens were recorded, which static trees are replayed by.
    pub fn has_ranks(&self) -> bool {
        let mut places = self.responses.iter().flat_map(|response| response.places.iter());
        places.all(|place| place.draft_rank.is_some())
    }
}

/// A static shape, with a chain that may go on behind it.
struct StaticTree {
    shape: TreeShape,
    levels: Vec<Level>,
    /// How many of the chain's nodes the shape has.
    num_of_chain: usize,
}

impl StaticTree {
    fn new(shape: TreeShape) -> Result<Self, TheoryError> {
        let levels = shape.levels();
        let levels = levels.ok_or_else(|| TheoryError::NoStaticTree(shape.to_string()))?;
        let child = |place: &Place| (shape.width(*place) > 0).then(|| shape.child(*place, 0));
        let num_of_chain = std::iter::successors(Some(Place::ROOT), child).count() - 1;
        Ok(Self { shape, levels, num_of_chain })
    }

    /// The nodes that a forward reads behind so many tokens of the chain; the first reads what stands.
    fn num_read(&self, depth: usize) -> usize {
        let of_shape = self.levels.get(depth).map_or(0, |level| level.num_parents);
        // The chain's last is read also where nothing of the shape follows it.
        of_shape + usize::from(depth >= self.num_of_chain)
    }

    /// The nodes around a chain of so many, itself among them.
    fn num_nodes(&self, chain_len: usize) -> usize {
        let of_shape = self.levels.iter().take(chain_len).map(|level| level.num_children);
        of_shape.sum::<usize>() + chain_len.saturating_sub(self.num_of_chain)
    }

    /// The round of a tree around a chain, before the rest of a response.
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

    /// How far the target goes with the response.
    fn num_accepted(&self, chain_len: usize, places: &[RecordedPlace]) -> usize {
        let (mut place, mut is_chain, mut num_accepted) = (Place::ROOT, true, 0);
        let ranks = places.iter().take(chain_len).map_while(|recorded| recorded.draft_rank);
        for rank in ranks.map(|rank| rank as usize) {
            is_chain &= rank == 0;
            if !is_chain && rank >= self.shape.width(place) {
                break;
            }
            place = self.shape.child(place, rank);
            num_accepted += 1;
        }
        num_accepted
    }
}
