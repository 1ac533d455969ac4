//! What heads and adapters are trained with alike: the tables `[head.optimizer]`,
//! `[adapter.optimizer]` and `[adapter_head.optimizer]` of a recipe.
//!
//! The keys are the same; their defaults are the authors' of either system, so that a table which
//! leaves some out is read over its section's.

use burn::optim::{AdamWConfig, ModuleOptimizer};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::TrainError;
use crate::ranges::{Range, check_counts, check_numbers};
use crate::run::clipping::Clipping;
use crate::run::schedule::{Schedule, WarmedUp};
use crate::section::Section;

/// How long, in which steps and at which rate something is trained, and what is held out. Every key
/// may be left out of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSettings {
    /// The peak learning rate of AdamW, above 0.
    pub learning_rate: f64,
    /// What the learning rate does after its warmup: `cosine`, `linear` (both fall to 0) or
    /// `constant`.
    pub schedule: Schedule,
    /// The share of steps in which the learning rate climbs from 0 to its peak, from 0 to 1;
    /// rounded up.
    pub warmup_ratio: f64,
    /// The number of those steps, in place of the share.
    pub warmup_steps: Option<usize>,
    /// Decoupled weight decay of AdamW, 0 or more.
    pub weight_decay: f64,
    /// Decay of AdamW's mean of gradients, from 0 to below 1.
    pub beta_1: f64,
    /// Decay of AdamW's mean of squared gradients, from 0 to below 1.
    pub beta_2: f64,
    /// Added to the root of AdamW's mean of squares, above 0.
    pub epsilon: f64,
    /// How a step's gradients are cut: `norm`, all together to a global norm, or `value`, each
    /// number for itself; above 0.
    pub clipping: Clipping,
    /// How often the data is gone through, 1 or more.
    pub num_epochs: usize,
    /// Epochs in a row without a better validation score after which training ends, 1 or more;
    /// never if absent. The learning rate is planned for all epochs all the same.
    pub patience: Option<usize>,
    /// Rows a batch, 1 or more: what goes through the frozen model at once.
    pub batch_size: usize,
    /// Batches a step, 1 or more.
    pub gradient_accumulation: usize,
    /// The share of conversations held out for validation, between 0 and 1.
    pub validation_fraction: f64,
}

/// Keys that stood in a section itself before they had a table, and what they are called in it.
const MOVED_KEYS: [(&str, &str); 14] = [
    ("learning_rate", "learning_rate"),
    ("schedule", "schedule"),
    ("warm_up_share", "warmup_ratio"),
    ("warm_up_steps", "warmup_steps"),
    ("weight_decay", "weight_decay"),
    ("beta_1", "beta_1"),
    ("beta_2", "beta_2"),
    ("epsilon", "epsilon"),
    ("clipping", "clipping"),
    ("num_epochs", "num_epochs"),
    ("patience", "patience"),
    ("batch_size", "batch_size"),
    ("gradient_accumulation", "gradient_accumulation"),
    ("validation_share", "validation_fraction"),
];

/// Checks that a recipe has no key where it stood before sections had a table `optimizer`.
///
/// # Errors
/// [`TrainError::MovedKey`] with the first one that does.
pub fn check_moved_keys(recipe: &toml::Table) -> Result<(), TrainError> {
    for section in Section::ALL {
        let table = recipe.get(section.name()).and_then(toml::Value::as_table);
        let is_there =
            |(old, _): &&(&str, &str)| table.is_some_and(|table| table.contains_key(*old));
        if let Some((old, new)) = MOVED_KEYS.iter().find(is_there) {
            return Err(TrainError::MovedKey { section, old, new });
        }
    }
    Ok(())
}

impl OptimizerSettings {
    /// The defaults of heads: the SpecDec++ authors' script, and those of the Hugging Face Trainer
    /// where that leaves them open. The share that is held out is ours; the authors hold out a fixed
    /// number of an unseeded shuffle.
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

    /// The defaults of adapters: the Kangaroo authors' rate, weight decay (torch's), betas and batch
    /// size, and the paper's 10 epochs (their script has 20). Ours are as for heads where theirs
    /// cannot be: their rate falls in a straight line that would end at step 800,000 after 2,000 of
    /// warmup, they clip by a value of 0.5, which changes the gradient's direction, their
    /// accumulation of 8 takes a step after each batch, and the 5 % that they split off are never
    /// used.
    pub const ADAPTER: Self = Self {
        weight_decay: 0.01,
        beta_2: 0.95,
        num_epochs: 10,
        gradient_accumulation: 1,
        ..Self::HEAD
    };

    /// Reads a table of which any key may be left out, over `defaults`.
    pub(crate) fn read_over<'de, D: Deserializer<'de>>(
        defaults: Self,
        deserializer: D,
    ) -> Result<Self, D::Error> {
        let given = toml::Table::deserialize(deserializer)?;
        let mut all = toml::Table::try_from(defaults).map_err(D::Error::custom)?;
        all.extend(given);
        all.try_into().map_err(|error: toml::de::Error| {
            // Its second line names the key.
            D::Error::custom(error.to_string().trim_end().replace('\n', " "))
        })
    }

    /// Checks every setting's range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key of `section` that is out of its range.
    pub(crate) fn check(&self, section: Section) -> Result<(), TrainError> {
        let (clipping_key, clipping_limit) = match self.clipping {
            Clipping::Norm(limit) => ("optimizer.clipping.norm", limit),
            Clipping::Value(limit) => ("optimizer.clipping.value", limit),
        };
        check_numbers(
            section,
            &[
                ("optimizer.learning_rate", self.learning_rate, Range::Positive),
                ("optimizer.warmup_ratio", self.warmup_ratio, Range::UpToOne),
                ("optimizer.weight_decay", self.weight_decay, Range::NotNegative),
                ("optimizer.beta_1", self.beta_1, Range::BelowOne),
                ("optimizer.beta_2", self.beta_2, Range::BelowOne),
                ("optimizer.epsilon", self.epsilon, Range::PositiveInF32),
                (clipping_key, clipping_limit, Range::Positive),
                (
                    "optimizer.validation_fraction",
                    self.validation_fraction,
                    Range::BetweenZeroAndOne,
                ),
            ],
        )?;
        check_counts(
            section,
            &[
                ("optimizer.num_epochs", self.num_epochs),
                ("optimizer.patience", self.patience.unwrap_or(1)),
                ("optimizer.batch_size", self.batch_size),
                ("optimizer.gradient_accumulation", self.gradient_accumulation),
            ],
        )
    }

    /// AdamW. All settings are explicit: burn's defaults are not torch's.
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

    /// The rates of a training of `num_steps` steps.
    pub(crate) fn rates(&self, num_steps: usize) -> WarmedUp {
        let num_warmup_steps = self
            .warmup_steps
            .unwrap_or_else(|| (num_steps as f64 * self.warmup_ratio).ceil() as usize);
        WarmedUp::new(self.schedule, self.learning_rate, num_warmup_steps, num_steps)
    }
}

#[cfg(test)]
mod tests {
    use burn::lr_scheduler::LrScheduler;

    use super::*;
    use crate::{AdapterTraining, HeadTraining};

    const HEAD: OptimizerSettings = OptimizerSettings::HEAD;

    #[test]
    fn a_table_is_read_over_the_defaults_of_its_section() {
        let head: HeadTraining = toml::from_str("[optimizer]\nbatch_size = 7").unwrap();
        assert_eq!(head.optimizer, OptimizerSettings { batch_size: 7, ..HEAD });
        let adapter: AdapterTraining = toml::from_str("[optimizer]\nbatch_size = 7").unwrap();
        let expected = OptimizerSettings { batch_size: 7, ..OptimizerSettings::ADAPTER };
        assert_eq!(adapter.optimizer, expected);
        assert_ne!(head.optimizer, adapter.optimizer);
        assert_eq!(toml::from_str::<HeadTraining>("").unwrap().optimizer, HEAD);
    }

    #[test]
    fn keys_are_read_by_name_and_written_so() {
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
    fn a_key_where_it_stood_before_is_told_where_it_is_now() {
        let known = toml::Table::try_from(OptimizerSettings {
            warmup_steps: Some(1),
            patience: Some(1),
            ..HEAD
        });
        let known = known.unwrap();
        for section in Section::ALL {
            for (old, new) in MOVED_KEYS {
                assert!(known.contains_key(new), "{new}");
                let recipe = format!("[{section}]\nnum_layers = 1\n{old} = 1");
                let moved = check_moved_keys(&toml::from_str(&recipe).unwrap());
                let expected =
                    format!("`{section}.{old}` has moved; hint: write `{section}.optimizer.{new}`");
                assert_eq!(moved.unwrap_err().to_string(), expected);
            }
            let recipe = format!("[{section}.optimizer]\nlearning_rate = 1");
            check_moved_keys(&toml::from_str(&recipe).unwrap()).unwrap();
        }
        assert_eq!(known.len(), MOVED_KEYS.len());
    }

    #[test]
    fn every_default_is_in_range_and_a_bad_value_names_section_and_key() {
        for section in Section::ALL {
            for defaults in [HEAD, OptimizerSettings::ADAPTER] {
                defaults.check(section).unwrap();
            }
        }
        let check = |key: &str, bad: OptimizerSettings| {
            for section in Section::ALL {
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
    fn the_warmup_is_a_share_rounded_up_unless_its_steps_are_given() {
        let first_full = |warmup_ratio, warmup_steps, num_steps| {
            let schedule = Schedule::Constant;
            let settings = OptimizerSettings { schedule, warmup_ratio, warmup_steps, ..HEAD };
            let mut rates = settings.rates(num_steps);
            (0..num_steps).position(|_| rates.step() == settings.learning_rate)
        };
        assert_eq!(first_full(0.03, None, 101), Some(4));
        assert_eq!(first_full(0.0, None, 101), Some(0));
        assert_eq!(first_full(0.03, Some(7), 101), Some(7));
        assert_eq!(first_full(0.03, Some(0), 101), Some(0));
        // Kangaroo's 2,000 steps, in a training that is shorter.
        assert_eq!(first_full(0.03, Some(2000), 101), None);
    }
}
