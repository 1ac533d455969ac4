//! Trees of candidates, which grow around the chain that the drafter would propose without a tree.
//!
//! A chain takes one token from the distribution of each draft forward. In a tree, every node that
//! the drafter reads gets several children, and each forward reads the most probable nodes that
//! have none yet. The chain of first children equals the drafter's chain without a tree. It is
//! always read, and stop rules see only this chain.
//!
//! If all nodes are read, this is SpecInfer's expansion with fixed widths (Miao et al. 2023,
//! section 3). If only some are read, it is EAGLE-2's expansion (Li et al. 2024, section 4). The
//! nodes with the largest products of probabilities are then expanded, and the most probable of the
//! rest fill the proposal.
//!
//! A node's children are either the drafter's most probable tokens, verified as tokens of draft
//! probability 1, or tokens drawn without replacement. The target verifies every drawn token,
//! because withholding one for its value would bias the output.

mod children;
mod shape;
#[cfg(test)]
mod tests;

use crate::{Decoding, DrawnFrom, Draws, Node, Proposal};

pub use children::Children;
pub use shape::{TreeChildren, TreeShape};

/// The growing tree of one round.
#[derive(Debug, Clone)]
pub struct TreeGrowth {
    shape: TreeShape,
    candidates: Vec<Candidate>,
    /// The index of the chain's last candidate; None while the chain is empty.
    tip: Option<usize>,
    /// The number of nodes outside the chain.
    num_beside: usize,
}

/// A child token that is proposed already or may still be.
#[derive(Debug, Clone)]
struct Candidate {
    /// The proposal's node that the token follows; None if it directly follows the sequence.
    parent: Option<usize>,
    token_id: u32,
    drawn_from: DrawnFrom,
    rank: usize,
    /// The number of the round's tokens up to and including this one.
    depth: usize,
    /// The product of the drafter's probabilities along the path to the token.
    prob: f64,
    /// The token's index among the proposal's nodes; None until it is proposed.
    node: Option<usize>,
}

impl TreeGrowth {
    /// Creates an empty tree.
    pub fn new(shape: TreeShape) -> Self {
        Self { shape, candidates: Vec::new(), tip: None, num_beside: 0 }
    }

    /// Returns the children of a node at `depth`, computed from the drafter's `logits` after it.
    /// There is at least one child.
    fn children(&self, depth: usize, logits: &[f32], decoding: &Decoding) -> Children {
        let probs = match self.shape.children {
            TreeChildren::Top => None,
            TreeChildren::Drawn => decoding.sampled_probs(logits),
        };
        let top = || Children::top(logits, self.shape.width(depth).max(1));
        probs.map_or_else(top, Children::drawn)
    }

    /// Extends the chain by the first child of its last token, and adds the siblings of this child
    /// as candidates. `logits` are the drafter's after that last token. Returns the child and its
    /// probability.
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
        let depth = self.tip.map_or(0, |tip| self.candidates[tip].depth);
        let mut children = self.children(depth, logits, decoding);
        let first = children.next(draws).expect("a distribution has a token");
        let (token_id, _, prob) = first;
        self.tip = Some(self.candidates.len());
        self.add(parent, depth, first, 0);
        self.add_children(parent, depth, children, 1, draws);
        (token_id, prob)
    }

    /// Adds the children of `node`, which is outside the chain, as candidates. `logits` are the
    /// drafter's after the node.
    ///
    /// # Panics
    /// If the node does not exist.
    pub fn branch(
        &mut self,
        node: usize,
        logits: &[f32],
        decoding: &Decoding,
        draws: &mut dyn Draws,
    ) {
        let of_node = self.candidates.iter().find(|candidate| candidate.node == Some(node));
        let depth = of_node.expect("a node was a candidate").depth;
        let children = self.children(depth, logits, decoding);
        self.add_children(Some(node), depth, children, 0, draws);
    }

    /// Returns the product of probabilities along the path to a node, which is 1 for None.
    fn prob_of(&self, node: Option<usize>) -> f64 {
        let is_it = |candidate: &&Candidate| node.is_some() && candidate.node == node;
        self.candidates.iter().find(is_it).map_or(1.0, |candidate| candidate.prob)
    }

    /// Adds the children of a parent at `depth`, from rank `first` on. Drawn children must be
    /// proposed, so they already count towards the limit on nodes outside the chain.
    fn add_children(
        &mut self,
        parent: Option<usize>,
        depth: usize,
        mut children: Children,
        first: usize,
        draws: &mut dyn Draws,
    ) {
        for rank in first..self.shape.width(depth) {
            if children.are_drawn() {
                if self.num_beside == usize::from(self.shape.num_beside) {
                    return;
                }
                self.num_beside += 1;
            }
            match children.next(draws) {
                Some(child) => self.add(parent, depth, child, rank),
                None => return,
            }
        }
    }

    fn add(
        &mut self,
        parent: Option<usize>,
        depth: usize,
        (token_id, drawn_from, prob): (u32, DrawnFrom, f64),
        rank: usize,
    ) {
        let (depth, prob) = (depth + 1, self.prob_of(parent) * prob);
        let candidate = Candidate { parent, token_id, drawn_from, rank, depth, prob, node: None };
        self.candidates.push(candidate);
    }

    /// Proposes the candidates that the drafter reads next: the chain's last token, then the most
    /// probable candidates that are not end tokens. Appends their tokens to `tokens` and returns
    /// their number.
    pub fn read_next(
        &mut self,
        eos_token_ids: &[u32],
        proposal: &mut Proposal,
        tokens: &mut Vec<u32>,
    ) -> usize {
        let first = proposal.len();
        self.propose_tip(proposal, tokens);
        while proposal.len() - first < usize::from(self.shape.num_read)
            && let Some(next) =
                self.next_beside(|candidate| !eos_token_ids.contains(&candidate.token_id))
        {
            self.propose(next, proposal, tokens);
        }
        proposal.len() - first
    }

    /// Proposes the remaining candidates: the chain's last token, then all drawn candidates, or the
    /// most probable ones up to the limit on nodes outside the chain.
    pub fn finish(&mut self, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        self.propose_tip(proposal, tokens);
        while let Some(next) = self.next_beside(|_| true) {
            self.propose(next, proposal, tokens);
        }
    }

    fn propose_tip(&mut self, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        if let Some(tip) = self.tip.filter(|tip| self.candidates[*tip].node.is_none()) {
            self.propose(tip, proposal, tokens);
        }
    }

    /// Finds the most probable candidate that is not proposed yet and satisfies `belongs`, and
    /// counts it as a node outside the chain. None if there is no such candidate or the limit is
    /// reached.
    fn next_beside(&mut self, belongs: impl Fn(&Candidate) -> bool) -> Option<usize> {
        let open = self
            .candidates
            .iter()
            .enumerate()
            .filter(|(_, candidate)| candidate.node.is_none() && belongs(candidate));
        // Among equally probable candidates, the first wins.
        let (number, candidate) = open.rev().max_by(|(_, a), (_, b)| a.prob.total_cmp(&b.prob))?;
        // Drawn candidates were counted when they were drawn.
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
        // The proposal takes over the distribution.
        let drawn_from = std::mem::replace(&mut candidate.drawn_from, DrawnFrom::OneHot);
        tokens.push(token_id);
        candidate.node = Some(proposal.push(Node { parent, token_id, drawn_from, rank }));
    }
}
