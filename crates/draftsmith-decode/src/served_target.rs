//! A target of which the first layers are here, and of whose rest nothing is known but what it answered:
//! enough to record a self-draft along the answers.

use std::ops::Range;

use draftsmith_model::{CausalLm, Rows};

use crate::error::DecodeError;
use crate::features::WantedFeatures;
use crate::logits::Logits;
use crate::response_target::ResponseTarget;
use crate::session::ModelSession;
use crate::target::{FirstLayers, Target, Verification};

/// The target's side of answers that it gave elsewhere, with the layers that a self-draft stands on.
#[derive(Debug)]
pub struct ServedTarget<'m, 'a> {
    layers: ModelSession<'m>,
    answers: ResponseTarget<'a>,
}

impl<'m, 'a> ServedTarget<'m, 'a> {
    /// A target whose first layers, `exit_layer` of them at least, are in `layers`.
    ///
    /// # Panics
    /// Unless there is a layer behind the exit.
    pub fn new(layers: &'m CausalLm, exit_layer: usize, answers: ResponseTarget<'a>) -> Self {
        let (capacity, num_slots) = (answers.context(), answers.num_slots());
        let mut layers = ModelSession::with_slots(layers, capacity, num_slots, "target");
        layers.set_exit(Some(exit_layer));
        Self { layers, answers }
    }
}

impl FirstLayers for ServedTarget<'_, '_> {
    fn features(&mut self, wanted: &[WantedFeatures<'_>]) -> Rows {
        self.layers.features(wanted)
    }
}

impl Target for ServedTarget<'_, '_> {
    fn num_slots(&self) -> usize {
        self.answers.num_slots()
    }

    /// # Panics
    /// If more sequences begin than there are answers.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.layers.check_prompt(prompt)?;
        // What they read, the drafter has them read.
        self.layers.commit(slot, 0, &[]);
        self.answers.begin(slot, prompt)
    }

    /// # Panics
    /// If anything is proposed, or a sequence is not its answer so far.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError> {
        self.answers.verify(batch)
    }

    fn logits_along(
        &mut self,
        slot: usize,
        text: &[u32],
        lens: Range<usize>,
    ) -> Result<Logits, DecodeError> {
        self.answers.logits_along(slot, text, lens)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.layers.commit(slot, num_standing, path);
        self.answers.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.layers.context().min(self.answers.context())
    }
}
