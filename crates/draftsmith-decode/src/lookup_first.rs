//! Prompt lookup before a drafter with a model: what a sequence has read is copied where it repeats
//! itself, at no draft forward, and drafted where it does not.
//!
//! Who proposes depends on what stands alone, so that nothing is biased. A round that was looked up is
//! none of the stop rule's: it ends at its length, at the match's end, or at an end token.

use draftsmith_theory::LookupFirst;

use crate::drafter::{DraftRound, Drafter};
use crate::error::DecodeError;
use crate::max_gram::MaxGramDraft;

/// A drafter that is asked where a look-up finds nothing.
#[derive(Debug, Clone)]
pub struct LookupFirstDraft<D> {
    drafter: D,
    lookup: MaxGramDraft<'static>,
    most: usize,
}

impl<D> LookupFirstDraft<D> {
    /// Look-ups before what `drafter` proposes, for `num_slots` sequences side by side.
    pub fn new(drafter: D, first: LookupFirst, num_slots: usize) -> Self {
        let lookup = MaxGramDraft::new(first.config(), None, num_slots);
        Self { drafter, lookup, most: first.most }
    }
}

impl<T, D: Drafter<T>> Drafter<T> for LookupFirstDraft<D> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.lookup.begin(target, slot, prompt)?;
        self.drafter.begin(target, slot, prompt)
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        let others = rounds.iter_mut().filter_map(|round| {
            let num_found = self.lookup.propose_up_to(self.most, round);
            (num_found == 0).then(|| round.reborrow())
        });
        let mut others: Vec<DraftRound<'_>> = others.collect();
        if others.is_empty() { Ok(()) } else { self.drafter.propose(target, &mut others) }
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        Drafter::<T>::commit(&mut self.lookup, slot, num_standing, path);
        self.drafter.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.drafter.context()
    }
}
