//! Self-drafting (Kangaroo, Liu et al. 2024): the target's own shallow layers and an adapter as the
//! drafter.
//!
//! A draft step runs the target's layers `0..exit_layer` on the newest token, the adapter on the
//! features that come out, and the LM head of the target or of the adapter on the adapter's output. The
//! target's session keeps the features: verification runs layers `exit_layer..num_layers` over all of a
//! round's features at once, so the shallow layers read each token once. Kangaroo's second early exit,
//! which ends a round at a low confidence, is a stop rule.
//!
//! Over a round of K candidates the shallow layers read K tokens while drafting and one, the last
//! candidate, while verifying. So a draft forward is shallow layers, adapter and LM head over one row,
//! and a target forward without candidates is the same as in plain decoding. N_draft is the number of
//! candidates, and N_draft + N_target = N + N_discarded holds as for a separate draft.
//!
//! With an exit before the first layer, the features are the embeddings: the adapter is a small draft
//! that shares only the embedding and the LM head. An acceptance head reads the adapter's final hidden
//! state and takes candidates' embeddings from the target.

#[cfg(test)]
pub(crate) mod tests;

use std::ops::ControlFlow;

use draftsmith_model::{AcceptanceHead, Adapter, CausalLm, DrafterModel, Rows};
use draftsmith_theory::{DrafterId, Recording};

use crate::drafter::ModelDrafter;
use crate::error::DecodeError;
use crate::feature_draft::{FeatureDraft, FeatureSource};
use crate::features::WantedFeatures;
use crate::record::{RecordOptions, RecordRequest, record};
use crate::registry::{AnsweringTarget, DrafterParts, Sizes};
use crate::served_target::ServedTarget;
use crate::target::{FirstLayers, Target, TargetLayers};

/// A target's shallow layers with an adapter, which propose one candidate a forward of the adapter.
///
/// The target must be a session with an exit at the adapter's layer
/// ([`ModelSession::set_layers`](crate::ModelSession::set_layers)), otherwise the drafter panics.
pub type SelfDraft<'m> = FeatureDraft<'m, ShallowLayers>;

/// The hidden states after the target's shallow layers.
#[derive(Debug)]
pub struct ShallowLayers;

impl<T: FirstLayers> FeatureSource<T> for ShallowLayers {
    fn features(_model: &DrafterModel, target: &mut T, wanted: &[WantedFeatures<'_>]) -> Rows {
        target.features(wanted)
    }
}

impl<'m> SelfDraft<'m> {
    /// Creates a drafter that runs `adapter` after the first `exit_layer` layers of `target`, for `num_slots`
    /// sequences of up to `capacity` tokens side by side.
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

/// An adapter, its exit layer and its acceptance head, if it has one.
#[derive(Debug, Clone)]
pub struct SelfDraftParts {
    /// The number of the target's layers before the adapter.
    pub exit_layer: usize,
    /// The adapter.
    pub adapter: Adapter,
    /// Its head.
    pub head: Option<AcceptanceHead>,
}

impl DrafterParts for SelfDraftParts {
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::exit(self.exit_layer)
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let Sizes { target, capacity, num_slots } = sizes;
        let Self { exit_layer, adapter, head } = self;
        let head = head.as_ref();
        let drafter = SelfDraft::new(target, adapter, *exit_layer, head, capacity, num_slots);
        Box::new(drafter.named(id))
    }

    fn record_elsewhere<'a>(
        &self,
        target: AnsweringTarget<'_, 'a>,
        options: &RecordOptions,
        requests: Vec<RecordRequest<'a>>,
        observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Option<Result<Vec<Recording>, DecodeError>> {
        let (answers, layers) = (target.answers, target.layers?);
        let (capacity, num_slots) = (answers.context(), answers.num_slots());
        let Self { exit_layer, adapter, head } = self;
        let head = head.as_ref();
        let mut drafter = SelfDraft::new(layers, adapter, *exit_layer, head, capacity, num_slots);
        let mut target = ServedTarget::new(layers, *exit_layer, answers);
        Some(record(&mut target, &mut drafter, options, requests, observe))
    }
}
