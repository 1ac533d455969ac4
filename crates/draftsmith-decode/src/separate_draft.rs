//! A separate, smaller model as the drafter, with or without an acceptance head and a calibration
//! of what it says.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, CausalLm};
use draftsmith_theory::{Calibration, DraftSignals, SignalNeeds};

use crate::acceptance::{Acceptance, Step};
use crate::error::DecodeError;
use crate::round::{Drafted, Drafter, Target};
use crate::session::ModelSession;

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
        let session = ModelSession::new(draft, capacity, "draft");
        let acceptance = Acceptance::new(head, draft.config().vocab_size);
        Self { session, acceptance, vocab_size }
    }

    /// From now on the head's predictions are calibrated so, or told as they are. A calibration
    /// belongs to a way of decoding, so that a drafter for several changes it between them.
    pub fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.acceptance.set_calibration(calibration);
    }

    /// Tokens as the draft can read them: one it has no embedding for becomes token 0, which
    /// costs agreement and nothing else.
    fn readable(session: &ModelSession<'_>, tokens: &[u32]) -> Vec<u32> {
        let own = session.model().config().vocab_size as u32;
        tokens.iter().map(|id| if *id < own { *id } else { 0 }).collect()
    }
}

impl<T> Drafter<T> for SeparateDraft<'_> {
    fn begin(&mut self, _target: &mut T, prompt: &[u32]) -> Result<(), DecodeError> {
        self.acceptance.roll_back(0);
        // A draft begins as any model does: it reads the prompt but for its last token.
        let prompt = Self::readable(&self.session, prompt);
        self.session.begin(&prompt)
    }

    fn draft(
        &mut self,
        _target: &mut T,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        let new = Self::readable(&self.session, &tokens[self.session.num_read()..]);
        let normed = self.session.read(&new, 1);
        let logits = self.session.model().logits(&normed);
        let (mut logits, acceptance_prob) = self.acceptance.read(Step {
            normed,
            logits,
            num_read: self.session.num_read(),
            num_candidates,
            needs_head: needs.acceptance_prob,
            role: self.session.role(),
        })?;
        logits.resize(self.vocab_size, f32::NEG_INFINITY);
        let signals = DraftSignals { acceptance_prob, ..needs.signals_of_logits(&logits) };
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    /// # Panics
    /// If the last draft step did not ask for the head's word.
    fn predict_acceptance(
        &mut self,
        _target: &mut T,
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let session = &self.session;
        let embed = || session.model().embed_ids(&Self::readable(session, &[candidate]));
        self.acceptance.predict_acceptance(logits, candidate, embed, session.role())
    }

    fn roll_back(&mut self, len: usize) {
        self.session.truncate(len);
        self.acceptance.roll_back(len);
    }

    fn context(&self) -> usize {
        self.session.capacity()
    }
}
