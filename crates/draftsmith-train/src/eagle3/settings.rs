//! The settings of a drafter of the kind `eagle3`.

use draftsmith_model::{NUM_TARGET_STATES, WeightDtype};
use serde::{Deserialize, Deserializer, Serialize};

use super::scores::MAX_STEPS;
use crate::error::TrainError;
use crate::lessons::distillation::DistillationLoss;
use crate::lessons::{LessonSettings, Teaching};
use crate::ranges::{Range, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::self_draft::InitialWeights;
use crate::states::{FeatureFormat, Features};

/// The settings of an EAGLE-3 drafter's [training](crate::train_state_drafters). Every key is optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eagle3Training {
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
    /// The size of the draft vocabulary, which contains the most frequent tokens of the training
    /// responses and the target's end tokens. Default: all tokens.
    pub draft_vocabulary: Option<usize>,
    /// The initial weights: `"random"`, or `"target"`, which copies the target's last layer and LM
    /// head where the shapes allow.
    pub initial: InitialWeights,
    /// The teacher: `"target"`, the target's distributions, for which all its layers run; or
    /// `"response"`, the tokens of the response.
    pub teacher: Teaching,
    /// The longest training sequence in tokens, 2 or more; longer rows are cut. Default: 2048, as
    /// in the authors' code.
    pub max_len: usize,
    /// The loss: `"cross-entropy"` (the paper), `"total-variation"`, or `"dspark"`, a sum of both (as
    /// DSpark trains its blocks). Training keeps the epoch with the largest accepted length on the validation rows.
    pub loss: DistillationLoss,
    /// The number of tokens whose loss is computed at once, 1 or more. It bounds memory and does
    /// not change the result. Default: 256, our choice.
    pub loss_chunk: usize,
    /// The memory in MiB in which the target's final hidden states are kept for later epochs, on
    /// the CPU only. Default: 1024, our choice.
    pub cache_mib: usize,
    /// `"recompute"`: the target's hidden states are computed in each epoch. `"cache"`: they are computed once
    /// and kept on disk, for other trainings too.
    pub features: Features,
    /// The format of hidden states on disk: `"f16"`, or `"int8"` with a scale for each token.
    pub features_format: FeatureFormat,
    /// The type in which the frozen target and the drafter compute: `"f32"`, or `"bf16"` on a GPU.
    pub dtype: WeightDtype,
    /// Settings for epochs, batches, steps and the learning rate.
    #[serde(deserialize_with = "read_optimizer")]
    pub optimizer: OptimizerSettings,
}

impl Default for Eagle3Training {
    fn default() -> Self {
        Self {
            layers: None,
            num_steps: 5,
            step_weight: 0.8,
            draft_vocabulary: None,
            initial: InitialWeights::Target,
            teacher: Teaching::Target,
            max_len: 2048,
            loss: DistillationLoss::CrossEntropy,
            loss_chunk: 256,
            cache_mib: 1024,
            features: Features::Recompute,
            features_format: FeatureFormat::F16,
            dtype: WeightDtype::F32,
            optimizer: OptimizerSettings::EAGLE3,
        }
    }
}

const STEPS: Range = Range::Within(1.0, MAX_STEPS as f64, "1 to 8");
const STEP_WEIGHT: Range = Range::Within(f64::MIN_POSITIVE, 1.0, "above 0 and at most 1");

impl Eagle3Training {
    /// Checks every setting's range. It does not check that the target has the layers.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key that is out of range.
    pub fn validate(&self) -> Result<(), TrainError> {
        let section = "eagle3";
        let invalid =
            |key, value, expected| Err(TrainError::setting(section, key, value, expected));
        if let Some(layers) = self.layers
            && !layers.is_sorted_by(|one, next| one < next)
        {
            return invalid("layers", format!("{layers:?}"), "three numbers that rise");
        }
        if self.draft_vocabulary == Some(0) {
            return invalid("draft_vocabulary", "0".to_owned(), "1 or more");
        }
        self.optimizer.check(section)?;
        check_numbers(
            section,
            &[
                ("num_steps", self.num_steps as f64, STEPS),
                ("step_weight", self.step_weight, STEP_WEIGHT),
                ("max_len", self.max_len as f64, Range::AT_LEAST_TWO),
                ("loss_chunk", self.loss_chunk as f64, Range::AT_LEAST_ONE),
            ],
        )
    }

    /// Checks that a target of `num_layers` layers has the layers that the drafter reads.
    ///
    /// # Errors
    /// [`TrainError::Setting`] if the target lacks one of them.
    pub fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        match self.layers {
            Some(layers) if layers.iter().any(|layer| *layer >= num_layers) => {
                let expected = "numbers below the target's number of layers";
                Err(TrainError::setting("eagle3", "layers", format!("{layers:?}"), expected))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether drafters with these and `other` settings can be trained in one pass over the
    /// data. The settings may differ in the target's layers, steps, loss and initial weights.
    pub fn shares_pass_with(&self, other: &Self) -> bool {
        self.of_pass() == other.of_pass()
    }

    /// Returns the settings that all drafters of a pass must share. Settings that may differ have
    /// their default values.
    pub fn of_pass(&self) -> Self {
        let Self { layers, num_steps, step_weight, initial, loss, loss_chunk, .. } =
            Self::default();
        Self { layers, num_steps, step_weight, initial, loss, loss_chunk, ..self.clone() }
    }

    /// Returns the settings that all self-drafts have for what they learn from.
    pub fn lessons(&self) -> LessonSettings {
        LessonSettings {
            draft_vocabulary: self.draft_vocabulary,
            teacher: self.teacher,
            max_len: self.max_len,
            cache_mib: self.cache_mib,
            features: self.features,
            features_format: self.features_format,
            dtype: self.dtype,
            optimizer: self.optimizer,
        }
    }
}

fn read_optimizer<'de, D: Deserializer<'de>>(from: D) -> Result<OptimizerSettings, D::Error> {
    OptimizerSettings::read_over(OptimizerSettings::EAGLE3, from)
}
