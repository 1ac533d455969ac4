//! AdamW, its learning rates and its clipping, as both recipe sections have them: one check of
//! their ranges, and the trainer that they make.
//!
//! The keys lie flat in each section, which names its own defaults and their sources; what they
//! mean together is here.

use burn::optim::{AdamWConfig, ModuleOptimizer};

use crate::error::TrainError;
use crate::ranges::{Range, check_numbers};
use crate::run::clipping::Clipping;
use crate::run::schedule::{Schedule, WarmedUp};

/// How weights are moved along their gradients.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Optimiser {
    pub(crate) learning_rate: f64,
    pub(crate) schedule: Schedule,
    pub(crate) warm_up_share: f64,
    pub(crate) warm_up_steps: Option<usize>,
    pub(crate) clipping: Clipping,
    pub(crate) weight_decay: f64,
    pub(crate) beta_1: f64,
    pub(crate) beta_2: f64,
    pub(crate) epsilon: f64,
}

impl Optimiser {
    /// Checks every setting's range.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key of `section` that is out of its range.
    pub(crate) fn check(&self, section: &'static str) -> Result<(), TrainError> {
        let (clipping_key, clipping_limit) = self.clipping.setting();
        check_numbers(
            section,
            &[
                ("learning_rate", self.learning_rate, Range::Positive),
                ("weight_decay", self.weight_decay, Range::NotNegative),
                ("beta_1", self.beta_1, Range::BelowOne),
                ("beta_2", self.beta_2, Range::BelowOne),
                ("epsilon", self.epsilon, Range::PositiveInF32),
                ("warm_up_share", self.warm_up_share, Range::UpToOne),
                (clipping_key, clipping_limit, Range::Positive),
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
        let num_warm_up_steps = self
            .warm_up_steps
            .unwrap_or_else(|| (num_steps as f64 * self.warm_up_share).ceil() as usize);
        WarmedUp::new(self.schedule, self.learning_rate, num_warm_up_steps, num_steps)
    }
}

#[cfg(test)]
mod tests {
    use burn::lr_scheduler::LrScheduler;

    use super::*;
    use crate::{AdapterTraining, HeadTraining};

    #[test]
    fn a_value_out_of_range_names_the_section_it_is_in() {
        let bad = Clipping::Value(0.0);
        let head = HeadTraining { clipping: bad, ..HeadTraining::default() };
        let adapter = AdapterTraining { clipping: bad, ..AdapterTraining::default() };
        for (section, checked) in [("head", head.validate()), ("adapter", adapter.validate())] {
            let expected = format!("`{section}.clipping.value` is 0, expected a number above 0");
            assert_eq!(checked.unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn schedule_and_clipping_are_read_by_name_and_written_so() {
        let read = |text: &str| toml::from_str::<HeadTraining>(text);
        let text = "schedule = \"linear\"\nwarm_up_steps = 2000\nclipping = { value = 0.5 }";
        let training = read(text).unwrap();
        assert_eq!(training.schedule, Schedule::Linear);
        assert_eq!(training.warm_up_steps, Some(2000));
        assert_eq!(training.clipping, Clipping::Value(0.5));
        assert_eq!(read(&toml::to_string(&training).unwrap()).unwrap(), training);
        for (wrong, named) in [
            ("schedule = \"step\"", "`cosine`, `linear`, `constant`"),
            ("clipping = { global = 1.0 }", "`norm` or `value`"),
            ("clipping = { norm = 1.0, value = 0.5 }", "clipping"),
            ("clipping = 1.0", "clipping"),
            ("warm_up_steps = -1", "warm_up_steps"),
            ("max_grad_norm = 1.0", "max_grad_norm"),
        ] {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn the_warm_up_is_a_share_rounded_up_unless_its_steps_are_given() {
        let default = HeadTraining::default;
        let first_full = |warm_up_share, warm_up_steps, num_steps| {
            let schedule = Schedule::Constant;
            let training = HeadTraining { schedule, warm_up_share, warm_up_steps, ..default() };
            let mut rates = training.optimiser().rates(num_steps);
            (0..num_steps).position(|_| rates.step() == training.learning_rate)
        };
        assert_eq!(first_full(0.03, None, 101), Some(4));
        assert_eq!(first_full(0.0, None, 101), Some(0));
        assert_eq!(first_full(0.03, Some(7), 101), Some(7));
        assert_eq!(first_full(0.03, Some(0), 101), Some(0));
        // Kangaroo's 2,000 steps, in a training that is shorter.
        assert_eq!(first_full(0.03, Some(2000), 101), None);
    }
}
