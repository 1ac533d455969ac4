//! The learning rate of each step, equal to Hugging Face's
//! `get_{cosine,linear,constant}_schedule_with_warmup`.
//!
//! burn's linear scheduler cannot begin at 0, as these do.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// How the learning rate changes after the warmup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// It falls to 0 along half a cosine.
    #[default]
    Cosine,
    /// It falls to 0 linearly.
    Linear,
    /// It stays at its peak.
    Constant,
}

/// The learning rates of a training: a linear warmup from 0 to the peak, then a [`Schedule`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct LearningRates {
    pub(crate) schedule: Schedule,
    pub(crate) peak: f64,
    pub(crate) num_warmup_steps: usize,
    pub(crate) num_steps: usize,
}

impl LearningRates {
    /// The rate of a step, counted from 0.
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

    /// From transformers 5.23, with `get_constant_schedule_with_warmup(optimizer, 3)` for the constant
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
