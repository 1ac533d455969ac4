//! A drafter's proposal in a round: a tree of candidate tokens that continue the sequence, each
//! with the distribution it was drawn from.
//!
//! Step-by-step drafting gives a chain, a tree of width 1. Siblings are verified in order of rank.

use crate::Forwards;

/// A proposed token.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The index of the node that this token follows; None if it directly follows the sequence.
    pub parent: Option<usize>,
    /// The token's id.
    pub token_id: u32,
    /// The distribution the token was drawn from, given its parent and siblings of lower rank.
    pub drawn_from: DrawnFrom,
    /// The node's place in the order in which siblings are verified.
    pub rank: usize,
}

/// The distribution that a token was drawn from, after temperature and filters such as top-p.
#[derive(Debug, Clone, PartialEq)]
pub enum DrawnFrom {
    /// A distribution with all mass on the token, as for a most probable or a looked-up token.
    OneHot,
    /// The probability of each token of the target's vocabulary.
    Probs(Vec<f64>),
}

/// The tokens proposed in a round, and the draft forwards they took.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Proposal {
    nodes: Vec<Node>,
    /// The number of draft forwards of each drafter. A stop rule that stops before a draw leaves a
    /// forward without a token.
    pub forwards: Forwards,
}

impl Proposal {
    /// Builds a chain of tokens that were each proposed with probability 1.
    pub fn certain_chain(tokens: &[u32]) -> Self {
        let mut proposal = Self::default();
        tokens.iter().for_each(|id| proposal.push_next(*id, DrawnFrom::OneHot));
        proposal
    }

    /// Adds a node and returns its index.
    ///
    /// # Panics
    /// If the node's parent was not added before.
    pub fn push(&mut self, node: Node) -> usize {
        let number = self.nodes.len();
        assert!(node.parent.is_none_or(|parent| parent < number), "parents come first");
        self.nodes.push(node);
        number
    }

    /// Converts the proposal into its nodes.
    pub fn into_nodes(self) -> impl Iterator<Item = Node> {
        self.nodes.into_iter()
    }

    /// Adds a node after the last one.
    pub fn push_next(&mut self, token_id: u32, drawn_from: DrawnFrom) {
        let parent = self.nodes.len().checked_sub(1);
        self.push(Node { parent, token_id, drawn_from, rank: 0 });
    }

    /// Removes all nodes and forwards.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.forwards = Forwards::default();
    }

    /// Returns the nodes; each comes after its parent.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns whether nothing is proposed. The target then decodes one token by itself.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the number of rows of the target's forward: one after the sequence and each node.
    pub fn num_rows(&self) -> usize {
        self.nodes.len() + 1
    }

    /// Returns the number of nodes on the longest path.
    pub fn depth(&self) -> usize {
        let mut depths = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            depths.push(node.parent.map_or(0, |parent| depths[parent]) + 1);
        }
        depths.into_iter().max().unwrap_or(0)
    }

    /// Returns whether each node follows the one before it.
    pub fn is_chain(&self) -> bool {
        let mut parents = self.nodes.iter().map(|node| node.parent).enumerate();
        parents.all(|(number, parent)| parent == number.checked_sub(1))
    }

    /// Yields the nodes on the path to node `last`, from that node up to the root. Yields nothing
    /// if `last` is None.
    pub fn path_to(&self, last: Option<usize>) -> impl Iterator<Item = &Node> {
        let node = |number: usize| &self.nodes[number];
        std::iter::successors(last.map(node), move |it| it.parent.map(node))
    }

    /// Yields the children of `parent` with their indices, in the order of verification. The
    /// children of None directly follow the sequence.
    pub(crate) fn children(&self, parent: Option<usize>) -> impl Iterator<Item = (usize, &Node)> {
        let first = parent.map_or(0, |parent| parent + 1);
        let later = self.nodes.iter().enumerate().skip(first);
        let mut children: Vec<(usize, &Node)> =
            later.filter(|(_, node)| node.parent == parent).collect();
        children.sort_by_key(|(_, node)| node.rank);
        children.into_iter()
    }
}

#[cfg(test)]
impl Proposal {
    /// Builds a chain of candidates, each drawn from its row of draft probabilities.
    pub(crate) fn chain<R: AsRef<[f64]>>(candidates: &[u32], rows: &[R]) -> Self {
        assert_eq!(candidates.len(), rows.len(), "a row for each candidate");
        let mut proposal = Self::default();
        for (candidate, row) in candidates.iter().zip(rows) {
            proposal.push_next(*candidate, DrawnFrom::Probs(row.as_ref().to_vec()));
        }
        proposal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_trees_of_width_one() {
        let mut proposal = Proposal::certain_chain(&[4, 5, 6]);
        assert!(proposal.is_chain() && Proposal::default().is_chain());
        let tokens = |proposal: &Proposal, parent| -> Vec<u32> {
            proposal.children(parent).map(|(_, node)| node.token_id).collect()
        };
        assert_eq!(
            [None, Some(1), Some(2)].map(|at| tokens(&proposal, at)),
            [vec![4], vec![6], vec![]]
        );
        let node =
            |rank| Node { parent: Some(0), token_id: 7, drawn_from: DrawnFrom::OneHot, rank };
        assert_eq!(proposal.push(node(1)), 3);
        assert!(!proposal.is_chain());
        assert_eq!(tokens(&proposal, Some(0)), [5, 7]);
        let path = |last| proposal.path_to(last).map(|node| node.token_id).collect::<Vec<u32>>();
        assert_eq!([path(None), path(Some(2)), path(Some(3))], [vec![], vec![6, 5, 4], vec![7, 4]]);
        assert_eq!((proposal.depth(), Proposal::default().depth()), (3, 0));
        assert_eq!(proposal.num_rows(), 5);
        proposal.clear();
        assert_eq!(proposal, Proposal::default());
    }

    #[test]
    #[should_panic(expected = "parents come first")]
    fn a_node_before_its_parent_is_a_bug() {
        let node = Node { parent: Some(0), token_id: 7, drawn_from: DrawnFrom::OneHot, rank: 0 };
        Proposal::default().push(node);
    }
}
