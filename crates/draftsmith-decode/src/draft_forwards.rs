//! Draft forwards over a cache, whichever features a drafter's model reads: its second half, the
//! acceptance head, and the signals of a step.

use draftsmith_model::{AcceptanceHead, DrafterModel, KvCache, Rows};
use draftsmith_theory::{Calibration, DraftSignals};

use crate::acceptance::Acceptance;
use crate::drafter::{DraftStep, Drafted};
use crate::error::DecodeError;
use crate::session::check_fits;

/// What a drafter's model has read of the sequence in each slot.
#[derive(Debug)]
pub(crate) struct DraftForwards<'m> {
    model: DrafterModel,
    /// Of the model's second half.
    cache: KvCache,
    acceptance: Acceptance<'m>,
    /// The target's vocabulary, which rows are cut or padded to.
    vocab_size: usize,
    /// What errors call the drafter.
    role: &'static str,
}

impl<'m> DraftForwards<'m> {
    /// Nothing read yet, in `num_slots` slots for sequences of up to `capacity` tokens; the model's
    /// own context bounds the capacity.
    pub(crate) fn new(
        model: DrafterModel,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
        num_slots: usize,
        role: &'static str,
    ) -> Self {
        let cache = model.new_cache(capacity.min(model.context()), num_slots);
        Self { model, cache, acceptance: Acceptance::new(head, num_slots), vocab_size, role }
    }

    pub(crate) fn model(&self) -> &DrafterModel {
        &self.model
    }

    pub(crate) fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.acceptance.set_calibration(calibration);
    }

    /// The number of tokens read of the sequence in a slot.
    pub(crate) fn num_read(&self, slot: usize) -> usize {
        self.cache.len(slot, 0)
    }

    /// The longest sequence a slot can hold.
    pub(crate) fn context(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets the sequence in a slot.
    ///
    /// # Errors
    /// If the next one's prompt does not fit.
    pub(crate) fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        check_fits(prompt, self.context(), self.role)?;
        self.commit(slot, 0, &[]);
        self.acceptance.begin(slot);
        Ok(())
    }

    /// Reads features for their keys and values alone.
    pub(crate) fn fill(&mut self, features: Rows) {
        self.model.fill_cache(features, &mut self.cache);
    }

    /// Reads features of sequences, in their slots, each up to its step's last token. A step's rows
    /// come one behind the other.
    ///
    /// # Errors
    /// If a number is none, or the device fails.
    pub(crate) fn draft(
        &mut self,
        features: Rows,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<Drafted>, DecodeError> {
        for step in steps {
            self.cache.branch(step.slot, step.num_standing(), step.parents);
        }
        let num_rows = steps.iter().map(|step| step.num_rows);
        let normed = self.model.forward_cached(features, num_rows, &mut self.cache);
        let logits = self.model.logits(&normed);
        let read = self.acceptance.read(&self.model, normed, logits, steps, self.role)?;
        let rows = steps.iter().flat_map(DraftStep::rows);
        let drafted = rows.zip(read).map(|((step, row), (mut logits, acceptance_prob))| {
            logits.resize(self.vocab_size, f32::NEG_INFINITY);
            let signals = DraftSignals { acceptance_prob, ..step.needs.signals_of_logits(&logits) };
            Drafted { logits, signals, num_forwards: usize::from(row == 0) }
        });
        Ok(drafted.collect())
    }

    /// What a head that looks ahead predicts for a candidate of a row of the last step in a slot.
    ///
    /// # Errors
    /// If the prediction is not a number, or the device fails.
    ///
    /// # Panics
    /// If that step did not ask for the head's prediction.
    pub(crate) fn predict_acceptance(
        &mut self,
        (slot, row): (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        self.acceptance.predict(&self.model, (slot, row), logits, candidate, self.role)
    }

    /// Keeps the tokens that stand and forgets the others.
    pub(crate) fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.cache.keep(slot, num_standing, path);
        self.acceptance.roll_back(slot, self.num_read(slot));
    }
}
