//! The tables `optimizer` of heads and drafters in a recipe.
//!
//! All have the same keys. The defaults follow the authors of each system, so missing keys are taken
//! from the defaults of the section.

use std::f64::consts::PI;

use burn::optim::{AdamWConfig, ModuleOptimizer};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::data::BatchSettings;
use crate::error::{Result, Section};
use crate::ranges::{Range, check_numbers};
use crate::run::clipping::Clipping;

/// The training schedule of a head or adapter, and the fraction of data held out. In a recipe every key
/// is optional.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSettings {
    /// The peak learning rate of AdamW, above 0. Default: from the width of the model: 5e-5 × (4096 / width)^1.5, at most 4e-3.
    pub learning_rate: Option<f64>,
    /// The course of the learning rate after the warmup: `cosine`, `linear` (both fall to 0) or
    /// `constant`.
    pub schedule: Schedule,
    /// The fraction of steps in which the learning rate rises from 0 to its peak (warmup), from 0
    /// to 1. The number of steps is rounded up.
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
    /// Gradient clipping: `norm` limits the global norm, `value` limits each number. Above 0.
    pub clipping: Clipping,
    /// The number of epochs, 1 or more.
    pub num_epochs: usize,
    /// The number of epochs in a row without a better validation score after which training ends, 1
    /// or more. If absent, training never ends early. The learning rate is planned for all epochs
    /// in either case.
    pub patience: Option<usize>,
    /// The number of rows per batch, 1 or more. The frozen model reads one batch at a time.
    pub batch_size: usize,
    /// The number of batches per step, 1 or more.
    pub gradient_accumulation: usize,
    /// The fraction of conversations held out for validation, between 0 and 1.
    pub validation_fraction: f64,
}

impl OptimizerSettings {
    /// The defaults for heads: the values in the SpecDec++ authors' script, and the Hugging Face
    /// Trainer's defaults for the rest. The authors' learning rate is 5e-5, for hidden states of
    /// 4,096 numbers. `validation_fraction` is ours; the authors hold out a fixed number of rows
    /// after an unseeded shuffle.
    pub const HEAD: Self = Self {
        learning_rate: None,
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

    /// The defaults for adapters. The weight decay (torch's default), betas and batch size are those of
    /// the Kangaroo authors, and so is the learning rate at their model's width. We train 5 epochs; the
    /// paper has 10, and their script 20. The other values are those for heads, because the authors' values do not carry
    /// over. They have a linear schedule that ends at step 800,000 after 2,000 steps of warmup;
    /// clipping by a value of 0.5, which changes the gradient's direction; an accumulation of 8
    /// that still takes a step after each batch; and a held-out 5 % that is never used.
    pub const ADAPTER: Self = Self {
        weight_decay: 0.01,
        beta_2: 0.95,
        num_epochs: 5,
        gradient_accumulation: 1,
        ..Self::HEAD
    };

    /// The defaults for EAGLE-3. The betas and clipping are those of its authors (Li et al. 2025,
    /// appendix), and so is the learning rate at their model's width. A step has two batches, which run side by side on a CPU. The other
    /// values are those for adapters.
    pub const EAGLE3: Self = Self {
        weight_decay: 0.0,
        clipping: Clipping::Norm(0.5),
        gradient_accumulation: 2,
        ..Self::ADAPTER
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
    /// If a key of `section` is out of range. The error names the first one.
    pub(crate) fn check(&self, section: Section) -> Result<()> {
        let (clipping_key, clipping_limit) = match self.clipping {
            Clipping::Norm(limit) => ("optimizer.clipping.norm", limit),
            Clipping::Value(limit) => ("optimizer.clipping.value", limit),
        };
        let count = |key, count: usize| (key, count as f64, Range::AT_LEAST_ONE);
        check_numbers(
            section,
            &[
                ("optimizer.learning_rate", self.learning_rate.unwrap_or(1.0), Range::Positive),
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

    /// Returns the settings that decide how rows are divided into batches.
    pub(crate) fn batches(&self, seed: u64) -> BatchSettings {
        let Self { batch_size, gradient_accumulation, .. } = *self;
        BatchSettings { seed, batch_size, gradient_accumulation }
    }

    /// Builds AdamW. Every setting is explicit because burn's defaults differ from torch's.
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

    /// Returns the settings with a learning rate, given the width of the model that is trained on.
    #[must_use]
    pub(crate) fn of_width(self, width: usize) -> Self {
        let learning_rate = self.learning_rate.unwrap_or_else(|| learning_rate_of(width));
        Self { learning_rate: Some(learning_rate), ..self }
    }

    /// Computes the learning rates of a training with `num_steps` steps.
    ///
    /// # Panics
    /// Without a learning rate.
    pub(crate) fn rates(&self, num_steps: usize) -> LearningRates {
        let num_warmup_steps = self
            .warmup_steps
            .unwrap_or_else(|| (num_steps as f64 * self.warmup_ratio).ceil() as usize);
        let Self { schedule, .. } = *self;
        let peak = self.learning_rate.expect("a training has a learning rate");
        LearningRates { schedule, peak, num_warmup_steps, num_steps }
    }
}

/// Returns the default learning rate on a model whose hidden states have `width` numbers: 5e-5 at
/// 4,096, as in the papers, and more for narrower models, up to 4e-3.
///
/// On SmolLM2-135M (width 576), five epochs with 5e-5 end at an agreement of 0.14 with the target,
/// and with 1e-3 at 0.34.
pub(crate) fn learning_rate_of(width: usize) -> f64 {
    (5e-5 * (4096.0 / width as f64).powf(1.5)).min(4e-3)
}

/// The course of the learning rate after the warmup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// The learning rate falls to 0 along half a cosine.
    #[default]
    Cosine,
    /// The learning rate falls to 0 linearly.
    Linear,
    /// The learning rate stays at its peak.
    Constant,
}

/// The learning rates of a training: a linear warmup from 0 to the peak, then a [`Schedule`]. They equal those
/// of Hugging Face's `get_{cosine,linear,constant}_schedule_with_warmup`. burn's linear scheduler cannot begin
/// at 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LearningRates {
    pub(crate) schedule: Schedule,
    pub(crate) peak: f64,
    pub(crate) num_warmup_steps: usize,
    pub(crate) num_steps: usize,
}

impl LearningRates {
    /// Returns the learning rate of a step, counted from 0.
    pub(crate) fn at(&self, step: usize) -> f64 {
        if step < self.num_warmup_steps {
            return self.peak * step as f64 / self.num_warmup_steps as f64;
        }
        let num_fallen = step - self.num_warmup_steps;
        let num_falling = self.num_steps.saturating_sub(self.num_warmup_steps);
        let share = match self.schedule {
            Schedule::Cosine => {
                let fallen = (num_fallen as f64 / num_falling.max(1) as f64).min(1.0);
                0.5 * (1.0 + (PI * fallen).cos())
            }
            Schedule::Linear => {
                num_falling.saturating_sub(num_fallen) as f64 / num_falling.max(1) as f64
            }
            Schedule::Constant => 1.0,
        };
        self.peak * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdapterTraining, HeadTraining};

    const HEAD: OptimizerSettings = OptimizerSettings::HEAD;
    const SECTIONS: [Section; 3] = ["head", "adapter", "head"];

    #[test]
    fn the_default_rate_is_the_papers_at_their_width_and_higher_below() {
        let rate = |width| HEAD.of_width(width).learning_rate.expect("set");
        assert!((rate(4096) - 5e-5).abs() < 1e-15);
        assert!((rate(576) - 9.48e-4).abs() < 1e-6, "{}", rate(576));
        assert_eq!(rate(128), 4e-3);
        assert!(rate(8192) < rate(4096));
        let given = OptimizerSettings { learning_rate: Some(0.5), ..HEAD };
        assert_eq!(given.of_width(128), given);
    }

    #[test]
    fn missing_keys_come_from_the_defaults_of_the_section() {
        let head: HeadTraining = toml::from_str("[optimizer]\nbatch_size = 7").unwrap();
        assert_eq!(head.optimizer, OptimizerSettings { batch_size: 7, ..HEAD });
        let adapter: AdapterTraining = toml::from_str("[optimizer]\nbatch_size = 7").unwrap();
        let expected = OptimizerSettings { batch_size: 7, ..OptimizerSettings::ADAPTER };
        assert_eq!(adapter.common.optimizer, expected);
        assert_ne!(head.optimizer, adapter.common.optimizer);
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
            check("learning_rate", OptimizerSettings { learning_rate: Some(bad), ..HEAD });
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
        assert_eq!(bad.check("head").unwrap_err().to_string(), expected);
    }

    #[test]
    fn the_warmup_ratio_is_rounded_up_unless_steps_are_given() {
        let first_full = |warmup_ratio, warmup_steps, num_steps| {
            let schedule = Schedule::Constant;
            let settings = OptimizerSettings { schedule, warmup_ratio, warmup_steps, ..HEAD };
            let settings = settings.of_width(4096);
            let rates = settings.rates(num_steps);
            (0..num_steps).position(|step| Some(rates.at(step)) == settings.learning_rate)
        };
        assert_eq!(first_full(0.03, None, 101), Some(4));
        assert_eq!(first_full(0.0, None, 101), Some(0));
        assert_eq!(first_full(0.03, Some(7), 101), Some(7));
        assert_eq!(first_full(0.03, Some(0), 101), Some(0));
        // Kangaroo's 2,000 warmup steps, in a shorter training.
        assert_eq!(first_full(0.03, Some(2000), 101), None);
    }

    fn rates(
        schedule: Schedule,
        peak: f64,
        num_warmup_steps: usize,
        num_steps: usize,
    ) -> LearningRates {
        LearningRates { schedule, peak, num_warmup_steps, num_steps }
    }

    #[track_caller]
    fn check(rates: LearningRates, expected: &[f64]) {
        for (step, expected) in expected.iter().enumerate() {
            let rate = rates.at(step);
            // Rounding of f64 numbers near 1.
            assert!((rate - expected).abs() < 1e-12, "step {step}: {rate}, not {expected}");
        }
    }

    /// Compares with transformers 5.23, with `get_constant_schedule_with_warmup(optimizer, 3)` for the constant
    /// schedule:
    /// ```python
    /// optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    /// scheduler = get_cosine_schedule_with_warmup(optimizer, 3, 10)  # or linear
    /// for _ in range(11):
    ///     print(scheduler.get_last_lr()[0]); optimizer.step(); scheduler.step()
    /// ```
    #[test]
    fn the_rates_equal_those_of_transformers() {
        let rates = |schedule| rates(schedule, 2.0, 3, 10);
        let climb = [0.0, 0.6666666666666666, 1.3333333333333333, 2.0];
        let cosine = [
            1.900968867902419,
            1.6234898018587336,
            1.2225209339563143,
            0.7774790660436857,
            0.3765101981412665,
            0.09903113209758097,
            0.0,
        ];
        let linear = [
            1.7142857142857142,
            1.4285714285714286,
            1.1428571428571428,
            0.8571428571428571,
            0.5714285714285714,
            0.2857142857142857,
            0.0,
        ];
        check(rates(Schedule::Cosine), &[&climb[..], &cosine].concat());
        check(rates(Schedule::Linear), &[&climb[..], &linear].concat());
        check(rates(Schedule::Constant), &[&climb[..], &[2.0; 7]].concat());
    }

    #[test]
    fn the_warmup_may_take_no_step_or_all() {
        for schedule in [Schedule::Cosine, Schedule::Linear, Schedule::Constant] {
            assert_eq!(rates(schedule, 1.0, 0, 10).at(0), 1.0);
            check(rates(schedule, 1.0, 4, 4), &[0.0, 0.25, 0.5, 0.75]);
            check(rates(schedule, 1.0, 8, 4), &[0.0, 0.125, 0.25, 0.375]);
        }
    }

    #[test]
    fn the_rate_stays_at_0_after_the_last_step() {
        // In transformers the cosine rises again; neither program takes such steps.
        check(rates(Schedule::Cosine, 1.0, 1, 2), &[0.0, 1.0, 0.0, 0.0, 0.0]);
        check(rates(Schedule::Linear, 1.0, 1, 2), &[0.0, 1.0, 0.0, 0.0, 0.0]);
    }
}
