//! A drafter that is a function of the text: the logits of the next token after any tokens.
//!
//! It is the shortest way to try an idea, such as a table of counts or a rule for one format: chains, trees, stop
//! rules, recordings and composites take it as they take a model.

use std::fmt;
use std::sync::Arc;

use draftsmith_theory::DrafterId;

use crate::chain::propose_chain;
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, Member, ModelDrafter, StepDrafter};
use crate::error::DecodeError;
use crate::registry::{DrafterParts, Sizes};
use crate::session::ModelSession;

/// Computes logits of the next token from all tokens before it.
type NextLogits = dyn Fn(&[u32]) -> Vec<f32> + Send + Sync;

/// A function as a drafter.
#[derive(Clone)]
pub struct TextParts(Arc<NextLogits>);

impl TextParts {
    /// Wraps a function that returns the logits of every token of the target's vocabulary, given the tokens of the
    /// text so far and the candidates after it. It must be a function of them only.
    pub fn new(next: impl Fn(&[u32]) -> Vec<f32> + Send + Sync + 'static) -> Self {
        Self(Arc::new(next))
    }
}

impl fmt::Debug for TextParts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TextParts")
    }
}

impl DrafterParts for TextParts {
    fn drafter<'m>(&'m self, id: DrafterId, _sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        Box::new(TextDraft { id, next: &*self.0 })
    }
}

struct TextDraft<'m> {
    id: DrafterId,
    next: &'m NextLogits,
}

impl<'m> Drafter<ModelSession<'m>> for TextDraft<'m> {
    fn begin(
        &mut self,
        _target: &mut ModelSession<'m>,
        _slot: usize,
        _prompt: &[u32],
    ) -> Result<(), DecodeError> {
        Ok(())
    }

    fn propose(
        &mut self,
        target: &mut ModelSession<'m>,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        propose_chain(self, target, rounds)
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        usize::MAX
    }
}

impl<'m> StepDrafter<ModelSession<'m>> for TextDraft<'m> {
    fn id(&self) -> DrafterId {
        self.id
    }

    /// # Panics
    /// If the function returns another number of logits than the target has tokens.
    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>, DecodeError> {
        let vocab_size = target.model().shape().vocab_size;
        let drafted = |(step, row): (&DraftStep<'_>, usize)| {
            let logits = (self.next)(&step.text_before(row));
            assert_eq!(
                logits.len(),
                vocab_size,
                "the drafter gives each token of the target a logit"
            );
            DraftRow::new((step, row), logits, None)
        };
        Ok(steps.iter().flat_map(DraftStep::rows).map(drafted).collect())
    }
}

impl<'m> ModelDrafter<'m> for TextDraft<'m> {
    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        Some(self)
    }

    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::Steps(self)
    }
}
