//! The recipe's `[adapter]` section: the settings for training self-draft adapters.
//!
//! The defaults are those of the Kangaroo authors' run. Where ours differ, the key's doc says so.

use draftsmith_model::{AdapterArchitecture, WeightDtype};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::TrainError;
use crate::lessons::distillation::DistillationLoss;
use crate::lessons::{LessonSettings, Teaching};
use crate::ranges::{Range, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::self_draft::InitialWeights;
use crate::states::{FeatureFormat, Features};

/// The settings of [`train_adapters`](crate::train_adapters). Every key is optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdapterTraining {
    /// The number of the target's layers that run before the adapter, or a list of such numbers:
    /// one adapter is trained for each. Default: 2, Kangaroo's for 7B models (3 for 13B). With 0
    /// the adapter is a small draft that shares only the target's embedding and LM head.
    pub exit_layer: ExitLayers,
    /// The architecture of the adapter: `"decoder-layer"` (our default, which servers load without
    /// loss), `"attention"` (the paper's), or one of the paper's other ablations (Table 2):
    /// `"mlp-only"` or `"attention-with-head"`.
    pub architecture: AdapterArchitecture,
    /// The number of the adapter's layers, 1 to 8. Default: 1, as in the paper.
    pub num_layers: usize,
    /// The size of the draft vocabulary: the most frequent tokens of the training responses, and
    /// the target's end tokens. The adapter then uses only these rows of the target's LM head, and
    /// the loss covers only these tokens (FR-Spec, Zhao et al. 2025). Default: all tokens. It
    /// cannot be combined with a separate LM head.
    pub draft_vocabulary: Option<usize>,
    /// The initial weights: `"target"` (our default) copies the target's layer after the exit for the
    /// parts that it has, and `"random"` draws them, as in the authors' code. A separate LM head starts as a copy
    /// of the target's.
    pub initial: InitialWeights,
    /// The teacher: `"target"`, the target's whole distributions, for which all its layers run; or
    /// `"response"`, the tokens of the response, for which only the layers before the exit run.
    /// Both have the same expected loss gradient if the tokens were sampled at temperature 1.
    pub teacher: Teaching,
    /// The longest training sequence in tokens, 2 or more; longer rows are cut. Default: 2048, as
    /// in the authors' code.
    pub max_len: usize,
    /// The loss: `"cross-entropy"` (the paper), `"total-variation"`, the fraction of sampled
    /// candidates that are rejected, or `"dspark"`, a sum of both. Training keeps the epoch with the lowest mean loss on the
    /// validation rows.
    pub loss: DistillationLoss,
    /// The number of tokens whose loss is computed at once, 1 or more. It bounds memory to a few
    /// times vocabulary × this many floats, and does not change the result. Default: 256, our
    /// choice.
    pub loss_chunk: usize,
    /// The memory in MiB in which the target's final hidden states are kept for later epochs, on
    /// the CPU only. For the rows that fit, later epochs run only the layers before the exit. With
    /// 0, all states are computed in each epoch. The adapters are the same, bit for bit. Default:
    /// 1024, our choice.
    pub cache_mib: usize,
    /// `"recompute"`: the target's hidden states are computed in each epoch, except those kept in
    /// memory (`cache_mib`). `"cache"`: they are computed once and kept on disk, for other
    /// trainings too.
    pub features: Features,
    /// The format of hidden states on disk: `"f16"`, or `"int8"` with a scale for each token.
    pub features_format: FeatureFormat,
    /// The type in which the frozen target and the adapter compute: `"f32"`, or `"bf16"` on a GPU.
    /// Parameters, optimizer, softmaxes and losses are always f32. Default: f32; the authors train
    /// in fp16.
    pub dtype: WeightDtype,
    /// Settings for epochs, batches, steps and the learning rate. All rows of a batch go through
    /// the target and the adapter together. A step's loss is the mean over all its supervised
    /// tokens.
    #[serde(deserialize_with = "read_optimizer")]
    pub optimizer: OptimizerSettings,
}

/// One exit layer, or several with an adapter each. In a recipe, `2` or `[1, 2]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number of layers, or a list of such numbers")]
pub enum ExitLayers {
    /// The exit layer of a single adapter.
    One(usize),
    /// The exit layers of several adapters, one for each, in this order.
    Many(Vec<usize>),
}

impl ExitLayers {
    /// Lists the exit layers, in the recipe's order.
    pub fn to_vec(&self) -> Vec<usize> {
        match self {
            Self::One(exit_layer) => vec![*exit_layer],
            Self::Many(exit_layers) => exit_layers.clone(),
        }
    }
}

impl Default for AdapterTraining {
    fn default() -> Self {
        Self {
            exit_layer: ExitLayers::One(2),
            architecture: AdapterArchitecture::DecoderLayer,
            num_layers: 1,
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
            optimizer: OptimizerSettings::ADAPTER,
        }
    }
}

impl AdapterTraining {
    /// Checks every setting's range, except the upper end of exit layers, which depends on the target.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key that is out of range.
    pub fn validate(&self) -> Result<(), TrainError> {
        let section = "adapter";
        let invalid =
            |key, value, expected| Err(TrainError::setting(section, key, value, expected));
        let exit_layers = self.exit_layer.to_vec();
        let are_distinct =
            exit_layers.iter().enumerate().all(|(n, layer)| !exit_layers[..n].contains(layer));
        if exit_layers.is_empty() || !are_distinct {
            let expected = "0 or more, or a list of different such numbers";
            return invalid("exit_layer", format!("{exit_layers:?}"), expected);
        }
        if let Some(size) = self.draft_vocabulary
            && (size == 0 || self.architecture.has_head())
        {
            let expected = "1 or more, and an architecture without a separate LM head";
            return invalid("draft_vocabulary", size.to_string(), expected);
        }
        self.features.check_local(section)?;
        self.optimizer.check(section)?;
        check_numbers(
            section,
            &[
                ("max_len", self.max_len as f64, Range::AT_LEAST_TWO),
                ("num_layers", self.num_layers as f64, Range::Within(1.0, 8.0, "1 to 8")),
                ("loss_chunk", self.loss_chunk as f64, Range::AT_LEAST_ONE),
            ],
        )
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
    OptimizerSettings::read_over(OptimizerSettings::ADAPTER, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default_and_an_error_names_a_misspelt_key() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        assert_eq!(read("").unwrap(), AdapterTraining::default());
        let message = read("loss_chunks = 1").unwrap_err().to_string();
        assert!(message.contains("loss_chunks"), "{message}");
    }

    #[test]
    fn exit_layers_are_a_number_or_a_list() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        assert_eq!(read("exit_layer = 3").unwrap().exit_layer.to_vec(), [3]);
        assert_eq!(read("exit_layer = [1, 2]").unwrap().exit_layer.to_vec(), [1, 2]);
        for wrong in ["exit_layer = \"2\"", "exit_layer = -1", "exit_layer = [1.5]"] {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains("exit_layer"), "{message}");
            assert!(message.contains("or a list of such numbers"), "{message}");
        }
        let written = toml::to_string(&read("exit_layer = [1, 2]").unwrap()).unwrap();
        assert_eq!(read(&written).unwrap().exit_layer, ExitLayers::Many(vec![1, 2]));
    }

    #[test]
    fn every_architecture_and_initialisation_has_a_name() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        for architecture in AdapterArchitecture::ALL {
            let training = read(&format!("architecture = \"{architecture}\"")).unwrap();
            assert_eq!(training.architecture, architecture);
            assert_eq!(read(&toml::to_string(&training).unwrap()).unwrap(), training);
        }
        assert_eq!(read("initial = \"target\"").unwrap(), AdapterTraining::default());
        assert_eq!(read("initial = \"random\"").unwrap().initial, InitialWeights::Random);
        for (wrong, known) in
            [("architecture = \"ffn\"", "mlp-only"), ("initial = \"draft\"", "target")]
        {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains(&format!("`{known}`")), "{message}");
        }
    }

    #[test]
    fn every_loss_has_a_name() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        for (name, loss) in [
            ("cross-entropy", DistillationLoss::CrossEntropy),
            ("total-variation", DistillationLoss::TotalVariation),
            ("dspark", DistillationLoss::Dspark),
        ] {
            let training = read(&format!("loss = \"{name}\"")).unwrap();
            assert_eq!(training.loss, loss);
            assert!(toml::to_string(&training).unwrap().contains(name));
        }
        let message = read("loss = \"kl\"").unwrap_err().to_string();
        assert!(message.contains("`total-variation`"), "{message}");
    }

    #[test]
    fn defaults_are_in_range_and_errors_name_the_key() {
        AdapterTraining::default().validate().unwrap();
        let check = |key: &str, bad: AdapterTraining| {
            let message = bad.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`adapter.{key}` is ")), "{message}");
        };
        let default = AdapterTraining::default;
        for bad in [vec![], vec![2, 1, 2]] {
            check("exit_layer", AdapterTraining { exit_layer: ExitLayers::Many(bad), ..default() });
        }
        for num_layers in [0, 9] {
            check("num_layers", AdapterTraining { num_layers, ..default() });
        }
        check("max_len", AdapterTraining { max_len: 1, ..default() });
        check("draft_vocabulary", AdapterTraining { draft_vocabulary: Some(0), ..default() });
        let architecture = AdapterArchitecture::AttentionWithHead;
        let narrow = AdapterTraining { draft_vocabulary: Some(9), architecture, ..default() };
        check("draft_vocabulary", narrow);
        check("loss_chunk", AdapterTraining { loss_chunk: 0, ..default() });
        let optimizer = OptimizerSettings { batch_size: 0, ..OptimizerSettings::ADAPTER };
        check("optimizer.batch_size", AdapterTraining { optimizer, ..default() });
    }
}
