//! The tables `[head.optimizer]`, `[adapter.optimizer]` and `[adapter_head.optimizer]` of a recipe.
//!
//! All have the same keys. The defaults follow the authors of each system, so missing keys are taken
//! from the defaults of the section.

use burn::optim::{AdamWConfig, ModuleOptimizer};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::data::BatchSettings;
use crate::error::{Section, TrainError};
use crate::ranges::{Range, check_numbers};
use crate::run::clipping::Clipping;
use crate::run::schedule::{LearningRates, Schedule};

/// The training schedule of a head or adapter, and the fraction of data held out. In a recipe every key
/// is optional.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSettings {
    /// The peak learning rate of AdamW, above 0.
    pub learning_rate: f64,
    /// How the learning rate changes after the warmup: `cosine`, `linear` (both fall to 0) or
    /// `constant`.
    pub schedule: Schedule,
    /// The fraction of steps that the warmup from 0 to the peak takes, from 0 to 1; the number of steps
    /// is rounded up.
    pub warmup_ratio: f64,
    /// The number of warmup steps, instead of `warmup_ratio`.
    pub warmup_steps: Option<usize>,
    /// AdamW's decoupled weight decay, 0 or more.
    pub weight_decay: f64,
    /// The decay of AdamW's first moment, from 0 to below 1.
    pub beta_1: f64,
    /// The decay of AdamW's second moment, from 0 to below 1.
    pub beta_2: f64,
    /// The term added to the root of AdamW's second moment, above 0.
    pub epsilon: f64,
    /// Gradient clipping: `norm`, to a global norm, or `value`, each number separately; above 0.
    pub clipping: Clipping,
    /// The number of epochs, 1 or more.
    pub num_epochs: usize,
    /// Training ends after this many epochs in a row without a better validation score, 1 or more; never
    /// if absent. The learning rate is still planned for all epochs.
    pub patience: Option<usize>,
    /// Rows per batch, 1 or more. The frozen model reads one batch at a time.
    pub batch_size: usize,
    /// Batches per step, 1 or more.
    pub gradient_accumulation: usize,
    /// The fraction of conversations held out for validation, between 0 and 1.
    pub validation_fraction: f64,
}

impl OptimizerSettings {
    /// The defaults for heads: the values in the SpecDec++ authors' script, and the Hugging Face Trainer's
    /// defaults for the rest. `validation_fraction` is ours; the authors hold out a fixed number of rows
    /// after an unseeded shuffle.
    pub const HEAD: Self = Self {
        learning_rate: 5e-5,
        schedule: Schedule::Cosine,
        warmup_ratio: 0.03,
        warmup_steps: None,
        weight_decay: 0.0,
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        clipping: Clipping::Norm(1.0),
        num_epochs: 3,
        patience: None,
        batch_size: 4,
        gradient_accumulation: 8,
        validation_fraction: 0.1,
    };

    /// The defaults for adapters: the Kangaroo authors' learning rate, weight decay (torch's default),
    /// betas and batch size, and the paper's 10 epochs (their script has 20). The other values are those
    /// for heads, because the authors' do not carry over: a linear schedule that ends at step 800,000
    /// after 2,000 steps of warmup, clipping by a value of 0.5, which changes the gradient's direction,
    /// an accumulation of 8 that still takes a step after each batch, and a held-out 5 % that is never
    /// used.
    pub const ADAPTER: Self = Self {
        weight_decay: 0.01,
        beta_2: 0.95,
        num_epochs: 10,
        gradient_accumulation: 1,
        ..Self::HEAD
    };

    /// Reads a table whose missing keys come from `defaults`.
    pub(crate) fn read_over<'de, D: Deserializer<'de>>(
        defaults: Self,
        deserializer: D,
    ) -> Result<Self, D::Error> {
        let given = toml::Table::deserialize(deserializer)?;
        let mut all = toml::Table::try_from(defaults).map_err(D::Error::custom)?;
        all.extend(given);
        all.try_into().map_err(|error: toml::de::Error| {
            // The second line of toml's message names the key.
            D::Error::custom(error.to_string().trim_end().replace('\n', " "))
        })
    }

    /// Checks every setting's range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key of `section` that is out of range.
    pub(crate) fn check(&self, section: Section) -> Result<(), TrainError> {
        let (clipping_key, clipping_limit) = match self.clipping {
            Clipping::Norm(limit) => ("optimizer.clipping.norm", limit),
            Clipping::Value(limit) => ("optimizer.clipping.value", limit),
        };
        let count = |key, count: usize| (key, count as f64, Range::AT_LEAST_ONE);
        check_numbers(
            section,
            &[
                ("optimizer.learning_rate", self.learning_rate, Range::Positive),
                ("optimizer.warmup_ratio", self.warmup_ratio, Range::Within(0.0, 1.0, "0 to 1")),
                ("optimizer.weight_decay", self.weight_decay, Range::NOT_NEGATIVE),
                ("optimizer.beta_1", self.beta_1, Range::BelowOne),
                ("optimizer.beta_2", self.beta_2, Range::BelowOne),
                ("optimizer.epsilon", self.epsilon, Range::PositiveInF32),
                (clipping_key, clipping_limit, Range::Positive),
                (
                    "optimizer.validation_fraction",
                    self.validation_fraction,
                    Range::BetweenZeroAndOne,
                ),
                count("optimizer.num_epochs", self.num_epochs),
                count("optimizer.patience", self.patience.unwrap_or(1)),
                count("optimizer.batch_size", self.batch_size),
                count("optimizer.gradient_accumulation", self.gradient_accumulation),
            ],
        )
    }

    /// How these settings divide rows into batches.
    pub(crate) fn batches(&self, seed: u64) -> BatchSettings {
        let Self { batch_size, gradient_accumulation, .. } = *self;
        BatchSettings { seed, batch_size, gradient_accumulation }
    }

    /// AdamW. Every setting is explicit because burn's defaults differ from torch's.
    pub(crate) fn adam_w(&self) -> ModuleOptimizer {
        AdamWConfig::new()
            .with_beta_1(self.beta_1 as f32)
            .with_beta_2(self.beta_2 as f32)
            .with_epsilon(self.epsilon as f32)
            .with_weight_decay(self.weight_decay as f32)
            .with_cautious_weight_decay(false)
            .with_amsgrad(false)
            .init()
    }

    /// The learning rates of a training with `num_steps` steps.
    pub(crate) fn rates(&self, num_steps: usize) -> LearningRates {
        let num_warmup_steps = self
            .warmup_steps
            .unwrap_or_else(|| (num_steps as f64 * self.warmup_ratio).ceil() as usize);
        let Self { schedule, learning_rate: peak, .. } = *self;
        LearningRates { schedule, peak, num_warmup_steps, num_steps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdapterTraining, HeadTraining};

    const HEAD: OptimizerSettings = OptimizerSettings::HEAD;
    const SECTIONS: [Section; 3] = [Section::Head, Section::Adapter, Section::AdapterHead];

    #[test]
    fn missing_keys_come_from_the_defaults_of_the_section() {
        let head: HeadTraining = toml::from_str("[optimizer]\nbatch_size = 7").unwrap();
        assert_eq!(head.optimizer, OptimizerSettings { batch_size: 7, ..HEAD });
        let adapter: AdapterTraining = toml::from_str("[optimizer]\nbatch_size = 7").unwrap();
        let expected = OptimizerSettings { batch_size: 7, ..OptimizerSettings::ADAPTER };
        assert_eq!(adapter.optimizer, expected);
        assert_ne!(head.optimizer, adapter.optimizer);
        assert_eq!(toml::from_str::<HeadTraining>("").unwrap().optimizer, HEAD);
    }

    #[test]
    fn every_key_is_read_and_written_by_its_name() {
        let read = |text: &str| toml::from_str::<HeadTraining>(&format!("[optimizer]\n{text}"));
        let text = "schedule = \"linear\"\nwarmup_steps = 2000\nclipping = { value = 0.5 }";
        let training = read(text).unwrap();
        let (schedule, clipping) = (Schedule::Linear, Clipping::Value(0.5));
        let expected = OptimizerSettings { schedule, clipping, warmup_steps: Some(2000), ..HEAD };
        assert_eq!(training.optimizer, expected);
        let written = toml::to_string(&training).unwrap();
        assert_eq!(toml::from_str::<HeadTraining>(&written).unwrap(), training);
        for (wrong, named) in [
            ("schedule = \"step\"", "`cosine`, `linear`, `constant`"),
            ("clipping = { global = 1.0 }", "`norm` or `value`"),
            ("clipping = { norm = 1.0, value = 0.5 }", "clipping"),
            ("clipping = 1.0", "clipping"),
            ("warmup_steps = -1", "warmup_steps"),
            ("max_grad_norm = 1.0", "max_grad_norm"),
            ("learning_rat = 1.0", "learning_rat"),
        ] {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn defaults_are_in_range_and_errors_name_section_and_key() {
        for section in SECTIONS {
            for defaults in [HEAD, OptimizerSettings::ADAPTER] {
                defaults.check(section).unwrap();
            }
        }
        let check = |key: &str, bad: OptimizerSettings| {
            for section in SECTIONS {
                let message = bad.check(section).unwrap_err().to_string();
                let expected = format!("`{section}.optimizer.{key}` is ");
                assert!(message.starts_with(&expected), "{message}");
            }
        };
        check("num_epochs", OptimizerSettings { num_epochs: 0, ..HEAD });
        check("patience", OptimizerSettings { patience: Some(0), ..HEAD });
        check("batch_size", OptimizerSettings { batch_size: 0, ..HEAD });
        check("gradient_accumulation", OptimizerSettings { gradient_accumulation: 0, ..HEAD });
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            check("learning_rate", OptimizerSettings { learning_rate: bad, ..HEAD });
            check("weight_decay", OptimizerSettings { weight_decay: bad, ..HEAD });
            check("beta_1", OptimizerSettings { beta_1: bad, ..HEAD });
            check("beta_2", OptimizerSettings { beta_2: bad, ..HEAD });
            check("epsilon", OptimizerSettings { epsilon: bad, ..HEAD });
            check("warmup_ratio", OptimizerSettings { warmup_ratio: bad, ..HEAD });
            check("clipping.norm", OptimizerSettings { clipping: Clipping::Norm(bad), ..HEAD });
            check("clipping.value", OptimizerSettings { clipping: Clipping::Value(bad), ..HEAD });
            check("validation_fraction", OptimizerSettings { validation_fraction: bad, ..HEAD });
        }
        check("validation_fraction", OptimizerSettings { validation_fraction: 0.0, ..HEAD });
        check("validation_fraction", OptimizerSettings { validation_fraction: 1.0, ..HEAD });
        check("epsilon", OptimizerSettings { epsilon: 1e-60, ..HEAD });
        let bad = OptimizerSettings { clipping: Clipping::Value(0.0), ..HEAD };
        let expected = "`head.optimizer.clipping.value` is 0, expected a number above 0";
        assert_eq!(bad.check(Section::Head).unwrap_err().to_string(), expected);
    }

    #[test]
    fn the_warmup_ratio_is_rounded_up_unless_steps_are_given() {
        let first_full = |warmup_ratio, warmup_steps, num_steps| {
            let schedule = Schedule::Constant;
            let settings = OptimizerSettings { schedule, warmup_ratio, warmup_steps, ..HEAD };
            let rates = settings.rates(num_steps);
            (0..num_steps).position(|step| rates.at(step) == settings.learning_rate)
        };
        assert_eq!(first_full(0.03, None, 101), Some(4));
        assert_eq!(first_full(0.0, None, 101), Some(0));
        assert_eq!(first_full(0.03, Some(7), 101), Some(7));
        assert_eq!(first_full(0.03, Some(0), 101), Some(0));
        // Kangaroo's 2,000 warmup steps, in a shorter training.
        assert_eq!(first_full(0.03, Some(2000), 101), None);
    }
}
