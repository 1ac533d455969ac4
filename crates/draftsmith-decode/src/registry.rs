//! The one place where drafters are built, with what their target needs for them.
//!
//! A new drafter is a file of its own, a [`DrafterId`] and a line here.

use draftsmith_model::{AcceptanceHead, Adapter, CausalLm, DrafterModel};
use draftsmith_theory::{Bigrams, DrafterId, LookupFirst, MaxGramConfig};

use crate::cascade::{Cascade, CascadeConfig};
use crate::drafter::StepDrafter;
use crate::max_gram::MaxGramDraft;
use crate::merged::MergedDraft;
use crate::model_drafter::ModelDrafter;
use crate::self_draft::SelfDraft;
use crate::separate_draft::SeparateDraft;
use crate::session::ModelSession;

/// What a drafter is made of.
#[derive(Debug, Clone)]
pub enum DrafterParts<'m> {
    /// A draft model.
    Draft {
        /// The model.
        model: &'m CausalLm,
        /// What predicts whether its candidates are accepted.
        head: Option<&'m AcceptanceHead>,
    },
    /// An adapter behind the target's first layers.
    SelfDraft {
        /// The number of those layers.
        exit_layer: usize,
        /// The adapter.
        adapter: &'m Adapter,
        /// What predicts whether its candidates are accepted.
        head: Option<&'m AcceptanceHead>,
    },
    /// The sequence itself.
    MaxGram {
        /// How it is looked up.
        config: MaxGramConfig,
        /// What goes on where a look-up does not.
        bigrams: Option<&'m Bigrams>,
    },
    /// A second, smaller draft model.
    SmallDraft {
        /// The model.
        model: &'m CausalLm,
        /// What predicts whether its candidates are accepted.
        head: Option<&'m AcceptanceHead>,
    },
    /// Drafters that review each other's candidates, or take turns.
    Cascade {
        /// Which one of several.
        number: usize,
        /// How they work together.
        config: CascadeConfig,
        /// From the largest on; prompt lookup, where it takes part, is the last.
        drafters: Vec<DrafterParts<'m>>,
    },
    /// Drafters whose chains are one tree.
    Merged {
        /// Which one of several.
        number: usize,
        /// Those with models, an adapter first.
        drafters: Vec<DrafterParts<'m>>,
        /// What is looked up besides, if anything is.
        lookup: Option<LookupFirst>,
    },
}

impl DrafterParts<'_> {
    /// What the drafter is called.
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
}

/// A target and the drafters that can propose for it.
pub struct Drafters<'m> {
    target: ModelSession<'m>,
    drafters: Vec<(DrafterId, Box<dyn ModelDrafter<'m> + 'm>)>,
}

/// A target's session and a drafter for it.
pub type Drafting<'a, 'm> = (&'a mut ModelSession<'m>, &'a mut (dyn ModelDrafter<'m> + 'm));

impl<'m> Drafters<'m> {
    /// Builds drafters for `target`, each for `num_slots` sequences of up to `capacity` tokens side
    /// by side.
    pub fn new(
        target: &'m CausalLm,
        parts: impl IntoIterator<Item = DrafterParts<'m>>,
        capacity: usize,
        num_slots: usize,
    ) -> Self {
        let sizes = Sizes { target, capacity, num_slots };
        let build = |parts: DrafterParts<'m>| (parts.id(), sizes.drafter(parts));
        Self {
            target: ModelSession::with_slots(target, capacity, num_slots, "target"),
            drafters: parts.into_iter().map(build).collect(),
        }
    }

    /// What drafters there are.
    pub fn ids(&self) -> impl Iterator<Item = DrafterId> {
        self.drafters.iter().map(|(id, _)| *id)
    }

    /// The target, to decode alone.
    pub fn target(&mut self) -> &mut ModelSession<'m> {
        self.target.set_exit(None);
        &mut self.target
    }

    /// The target's session, ready for a drafter, and that drafter; None if there is no such.
    pub fn drafting(&mut self, id: DrafterId) -> Option<Drafting<'_, 'm>> {
        let (_, drafter) = self.drafters.iter_mut().find(|(known, _)| *known == id)?;
        self.target.set_exit(drafter.exit_layer());
        Some((&mut self.target, &mut **drafter))
    }
}

/// The separate draft of a target of `vocab_size` tokens that need not be here, for `num_slots` sequences
/// of up to `capacity` tokens side by side.
pub fn separate_draft<'m>(
    model: &CausalLm,
    head: Option<&'m AcceptanceHead>,
    vocab_size: usize,
    capacity: usize,
    num_slots: usize,
) -> SeparateDraft<'m> {
    SeparateDraft::with_slots(DrafterModel::from(model), head, vocab_size, capacity, num_slots)
}

/// What all drafters of a target are built for.
#[derive(Clone, Copy)]
struct Sizes<'m> {
    target: &'m CausalLm,
    capacity: usize,
    num_slots: usize,
}

impl<'m> Sizes<'m> {
    fn drafter(self, parts: DrafterParts<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        match parts {
            DrafterParts::Draft { model, head } => Box::new(self.draft(model, head)),
            DrafterParts::SmallDraft { model, head } => Box::new(self.small_draft(model, head)),
            DrafterParts::SelfDraft { exit_layer, adapter, head } => {
                Box::new(self.self_draft(exit_layer, adapter, head))
            }
            DrafterParts::MaxGram { config, bigrams } => {
                Box::new(MaxGramDraft::new(config, bigrams, self.num_slots))
            }
            DrafterParts::Cascade { number, config, drafters } => {
                let id = DrafterId::Cascade { number };
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

    /// A drafter with a model of its own, for a cascade. None of others.
    fn by_steps(
        self,
        parts: DrafterParts<'m>,
    ) -> Option<Box<dyn StepDrafter<ModelSession<'m>> + 'm>> {
        match parts {
            DrafterParts::Draft { model, head } => Some(Box::new(self.draft(model, head))),
            DrafterParts::SmallDraft { model, head } => {
                Some(Box::new(self.small_draft(model, head)))
            }
            DrafterParts::SelfDraft { exit_layer, adapter, head } => {
                Some(Box::new(self.self_draft(exit_layer, adapter, head)))
            }
            DrafterParts::MaxGram { .. }
            | DrafterParts::Cascade { .. }
            | DrafterParts::Merged { .. } => None,
        }
    }

    fn draft(self, model: &CausalLm, head: Option<&'m AcceptanceHead>) -> SeparateDraft<'m> {
        let vocab_size = self.target.shape().vocab_size;
        separate_draft(model, head, vocab_size, self.capacity, self.num_slots)
    }

    fn small_draft(self, model: &CausalLm, head: Option<&'m AcceptanceHead>) -> SeparateDraft<'m> {
        self.draft(model, head).named(DrafterId::SmallDraft)
    }

    fn self_draft(
        self,
        exit_layer: usize,
        adapter: &Adapter,
        head: Option<&'m AcceptanceHead>,
    ) -> SelfDraft<'m> {
        let Self { target, capacity, num_slots } = self;
        SelfDraft::with_slots(target, adapter, exit_layer, head, capacity, num_slots)
    }
}
