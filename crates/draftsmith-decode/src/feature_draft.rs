//! A drafter whose model reads feature vectors. In a separate draft model these are its token
//! embeddings. In a self-draft they are hidden states of the target's first layers.
//!
//! This file owns the model's KV cache, its draft forwards and its acceptance head.
//! `separate_draft.rs` and `self_draft.rs` define where the features come from.

use std::marker::PhantomData;

use draftsmith_model::{AcceptanceHead, DrafterModel, KvCache, Rows};
use draftsmith_theory::DrafterId;

use crate::acceptance::Acceptance;
use crate::drafter::{DraftRow, DraftStep, Drafter, StepDrafter};
use crate::error::Result;
use crate::features::WantedFeatures;
use crate::session::check_fits;

/// A source of the features that a drafter's model reads.
pub(crate) trait FeatureSource<T>: Send {
    /// Returns the requested features of all sequences, in the order of the requests.
    fn features(model: &DrafterModel, target: &mut T, wanted: &[WantedFeatures<'_>]) -> Rows;
}

/// A drafter that proposes one candidate per forward of its model. `F` is the source of its
/// features.
#[derive(Debug)]
pub struct FeatureDraft<'m, F> {
    pub(crate) id: DrafterId,
    /// The model's name in error messages.
    role: &'static str,
    model: DrafterModel,
    /// The KV cache of the model's layers that read the features.
    cache: KvCache,
    acceptance: Acceptance<'m>,
    /// The target's vocabulary size. The model's logits are cut or padded to it.
    vocab_size: usize,
    source: PhantomData<F>,
}

impl<'m, F> FeatureDraft<'m, F> {
    /// Creates a drafter for up to `num_slots` concurrent sequences of at most `capacity` tokens
    /// each. The capacity is reduced to the model's context length if that is shorter.
    pub(crate) fn over(
        (id, role): (DrafterId, &'static str),
        model: DrafterModel,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let cache = model.new_cache(capacity.min(model.context()), num_slots);
        let acceptance = Acceptance::new(head, num_slots);
        Self { id, role, model, cache, acceptance, vocab_size, source: PhantomData }
    }

    /// Returns the number of tokens that the model has read in a slot.
    pub(crate) fn num_read(&self, slot: usize) -> usize {
        self.cache.len(slot, 0)
    }
}

impl<T, F: FeatureSource<T>> Drafter<T> for FeatureDraft<'_, F> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        check_fits(prompt, self.cache.capacity(), self.role)?;
        Drafter::<T>::commit(self, slot, 0, &[]);
        let prefix = &prompt[..prompt.len() - 1];
        if !prefix.is_empty() {
            let wanted = WantedFeatures { slot, tokens: prefix, parents: &[], from: 0 };
            let features = F::features(&self.model, target, &[wanted]);
            self.model.fill_cache(features, &mut self.cache);
        }
        Ok(())
    }

    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<T>> {
        Some(self)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.cache.keep(slot, num_standing, path);
        self.acceptance.roll_back(slot, self.num_read(slot));
    }

    fn context(&self) -> usize {
        self.cache.capacity()
    }
}

impl<T, F: FeatureSource<T>> StepDrafter<T> for FeatureDraft<'_, F> {
    fn id(&self) -> DrafterId {
        self.id
    }

    /// Reads the tokens of each sequence that the model has not read. In a chain that is one token.
    /// After a round whose candidates were all accepted it is two, because the last candidate was
    /// never read.
    fn draft(&mut self, target: &mut T, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>> {
        let wanted = steps.iter().map(|step| WantedFeatures {
            slot: step.slot,
            tokens: step.tokens,
            parents: step.parents,
            from: self.num_read(step.slot),
        });
        let features = F::features(&self.model, target, &wanted.collect::<Vec<_>>());
        for step in steps {
            self.cache.branch(step.slot, step.num_standing(), step.parents);
        }
        let num_rows = steps.iter().map(|step| step.num_rows);
        let normed = self.model.forward_cached(features, num_rows, &mut self.cache);
        let logits = self.model.logits(&normed);
        let role = self.role;
        let read = self.acceptance.read(&self.model, normed, logits, steps, role)?;
        let rows = steps.iter().flat_map(DraftStep::rows).zip(read);
        let rows = rows.map(|(row, (mut logits, acceptance_prob))| {
            logits.resize(self.vocab_size, f32::NEG_INFINITY);
            DraftRow::new(row, logits, acceptance_prob)
        });
        Ok(rows.collect())
    }

    /// # Panics
    /// If the last draft step did not request the head's prediction.
    fn predict_acceptance(
        &mut self,
        at: (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>> {
        let role = self.role;
        self.acceptance.predict(&self.model, at, logits, candidate, role)
    }
}
