//! Max-Gram as a drafter (prompt lookup): candidates come from the sequence's own text, or from a table
//! of bigrams where a look-up finds nothing.
//!
//! Candidates are certain, so the target accepts one with the target's own probability. There is no
//! distribution that a stop rule could read: a round ends at its length, or where nothing is found.

use std::convert::Infallible;

use draftsmith_theory::{
    Bigrams, CandidateSource, DraftPhase, DraftSignals, DrafterId, DrawnFrom, DrawnToken, MaxGram,
    MaxGramConfig, Proposal, SignalNeeds,
};

use crate::drafter::{DraftRound, Drafter, LookUp, Member, ModelDrafter};
use crate::error::DecodeError;
use crate::registry::{DrafterParts, Sizes};

/// Max-Gram over the sequence in each slot.
#[derive(Debug, Clone)]
pub struct MaxGramDraft<'m> {
    id: DrafterId,
    slots: Vec<MaxGram>,
    bigrams: Option<&'m Bigrams>,
}

impl<'m> MaxGramDraft<'m> {
    /// Creates a drafter for `num_slots` sequences side by side. `bigrams` continue a chain where a look-up finds
    /// nothing.
    pub fn new(config: MaxGramConfig, bigrams: Option<&'m Bigrams>, num_slots: usize) -> Self {
        Self { id: DrafterId::LOOK_UP, slots: vec![MaxGram::new(config); num_slots], bigrams }
    }

    /// Renames the drafter, whose name is [`DrafterId::LOOK_UP`] until then.
    #[must_use]
    pub fn named(mut self, id: DrafterId) -> Self {
        self.id = id;
        self
    }

    /// Proposes what follows in the text, until the draft phase is over.
    ///
    /// # Errors
    /// If the stop rule reads probabilities.
    fn propose_one(&mut self, round: &mut DraftRound<'_>) -> Result<(), DecodeError> {
        let DraftRound { slot, tokens, proposal, rule, limits, .. } = round;
        if !rule.needs().is_nothing() {
            return Err(DecodeError::NoSignals { drafter: self.id });
        }
        let max_gram = &mut self.slots[*slot];
        max_gram.read(tokens);
        let mut copied = max_gram.continuation();
        let mut phase = DraftPhase::begin(*rule, *limits);
        while phase.needs_step()
            && let Some(token) = copied.next_or(self.bigrams, tokens)
        {
            let mut source = Certain { token, proposal };
            let signals = DraftSignals::default();
            let Ok(()) = phase.advance(&mut source, signals, *rule, *limits, tokens);
        }
        proposal.forwards.add(self.id, phase.num_steps());
        Ok(())
    }

    /// Appends up to `most` looked-up tokens to a round's sequence and proposal, and returns how many were
    /// found.
    pub(crate) fn propose_up_to(&mut self, most: usize, round: &mut DraftRound<'_>) -> usize {
        let DraftRound { slot, tokens, proposal, limits, .. } = round;
        let most = most.min(limits.room);
        let found = LookUp::<()>::look_up(self, *slot, tokens, most, limits.eos_token_ids);
        found.iter().for_each(|token| proposal.push_next(*token, DrawnFrom::OneHot));
        proposal.forwards.add(self.id, found.len());
        found.len()
    }
}

/// A candidate that was looked up.
struct Certain<'a> {
    token: u32,
    proposal: &'a mut Proposal,
}

impl CandidateSource for Certain<'_> {
    type Error = Infallible;

    fn draw(&mut self, _needs: SignalNeeds) -> DrawnToken {
        self.proposal.push_next(self.token, DrawnFrom::OneHot);
        DrawnToken { token_id: self.token, candidate_prob: None }
    }

    fn predict_acceptance(&mut self, _candidate: u32) -> Result<Option<f64>, Infallible> {
        Ok(None)
    }
}

impl<T> Drafter<T> for MaxGramDraft<'_> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.slots[slot].begin(prompt);
        Ok(())
    }

    fn propose(
        &mut self,
        _target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        rounds.iter_mut().try_for_each(|round| self.propose_one(round))
    }

    /// Forgets all candidates. Accepted ones are read again with the next round's sequence.
    fn commit(&mut self, slot: usize, num_standing: usize, _path: &[usize]) {
        self.slots[slot].truncate(num_standing);
    }

    fn context(&self) -> usize {
        usize::MAX
    }
}

impl<T> LookUp<T> for MaxGramDraft<'_> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn look_up(
        &mut self,
        slot: usize,
        tokens: &mut Vec<u32>,
        most: usize,
        eos_token_ids: &[u32],
    ) -> Vec<u32> {
        let num_found = self.slots[slot].extend(tokens, self.bigrams, most, eos_token_ids);
        tokens[tokens.len() - num_found..].to_vec()
    }
}

impl<'m> ModelDrafter<'m> for MaxGramDraft<'m> {
    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::LookUp(self)
    }
}

/// The settings of prompt lookup, and its table of bigrams, if it has one.
#[derive(Debug, Clone)]
pub struct LookUpParts {
    /// How the sequence is searched.
    pub config: MaxGramConfig,
    /// The table that continues a chain where a look-up finds nothing.
    pub bigrams: Option<Bigrams>,
}

impl DrafterParts for LookUpParts {
    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let bigrams = self.bigrams.as_ref();
        Box::new(MaxGramDraft::new(self.config, bigrams, sizes.num_slots).named(id))
    }
}
