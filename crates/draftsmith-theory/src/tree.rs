//! Trees of candidates: what a draft phase proposes besides its chain.
//!
//! A drafter's forward gives a distribution, of which a chain uses one token. Here every node that
//! the drafter reads has several children, and a forward reads the most probable nodes that have
//! none yet. The chain of first children is the one that the drafter would draft without a tree: it
//! is always among what is read, and stop rules look at it alone.
//!
//! Where everything is read, that is SpecInfer's expansion by fixed widths (Miao et al. 2023,
//! section 3); where a few nodes are, EAGLE-2's (Li et al. 2024, section 4): those of the greatest
//! products of probabilities are expanded, and of what is left the greatest fill the proposal.
//!
//! A node's children are either its drafter's most probable tokens, which are certain, or drawn
//! without replacement. What was drawn always goes to the target: leaving it out because of what it
//! is would bias the output.

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::select::largest;
use crate::{Decoding, DrawnFrom, Draws, Node, Proposal, SoftmaxSummary, TheoryError};

/// The most depths whose widths are told apart.
const MAX_DEPTHS: usize = 8;

/// How a tree grows. In names and settings `3-2-1x4x16`, with `-drawn` behind it where children are
/// drawn, and `-head` where an acceptance head says which are worth reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeShape {
    /// The children of a node by its depth, first those behind the sequence that stands; the last
    /// one's serves all that are deeper. 0 stands behind the last.
    widths: [u8; MAX_DEPTHS],
    /// Nodes that a draft forward reads, one of them the chain's.
    pub num_read: u16,
    /// The most nodes of a proposal beside its chain.
    pub num_beside: u16,
    /// What children are.
    pub children: TreeChildren,
    /// What tells how much nodes are worth.
    pub grown_by: GrownBy,
}

/// By what a tree's nodes are compared, in products along their paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum GrownBy {
    /// The drafter's probabilities, as in EAGLE-2.
    #[default]
    Draft,
    /// The chances of acceptance that a look-ahead head predicts.
    Head,
}

/// What a node's children are where tokens are sampled; where the most probable token is decoded they
/// are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TreeChildren {
    /// The drafter's most probable tokens.
    #[default]
    Top,
    /// Drawn without replacement.
    Drawn,
}

impl TreeShape {
    /// A shape.
    ///
    /// # Errors
    /// If there are no widths or more than eight, one is 0, or a forward reads no node.
    pub fn new(
        widths: &[u8],
        num_read: u16,
        num_beside: u16,
        children: TreeChildren,
    ) -> Result<Self, TheoryError> {
        let are_some = (1..=MAX_DEPTHS).contains(&widths.len()) && !widths.contains(&0);
        if !are_some || num_read == 0 {
            return Err(TheoryError::TreeShape);
        }
        let mut all = [0; MAX_DEPTHS];
        all[..widths.len()].copy_from_slice(widths);
        let grown_by = GrownBy::default();
        Ok(Self { widths: all, num_read, num_beside, children, grown_by })
    }

    /// The same, grown by a head's predictions.
    #[must_use]
    pub fn grown_by_head(self) -> Self {
        Self { grown_by: GrownBy::Head, ..self }
    }

    /// The widths by depth.
    pub fn widths(&self) -> &[u8] {
        let len = self.widths.iter().position(|width| *width == 0).unwrap_or(MAX_DEPTHS);
        &self.widths[..len]
    }

    /// The children of a node at `depth`; the sequence that stands is at 0.
    fn width(&self, depth: usize) -> usize {
        let widths = self.widths();
        usize::from(widths[depth.min(widths.len() - 1)])
    }
}

const DRAWN: &str = "-drawn";
const HEAD: &str = "-head";

impl fmt::Display for TreeShape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<String> = self.widths().iter().map(u8::to_string).collect();
        let drawn = if self.children == TreeChildren::Drawn { DRAWN } else { "" };
        let head = if self.grown_by == GrownBy::Head { HEAD } else { "" };
        write!(formatter, "{}x{}x{}", widths.join("-"), self.num_read, self.num_beside)?;
        write!(formatter, "{drawn}{head}")
    }
}

impl FromStr for TreeShape {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self, TheoryError> {
        let of_draft = text.strip_suffix(HEAD);
        let rest = of_draft.unwrap_or(text);
        let (rest, children) = match rest.strip_suffix(DRAWN) {
            Some(rest) => (rest, TreeChildren::Drawn),
            None => (rest, TreeChildren::Top),
        };
        let read = || {
            let (widths, counts) = rest.split_once('x')?;
            let (num_read, num_beside) = counts.split_once('x')?;
            let widths = widths.split('-').map(|width| width.parse().ok());
            let widths = widths.collect::<Option<Vec<u8>>>()?;
            Some((widths, num_read.parse().ok()?, num_beside.parse().ok()?))
        };
        let (widths, num_read, num_beside) = read().ok_or(TheoryError::TreeShape)?;
        let shape = Self::new(&widths, num_read, num_beside, children)?;
        let shape = if of_draft.is_some() { shape.grown_by_head() } else { shape };
        // `+1` and `01` are numbers too: what is read is what would be written.
        if shape.to_string() == text { Ok(shape) } else { Err(TheoryError::TreeShape) }
    }
}

impl Serialize for TreeShape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TreeShape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| de::Error::custom(format!("`{text}`: {error}")))
    }
}

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
    /// Tokens of the round up to it.
    depth: usize,
    /// The product of the drafter's probabilities up to it, or of a head's predictions.
    prob: f64,
    /// Its number among the proposal's nodes, once it is one.
    node: Option<usize>,
}

impl TreeGrowth {
    /// Nothing yet.
    pub fn new(shape: TreeShape) -> Self {
        Self { shape, candidates: Vec::new(), tip: None, num_beside: 0 }
    }

    /// How it grows.
    pub fn shape(&self) -> TreeShape {
        self.shape
    }

    /// The children of a node at `depth`, behind which the drafter gives `logits`.
    fn children(&self, depth: usize, logits: &[f32], decoding: &Decoding) -> Children {
        let probs = match self.shape.children {
            TreeChildren::Top => None,
            TreeChildren::Drawn => decoding.sampled_probs(logits),
        };
        Children::new(logits, probs, self.shape.width(depth))
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
        let depth = self.tip.map_or(0, |tip| self.candidates[tip].depth);
        let mut children = self.children(depth, logits, decoding);
        let first = children.next(draws).expect("a distribution has a token");
        let (token_id, _, prob) = first;
        self.tip = Some(self.candidates.len());
        self.add(parent, depth, first, 0);
        self.add_children(parent, depth, children, 1, draws);
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
        let depth = of_node.expect("a node was a candidate").depth;
        let children = self.children(depth, logits, decoding);
        self.add_children(Some(node), depth, children, 0, draws);
    }

    /// How many candidates there are.
    pub fn num_candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Compares candidates from number `first` on, all children of one parent, by another chance of
    /// each than its drafter's.
    ///
    /// # Errors
    /// If `chance` fails.
    pub fn weigh_since<E>(
        &mut self,
        first: usize,
        mut chance: impl FnMut(u32) -> Result<f64, E>,
    ) -> Result<(), E> {
        let parent = self.candidates.get(first).and_then(|candidate| candidate.parent);
        let before = self.prob_of(parent);
        self.candidates[first..].iter_mut().try_for_each(|candidate| {
            candidate.prob = before * chance(candidate.token_id)?;
            Ok(())
        })
    }

    /// That of a node, or of what stands.
    fn prob_of(&self, node: Option<usize>) -> f64 {
        let is_it = |candidate: &&Candidate| node.is_some() && candidate.node == node;
        self.candidates.iter().find(is_it).map_or(1.0, |candidate| candidate.prob)
    }

    /// Adds more children of a parent at `depth`, the first of which has rank `first`. What is drawn
    /// will be proposed, and so there is room for it.
    fn add_children(
        &mut self,
        parent: Option<usize>,
        depth: usize,
        mut children: Children,
        first: usize,
        draws: &mut dyn Draws,
    ) {
        for rank in first..self.shape.width(depth) {
            if matches!(children, Children::Drawn(_)) {
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

    /// Makes nodes of what the drafter is to read next, the chain's last token first and behind it
    /// the most probable that do not end a response, and appends their tokens to `tokens`. Returns
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
            && let Some(next) = self.next_beside(eos_token_ids)
        {
            self.propose(next, proposal, tokens);
        }
        proposal.len() - first
    }

    /// Makes nodes of what else is proposed: the chain's last token, and behind it all that was drawn,
    /// or the most probable as long as there is room.
    pub fn finish(&mut self, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        self.propose_tip(proposal, tokens);
        while let Some(next) = self.next_beside(&[]) {
            self.propose(next, proposal, tokens);
        }
    }

    fn propose_tip(&mut self, proposal: &mut Proposal, tokens: &mut Vec<u32>) {
        if let Some(tip) = self.tip.filter(|tip| self.candidates[*tip].node.is_none()) {
            self.propose(tip, proposal, tokens);
        }
    }

    /// The most probable candidate that is no node yet, none of `left_out`, and has room beside the
    /// chain, of which all are nodes.
    fn next_beside(&mut self, left_out: &[u32]) -> Option<usize> {
        let open = self.candidates.iter().enumerate().filter(|(_, candidate)| {
            candidate.node.is_none() && !left_out.contains(&candidate.token_id)
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

/// The children of one node, one after the other, each with what it was drawn from and its
/// probability given its parent.
enum Children {
    /// The most probable tokens.
    Top(std::vec::IntoIter<(u32, f64)>),
    /// What is left of the distribution, as served.
    Drawn(Vec<f64>),
}

impl Children {
    /// Up to `num` of them, or any number that is drawn from `probs`.
    fn new(logits: &[f32], probs: Option<Vec<f64>>, num: usize) -> Self {
        if let Some(probs) = probs {
            return Self::Drawn(probs);
        }
        let softmax = SoftmaxSummary::of(logits);
        let prob = |token: u32| (token, softmax.log_prob(logits[token as usize]).exp());
        let tokens: Vec<(u32, f64)> = largest(logits, num).into_iter().map(prob).collect();
        Self::Top(tokens.into_iter())
    }

    fn next(&mut self, draws: &mut dyn Draws) -> Option<(u32, DrawnFrom, f64)> {
        match self {
            Self::Top(tokens) => {
                let (token, prob) = tokens.next()?;
                Some((token, DrawnFrom::OneHot, prob))
            }
            Self::Drawn(left) => {
                let total: f64 = left.iter().sum();
                if total <= 0.0 {
                    return None;
                }
                let q: Vec<f64> = left.iter().map(|weight| weight / total).collect();
                let token = draws.categorical(&q);
                let prob = std::mem::take(&mut left[token]);
                Some((token as u32, DrawnFrom::Probs(q), prob))
            }
        }
    }
}
