//! Prompt lookup before a drafter with a model: where a sequence repeats itself, candidates are copied
//! without a draft forward; elsewhere the model drafts.
//!
//! Which of the two proposes depends only on accepted tokens, so the output is not biased. Stop rules do
//! not apply to looked-up rounds: they end at their length, at the end of the match or at an end token.

use draftsmith_theory::LookupFirst;

use crate::drafter::{DraftRound, Drafter};
use crate::error::DecodeError;
use crate::max_gram::MaxGramDraft;

/// A drafter that proposes only where a look-up finds nothing.
#[derive(Debug, Clone)]
pub struct LookupFirstDraft<D> {
    drafter: D,
    lookup: MaxGramDraft<'static>,
    most: usize,
}

impl<D> LookupFirstDraft<D> {
    /// Creates a drafter for `num_slots` sequences side by side that looks up first and lets `drafter` propose where
    /// nothing is found.
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
