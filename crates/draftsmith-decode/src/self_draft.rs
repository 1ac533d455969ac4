//! Self-drafting (Kangaroo, Liu et al. 2024): the target's own shallow layers and an adapter as the
//! drafter.
//!
//! A draft step runs the target's layers `0..exit_layer` on the newest token, the adapter on the
//! features that come out, and the target's LM head, or the adapter's own, on what the adapter
//! says. The features stay with the target's session: verification runs `exit_layer..num_layers`
//! over all of the round's at once, and no token passes the shallow layers twice. The second early
//! exit, ending a round at a low confidence, is the stop rule's.
//!
//! Over a round of K candidates the shallow layers read K tokens while drafting and one, the last
//! candidate, while verifying. So a draft forward is shallow layers, adapter and LM head over one
//! row, a target forward without candidates is exactly plain decoding's, and each verified row adds
//! deep layers and LM head: N_draft is the number of candidates, and N_draft + N_target = N +
//! N_discarded holds as for a separate draft.
//!
//! An acceptance head reads what the LM head reads of the adapter, as that of a separate draft
//! reads the draft's final hidden state, and looks candidates' embeddings up in the target.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, Adapter, KvCache};
use draftsmith_theory::{Calibration, DraftSignals, SignalNeeds};

use crate::acceptance::{Acceptance, Step};
use crate::error::DecodeError;
use crate::round::{Drafted, Drafter};
use crate::session::{ModelSession, check_fits};

/// What errors call the adapter.
const ROLE: &str = "adapter";

/// A target's shallow layers with an adapter, which propose one candidate a forward of the adapter.
///
/// Its target is a [`ModelSession::with_exit`] at the adapter's exit layer.
#[derive(Debug)]
pub struct SelfDraft<'a> {
    adapter: &'a Adapter,
    /// The adapter's own keys and values.
    cache: KvCache,
    acceptance: Acceptance<'a>,
}

impl<'a> SelfDraft<'a> {
    /// A drafter for sequences of up to `capacity` tokens, which the adapter's own context must
    /// hold.
    pub fn new(adapter: &'a Adapter, head: Option<&'a AcceptanceHead>, capacity: usize) -> Self {
        let acceptance = Acceptance::new(head, adapter.vocab_size());
        Self { adapter, cache: adapter.new_cache(capacity, 1), acceptance }
    }

    /// From now on the head's predictions are calibrated so, or told as they are. A calibration
    /// belongs to a way of decoding, so that a drafter for several changes it between them.
    pub fn set_calibration(&mut self, calibration: Option<&'a Calibration>) {
        self.acceptance.set_calibration(calibration);
    }
}

impl<'m> Drafter<ModelSession<'m>> for SelfDraft<'_> {
    /// # Panics
    /// If the target's session has no exit.
    fn begin(&mut self, target: &mut ModelSession<'m>, prompt: &[u32]) -> Result<(), DecodeError> {
        check_fits(prompt, self.cache.capacity(), ROLE)?;
        self.cache.truncate(0, 0);
        self.acceptance.roll_back(0);
        let prefix = &prompt[..prompt.len() - 1];
        if !prefix.is_empty() {
            self.adapter.fill_cache(target.features(prefix, 0), &mut self.cache);
        }
        Ok(())
    }

    /// The adapter reads one position; two after a round whose candidates were all accepted,
    /// because nothing was drafted from the last of them.
    ///
    /// # Panics
    /// If the target's session has no exit, or has not begun the same sequence.
    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        let features = target.features(tokens, self.cache.len(0, 0));
        let normed = self.adapter.forward_cached(features, &mut self.cache).last(1);
        let logits = self.adapter.logits(&normed, target.model());
        let (logits, acceptance_prob) = self.acceptance.read(Step {
            normed,
            logits,
            num_read: tokens.len(),
            num_candidates,
            needs_head: needs.acceptance_prob,
            role: ROLE,
        })?;
        let signals = DraftSignals { acceptance_prob, ..needs.signals_of_logits(&logits) };
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    /// # Panics
    /// If the last draft step did not ask for the head's word.
    fn predict_acceptance(
        &mut self,
        target: &mut ModelSession<'m>,
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let embed = || target.model().embed_ids(&[candidate]);
        self.acceptance.predict_acceptance(logits, candidate, embed, ROLE)
    }

    fn roll_back(&mut self, len: usize) {
        self.cache.truncate(0, len);
        self.acceptance.roll_back(len);
    }

    fn context(&self) -> usize {
        self.cache.capacity()
    }
}
