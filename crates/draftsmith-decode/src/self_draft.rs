//! Self-drafting (Kangaroo, Liu et al. 2024): the drafter consists of the target's own first
//! ("shallow") layers and an adapter.
//!
//! A draft step runs the target's layers `0..exit_layer` on the newest token. The adapter reads
//! their output (the features), and the LM head of the target or of the adapter reads the adapter's
//! output. The target's session keeps the features. Verification runs layers
//! `exit_layer..num_layers` over all of a round's features at once, so the shallow layers read each
//! token only once. Kangaroo's second early exit, which ends a round at a low confidence, is a stop
//! rule.
//!
//! In a round of K candidates, the shallow layers read K tokens while drafting and one token, the
//! last candidate, during verification. So a draft forward runs the shallow layers, the adapter and
//! the LM head over one row. A target forward without candidates is the same as in plain decoding.
//! The number of draft forwards N_draft equals the number of candidates, and N_draft + N_target = N
//! + N_discarded holds as for a separate draft model, with N new tokens.
//!
//! If `exit_layer` is 0, the features are the token embeddings. The adapter is then a small draft
//! model that shares only the embeddings and the LM head with the target. An acceptance head reads
//! the adapter's final hidden state and the target's embeddings of candidates.

#[cfg(test)]
pub(crate) mod tests;

use draftsmith_model::{AcceptanceHead, Adapter, CausalLm, DrafterModel, Rows};
use draftsmith_theory::DrafterId;

use crate::drafter::ModelDrafter;
use crate::feature_draft::{FeatureDraft, FeatureSource};
use crate::features::WantedFeatures;
use crate::record::{RecordTask, Recorded};
use crate::registry::{AnsweringTarget, DrafterParts, Sizes};
use crate::served_target::ServedTarget;
use crate::target::{FirstLayers, TargetLayers};

/// A drafter that runs the target's shallow layers and an adapter, and proposes one candidate per
/// forward of the adapter.
///
/// The drafter panics unless the target's session has an exit at the adapter's layer
/// ([`ModelSession::set_layers`](crate::ModelSession::set_layers)).
pub type SelfDraft<'m> = FeatureDraft<'m, ShallowLayers>;

/// The feature source of a self-draft: the hidden states after the target's shallow layers.
#[derive(Debug)]
pub struct ShallowLayers;

impl<T: FirstLayers> FeatureSource<T> for ShallowLayers {
    fn features(_model: &DrafterModel, target: &mut T, wanted: &[WantedFeatures<'_>]) -> Rows {
        target.features(wanted)
    }
}

impl<'m> SelfDraft<'m> {
    /// Creates a drafter that runs `adapter` after the first `exit_layer` layers of `target`. It
    /// holds up to `num_slots` concurrent sequences of at most `capacity` tokens each.
    pub fn new(
        target: &CausalLm,
        adapter: &Adapter,
        exit_layer: usize,
        head: Option<&'m AcceptanceHead>,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let model = DrafterModel::self_draft(target.clone(), adapter.clone(), exit_layer);
        let (named, vocab_size) = ((DrafterId::DRAFT, "adapter"), model.vocab_size());
        Self::over(named, model, head, vocab_size, capacity, num_slots)
    }
}

/// The parts of a self-draft.
#[derive(Debug, Clone)]
pub struct SelfDraftParts {
    /// The number of target layers that run before the adapter.
    pub exit_layer: usize,
    /// The adapter.
    pub adapter: Adapter,
    /// The adapter's acceptance head, if any.
    pub head: Option<AcceptanceHead>,
}

impl SelfDraftParts {
    fn session<'m>(&'m self, sizes: Sizes<'m>) -> SelfDraft<'m> {
        let (Self { exit_layer, adapter, head }, Sizes { target, capacity, num_slots }) =
            (self, sizes);
        SelfDraft::new(target, adapter, *exit_layer, head.as_ref(), capacity, num_slots)
    }
}

impl DrafterParts for SelfDraftParts {
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::exit(self.exit_layer)
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let mut drafter = self.session(sizes);
        drafter.id = id;
        Box::new(drafter)
    }

    fn record_elsewhere(
        &self,
        target: AnsweringTarget<'_, '_>,
        task: RecordTask<'_, '_>,
    ) -> Recorded {
        let sizes = target.sizes()?;
        let mut served = ServedTarget::new(sizes.target, self.exit_layer, target.answers);
        task.along(&mut served, &mut self.session(sizes))
    }
}
