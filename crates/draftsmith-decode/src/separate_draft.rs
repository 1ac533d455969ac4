//! A separate, smaller model as the drafter, with or without an acceptance head and a calibration
//! of its predictions.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, DrafterModel, Rows};
use draftsmith_theory::{Calibration, DrafterId};

use crate::chain::propose_chain;
use crate::draft_forwards::DraftForwards;
use crate::drafter::{DraftRound, DraftStep, Drafted, Drafter, StepDrafter};
use crate::error::DecodeError;
use crate::model_drafter::ModelDrafter;
use crate::session::ModelSession;

/// A draft model that reads what the target reads and proposes one candidate a forward.
#[derive(Debug)]
pub struct SeparateDraft<'m>(DraftForwards<'m>, DrafterId);

impl<'m> SeparateDraft<'m> {
    /// A drafter for one sequence of up to `capacity` tokens under a target with `vocab_size`
    /// embeddings.
    ///
    /// The two vocabularies may differ in padding: a candidate that the target has no embedding
    /// for is never drawn, one that the draft has none for has chance 0.
    pub fn new(
        draft: impl Into<DrafterModel>,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
    ) -> Self {
        Self::with_slots(draft, head, vocab_size, capacity, 1)
    }

    /// A drafter for `num_slots` sequences side by side.
    pub fn with_slots(
        draft: impl Into<DrafterModel>,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let role = "draft";
        let forwards =
            DraftForwards::new(draft.into(), head, vocab_size, capacity, num_slots, role);
        Self(forwards, DrafterId::Draft)
    }

    /// The same under another name: one of several drafts.
    #[must_use]
    pub fn named(mut self, id: DrafterId) -> Self {
        self.1 = id;
        self
    }
}

impl<'m> ModelDrafter<'m> for SeparateDraft<'m> {
    fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.0.set_calibration(calibration);
    }

    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        Some(self)
    }
}

impl<T> Drafter<T> for SeparateDraft<'_> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.0.begin(slot, prompt)?;
        let prefix = &prompt[..prompt.len() - 1];
        if !prefix.is_empty() {
            self.0.fill(self.0.model().features(prefix, None).in_slot(slot));
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
        self.0.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.0.context()
    }
}

impl<T> StepDrafter<T> for SeparateDraft<'_> {
    fn id(&self) -> DrafterId {
        self.1
    }

    /// The draft reads one position of each sequence; two after a round whose candidates were all
    /// accepted, because nothing was drafted from the last of them.
    fn draft(
        &mut self,
        _target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<Drafted>, DecodeError> {
        let features = steps.iter().map(|step| {
            let new = &step.tokens[self.0.num_read(step.slot)..];
            self.0.model().features(new, None).in_slot(step.slot)
        });
        let features = Rows::cat(features);
        self.0.draft(features, steps)
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
        self.0.predict_acceptance(at, logits, candidate)
    }
}
