//! A remote target whose first layers are loaded locally, while its outputs are known only from
//! recorded responses. This suffices to record a self-draft along the responses, because a
//! self-draft runs only the first layers (`CausalLm::load`).

use std::ops::Range;

use draftsmith_model::{CausalLm, Rows};

use crate::error::Result;
use crate::features::WantedFeatures;
use crate::response_target::ResponseTarget;
use crate::session::ModelSession;
use crate::target::{FirstLayers, Logits, Target, TargetLayers, Verification};

/// A remote target's recorded responses, with its first layers loaded for a self-draft.
#[derive(Debug)]
pub(crate) struct ServedTarget<'m, 'a> {
    layers: ModelSession<'m>,
    answers: ResponseTarget<'a>,
}

impl<'m, 'a> ServedTarget<'m, 'a> {
    /// Creates a target that replays `answers` and runs the first `exit_layer` layers of `layers`.
    ///
    /// # Panics
    /// If `layers` has no more than `exit_layer` layers.
    pub(crate) fn new(
        layers: &'m CausalLm,
        exit_layer: usize,
        answers: ResponseTarget<'a>,
    ) -> Self {
        let (capacity, num_slots) = (answers.context(), answers.num_slots());
        let mut layers = ModelSession::with_slots(layers, capacity, num_slots, "target");
        layers.set_layers(&TargetLayers::exit(exit_layer));
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
    /// If more sequences begin than there are responses.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        self.layers.check_prompt(prompt)?;
        // The layers read the prompt later, when the drafter requests its features.
        self.layers.commit(slot, 0, &[]);
        self.answers.begin(slot, prompt)
    }

    /// # Panics
    /// If a proposal is not empty. In debug builds also if the tokens differ from the response.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        self.answers.verify(batch)
    }

    fn logits_along(&mut self, slot: usize, text: &[u32], lens: Range<usize>) -> Result<Logits> {
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
