//! The settings of a drafter of the kind `eagle3`.

use draftsmith_model::{NUM_TARGET_STATES, WeightDtype};
use serde::{Deserialize, Deserializer, Serialize};

use super::scores::MAX_STEPS;
use crate::adapter::Lessons;
use crate::adapter::distillation::DistillationLoss;
use crate::adapter::settings::{InitialWeights, Teaching};
use crate::error::{Section, TrainError};
use crate::ranges::{Range, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::states::{FeatureFormat, Features};

/// The settings of [`train_eagle3`](crate::train_eagle3). Every key is optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eagle3Training {
    /// The numbers of the target's layers before the three hidden states that the drafter reads, in rising
    /// order. Default: 2, n/2 and n − 3 of the target's n, which every server knows.
    pub layers: Option<[usize; NUM_TARGET_STATES]>,
    /// The number of unrolled steps, 1 to 8: as many as will be drafted. A drafter is accepted little after
    /// the steps that it was trained with. 5: ours; the authors' code has 7.
    pub num_steps: usize,
    /// The weight of each step's loss relative to the one before, above 0 and at most 1. 0.8: the authors' code.
    pub step_weight: f64,
    /// The size of the draft vocabulary: the most frequent tokens of the training responses, and the target's
    /// end tokens. Default: all tokens.
    pub draft_vocabulary: Option<usize>,
    /// The initial weights: `"random"`, or `"target"`: those of the target's last layer and LM head, where the
    /// shapes allow.
    pub initial: InitialWeights,
    /// The teacher: `"target"`, the target's distributions, which takes all its layers; or `"response"`, the
    /// tokens that it chose.
    pub teacher: Teaching,
    /// The longest training sequence in tokens, 2 or more; longer rows are cut. 2048: the authors' code.
    pub max_len: usize,
    /// The loss: `"cross-entropy"` (the paper) or `"total-variation"`. Training keeps the epoch with the
    /// largest accepted length on the validation rows.
    pub loss: DistillationLoss,
    /// The number of tokens whose loss is computed at once, 1 or more. It bounds memory and does not change
    /// the result. 256: ours.
    pub loss_chunk: usize,
    /// Memory in MiB for the target's final hidden states on the CPU, for later epochs. 1024: ours.
    pub cache_mib: usize,
    /// `"recompute"`: the target's hidden states are computed in each epoch. `"cache"`: they are computed once
    /// and kept on disk, for other trainings too.
    pub features: Features,
    /// The format of hidden states on disk: `"f16"`, or `"int8"` with a scale for each token.
    pub features_format: FeatureFormat,
    /// The type that the frozen target and the drafter compute in: `"f32"`, or `"bf16"` on a GPU.
    pub dtype: WeightDtype,
    /// Epochs, batches, steps and learning rate.
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

impl Eagle3Training {
    /// Checks every setting's range, except that the target has the layers.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key that is out of range.
    pub fn validate(&self) -> Result<(), TrainError> {
        let section = "eagle3";
        let invalid =
            |key, value, expected| Err(TrainError::Setting { section, key, value, expected });
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
                (
                    "num_steps",
                    self.num_steps as f64,
                    Range::Within(1.0, MAX_STEPS as f64, "1 to 8"),
                ),
                (
                    "step_weight",
                    self.step_weight,
                    Range::Within(f64::MIN_POSITIVE, 1.0, "above 0 and at most 1"),
                ),
                ("max_len", self.max_len as f64, Range::Within(2.0, f64::MAX, "2 or more")),
                ("loss_chunk", self.loss_chunk as f64, Range::AT_LEAST_ONE),
            ],
        )
    }

    /// Checks that a target of `num_layers` layers has the layers that the drafter reads.
    ///
    /// # Errors
    /// [`TrainError::Setting`] if it has not.
    pub fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        match self.layers {
            Some(layers) if layers.iter().any(|layer| *layer >= num_layers) => {
                Err(TrainError::Setting {
                    section: "eagle3",
                    key: "layers",
                    value: format!("{layers:?}"),
                    expected: "numbers below the target's number of layers",
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns whether one pass over the data can train both: they differ at most in what they read of the target,
    /// their steps, loss and initial weights.
    pub fn shares_pass_with(&self, other: &Self) -> bool {
        self.of_pass() == other.of_pass()
    }

    /// Returns the settings that all drafters of a pass share, with defaults for the others.
    pub fn of_pass(&self) -> Self {
        let Self { layers, num_steps, step_weight, initial, loss, loss_chunk, .. } =
            Self::default();
        Self { layers, num_steps, step_weight, initial, loss, loss_chunk, ..self.clone() }
    }

    /// Describes what the training reads; `layers` are those of the target.
    pub(crate) fn lessons(&self, section: Section, mut layers: Vec<usize>) -> Lessons<'_> {
        layers.sort_unstable();
        layers.dedup();
        Lessons {
            section,
            layers,
            reads_tokens: true,
            caps_own_heads: false,
            draft_vocabulary: self.draft_vocabulary,
            teacher: self.teacher,
            max_len: self.max_len,
            cache_mib: self.cache_mib,
            features: self.features,
            features_format: self.features_format,
            optimizer: &self.optimizer,
        }
    }
}

fn read_optimizer<'de, D: Deserializer<'de>>(from: D) -> Result<OptimizerSettings, D::Error> {
    OptimizerSettings::read_over(OptimizerSettings::EAGLE3, from)
}
