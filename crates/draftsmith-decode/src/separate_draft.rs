//! A separate, smaller model as the drafter, with or without an acceptance head and a calibration of what it says.

use draftsmith_model::{AcceptanceHead, CausalLm};
use draftsmith_theory::{Calibration, DraftSignals, SignalNeeds};

use crate::error::DecodeError;
use crate::round::{Drafted, Drafter, Target};
use crate::session::{ModelSession, check_logits, to_host};

/// A draft model that reads what the target reads and proposes one candidate a forward.
#[derive(Debug)]
pub struct SeparateDraft<'m> {
    session: ModelSession<'m>,
    head: Option<&'m AcceptanceHead>,
    calibration: Option<&'m Calibration>,
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
        Self { session, head, calibration: None, vocab_size }
    }

    /// From now on the head's predictions are calibrated so, or told as they are. A calibration belongs to a way of
    /// decoding, so that a drafter for several changes it between them.
    pub fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.calibration = calibration;
    }

    /// What rules are told where the head says `logit`.
    fn acceptance_prob(&self, logit: f32) -> Result<f64, DecodeError> {
        let prob = 1.0 / (1.0 + (-f64::from(logit)).exp());
        if prob.is_nan() {
            let num_tokens = self.session.num_read();
            return Err(DecodeError::NotFinite { role: "acceptance head", num_tokens });
        }
        Ok(self.calibration.map_or(prob, |calibration| calibration.apply(prob)))
    }

    /// Tokens as the draft can read them: one it has no embedding for becomes token 0, which
    /// costs agreement and nothing else.
    fn readable(&self, tokens: &[u32]) -> Vec<u32> {
        let own = self.session.model().config().vocab_size as u32;
        tokens.iter().map(|id| if *id < own { *id } else { 0 }).collect()
    }
}

impl<T> Drafter<T> for SeparateDraft<'_> {
    fn begin(&mut self, _target: &mut T, prompt: &[u32]) -> Result<(), DecodeError> {
        // A draft begins as any model does: it reads the prompt but for its last token.
        self.session.begin(&self.readable(prompt))
    }

    fn draft(
        &mut self,
        _target: &mut T,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        let new = self.readable(&tokens[self.session.num_read()..]);
        let normed = self.session.read(&new, 1);
        let (role, num_tokens) = (self.session.role(), self.session.num_read());
        let logits = self.session.model().logits(&normed);
        // The last token read is the candidate before the one now drafted: its own hidden state,
        // hence the head's word on it.
        let head = self.head.filter(|_| needs.acceptance_prob && num_candidates > 0);
        let (mut logits, acceptance_prob) = match head {
            Some(head) => {
                let [logits, acceptance] =
                    to_host([logits, head.acceptance_logits(&normed)], role)?;
                (logits, Some(self.acceptance_prob(acceptance[0])?))
            }
            None => {
                let [logits] = to_host([logits], role)?;
                (logits, None)
            }
        };
        check_logits(&logits, role, num_tokens)?;
        logits.resize(self.vocab_size, f32::NEG_INFINITY);
        let signals = DraftSignals { acceptance_prob, ..needs.signals_of_logits(&logits) };
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    fn roll_back(&mut self, len: usize) {
        self.session.truncate(len);
    }

    fn context(&self) -> usize {
        self.session.capacity()
    }
}
