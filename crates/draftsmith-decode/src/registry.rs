//! The one place where drafters are built, with what their target needs for them.
//!
//! A new drafter is a file of its own, a [`DrafterId`] and a line here.

use draftsmith_model::{AcceptanceHead, Adapter, CausalLm, DraftVocabulary, DrafterModel};
use draftsmith_theory::{Bigrams, DrafterId, MaxGramConfig};

use crate::max_gram::MaxGramDraft;
use crate::model_drafter::ModelDrafter;
use crate::self_draft::SelfDraft;
use crate::separate_draft::SeparateDraft;
use crate::session::ModelSession;

/// What a drafter is made of.
#[derive(Debug, Clone, Copy)]
pub enum DrafterParts<'m> {
    /// A draft model.
    Draft {
        /// The model.
        model: &'m CausalLm,
        /// The tokens that it may draw; all of them if None.
        vocabulary: Option<&'m DraftVocabulary>,
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
}

impl DrafterParts<'_> {
    /// What the drafter is called.
    pub fn id(&self) -> DrafterId {
        match self {
            Self::Draft { .. } => DrafterId::Draft,
            Self::SelfDraft { exit_layer, .. } => DrafterId::SelfDraft { exit_layer: *exit_layer },
            Self::MaxGram { .. } => DrafterId::MaxGram,
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
        let vocab_size = target.shape().vocab_size;
        let build = |parts: DrafterParts<'m>| -> (DrafterId, Box<dyn ModelDrafter<'m> + 'm>) {
            let id = parts.id();
            let drafter: Box<dyn ModelDrafter<'m> + 'm> = match parts {
                DrafterParts::Draft { model, vocabulary, head } => {
                    let model = DrafterModel::from(model);
                    let model = match vocabulary {
                        Some(vocabulary) => model.with_draft_vocabulary(vocabulary.clone()),
                        None => model,
                    };
                    Box::new(SeparateDraft::with_slots(
                        model, head, vocab_size, capacity, num_slots,
                    ))
                }
                DrafterParts::SelfDraft { exit_layer, adapter, head } => Box::new(
                    SelfDraft::with_slots(target, adapter, exit_layer, head, capacity, num_slots),
                ),
                DrafterParts::MaxGram { config, bigrams } => {
                    Box::new(MaxGramDraft::new(config, bigrams, num_slots))
                }
            };
            (id, drafter)
        };
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
