//! The place of each row of a forward in the KV cache: the sequence that it continues, and its
//! cache entry.

use crate::token_tree::TokenTree;

/// Rows of a forward that are the next tokens of one cache slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedRun {
    pub(crate) slot: usize,
    /// The cache entry of the first row. It is the row's position in the text unless the tokens
    /// form a tree.
    pub(crate) start: usize,
    pub(crate) num_rows: usize,
}

/// Consecutive rows of a forward, with their runs and trees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedRows<'a> {
    /// The runs of the whole forward.
    runs: &'a [PlacedRun],
    /// The token tree of each slot. Empty if the tokens of all slots are chains.
    trees: &'a [TokenTree],
    /// The number of rows of the forward before these rows.
    num_before: usize,
    num_rows: usize,
}

impl<'a> PlacedRows<'a> {
    /// Covers all rows of a forward. `trees` contains the token tree of each slot.
    pub(crate) fn new(runs: &'a [PlacedRun], trees: &'a [TokenTree]) -> Self {
        let num_rows = runs.iter().map(|run| run.num_rows).sum();
        Self { runs, trees, num_before: 0, num_rows }
    }

    /// Returns the tree of a slot's tokens; `None` for a chain.
    #[inline(always)]
    pub(crate) fn tree(&self, slot: usize) -> Option<&'a TokenTree> {
        self.trees.get(slot).filter(|tree| !tree.is_chain())
    }

    /// Returns whether some rows attend to later rows, as the nodes of a block do.
    pub(crate) fn attend_ahead(&self) -> bool {
        self.runs().any(|run| self.tree(run.slot).is_some_and(|tree| tree.is_block))
    }

    /// Returns the position to which cache entry `entry` of a slot is rotated.
    #[inline(always)]
    pub(crate) fn position(&self, slot: usize, entry: usize) -> usize {
        self.tree(slot).map_or(entry, |tree| tree.rotary_position(entry))
    }

    /// Lists the runs of these rows, without rows outside.
    pub(crate) fn runs(&self) -> impl Iterator<Item = PlacedRun> {
        let (mut num_to_skip, mut num_left) = (self.num_before, self.num_rows);
        self.runs.iter().filter_map(move |run| {
            let num_skipped = num_to_skip.min(run.num_rows);
            let num_rows = (run.num_rows - num_skipped).min(num_left);
            num_to_skip -= num_skipped;
            num_left -= num_rows;
            let start = run.start + num_skipped;
            (num_rows > 0).then_some(PlacedRun { slot: run.slot, start, num_rows })
        })
    }

    /// Splits the rows after the first `num_rows`.
    pub(crate) fn split_at(self, num_rows: usize) -> (Self, Self) {
        let first = Self { num_rows, ..self };
        let num_before = self.num_before + num_rows;
        (first, Self { num_before, num_rows: self.num_rows - num_rows, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_can_be_split_within_and_between_slots() {
        let run = |slot, start, num_rows| PlacedRun { slot, start, num_rows };
        let all = [run(2, 7, 3), run(0, 0, 1), run(1, 40, 4)];
        let each = |rows: PlacedRows<'_>| -> Vec<(usize, usize)> {
            let of_run = |run: PlacedRun| (0..run.num_rows).map(move |r| (run.slot, run.start + r));
            rows.runs().flat_map(of_run).collect()
        };
        let rows = PlacedRows::new(&all, &[]);
        let whole = each(rows);
        assert_eq!(whole[2..5], [(2, 9), (0, 0), (1, 40)]);
        for cut in 0..=8 {
            let (first, second) = rows.split_at(cut);
            assert_eq!((each(first), each(second)), (whole[..cut].into(), whole[cut..].into()));
            for again in 0..=8 - cut {
                let (third, fourth) = second.split_at(again);
                let expected = (whole[cut..cut + again].into(), whole[cut + again..].into());
                assert_eq!((each(third), each(fourth)), expected);
            }
        }
    }
}
