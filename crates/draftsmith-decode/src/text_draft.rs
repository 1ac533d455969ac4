//! A drafter that is a plain function from the tokens so far to the next token's logits.
//!
//! This is the shortest way to try an idea, such as an n-gram table or a rule for one output
//! format. Chains, trees, stop rules, recordings and composite drafters treat it like a draft
//! model.

use std::fmt;
use std::sync::Arc;

use draftsmith_theory::DrafterId;

use crate::drafter::{DraftRow, DraftStep, Drafter, ModelDrafter, StepDrafter};
use crate::error::Result;
use crate::registry::{DrafterParts, Sizes};
use crate::session::ModelSession;

/// A function that computes the next token's logits from all tokens before it.
type NextLogits = dyn Fn(&[u32]) -> Vec<f32> + Send + Sync;

/// The parts of a drafter that is a function over token ids.
#[derive(Clone)]
pub struct TextParts(Arc<NextLogits>);

impl TextParts {
    /// Wraps a function that returns one logit for every token of the target's vocabulary. Its
    /// input is the sequence so far followed by the drafted candidates. The result must depend on
    /// nothing else.
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
    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<ModelSession<'m>>> {
        Some(self)
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}
}

impl<'m> StepDrafter<ModelSession<'m>> for TextDraft<'m> {
    fn id(&self) -> DrafterId {
        self.id
    }

    /// # Panics
    /// If the number of logits differs from the target's vocabulary size.
    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>> {
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
