//! Remote targets, whose outputs are known only from recorded responses. This suffices to record a
//! self-draft along the responses if the target's first layers are loaded locally
//! (`CausalLm::load`), because it runs only them. A drafter that reads hidden states of the target
//! needs these states along the responses.

use std::ops::Range;

use draftsmith_model::{CausalLm, Rows};

use crate::error::DecodeError;
use crate::features::WantedFeatures;
use crate::registry::AnsweringTarget;
use crate::response_target::{KnownStates, ResponseTarget};
use crate::session::ModelSession;
use crate::target::{FirstLayers, KeptStates, Logits, Target, TargetLayers, Verification};

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
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.layers.check_prompt(prompt)?;
        // The layers read the prompt later, when the drafter requests its features.
        self.layers.commit(slot, 0, &[]);
        self.answers.begin(slot, prompt)
    }

    /// # Panics
    /// If a proposal is not empty. In debug builds also if the tokens differ from the response.
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

/// A remote target's recorded responses, with its hidden states along them.
#[derive(Debug)]
pub(crate) struct StatesTarget<'m, 'a> {
    answers: ResponseTarget<'a>,
    states: Vec<KnownStates<'m>>,
    /// The number of final tokens in each slot.
    standing: Vec<usize>,
}

impl<'m, 'a> StatesTarget<'m, 'a> {
    /// Returns the target's ends and a target that replays its answers and states. Returns `None`
    /// without either.
    pub(crate) fn of(target: AnsweringTarget<'m, 'a>) -> Option<(&'m CausalLm, Self)> {
        let AnsweringTarget { answers, layers, states, .. } = target;
        let (ends, states) = layers.zip(states)?;
        let standing = vec![0; answers.num_slots()];
        Some((ends, Self { answers, states, standing }))
    }
}

impl KeptStates for StatesTarget<'_, '_> {
    fn num_standing(&self, slot: usize) -> usize {
        self.standing[slot]
    }

    /// Returns the states of a text that begins with the same tokens, which determine them.
    fn kept_states(
        &mut self,
        slot: usize,
        tokens: &[u32],
        from: usize,
        layers: &[usize],
    ) -> Vec<Rows> {
        let known = &tokens[..self.standing[slot] - 1];
        let text = self.states.iter().find(|text| text.ids.starts_with(known));
        let text = text.expect("the states along every response are known");
        let of_layer = |layer: &usize| {
            let found = text.layers.iter().find(|(number, _)| number == layer);
            let (_, states) = found.expect("the states after the drafter's layers are known");
            states.slice(from..known.len())
        };
        layers.iter().map(of_layer).collect()
    }
}

impl Target for StatesTarget<'_, '_> {
    fn num_slots(&self) -> usize {
        self.answers.num_slots()
    }

    /// # Panics
    /// If more sequences begin than there are responses.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.answers.begin(slot, prompt)
    }

    fn begin_round(&mut self, slot: usize, num_standing: usize) {
        self.standing[slot] = num_standing;
    }

    /// # Panics
    /// If a proposal is not empty. In debug builds also if the tokens differ from the response.
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
        self.answers.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.answers.context()
    }
}
