//! Prompt lookup in front of another drafter. Where a sequence repeats itself, candidates are
//! copied without a draft forward. Elsewhere the other drafter proposes them.
//!
//! The choice between the two depends only on accepted tokens, so the output is not biased. Stop
//! rules do not apply to rounds with copied candidates. Such a round ends at its maximum length, at
//! the end of the copied text or at an end-of-sequence token.

use std::sync::Arc;

use draftsmith_theory::{LookupFirst, StoredAnswers};

use crate::drafter::{DraftRound, Drafter};
use crate::error::Result;
use crate::max_gram::MaxGramDraft;

/// A drafter that tries prompt lookup first and uses another drafter where it finds no match.
#[derive(Debug, Clone)]
pub struct LookupFirstDraft<D> {
    drafter: D,
    lookup: MaxGramDraft<'static>,
    most: usize,
}

impl<D> LookupFirstDraft<D> {
    /// Creates a drafter for up to `num_slots` concurrent sequences. It tries prompt lookup with
    /// the settings `first`, which may also search `answers`, and lets `drafter` propose where there
    /// is no match.
    pub fn new(
        drafter: D,
        (first, answers): (LookupFirst, Option<&Arc<StoredAnswers>>),
        num_slots: usize,
    ) -> Self {
        let lookup = MaxGramDraft::new(first.config(), (None, answers.cloned()), num_slots);
        Self { drafter, lookup, most: first.most }
    }
}

impl<T, D: Drafter<T>> Drafter<T> for LookupFirstDraft<D> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        self.lookup.begin(target, slot, prompt)?;
        self.drafter.begin(target, slot, prompt)
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
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
