//! Builds drafters and the session of their target. No other file does.
//!
//! A drafter is named by its [`DrafterId`]. One that drafts step by step implements [`StepDrafter`]; its
//! steps can be recorded, and `propose_chain` makes proposals of them. Others, such as Max-Gram and
//! cascades, propose without steps and are not recorded. A new drafter takes a file, a [`DrafterId`] and
//! a line here.

use draftsmith_model::{AcceptanceHead, Adapter, CausalLm};
use draftsmith_theory::{Bigrams, DrafterId, LookupFirst, MaxGramConfig};

use crate::cascade::{Cascade, CascadeConfig};
use crate::drafter::{ModelDrafter, StepDrafter};
use crate::max_gram::MaxGramDraft;
use crate::merged::MergedDraft;
use crate::self_draft::SelfDraft;
use crate::separate_draft::SeparateDraft;
use crate::session::ModelSession;

/// The parts that a drafter is built from.
#[derive(Debug, Clone)]
pub enum DrafterParts<'m> {
    /// A draft model.
    Draft {
        /// The model.
        model: &'m CausalLm,
        /// Its acceptance head.
        head: Option<&'m AcceptanceHead>,
    },
    /// The target's first layers and an adapter.
    SelfDraft {
        /// The number of those layers.
        exit_layer: usize,
        /// The adapter.
        adapter: &'m Adapter,
        /// Its acceptance head.
        head: Option<&'m AcceptanceHead>,
    },
    /// Prompt lookup.
    MaxGram {
        /// How the sequence is searched.
        config: MaxGramConfig,
        /// The table that continues a chain where a look-up finds nothing.
        bigrams: Option<&'m Bigrams>,
    },
    /// A second, smaller draft model.
    SmallDraft {
        /// The model.
        model: &'m CausalLm,
        /// Its acceptance head.
        head: Option<&'m AcceptanceHead>,
    },
    /// Drafters that review each other's candidates or take turns.
    Cascade {
        /// Its number among the cascades.
        number: usize,
        /// How the drafters work together.
        config: CascadeConfig,
        /// The drafters, largest first; prompt lookup comes last.
        drafters: Vec<DrafterParts<'m>>,
    },
    /// Drafters whose chains form one tree.
    Merged {
        /// Its number among the merged drafters.
        number: usize,
        /// The drafters with models, an adapter first.
        drafters: Vec<DrafterParts<'m>>,
        /// Look-ups that add another chain.
        lookup: Option<LookupFirst>,
    },
}

impl DrafterParts<'_> {
    /// The drafter's name.
    pub fn id(&self) -> DrafterId {
        match self {
            Self::Draft { .. } => DrafterId::Draft,
            Self::SelfDraft { exit_layer, .. } => DrafterId::SelfDraft { exit_layer: *exit_layer },
            Self::MaxGram { .. } => DrafterId::MaxGram,
            Self::SmallDraft { .. } => DrafterId::SmallDraft,
            Self::Cascade { number, .. } => DrafterId::Cascade { number: *number },
            Self::Merged { number, .. } => DrafterId::Merged { number: *number },
        }
    }

    /// The number of target layers that a self-draft among the drafters runs.
    fn exit_layer(&self) -> Option<usize> {
        match self {
            Self::Cascade { drafters, .. } | Self::Merged { drafters, .. } => {
                drafters.iter().find_map(Self::exit_layer)
            }
            other => other.id().exit_layer(),
        }
    }
}

/// A drafter and what its target's session must know of it.
struct BuiltDrafter<'m> {
    id: DrafterId,
    exit_layer: Option<usize>,
    drafter: Box<dyn ModelDrafter<'m> + 'm>,
}

/// A target and the drafters that can propose for it.
pub struct Drafters<'m> {
    target: ModelSession<'m>,
    drafters: Vec<BuiltDrafter<'m>>,
}

/// A target's session and a drafter for it.
pub type Drafting<'a, 'm> = (&'a mut ModelSession<'m>, &'a mut (dyn ModelDrafter<'m> + 'm));

impl<'m> Drafters<'m> {
    /// Builds drafters for `target`, each for `num_slots` sequences of up to `capacity` tokens side by
    /// side.
    pub fn new(
        target: &'m CausalLm,
        parts: impl IntoIterator<Item = DrafterParts<'m>>,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let sizes = Sizes { target, capacity, num_slots };
        let build = |parts: DrafterParts<'m>| BuiltDrafter {
            id: parts.id(),
            exit_layer: parts.exit_layer(),
            drafter: sizes.drafter(parts),
        };
        Self {
            target: ModelSession::with_slots(target, capacity, num_slots, "target"),
            drafters: parts.into_iter().map(build).collect(),
        }
    }

    /// The names of the drafters.
    pub fn ids(&self) -> impl Iterator<Item = DrafterId> {
        self.drafters.iter().map(|built| built.id)
    }

    /// The target's session, ready for plain decoding.
    pub fn target(&mut self) -> &mut ModelSession<'m> {
        self.target.set_exit(None);
        &mut self.target
    }

    /// A drafter and the target's session, ready for it; `None` if no drafter has this name.
    pub fn drafting(&mut self, id: DrafterId) -> Option<Drafting<'_, 'm>> {
        let built = self.drafters.iter_mut().find(|built| built.id == id)?;
        self.target.set_exit(built.exit_layer);
        Some((&mut self.target, &mut *built.drafter))
    }
}

/// The target and the sizes that all drafters are built for.
#[derive(Clone, Copy)]
struct Sizes<'m> {
    target: &'m CausalLm,
    capacity: usize,
    num_slots: usize,
}

impl<'m> Sizes<'m> {
    fn drafter(self, parts: DrafterParts<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let id = parts.id();
        match parts {
            DrafterParts::Draft { model, head } | DrafterParts::SmallDraft { model, head } => {
                Box::new(self.draft(id, model, head))
            }
            DrafterParts::SelfDraft { exit_layer, adapter, head } => {
                Box::new(self.self_draft(exit_layer, adapter, head))
            }
            DrafterParts::MaxGram { config, bigrams } => {
                Box::new(MaxGramDraft::new(config, bigrams, self.num_slots))
            }
            DrafterParts::Cascade { config, drafters, .. } => {
                let (mut models, mut lookup) = (Vec::new(), None);
                for parts in drafters {
                    match parts {
                        DrafterParts::MaxGram { config, bigrams } => {
                            lookup = Some(MaxGramDraft::new(config, bigrams, self.num_slots));
                        }
                        parts => models.extend(self.by_steps(parts)),
                    }
                }
                Box::new(Cascade::new(id, config, models, lookup))
            }
            DrafterParts::Merged { drafters, lookup, .. } => {
                let models = drafters.into_iter().filter_map(|parts| self.by_steps(parts));
                Box::new(MergedDraft::new(models.collect(), lookup, self.num_slots))
            }
        }
    }

    /// A drafter that drafts step by step; `None` for the others.
    fn by_steps(
        self,
        parts: DrafterParts<'m>,
    ) -> Option<Box<dyn StepDrafter<ModelSession<'m>> + 'm>> {
        let id = parts.id();
        match parts {
            DrafterParts::Draft { model, head } | DrafterParts::SmallDraft { model, head } => {
                Some(Box::new(self.draft(id, model, head)))
            }
            DrafterParts::SelfDraft { exit_layer, adapter, head } => {
                Some(Box::new(self.self_draft(exit_layer, adapter, head)))
            }
            DrafterParts::MaxGram { .. }
            | DrafterParts::Cascade { .. }
            | DrafterParts::Merged { .. } => None,
        }
    }

    fn draft(
        self,
        id: DrafterId,
        model: &CausalLm,
        head: Option<&'m AcceptanceHead>,
    ) -> SeparateDraft<'m> {
        let Self { target, capacity, num_slots } = self;
        SeparateDraft::new(model, head, target.shape().vocab_size, capacity, num_slots).named(id)
    }

    fn self_draft(
        self,
        exit_layer: usize,
        adapter: &Adapter,
        head: Option<&'m AcceptanceHead>,
    ) -> SelfDraft<'m> {
        let Self { target, capacity, num_slots } = self;
        SelfDraft::new(target, adapter, exit_layer, head, capacity, num_slots)
    }
}
