//! Max-Gram as a drafter (prompt lookup). Candidates are copied from an earlier match in the
//! sequence itself. Where there is no match, they come from a table of bigrams.
//!
//! Each candidate has draft probability 1, so its acceptance probability is the target's
//! probability of the token. There is no draft distribution that a stop rule could read. A round
//! ends at its maximum length or when the lookup finds no further token.

use std::convert::Infallible;

use draftsmith_theory::{
    Bigrams, CandidateSource, DraftPhase, DraftSignals, DrafterId, DrawnFrom, DrawnToken, MaxGram,
    MaxGramConfig, Proposal, SignalNeeds,
};

use crate::drafter::{DraftRound, Drafter, LookUp, Member, ModelDrafter};
use crate::error::{DecodeError, Result};
use crate::registry::{DrafterParts, Sizes};

/// A drafter that searches each slot's own sequence with Max-Gram.
#[derive(Debug, Clone)]
pub struct MaxGramDraft<'m> {
    id: DrafterId,
    slots: Vec<MaxGram>,
    bigrams: Option<&'m Bigrams>,
}

impl<'m> MaxGramDraft<'m> {
    /// Creates a drafter for up to `num_slots` concurrent sequences. `bigrams` continue a chain
    /// where the lookup finds no match.
    pub fn new(config: MaxGramConfig, bigrams: Option<&'m Bigrams>, num_slots: usize) -> Self {
        Self { id: DrafterId::LOOK_UP, slots: vec![MaxGram::new(config); num_slots], bigrams }
    }

    /// Drafts one round: copies the tokens after the match until the draft phase ends.
    ///
    /// # Errors
    /// If the stop rule reads probabilities.
    fn propose_one(&mut self, round: &mut DraftRound<'_>) -> Result<()> {
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

    /// Appends up to `most` copied tokens to a round's sequence and proposal, and returns their
    /// number.
    pub(crate) fn propose_up_to(&mut self, most: usize, round: &mut DraftRound<'_>) -> usize {
        let DraftRound { slot, tokens, proposal, limits, .. } = round;
        let most = most.min(limits.room);
        let found = LookUp::<()>::look_up(self, *slot, tokens, most, limits.eos_token_ids);
        found.iter().for_each(|token| proposal.push_next(*token, DrawnFrom::OneHot));
        proposal.forwards.add(self.id, found.len());
        found.len()
    }
}

/// A source that returns one copied token as the next candidate.
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
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        self.slots[slot].begin(prompt);
        Ok(())
    }

    fn propose(&mut self, _target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        rounds.iter_mut().try_for_each(|round| self.propose_one(round))
    }

    /// Forgets all candidates. The next round reads the accepted ones again as part of the
    /// sequence.
    fn commit(&mut self, slot: usize, num_standing: usize, _path: &[usize]) {
        self.slots[slot].truncate(num_standing);
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

/// The settings of prompt lookup and its optional table of bigrams.
#[derive(Debug, Clone)]
pub struct LookUpParts {
    /// The search settings.
    pub config: MaxGramConfig,
    /// The table that continues a chain where the lookup finds no match; `None` ends the chain
    /// there.
    pub bigrams: Option<Bigrams>,
}

impl DrafterParts for LookUpParts {
    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let bigrams = self.bigrams.as_ref();
        Box::new(MaxGramDraft { id, ..MaxGramDraft::new(self.config, bigrams, sizes.num_slots) })
    }
}
