//! EAGLE-3 drafters (Li et al. 2025): the settings of their own, and their first weights.
//!
//! The drafter is unrolled for as many steps as it will draft; each step has the same inputs as in
//! decoding.

#[cfg(test)]
mod tests;

use std::path::Path;

use draftsmith_model::{
    CausalLm, Eagle3, Eagle3Config, ModelConfig, NUM_TARGET_STATES, StateNetwork, StateNorms,
};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::lessons::settings::LessonSettings;
use crate::ranges::{Range, check_numbers};
use crate::self_draft::scores::{DraftScores, MAX_STEPS};
use crate::self_draft::settings::SelfDraftTraining;
use crate::self_draft::{FirstWeights, Initial, StateTraining, read_initial};

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
    /// The number of tokens that each position attends to, itself included, 1 or more. Default: all.
    pub window: Option<usize>,
    /// Whether the target's three states are concatenated and normed before their projection.
    pub norm_before_fc: bool,
    /// Whether each of the target's states is normed before the projection.
    pub fc_norm: bool,
    /// Whether a step reads the normed output of the step before (EAGLE-3.1).
    pub norm_output: bool,
    /// Whether queries and keys are normed, as in a Qwen 3.
    pub head_norms: bool,
    /// Whether the drafter has token embeddings of its own, which are trained. If false, it reads the
    /// target's.
    pub embeddings: bool,
}

impl Default for Eagle3Shape {
    fn default() -> Self {
        Self {
            layers: None,
            num_steps: 5,
            step_weight: 0.8,
            window: None,
            norm_before_fc: false,
            fc_norm: false,
            norm_output: false,
            head_norms: false,
            embeddings: false,
        }
    }
}

pub(crate) const STEPS: Range = Range::Within(1.0, MAX_STEPS as f64, "1 to 8");
pub(crate) const STEP_WEIGHT: Range =
    Range::Within(f64::MIN_POSITIVE, 1.0, "above 0 and at most 1");

impl StateTraining for Eagle3Shape {
    type Network = Eagle3;
    type Config = Eagle3Config;
    type Scores = DraftScores;

    fn steps(&self) -> (usize, f64) {
        (self.num_steps, self.step_weight)
    }

    fn check(&self, _common: &LessonSettings) -> Result<()> {
        let section = Eagle3::KIND;
        if let Some(layers) = self.layers
            && !layers.is_sorted_by(|one, next| one < next)
        {
            let expected = "three numbers that rise";
            return Err(TrainError::setting(section, "layers", format!("{layers:?}"), expected));
        }
        if self.norm_before_fc && self.fc_norm {
            let expected = "false beside `norm_before_fc`";
            return Err(TrainError::setting(section, "fc_norm", true, expected));
        }
        let (num_steps, weight) = (self.num_steps as f64, self.step_weight);
        check_numbers(
            section,
            &[
                ("num_steps", num_steps, STEPS),
                ("step_weight", weight, STEP_WEIGHT),
                ("window", self.window.unwrap_or(1) as f64, Range::AT_LEAST_ONE),
            ],
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

    fn config(&self, target: &ModelConfig) -> Result<Eagle3Config> {
        Ok(Eagle3Config::new(target).with(|it| {
            it.target_layers = self.layers(target.shape.num_layers);
            it.norm_output = self.norm_output;
            it.has_embedding = self.embeddings;
            it.state_norms = StateNorms::of(self.norm_before_fc, self.fc_norm);
            if self.head_norms {
                it.add_head_norms();
            }
            it.set_window(self.window);
        }))
    }

    fn network(&self, config: &Eagle3Config, mut first: FirstWeights<'_>) -> Eagle3 {
        let drawn = config.init_from(&first.device, || first.draws.uniform());
        if first.is_random { drawn } else { drawn.with_weights_of(first.target) }
    }

    fn initial(&self, dir: &Path, target: &CausalLm) -> Result<Initial<Self>> {
        read_initial(self, dir, target)
    }
}
