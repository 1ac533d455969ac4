//! A drafter with a model that reads features: token embeddings in a separate draft, hidden states of
//! the target's first layers in a self-draft.
//!
//! Owns the model's cache, its draft forwards and its acceptance head. `separate_draft.rs` and
//! `self_draft.rs` say where the features come from.

use std::marker::PhantomData;

use draftsmith_model::{AcceptanceHead, DrafterModel, KvCache, Rows};
use draftsmith_theory::DrafterId;

use crate::acceptance::Acceptance;
use crate::chain::propose_chain;
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, Member, ModelDrafter, StepDrafter};
use crate::error::DecodeError;
use crate::features::WantedFeatures;
use crate::session::{ModelSession, check_fits};

/// Where the features of a drafter's model come from.
pub(crate) trait FeatureSource<T>: Send {
    /// Returns the wanted features of all sequences, in order.
    fn features(model: &DrafterModel, target: &mut T, wanted: &[WantedFeatures<'_>]) -> Rows;
}

/// A drafter that proposes one candidate a forward of its model. `F` is the source of its features.
#[derive(Debug)]
pub struct FeatureDraft<'m, F> {
    id: DrafterId,
    /// The model's name in errors.
    role: &'static str,
    model: DrafterModel,
    /// Keys and values of the layers that read features.
    cache: KvCache,
    acceptance: Acceptance<'m>,
    /// The target's vocabulary size, which logits are cut or padded to.
    vocab_size: usize,
    source: PhantomData<F>,
}

impl<'m, F> FeatureDraft<'m, F> {
    /// Creates a drafter for `num_slots` sequences of up to `capacity` tokens side by side. The model's context
    /// bounds the capacity.
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

    /// Renames the drafter, whose name is [`DrafterId::DRAFT`] until then.
    #[must_use]
    pub fn named(mut self, id: DrafterId) -> Self {
        self.id = id;
        self
    }

    /// Returns the number of tokens read in a slot.
    pub(crate) fn num_read(&self, slot: usize) -> usize {
        self.cache.len(slot, 0)
    }
}

impl<'m, F: FeatureSource<ModelSession<'m>> + 'm> ModelDrafter<'m> for FeatureDraft<'m, F> {
    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        Some(self)
    }

    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::Steps(self)
    }
}

impl<T, F: FeatureSource<T>> Drafter<T> for FeatureDraft<'_, F> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
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

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
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

    /// Reads one position of each sequence. After a round whose candidates were all accepted the model reads two,
    /// because nothing was drafted from the last candidate.
    fn draft(
        &mut self,
        target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>, DecodeError> {
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
    /// If the last draft step did not ask for the head's prediction.
    fn predict_acceptance(
        &mut self,
        at: (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let role = self.role;
        self.acceptance.predict(&self.model, at, logits, candidate, role)
    }
}
