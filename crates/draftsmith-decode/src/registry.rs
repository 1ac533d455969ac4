//! Builds drafters and the session of their target.
//!
//! A drafter is built from its [`DrafterParts`]: the models and tables that it was loaded from, which many
//! sessions share. Each kind of drafter implements them beside its session; nothing here names a kind.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_model::CausalLm;
use draftsmith_theory::{DrafterId, Recording};

use crate::drafter::ModelDrafter;
use crate::error::DecodeError;
use crate::record::{RecordOptions, RecordRequest};
use crate::response_target::ResponseTarget;
use crate::session::ModelSession;
use crate::target::TargetLayers;

/// What a drafter is built from.
pub trait DrafterParts: fmt::Debug + Send + Sync {
    /// Returns the layers of the target whose hidden states the drafter reads; none by default.
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::default()
    }

    /// Builds the drafter, under a name.
    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm>;

    /// Records the drafter along answers that the target gave elsewhere, as [`record`](crate::record) does.
    /// `None` if it does not draft step by step.
    fn record_elsewhere<'a>(
        &self,
        target: AnsweringTarget<'_, 'a>,
        options: &RecordOptions,
        requests: Vec<RecordRequest<'a>>,
        observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Option<Result<Vec<Recording>, DecodeError>> {
        let _ = (target, options, requests, observe);
        None
    }
}

/// A target that runs elsewhere.
#[derive(Debug)]
pub struct AnsweringTarget<'m, 'a> {
    /// Its answers, in the order of the requests.
    pub answers: ResponseTarget<'a>,
    /// Its first layers, if the drafter runs them.
    pub layers: Option<&'m CausalLm>,
    /// The size of its vocabulary.
    pub vocab_size: usize,
}

/// What all drafters of a target are built for.
#[derive(Debug, Clone, Copy)]
pub struct Sizes<'m> {
    /// The target.
    pub target: &'m CausalLm,
    /// The most tokens of a sequence.
    pub capacity: usize,
    /// The number of sequences side by side.
    pub num_slots: usize,
}

/// The parts of a drafter, and its name.
#[derive(Debug, Clone)]
pub struct NamedParts {
    /// The name.
    pub id: DrafterId,
    /// The parts.
    pub parts: Arc<dyn DrafterParts>,
}

impl NamedParts {
    /// Builds the drafter.
    pub(crate) fn drafter<'m>(&'m self, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        self.parts.drafter(self.id, sizes)
    }

    /// Merges the layers that several drafters read.
    pub(crate) fn target_layers(all: &[Self]) -> TargetLayers {
        let layers = all.iter().map(|it| it.parts.target_layers());
        layers.fold(TargetLayers::default(), TargetLayers::and)
    }
}

/// A drafter and what its target's session must know of it.
struct BuiltDrafter<'m> {
    id: DrafterId,
    layers: TargetLayers,
    drafter: Box<dyn ModelDrafter<'m> + 'm>,
}

/// A target and the drafters that can propose for it.
pub struct Drafters<'m> {
    target: ModelSession<'m>,
    drafters: Vec<BuiltDrafter<'m>>,
    /// What the target's session was last prepared for: plain decoding, or a drafter.
    prepared_for: Option<Option<DrafterId>>,
}

/// A target's session and a drafter for it.
pub type Drafting<'a, 'm> = (&'a mut ModelSession<'m>, &'a mut (dyn ModelDrafter<'m> + 'm));

impl<'m> Drafters<'m> {
    /// Builds drafters for the target of `sizes`.
    pub fn new(all: impl IntoIterator<Item = &'m NamedParts>, sizes: Sizes<'m>) -> Self {
        let Sizes { target, capacity, num_slots } = sizes;
        let build = |named: &'m NamedParts| BuiltDrafter {
            id: named.id,
            layers: named.parts.target_layers(),
            drafter: named.drafter(sizes),
        };
        Self {
            target: ModelSession::with_slots(target, capacity, num_slots, "target"),
            drafters: all.into_iter().map(build).collect(),
            prepared_for: None,
        }
    }

    /// Prepares the target's session for plain decoding and returns it. It forgets all sequences that were decoded with
    /// a drafter.
    pub fn target(&mut self) -> &mut ModelSession<'m> {
        if self.prepared_for.replace(None) != Some(None) {
            self.target.set_layers(&TargetLayers::default());
        }
        &mut self.target
    }

    /// Prepares the target's session for a drafter, and returns both; `None` if no drafter has this name. The session
    /// forgets all sequences that were decoded with another drafter or none.
    pub fn drafting(&mut self, id: DrafterId) -> Option<Drafting<'_, 'm>> {
        let built = self.drafters.iter_mut().find(|built| built.id == id)?;
        if self.prepared_for.replace(Some(id)) != Some(Some(id)) {
            self.target.set_layers(&built.layers);
        }
        Some((&mut self.target, &mut *built.drafter))
    }
}
