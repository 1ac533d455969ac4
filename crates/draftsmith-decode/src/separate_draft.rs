//! A separate, smaller model as the drafter, with or without an acceptance head and a calibration
//! of its predictions.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, CausalLm};
use draftsmith_theory::{Calibration, DraftSignals, DrafterId, SignalNeeds};

use crate::acceptance::{Acceptance, Step};
use crate::drafter::{DraftRound, Drafted, Drafter, StepDrafter, propose_chain};
use crate::error::DecodeError;
use crate::registry::ModelDrafter;
use crate::session::{ModelSession, NewTokens};
use crate::target::{Target, committed_len};

/// A draft model that reads what the target reads and proposes one candidate a forward.
#[derive(Debug)]
pub struct SeparateDraft<'m> {
    session: ModelSession<'m>,
    acceptance: Acceptance<'m>,
    /// The target's vocabulary, which rows are cut or padded to.
    vocab_size: usize,
}

impl<'m> SeparateDraft<'m> {
    /// A drafter for sequences of up to `capacity` tokens under a target with `vocab_size`
    /// embeddings.
    ///
    /// The two vocabularies may differ in padding: a candidate that the target has no embedding
    /// for is never drawn, one that the draft has none for has chance 0.
    pub fn new(
        draft: &'m CausalLm,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
    ) -> Self {
        Self::with_slots(draft, head, vocab_size, capacity, 1)
    }

    /// A drafter for `num_slots` sequences side by side.
    pub fn with_slots(
        draft: &'m CausalLm,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let session = ModelSession::with_slots(draft, capacity, num_slots, "draft");
        let acceptance = Acceptance::new(head, draft.config().vocab_size, num_slots);
        Self { session, acceptance, vocab_size }
    }

    /// Tokens as the draft can read them: one it has no embedding for becomes token 0, which
    /// costs agreement and nothing else.
    fn readable(session: &ModelSession<'_>, tokens: &[u32]) -> Vec<u32> {
        let own = session.model().config().vocab_size as u32;
        tokens.iter().map(|id| if *id < own { *id } else { 0 }).collect()
    }
}

impl<'m> ModelDrafter<'m> for SeparateDraft<'m> {
    fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.acceptance.set_calibration(calibration);
    }
}

impl<T> Drafter<T> for SeparateDraft<'_> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.acceptance.roll_back(slot, 0);
        // A draft begins as any model does: it reads the prompt but for its last token.
        let prompt = Self::readable(&self.session, prompt);
        self.session.begin(slot, &prompt)
    }

    fn propose(
        &mut self,
        target: &mut T,
        slot: usize,
        round: DraftRound<'_>,
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, slot, round)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.session.commit(slot, num_standing, path);
        self.acceptance.roll_back(slot, committed_len(num_standing, path));
    }

    fn context(&self) -> usize {
        self.session.capacity()
    }
}

impl<T> StepDrafter<T> for SeparateDraft<'_> {
    fn id(&self) -> DrafterId {
        DrafterId::Draft
    }

    fn draft(
        &mut self,
        _target: &mut T,
        slot: usize,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        let new = Self::readable(&self.session, &tokens[self.session.num_read(slot)..]);
        let normed = self.session.read(&[NewTokens { slot, ids: &new, num_rows: 1 }]);
        let logits = self.session.model().logits(&normed);
        let (mut logits, acceptance_prob) = self.acceptance.read(Step {
            slot,
            normed,
            logits,
            num_read: tokens.len(),
            num_candidates,
            needs_head: needs.acceptance_prob,
            role: self.session.role(),
        })?;
        logits.resize(self.vocab_size, f32::NEG_INFINITY);
        let signals = DraftSignals { acceptance_prob, ..needs.signals_of_logits(&logits) };
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    /// # Panics
    /// If the last draft step did not ask for the head's prediction.
    fn predict_acceptance(
        &mut self,
        _target: &mut T,
        slot: usize,
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let session = &self.session;
        let embed = || session.model().embed_ids(&Self::readable(session, &[candidate]));
        self.acceptance.predict(slot, logits, candidate, embed, session.role())
    }
}
