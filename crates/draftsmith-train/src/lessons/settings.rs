//! The settings that all self-drafts have for what they learn from.

use std::path::PathBuf;

use draftsmith_model::WeightDtype;
use serde::{Deserialize, Serialize};

use super::Teaching;
use super::distillation::DistillationLoss;
use crate::run::optimizer::OptimizerSettings;
use crate::states::{FeatureFormat, Features};

/// The source of a drafter's initial weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", expecting = "is neither `random`, `target` nor a directory")]
pub enum InitialWeights {
    /// Random weights: linear layers uniform within ±1/√inputs (torch's default), and norms of
    /// ones.
    Random,
    /// The weights of the target where they fit: of its last layers, final norm and LM head, and for
    /// an adapter, of the layer after the exit (the first that drafting skips) and of the final norm.
    /// Biases are left out, and the MLP of `mlp-only` is random.
    Target,
    /// The weights and the shape of the drafter in this directory, which may be of another target of the
    /// same shape, such as the model that the target was tuned from.
    #[serde(untagged)]
    Drafter(PathBuf),
}

/// The settings that all self-drafts have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LessonSettings {
    /// The size of the draft vocabulary, which contains the most frequent tokens of the training
    /// responses and the target's end tokens. The drafter then has only these rows of the LM head, and
    /// the loss covers only these tokens (FR-Spec, Zhao et al. 2025). Default: all tokens. An adapter
    /// with a separate LM head cannot have one.
    pub draft_vocabulary: Option<usize>,
    /// The initial weights: `"target"` (our default) copies the target's where the shapes allow,
    /// `"random"` draws them, as in the authors' code, and a directory names a drafter to train further. A
    /// separate LM head of an adapter starts as a copy of the target's.
    pub initial: InitialWeights,
    /// The teacher: `"target"`, the target's distributions, for which all its layers run; or
    /// `"response"`, the tokens of the response, for which only the layers that the drafter reads run.
    /// Both have the same expected loss gradient if the tokens were sampled at temperature 1.
    pub teacher: Teaching,
    /// The longest training sequence in tokens, 2 or more; longer rows are cut. Default: 2048, as
    /// in the authors' code.
    pub max_len: usize,
    /// The loss: `"cross-entropy"` (the papers), `"total-variation"`, the fraction of sampled
    /// candidates that are rejected, or `"dspark"`, a sum of both (as DSpark trains its blocks).
    pub loss: DistillationLoss,
    /// The number of tokens whose loss is computed at once, 1 or more. It bounds memory to a few
    /// times vocabulary × this many floats, and does not change the result. Default: 256, our
    /// choice.
    pub loss_chunk: usize,
    /// The memory in MiB in which the target's final hidden states are kept for later epochs, on
    /// the CPU only. For the rows that fit, later epochs run only the layers that the drafter reads.
    /// With 0, all states are computed in each epoch. The drafters are the same, bit for bit. Default:
    /// 1024, our choice.
    pub cache_mib: usize,
    /// `"recompute"`: the target's hidden states are computed in each epoch, except those kept in
    /// memory (`cache_mib`). `"cache"`: they are computed once and kept on disk, for other
    /// trainings too.
    pub features: Features,
    /// The format of hidden states on disk: `"f16"`, or `"int8"` with a scale for each token.
    pub features_format: FeatureFormat,
    /// The type in which the frozen target and the drafter compute: `"f32"`, or `"bf16"` on a GPU.
    /// Parameters, optimizer, softmaxes and losses are always f32. Default: f32.
    pub dtype: WeightDtype,
    /// Settings for epochs, batches, steps and the learning rate. All rows of a batch go through
    /// the target and the drafter together. A step's loss is the mean over all its supervised
    /// tokens.
    pub optimizer: OptimizerSettings,
}

impl Default for LessonSettings {
    fn default() -> Self {
        Self {
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

impl LessonSettings {
    /// Returns the number format in which states of servers are stored; `None` if servers give none.
    pub fn served_format(&self) -> Option<FeatureFormat> {
        (self.features == Features::Server).then_some(self.features_format)
    }

    /// Returns the settings that all drafters of a pass over the data must share. Settings that may
    /// differ have their default values.
    pub fn of_pass(&self) -> Self {
        let Self { initial, loss, loss_chunk, .. } = Self::default();
        Self { initial, loss, loss_chunk, ..self.clone() }
    }
}
