//! Self-drafting (Kangaroo, Liu et al. 2024): the target's own shallow layers and an adapter as the
//! drafter.
//!
//! A draft step runs the target's layers `0..exit_layer` on the newest token, the adapter on the
//! features that come out, and the target's LM head, or the adapter's own, on the adapter's
//! output. The features stay with the target's session: verification runs `exit_layer..num_layers`
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

use draftsmith_model::{AcceptanceHead, Adapter, CausalLm, DrafterModel};
use draftsmith_theory::{Calibration, DrafterId};

use crate::chain::propose_chain;
use crate::draft_forwards::DraftForwards;
use crate::drafter::{DraftRound, DraftStep, Drafted, Drafter, StepDrafter};
use crate::error::DecodeError;
use crate::features::WantedFeatures;
use crate::model_drafter::ModelDrafter;
use crate::session::ModelSession;
use crate::target::FirstLayers;

/// A target's shallow layers with an adapter, which propose one candidate a forward of the adapter.
///
/// Its target is a session with an exit ([`ModelSession::set_exit`]) at the adapter's layer.
#[derive(Debug)]
pub struct SelfDraft<'a> {
    forwards: DraftForwards<'a>,
    /// The target's layers before the adapter.
    exit_layer: usize,
}

impl<'a> SelfDraft<'a> {
    /// A drafter behind `exit_layer` layers of `target`, for one sequence of up to `capacity`
    /// tokens, which the adapter's own context must hold.
    pub fn new(
        target: &CausalLm,
        adapter: &Adapter,
        exit_layer: usize,
        head: Option<&'a AcceptanceHead>,
        capacity: usize,
    ) -> Self {
        Self::with_slots(target, adapter, exit_layer, head, capacity, 1)
    }

    /// A drafter for `num_slots` sequences side by side.
    pub fn with_slots(
        target: &CausalLm,
        adapter: &Adapter,
        exit_layer: usize,
        head: Option<&'a AcceptanceHead>,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let model = DrafterModel::self_draft(target.clone(), adapter.clone(), exit_layer);
        let vocab_size = model.vocab_size();
        let forwards = DraftForwards::new(model, head, vocab_size, capacity, num_slots, "adapter");
        Self { forwards, exit_layer }
    }
}

impl<'m> ModelDrafter<'m> for SelfDraft<'m> {
    fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.forwards.set_calibration(calibration);
    }

    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        Some(self)
    }

    fn exit_layer(&self) -> Option<usize> {
        Some(self.exit_layer)
    }
}

impl<T: FirstLayers> Drafter<T> for SelfDraft<'_> {
    /// # Panics
    /// If the target's session has no exit.
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.forwards.begin(slot, prompt)?;
        let prefix = &prompt[..prompt.len() - 1];
        if !prefix.is_empty() {
            let wanted = WantedFeatures { slot, tokens: prefix, parents: &[], from: 0 };
            self.forwards.fill(target.features(&[wanted]));
        }
        Ok(())
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.forwards.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.forwards.context()
    }
}

impl<T: FirstLayers> StepDrafter<T> for SelfDraft<'_> {
    fn id(&self) -> DrafterId {
        DrafterId::SelfDraft { exit_layer: self.exit_layer }
    }

    /// The adapter reads one position of each sequence; two after a round whose candidates were all
    /// accepted, because nothing was drafted from the last of them.
    ///
    /// # Panics
    /// If the target's session has no exit, or has not begun the same sequences.
    fn draft(
        &mut self,
        target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<Drafted>, DecodeError> {
        let wanted = steps.iter().map(|step| WantedFeatures {
            slot: step.slot,
            tokens: step.tokens,
            parents: step.parents,
            from: self.forwards.num_read(step.slot),
        });
        let features = target.features(&wanted.collect::<Vec<_>>());
        self.forwards.draft(features, steps)
    }

    /// # Panics
    /// If the last draft step did not ask for the head's prediction.
    fn predict_acceptance(
        &mut self,
        _target: &mut T,
        at: (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        self.forwards.predict_acceptance(at, logits, candidate)
    }
}
