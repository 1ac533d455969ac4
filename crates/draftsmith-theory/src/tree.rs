//! Trees of candidates: what a draft phase proposes besides its chain.
//!
//! A drafter's forward gives a distribution, of which a chain uses one token. Here every node that
//! the drafter reads has several children, and a forward reads the most probable nodes that have
//! none yet. The chain of first children is the one that the drafter would draft without a tree: it
//! is always among what is read, and stop rules look at it alone.
//!
//! Where everything is read, that is SpecInfer's expansion by fixed widths (Miao et al. 2023,
//! section 3); where a few nodes are, EAGLE-2's (Li et al. 2024, section 4): those of the greatest
//! products of probabilities are expanded, and of what is left the greatest fill the proposal. Where a
//! shape tells the children of every node, it is Medusa's (Cai et al. 2024, section 2.3.1): all of them
//! are proposed, and those are read that have some, whatever tokens they are.
//!
//! A node's children are either its drafter's most probable tokens, which are certain, or drawn
//! without replacement. What was drawn always goes to the target: leaving it out because of what it
//! is would bias the output.

mod children;
mod shape;
#[cfg(test)]
mod tests;

use crate::{Decoding, DrawnFrom, Draws, Node, Proposal};

pub use children::{Children, child_rank};
pub(crate) use shape::{Level, Place};
pub use shape::{MAX_CHILDREN, TreeChildren, TreeShape};

/// The tree of one round on its way.
#[derive(Debug, Clone)]
pub struct TreeGrowth {
    shape: TreeShape,
    candidates: Vec<Candidate>,
    /// The last of the chain, none before its first.
    tip: Option<usize>,
    /// Nodes beside the chain.
    num_beside: usize,
}

/// What may be proposed.
#[derive(Debug, Clone)]
struct Candidate {
    /// The node it follows.
    parent: Option<usize>,
    token_id: u32,
    drawn_from: DrawnFrom,
    rank: usize,
    /// Where in the shape it is.
    place: Place,
    /// The product of the drafter's probabilities along its path.
    prob: f64,
    /// Its number among the proposal's nodes, once it is one.
    node: Option<usize>,
}

impl TreeGrowth {
    /// Nothing yet.
    pub fn new(shape: TreeShape) -> Self {
        Self { shape, candidates: Vec::new(), tip: None, num_beside: 0 }
    }

    /// The children of a node, one at least, behind which the drafter gives `logits`.
    fn children(&self, place: Place, logits: &[f32], decoding: &Decoding) -> Children {
        let probs = match self.shape.children {
            TreeChildren::Top => None,
            TreeChildren::Drawn => decoding.sampled_probs(logits),
        };
        match probs {
            Some(probs) => Children::drawn(probs),
            None => Children::top(logits, self.shape.width(place).max(1)),
        }
    }

    /// Adds the next of the chain: the first child of its last token, or of the sequence that stands,
    /// behind which the drafter gives `logits`. Returns the token and its probability.
    ///
    /// # Panics
    /// If the last token of the chain has not been read.
    pub fn extend_chain(
        &mut self,
        logits: &[f32],
        decoding: &Decoding,
        draws: &mut dyn Draws,
    ) -> (u32, f64) {
        let parent = self.tip.map(|tip| self.candidates[tip].node.expect("the tip is read"));
        let place = self.tip.map_or(Place::ROOT, |tip| self.candidates[tip].place);
        let mut children = self.children(place, logits, decoding);
        let first = children.next(draws).expect("a distribution has a token");
        let (token_id, _, prob) = first;
        self.tip = Some(self.candidates.len());
        self.add(parent, place, first, 0);
        self.add_children(parent, place, children, 1, draws);
        (token_id, prob)
    }

    /// Adds the children of `node`, which is none of the chain's and behind which the drafter gives
    /// `logits`.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn branch(
        &mut self,
        node: usize,
        logits: &[f32],
        decoding: &Decoding,
        draws: &mut dyn Draws,
    ) {
        let of_node = self.candidates.iter().find(|candidate| candidate.node == Some(node));
        let place = of_node.expect("a node was a candidate").place;
        let children = self.children(place, logits, decoding);
        self.add_children(Some(node), place, children, 0, draws);
    }

    /// That of a node, or of what stands.
    fn prob_of(&self, node: Option<usize>) -> f64 {
        let is_it = |candidate: &&Candidate| node.is_some() && candidate.node == node;
        self.candidates.iter().find(is_it).map_or(1.0, |candidate| candidate.prob)
    }

    /// Adds more children of a parent at `place`, the first of which has rank `first`. What is drawn
    /// will be proposed, and so there is room for it.
    fn add_children(
        &mut self,
        parent: Option<usize>,
        place: Place,
        mut children: Children,
        first: usize,
        draws: &mut dyn Draws,
    ) {
        for rank in first..self.shape.width(place) {
            if children.are_drawn() {
                if self.num_beside == usize::from(self.shape.num_beside) {
                    return;
                }
                self.num_beside += 1;
            }
            match children.next(draws) {
                Some(child) => self.add(parent, place, child, rank),
                None => return,
            }
        }
    }

    fn add(
        &mut self,
        parent: Option<usize>,
        place: Place,
        (token_id, drawn_from, prob): (u32, DrawnFrom, f64),
        rank: usize,
    ) {
        let (place, prob) = (self.shape.child(place, rank), self.prob_of(parent) * prob);
        let candidate = Candidate { parent, token_id, drawn_from, rank, place, prob, node: None };
        self.candidates.push(candidate);
    }

    /// Makes nodes of what the drafter is to read next, the chain's last token first and behind it
    /// the most probable that may have children, and appends their tokens to `tokens`. Of a static shape
    /// that is all of them; of others none that ends a response, in whose place another is worth more.
    /// Returns their number.
    pub fn read_next(
        &mut self,
        eos_token_ids: &[u32],
        proposal: &mut Proposal,
        tokens: &mut Vec<u32>,
    ) -> usize {
        let first = proposal.len();
        self.propose_tip(proposal, tokens);
        while proposal.len() - first < usize::from(self.shape.num_read)
            && let Some(next) = self.next_beside(|shape, candidate| {
                let is_end = || eos_token_ids.contains(&candidate.token_id);
                shape.width(candidate.place) > 0 && (shape.is_static() || !is_end())
            })
        {
            self.propose(next, proposal, tokens);
        }
        proposal.len() - first
    }

    /// Makes nodes of what else is proposed: the chain's last token, and behind it all that was drawn,
    /// or the most probable as long as there is room.
    pub fn finish(&mut self, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        self.propose_tip(proposal, tokens);
        while let Some(next) = self.next_beside(|_, _| true) {
            self.propose(next, proposal, tokens);
        }
    }

    fn propose_tip(&mut self, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        if let Some(tip) = self.tip.filter(|tip| self.candidates[*tip].node.is_none()) {
            self.propose(tip, proposal, tokens);
        }
    }

    /// The most probable candidate that is no node yet, `belongs`, and has room beside the chain, of
    /// which all are nodes.
    fn next_beside(&mut self, belongs: impl Fn(&TreeShape, &Candidate) -> bool) -> Option<usize> {
        let open =
            self.candidates.iter().enumerate().filter(|(_, candidate)| {
                candidate.node.is_none() && belongs(&self.shape, candidate)
            });
        // The first of equals.
        let best = open.rev().max_by(|(_, a), (_, b)| a.prob.total_cmp(&b.prob))?;
        let (number, candidate) = best;
        // Room for what was drawn is taken since.
        if candidate.drawn_from == DrawnFrom::OneHot {
            if self.num_beside == usize::from(self.shape.num_beside) {
                return None;
            }
            self.num_beside += 1;
        }
        Some(number)
    }

    fn propose(&mut self, number: usize, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        let candidate = &mut self.candidates[number];
        let Candidate { parent, token_id, rank, .. } = *candidate;
        // What it was drawn from is the proposal's from here on.
        let drawn_from = std::mem::replace(&mut candidate.drawn_from, DrawnFrom::OneHot);
        tokens.push(token_id);
        candidate.node = Some(proposal.push(Node { parent, token_id, drawn_from, rank }));
    }
}
