//! EAGLE-1 drafters (Li et al. 2024): the settings of their own, and their first weights.
//!
//! Like an EAGLE-3 drafter, the drafter is unrolled for as many steps as it will draft, and learns
//! the target's distribution. The authors train one step with noise on the target's states, and also
//! let the output approach the target's state.

use std::path::Path;

use draftsmith_model::{CausalLm, Eagle, EagleConfig, ModelConfig, StateNetwork};
use serde::{Deserialize, Serialize};

use crate::eagle3::{STEP_WEIGHT, STEPS};
use crate::error::{Result, TrainError};
use crate::lessons::settings::LessonSettings;
use crate::ranges::check_numbers;
use crate::self_draft::scores::DraftScores;
use crate::self_draft::settings::SelfDraftTraining;
use crate::self_draft::{FirstWeights, Initial, StateTraining, read_initial};

/// The settings of an EAGLE-1 drafter's training.
pub type EagleTraining = SelfDraftTraining<EagleShape>;

/// The settings that only EAGLE-1 drafters have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EagleShape {
    /// The number of unrolled steps, 1 to 8. It should be the number of tokens to draft. Default: 5.
    pub num_steps: usize,
    /// The weight of each step's loss relative to that of the previous step, above 0 and at most 1.
    /// Default: 0.8.
    pub step_weight: f64,
}

impl Default for EagleShape {
    fn default() -> Self {
        Self { num_steps: 5, step_weight: 0.8 }
    }
}

impl StateTraining for EagleShape {
    type Network = Eagle;
    type Config = EagleConfig;
    type Scores = DraftScores;

    fn steps(&self) -> (usize, f64) {
        (self.num_steps, self.step_weight)
    }

    fn check(&self, common: &LessonSettings) -> Result<()> {
        if let Some(size) = common.draft_vocabulary {
            let expected = "left out: the target's LM head gives the logits of all tokens";
            return Err(TrainError::setting(Eagle::KIND, "draft_vocabulary", size, expected));
        }
        let steps = ("num_steps", self.num_steps as f64, STEPS);
        check_numbers(Eagle::KIND, &[steps, ("step_weight", self.step_weight, STEP_WEIGHT)])
    }

    fn layers(&self, num_layers: usize) -> Vec<usize> {
        vec![num_layers]
    }

    fn config(&self, target: &ModelConfig) -> Result<EagleConfig> {
        Ok(EagleConfig::new(target))
    }

    fn network(&self, config: &EagleConfig, mut first: FirstWeights<'_>) -> Eagle {
        let drawn = config.init_from(&first.device, || first.draws.uniform());
        let network = if first.is_random { drawn } else { drawn.passing_states() };
        network.with_norm_of(first.target)
    }

    fn initial(&self, dir: &Path, target: &CausalLm) -> Result<Initial<Self>> {
        let initial: Initial<Self> = read_initial(self, dir, target)?;
        Ok(Initial { network: initial.network.with_norm_of(target), ..initial })
    }
}
