//! The tree of a sequence's last tokens, if several candidates are proposed for one position.
//!
//! A cache stores a tree like a chain: nodes one after the other. A node's position depends on its
//! depth, so siblings share a position. A node attends only to its ancestors and the tokens before
//! the tree (SpecInfer's tree attention, Miao et al. 2023, section 4.2).
//!
//! A block is a chain whose nodes attend to later nodes too, as in drafters that were trained without
//! a causal mask.

/// The tree of the last tokens in a cache slot. Without nodes the tokens are a chain.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenTree {
    /// The number of tokens before the first node.
    pub(crate) num_standing: usize,
    parents: Vec<Option<usize>>,
    /// For each node, the number of its ancestors.
    depths: Vec<usize>,
    /// For each node and each earlier node, whether the earlier one is an ancestor. This is a lower
    /// triangle, stored row by row.
    follows: Vec<bool>,
    /// Whether the nodes are a block, which attend to all nodes.
    pub(crate) is_block: bool,
    /// The number of positions by which the nodes are rotated too far.
    pub(crate) shift: isize,
}

impl TokenTree {
    /// Sets the number of tokens before the tree, and the parent of each node. The leading nodes
    /// whose parents do not change are not recomputed.
    ///
    /// # Panics
    /// If a parent comes after its child.
    pub(crate) fn set(
        &mut self,
        num_standing: usize,
        parents: impl Iterator<Item = Option<usize>>,
    ) {
        self.num_standing = num_standing;
        (self.is_block, self.shift) = (false, 0);
        let mut num_nodes = 0;
        for parent in parents {
            if self.parents.get(num_nodes) != Some(&parent) {
                self.truncate(num_nodes);
                self.push(parent);
            }
            num_nodes += 1;
        }
        self.truncate(num_nodes);
    }

    /// Sets the number of tokens before a block, and the number of its nodes.
    pub(crate) fn set_block(&mut self, num_standing: usize, num_nodes: usize) {
        self.set(num_standing, (0..num_nodes).map(|node| node.checked_sub(1)));
        self.is_block = true;
    }

    /// Returns the end of the cache entries that `entry` may attend to.
    pub(crate) fn end_seen(&self, entry: usize) -> usize {
        let end = if self.is_block { self.num_standing + self.num_nodes() } else { 0 };
        end.max(entry + 1)
    }

    fn push(&mut self, parent: Option<usize>) {
        let node = self.parents.len();
        assert!(parent.is_none_or(|parent| parent < node), "parents come first");
        self.depths.push(parent.map_or(0, |parent| self.depths[parent] + 1));
        let first = self.follows.len();
        self.follows.resize(first + node, false);
        if let Some(parent) = parent {
            let of_parent = first_of(parent);
            self.follows.copy_within(of_parent..of_parent + parent, first);
            self.follows[first + parent] = true;
        }
        self.parents.push(parent);
    }

    fn truncate(&mut self, num_nodes: usize) {
        self.parents.truncate(num_nodes);
        self.depths.truncate(num_nodes);
        self.follows.truncate(first_of(num_nodes));
    }

    /// Removes all nodes, so that the tokens are a chain.
    pub(crate) fn clear(&mut self) {
        self.truncate(0);
        self.is_block = false;
    }

    pub(crate) fn is_chain(&self) -> bool {
        self.parents.is_empty()
    }

    pub(crate) fn num_nodes(&self) -> usize {
        self.parents.len()
    }

    /// Returns the position in the text of cache entry `entry`. Entries after the last node have no
    /// token.
    pub(crate) fn position(&self, entry: usize) -> usize {
        let node = entry.checked_sub(self.num_standing);
        node.and_then(|node| self.depths.get(node)).map_or(entry, |depth| self.num_standing + depth)
    }

    /// Returns the position to which cache entry `entry` is rotated: [`Self::position`], unless the nodes
    /// are shifted.
    pub(crate) fn rotary_position(&self, entry: usize) -> usize {
        let shift = if entry < self.num_standing { 0 } else { self.shift };
        self.position(entry).saturating_add_signed(shift)
    }

    /// Lists the nodes before `entry` that it does not attend to: those that are not its ancestors,
    /// and those before position `first_seen`.
    pub(crate) fn hidden_from(
        &self,
        entry: usize,
        first_seen: usize,
    ) -> impl Iterator<Item = usize> {
        let node = entry.checked_sub(self.num_standing);
        let node = node.filter(|node| *node < self.num_nodes()).unwrap_or(0);
        let follows = &self.follows[first_of(node)..][..node];
        let others = follows.iter().zip(&self.depths).enumerate();
        others
            .filter(move |(_, (follows, depth))| {
                !**follows || self.num_standing + **depth < first_seen
            })
            .map(|(other, _)| self.num_standing + other)
    }
}

/// Returns where a node's row of `follows` starts.
fn first_of(node: usize) -> usize {
    node * node.saturating_sub(1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    /// 0 ─ 1 ─ 4
    ///   └ 2
    /// 3 ─ 5
    /// ```
    const PARENTS: [Option<usize>; 6] = [None, Some(0), Some(0), None, Some(1), Some(3)];

    fn hidden(tree: &TokenTree, entry: usize, first_seen: usize) -> Vec<usize> {
        tree.hidden_from(entry, first_seen).collect()
    }

    #[test]
    fn a_nodes_position_follows_from_its_depth_and_it_sees_its_ancestors() {
        let mut tree = TokenTree::default();
        assert!(tree.is_chain());
        assert_eq!((tree.position(7), hidden(&tree, 7, 0)), (7, vec![]));
        tree.set(10, PARENTS.into_iter());
        let positions: Vec<usize> = (9..17).map(|entry| tree.position(entry)).collect();
        assert_eq!(positions, [9, 10, 11, 11, 10, 12, 11, 16]);
        let all: Vec<Vec<usize>> = (9..17).map(|entry| hidden(&tree, entry, 0)).collect();
        let expected: [&[usize]; 8] =
            [&[], &[], &[], &[11], &[10, 11, 12], &[12, 13], &[10, 11, 12, 14], &[]];
        assert_eq!(all, expected);
        // A window that starts inside the tree hides some ancestors too.
        assert_eq!(hidden(&tree, 14, 11), [10, 12, 13]);
    }

    #[test]
    fn the_nodes_of_a_block_are_a_chain_that_sees_its_end() {
        let mut tree = TokenTree::default();
        tree.set_block(10, 4);
        let positions: Vec<usize> = (9..15).map(|entry| tree.position(entry)).collect();
        assert_eq!(positions, [9, 10, 11, 12, 13, 14]);
        let ends: Vec<usize> = (10..16).map(|entry| tree.end_seen(entry)).collect();
        assert_eq!(ends, [14, 14, 14, 14, 15, 16]);
        assert!((10..14).all(|entry| hidden(&tree, entry, 0).is_empty()));
        tree.set(10, PARENTS.into_iter());
        assert_eq!((tree.is_block, tree.end_seen(11)), (false, 12));
        tree.set_block(10, 4);
        tree.clear();
        assert!(tree.is_chain() && !tree.is_block);
    }

    #[test]
    fn a_tree_that_grows_or_changes_equals_a_new_one() {
        let (mut grown, mut anew) = (TokenTree::default(), TokenTree::default());
        for len in [2, 5, 6] {
            grown.set(10, PARENTS[..len].iter().copied());
        }
        anew.set(10, PARENTS.into_iter());
        let seen = |tree: &TokenTree| -> Vec<Vec<usize>> {
            (10..16).map(|entry| hidden(tree, entry, 0)).collect()
        };
        assert_eq!(seen(&grown), seen(&anew));
        let other = [None, None, Some(1), Some(1)];
        grown.set(3, other.into_iter());
        let mut anew = TokenTree::default();
        anew.set(3, other.into_iter());
        assert_eq!(grown.num_nodes(), 4);
        for entry in 0..9 {
            assert_eq!(grown.position(entry), anew.position(entry));
            assert_eq!(hidden(&grown, entry, 0), hidden(&anew, entry, 0));
        }
        grown.clear();
        assert!(grown.is_chain());
    }
}
