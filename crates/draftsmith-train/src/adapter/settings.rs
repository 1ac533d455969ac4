//! The recipe's `[adapter]` section: how a self-draft adapter is trained.
//!
//! The defaults are the Kangaroo authors' run where ours can be theirs, and say so where not.

use draftsmith_model::{AdapterArchitecture, WeightDtype};
use serde::{Deserialize, Serialize};

use crate::adapter::distillation::DistillationLoss;
use crate::error::TrainError;
use crate::ranges::{Range, check_counts, check_numbers};
use crate::run::clipping::Clipping;
use crate::run::optimiser::Optimiser;
use crate::run::schedule::Schedule;

/// The settings of [`train_adapters`](crate::train_adapters). Every key may be left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdapterTraining {
    /// How many of the target's layers run before the adapter, or a list of such numbers: an
    /// adapter is trained for each. 2: Kangaroo's for 7B models (3 for 13B).
    pub exit_layer: ExitLayers,
    /// What the adapter is made of: `"attention"` (the paper's), `"mlp"`, `"attention-with-head"`
    /// or `"decoder-layer"` (its ablation, Table 2).
    pub architecture: AdapterArchitecture,
    /// The first weights: `"random"`, as the authors', or `"target"`. A head of its own begins as
    /// the target's either way.
    pub initial: InitialWeights,
    /// The peak learning rate of AdamW, above 0. 5e-5: the authors' script.
    pub learning_rate: f64,
    /// Decoupled weight decay of AdamW, 0 or more. 0.01: the authors' (torch's default).
    pub weight_decay: f64,
    /// Decay of AdamW's mean of gradients, from 0 to below 1. 0.9: the authors' code.
    pub beta_1: f64,
    /// Decay of AdamW's mean of squared gradients, from 0 to below 1. 0.95: the authors' code.
    pub beta_2: f64,
    /// Added to the root of AdamW's mean of squares, above 0. 1e-8: torch's default.
    pub epsilon: f64,
    /// What the learning rate does after its warm-up: `cosine`, `linear` (both fall to 0) or
    /// `constant`. Cosine: as for heads. The authors' falls in a straight line that would end at
    /// step 800,000.
    pub schedule: Schedule,
    /// The share of steps in which the learning rate climbs from 0 to its peak, from 0 to 1;
    /// rounded up. 0.03: as for heads.
    pub warm_up_share: f64,
    /// The number of those steps, in place of the share. The authors' is 2,000.
    pub warm_up_steps: Option<usize>,
    /// How a step's gradients are cut: `norm`, all together to a global norm, or `value`, each
    /// number for itself; above 0. A norm of 1: as for heads. The authors have a value of 0.5,
    /// which changes the gradient's direction.
    pub clipping: Clipping,
    /// How often the data is gone through, 1 or more. 10: the paper (20 in the authors' script).
    pub num_epochs: usize,
    /// Epochs in a row without a lower loss on the validation rows after which an adapter's
    /// training ends, 1 or more; never if absent. The learning rate is planned for all epochs all
    /// the same. Absent: the authors' code.
    pub patience: Option<usize>,
    /// Rows a batch, 1 or more: what goes through the target and the adapter at once. 4: the
    /// authors' script.
    pub batch_size: usize,
    /// Batches a step, 1 or more; a step's loss is the mean over all its supervised tokens. 1: the
    /// authors' code has 8, but takes a step after each batch.
    pub gradient_accumulation: usize,
    /// The longest sequence trained on, in tokens, 2 or more; longer rows are cut, as they are to
    /// the target's context. 2048: the authors' code.
    pub max_len: usize,
    /// What is minimised: `"cross-entropy"` (the paper), `"forward-kl"` (the same adapter, another
    /// number), `"reverse-kl"`, or `"total-variation"`, the share of sampled candidates that are
    /// rejected. The epoch that is kept is the one whose validation rows have the lowest mean of
    /// it.
    pub loss: DistillationLoss,
    /// Tokens whose loss is computed at once, 1 or more. It bounds memory, at a few times
    /// vocabulary × this many floats, and does not change the result. 256: ours.
    pub loss_chunk: usize,
    /// The type that the frozen target and the adapter are computed in: `"f32"`, or `"bf16"` on a
    /// GPU. Parameters, optimiser, softmaxes and losses are f32 either way. f32: ours; the authors
    /// train in fp16.
    pub dtype: WeightDtype,
    /// The share of conversations held out for validation, between 0 and 1. 0.1: ours, as for
    /// heads; the authors split off 5 % and never use them.
    pub validation_share: f64,
}

/// Where an adapter's first weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitialWeights {
    /// Linear layers from a normal distribution of standard deviation 0.02, norms of ones.
    Random,
    /// The target's own layer behind the exit, the first that drafting leaves out, and its final
    /// norm. Biases are left out.
    Target,
}

/// One exit layer, or several: an adapter each. In a recipe, `2` or `[1, 2]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number of layers, or a list of such numbers")]
pub enum ExitLayers {
    /// A single adapter.
    One(usize),
    /// An adapter each, in this order.
    Many(Vec<usize>),
}

impl ExitLayers {
    /// The exit layers, in the recipe's order.
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
            architecture: AdapterArchitecture::Attention,
            initial: InitialWeights::Random,
            learning_rate: 5e-5,
            weight_decay: 0.01,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            schedule: Schedule::Cosine,
            warm_up_share: 0.03,
            warm_up_steps: None,
            clipping: Clipping::Norm(1.0),
            num_epochs: 10,
            patience: None,
            batch_size: 4,
            gradient_accumulation: 1,
            max_len: 2048,
            loss: DistillationLoss::CrossEntropy,
            loss_chunk: 256,
            dtype: WeightDtype::F32,
            validation_share: 0.1,
        }
    }
}

impl AdapterTraining {
    /// The keys that say how weights are moved.
    pub(crate) fn optimiser(&self) -> Optimiser {
        Optimiser {
            learning_rate: self.learning_rate,
            schedule: self.schedule,
            warm_up_share: self.warm_up_share,
            warm_up_steps: self.warm_up_steps,
            clipping: self.clipping,
            weight_decay: self.weight_decay,
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
        }
    }

    /// Checks every setting's range; an exit layer's upper end is the target's to say.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key that is out of its range.
    pub fn validate(&self) -> Result<(), TrainError> {
        let exit_layers = self.exit_layer.to_vec();
        let are_distinct =
            exit_layers.iter().enumerate().all(|(n, layer)| !exit_layers[..n].contains(layer));
        if exit_layers.is_empty() || exit_layers.contains(&0) || !are_distinct {
            return Err(TrainError::Setting {
                section: "adapter",
                key: "exit_layer",
                value: format!("{exit_layers:?}"),
                expected: "1 or more, or a list of different such numbers",
            });
        }
        if self.max_len < 2 {
            return Err(TrainError::Setting {
                section: "adapter",
                key: "max_len",
                value: self.max_len.to_string(),
                expected: "2 or more",
            });
        }
        self.optimiser().check("adapter")?;
        check_numbers(
            "adapter",
            &[("validation_share", self.validation_share, Range::BetweenZeroAndOne)],
        )?;
        check_counts(
            "adapter",
            &[
                ("num_epochs", self.num_epochs),
                ("patience", self.patience.unwrap_or(1)),
                ("batch_size", self.batch_size),
                ("gradient_accumulation", self.gradient_accumulation),
                ("loss_chunk", self.loss_chunk),
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default_and_a_misspelt_key_is_named() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        assert_eq!(read("").unwrap(), AdapterTraining::default());
        let message = read("learning_rat = 1.0").unwrap_err().to_string();
        assert!(message.contains("learning_rat"), "{message}");
    }

    #[test]
    fn one_exit_layer_or_a_list_of_them() {
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
    fn an_architecture_is_one_of_four_and_first_weights_of_two() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        for architecture in AdapterArchitecture::ALL {
            let training = read(&format!("architecture = \"{architecture}\"")).unwrap();
            assert_eq!(training.architecture, architecture);
            assert_eq!(read(&toml::to_string(&training).unwrap()).unwrap(), training);
        }
        assert_eq!(read("initial = \"target\"").unwrap().initial, InitialWeights::Target);
        assert_eq!(read("initial = \"random\"").unwrap(), AdapterTraining::default());
        for (wrong, known) in [("architecture = \"ffn\"", "mlp"), ("initial = \"draft\"", "target")]
        {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains(&format!("`{known}`")), "{message}");
        }
    }

    #[test]
    fn a_loss_is_one_of_four() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        for (name, loss) in [
            ("cross-entropy", DistillationLoss::CrossEntropy),
            ("forward-kl", DistillationLoss::ForwardKl),
            ("reverse-kl", DistillationLoss::ReverseKl),
            ("total-variation", DistillationLoss::TotalVariation),
        ] {
            let training = read(&format!("loss = \"{name}\"")).unwrap();
            assert_eq!(training.loss, loss);
            assert!(toml::to_string(&training).unwrap().contains(name));
        }
        let message = read("loss = \"kl\"").unwrap_err().to_string();
        assert!(message.contains("`total-variation`"), "{message}");
    }

    #[test]
    fn every_default_is_in_range_and_bad_values_name_their_key() {
        AdapterTraining::default().validate().unwrap();
        let check = |key: &str, bad: AdapterTraining| {
            let message = bad.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`adapter.{key}` is ")), "{message}");
        };
        let default = AdapterTraining::default;
        for bad in [vec![], vec![0], vec![1, 0], vec![2, 1, 2]] {
            check("exit_layer", AdapterTraining { exit_layer: ExitLayers::Many(bad), ..default() });
        }
        check("exit_layer", AdapterTraining { exit_layer: ExitLayers::One(0), ..default() });
        check("max_len", AdapterTraining { max_len: 1, ..default() });
        check("num_epochs", AdapterTraining { num_epochs: 0, ..default() });
        check("patience", AdapterTraining { patience: Some(0), ..default() });
        check("batch_size", AdapterTraining { batch_size: 0, ..default() });
        check("gradient_accumulation", AdapterTraining { gradient_accumulation: 0, ..default() });
        check("loss_chunk", AdapterTraining { loss_chunk: 0, ..default() });
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            check("learning_rate", AdapterTraining { learning_rate: bad, ..default() });
            check("weight_decay", AdapterTraining { weight_decay: bad, ..default() });
            check("beta_1", AdapterTraining { beta_1: bad, ..default() });
            check("beta_2", AdapterTraining { beta_2: bad, ..default() });
            check("epsilon", AdapterTraining { epsilon: bad, ..default() });
            check("warm_up_share", AdapterTraining { warm_up_share: bad, ..default() });
            for clipping in [Clipping::Norm(bad), Clipping::Value(bad)] {
                check(clipping.setting().0, AdapterTraining { clipping, ..default() });
            }
            check("validation_share", AdapterTraining { validation_share: bad, ..default() });
        }
        check("epsilon", AdapterTraining { epsilon: 1e-60, ..default() });
    }
}
