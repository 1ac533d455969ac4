//! EAGLE-3 drafters (Li et al. 2025): the settings of their own, and their first weights.
//!
//! The drafter is unrolled for as many steps as it will draft; each step has the same inputs as in
//! decoding.

#[cfg(test)]
mod tests;

use draftsmith_model::{
    CausalLm, DraftVocabulary, Eagle3, Eagle3Config, NUM_TARGET_STATES, StateNetwork,
};
use draftsmith_theory::SeededDraws;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::lessons::settings::{InitialWeights, LessonSettings};
use crate::ranges::{Range, check_numbers};
use crate::self_draft::StateTraining;
use crate::self_draft::scores::{DraftScores, MAX_STEPS};
use crate::self_draft::settings::SelfDraftTraining;

/// The settings of an EAGLE-3 drafter's training.
pub type Eagle3Training = SelfDraftTraining<Eagle3Shape>;

/// The settings that only EAGLE-3 drafters have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eagle3Shape {
    /// For each of the three hidden states that the drafter reads, the number of the target's
    /// layers before it, in rising order. Default: 2, n/2 and n − 3 for a target with n layers,
    /// which every server supports.
    pub layers: Option<[usize; NUM_TARGET_STATES]>,
    /// The number of unrolled steps, 1 to 8. It should be the number of tokens to draft: candidates
    /// beyond the trained steps are rarely accepted. Default: 5 (the authors' code has 7).
    pub num_steps: usize,
    /// The weight of each step's loss relative to that of the previous step, above 0 and at most 1.
    /// Default: 0.8, as in the authors' code.
    pub step_weight: f64,
}

impl Default for Eagle3Shape {
    fn default() -> Self {
        Self { layers: None, num_steps: 5, step_weight: 0.8 }
    }
}

pub(crate) const STEPS: Range = Range::Within(1.0, MAX_STEPS as f64, "1 to 8");
pub(crate) const STEP_WEIGHT: Range =
    Range::Within(f64::MIN_POSITIVE, 1.0, "above 0 and at most 1");

impl StateTraining for Eagle3Shape {
    type Network = Eagle3;
    type Config = Eagle3Config;
    type Scores = DraftScores;

    fn num_steps(&self) -> usize {
        self.num_steps
    }

    fn step_weight(&self) -> f64 {
        self.step_weight
    }

    fn check(&self, _common: &LessonSettings) -> Result<()> {
        let section = Eagle3::KIND;
        if let Some(layers) = self.layers
            && !layers.is_sorted_by(|one, next| one < next)
        {
            let expected = "three numbers that rise";
            return Err(TrainError::setting(section, "layers", format!("{layers:?}"), expected));
        }
        let (num_steps, weight) = (self.num_steps as f64, self.step_weight);
        check_numbers(
            section,
            &[("num_steps", num_steps, STEPS), ("step_weight", weight, STEP_WEIGHT)],
        )
    }

    fn check_layers(&self, num_layers: usize) -> Result<()> {
        match self.layers {
            Some(layers) if layers.iter().any(|layer| *layer >= num_layers) => {
                let expected = "numbers below the target's number of layers";
                Err(TrainError::setting("eagle3", "layers", format!("{layers:?}"), expected))
            }
            _ => Ok(()),
        }
    }

    fn layers(&self, num_layers: usize) -> Vec<usize> {
        self.layers.unwrap_or_else(|| Eagle3Config::default_layers(num_layers)).to_vec()
    }

    fn config(
        &self,
        target: &CausalLm,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Eagle3Config> {
        Ok(Eagle3Config {
            target_layers: self.layers(target.shape().num_layers),
            dtype: target.stored_dtype(),
            draft_vocabulary: vocabulary.cloned(),
            ..Eagle3Config::new(target.config())
        })
    }

    fn network(
        &self,
        config: &Eagle3Config,
        initial: InitialWeights,
        target: &CausalLm,
        seed: u64,
    ) -> Eagle3 {
        let mut draws = SeededDraws::new(seed, &["eagle3"]);
        let drawn = config.init_from(&target.device().autodiff(), || draws.uniform());
        match initial {
            InitialWeights::Random => drawn,
            InitialWeights::Target => drawn.with_weights_of(target),
        }
    }
}
