//! A drafter that is a separate, smaller model, with or without an acceptance head.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, CausalLm, DrafterModel, Rows};
use draftsmith_theory::DrafterId;

use crate::drafter::ModelDrafter;
use crate::feature_draft::{FeatureDraft, FeatureSource};
use crate::features::WantedFeatures;
use crate::record::{RecordTask, Recorded};
use crate::registry::{AnsweringTarget, DrafterParts, Sizes};
use crate::target::Target;

/// A separate draft model, which proposes one candidate per forward pass.
pub type SeparateDraft<'m> = FeatureDraft<'m, Embeddings>;

/// The feature source of a separate draft model: its own token embeddings.
#[derive(Debug)]
pub struct Embeddings;

impl<T> FeatureSource<T> for Embeddings {
    fn features(model: &DrafterModel, _target: &mut T, wanted: &[WantedFeatures<'_>]) -> Rows {
        let embed = |one: &WantedFeatures<'_>| {
            model.features(&one.tokens[one.from..], None).in_slot(one.slot)
        };
        Rows::cat(wanted.iter().map(embed))
    }
}

impl<'m> SeparateDraft<'m> {
    /// Creates a drafter for up to `num_slots` concurrent sequences of at most `capacity` tokens
    /// each. `vocab_size` is the target's vocabulary size.
    ///
    /// The two vocabularies may be padded differently. The drafter never proposes a token that the
    /// target has no embedding for, and a token that only the target has gets draft probability 0.
    pub fn new(
        draft: impl Into<DrafterModel>,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        Self::over((DrafterId::DRAFT, "draft"), draft.into(), head, vocab_size, capacity, num_slots)
    }
}

/// A draft model with its optional acceptance head.
#[derive(Debug, Clone)]
pub struct DraftModelParts {
    /// The draft model.
    pub model: CausalLm,
    /// The draft model's acceptance head, if any.
    pub head: Option<AcceptanceHead>,
}

impl DraftModelParts {
    fn session(&self, vocab_size: usize, capacity: usize, num_slots: usize) -> SeparateDraft<'_> {
        SeparateDraft::new(&self.model, self.head.as_ref(), vocab_size, capacity, num_slots)
    }
}

impl DrafterParts for DraftModelParts {
    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let Sizes { target, capacity, num_slots } = sizes;
        let mut drafter = self.session(target.shape().vocab_size, capacity, num_slots);
        drafter.id = id;
        Box::new(drafter)
    }

    fn record_elsewhere(
        &self,
        target: AnsweringTarget<'_, '_>,
        task: RecordTask<'_, '_>,
    ) -> Recorded {
        let AnsweringTarget { mut answers, vocab_size, .. } = target;
        let mut draft = self.session(vocab_size, answers.context(), answers.num_slots());
        task.along(&mut answers, &mut draft)
    }
}
