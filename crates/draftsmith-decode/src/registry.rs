//! Construction of drafters and of their target's session.
//!
//! A drafter is built from its [`DrafterParts`]: the loaded models and tables, which many sessions
//! can share. Each kind of drafter implements this trait in its own file, so this file names no
//! kind.

use std::fmt;
use std::sync::Arc;

use draftsmith_model::CausalLm;
use draftsmith_theory::{DrafterId, HeadTiming};

use crate::drafter::ModelDrafter;
use crate::record::{RecordTask, Recorded};
use crate::response_target::ResponseTarget;
use crate::session::ModelSession;
use crate::target::{Target, TargetLayers};

/// The loaded models, tables and settings that a drafter is built from.
pub trait DrafterParts: fmt::Debug + Send + Sync {
    /// Returns the target layers whose hidden states the drafter reads. The default is none.
    fn target_layers(&self) -> TargetLayers {
        TargetLayers::default()
    }

    /// Returns when an acceptance head predicts that is a part of the drafter's own network; `None`
    /// without one, which is the default. It has no effect on heads that are given beside it.
    fn own_head(&self) -> Option<HeadTiming> {
        None
    }

    /// Builds the drafter and names it `id`.
    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm>;

    /// Records the drafter along responses of a remote target, as [`record`](crate::record) does.
    /// Returns `None` if the drafter does not support this, which is the default.
    fn record_elsewhere(
        &self,
        target: AnsweringTarget<'_, '_>,
        task: RecordTask<'_, '_>,
    ) -> Recorded {
        let _ = (target, task);
        None
    }
}

/// A remote target, known by its responses.
#[derive(Debug)]
pub struct AnsweringTarget<'m, 'a> {
    /// The target's responses, in the order of the requests.
    pub answers: ResponseTarget<'a>,
    /// The target's first layers, loaded locally, or only its ends; `None` if no drafter needs them.
    pub layers: Option<&'m CausalLm>,
    /// The target's vocabulary size, in tokens.
    pub vocab_size: usize,
}

impl<'m> AnsweringTarget<'m, '_> {
    /// Returns the sizes for drafters that run with the loaded layers; `None` if no layers are loaded.
    pub(crate) fn sizes(&self) -> Option<Sizes<'m>> {
        let (capacity, num_slots) = (self.answers.context(), self.answers.num_slots());
        self.layers.map(|target| Sizes { target, capacity, num_slots })
    }
}

/// The target and the cache sizes that drafters are built for.
#[derive(Debug, Clone, Copy)]
pub struct Sizes<'m> {
    /// The target model.
    pub target: &'m CausalLm,
    /// The maximum length of a sequence, in tokens.
    pub capacity: usize,
    /// The maximum number of concurrent sequences.
    pub num_slots: usize,
}

/// The parts of a drafter with its name.
#[derive(Debug, Clone)]
pub struct NamedParts {
    /// The drafter's name.
    pub id: DrafterId,
    /// The drafter's parts.
    pub parts: Arc<dyn DrafterParts>,
}

impl NamedParts {
    /// Builds the drafter under its name.
    pub(crate) fn drafter<'m>(&'m self, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        self.parts.drafter(self.id, sizes)
    }

    /// Merges the target layers that several drafters read.
    pub(crate) fn target_layers(all: &[Self]) -> TargetLayers {
        let layers = all.iter().map(|it| it.parts.target_layers());
        layers.fold(TargetLayers::default(), TargetLayers::and)
    }
}

/// A drafter with its name and the target layers that it reads.
struct BuiltDrafter<'m> {
    id: DrafterId,
    layers: TargetLayers,
    drafter: Box<dyn ModelDrafter<'m> + 'm>,
}

/// A target's session and the drafters that can propose for it.
pub struct Drafters<'m> {
    target: ModelSession<'m>,
    drafters: Vec<BuiltDrafter<'m>>,
    /// What the target's session was last prepared for: plain decoding, or a drafter.
    prepared_for: Option<Option<DrafterId>>,
}

/// A target's session and one drafter for it.
pub type Drafting<'a, 'm> = (&'a mut ModelSession<'m>, &'a mut (dyn ModelDrafter<'m> + 'm));

impl<'m> Drafters<'m> {
    /// Builds all given drafters for the target of `sizes`.
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

    /// Returns the target's session, prepared for plain decoding. The session forgets all
    /// sequences that were decoded with a drafter.
    pub fn target(&mut self) -> &mut ModelSession<'m> {
        if self.prepared_for.replace(None) != Some(None) {
            self.target.set_layers(&TargetLayers::default());
        }
        &mut self.target
    }

    /// Prepares the target's session for the drafter named `id`, and returns both. The session
    /// forgets all sequences that were decoded without this drafter. Returns `None` if no drafter
    /// has this name.
    pub fn drafting(&mut self, id: DrafterId) -> Option<Drafting<'_, 'm>> {
        let built = self.drafters.iter_mut().find(|built| built.id == id)?;
        if self.prepared_for.replace(Some(id)) != Some(Some(id)) {
            self.target.set_layers(&built.layers);
        }
        Some((&mut self.target, &mut *built.drafter))
    }
}
