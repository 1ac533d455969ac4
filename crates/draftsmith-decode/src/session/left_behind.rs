//! What a forward leaves behind for the next round: the final hidden state at the last position that
//! stands, which an acceptance head may read.

use draftsmith_model::Rows;

use super::ModelSession;
use crate::target::LeavesHidden;

/// Of the sequence in one slot.
#[derive(Debug, Default)]
pub(super) struct LeftBehind {
    /// At the last position that was read and stands.
    standing: Option<Rows>,
    /// Of the last forward, until it is committed: the first position, and a row each from there on.
    read: Option<(usize, Rows)>,
}

impl LeftBehind {
    /// Notes the rows of a forward, the first of them at position `first`.
    pub(super) fn read(&mut self, first: usize, normed: Rows) {
        self.read = Some((first, normed));
    }

    /// Keeps the row of the last of the tokens that stand: the last one on `path`, whose numbers count
    /// from `num_standing`, or the one before them. What was read before the last forward stays.
    pub(super) fn commit(&mut self, num_standing: usize, path: &[usize]) {
        let last = match path.last() {
            Some(node) => num_standing + node,
            None => num_standing - 1,
        };
        if let Some((first, rows)) = self.read.take()
            && let Some(row) = last.checked_sub(first)
        {
            self.standing = Some(rows.slice(row..row + 1));
        }
    }
}

impl ModelSession<'_> {
    /// From now on the session keeps what [`LeavesHidden::last_hidden`] gives, or does not. What was
    /// read is not in it.
    pub fn set_keeps_hidden(&mut self, keeps: bool) {
        let slots = std::iter::repeat_with(LeftBehind::default).take(self.cache.num_slots());
        self.left_behind = keeps.then(|| slots.collect());
    }
}

impl LeavesHidden for ModelSession<'_> {
    fn last_hidden(&self, slot: usize) -> Option<&Rows> {
        self.left_behind.as_ref()?[slot].standing.as_ref()
    }
}
