//! The learning rate of each step: Hugging Face's
//! `get_{cosine,linear,constant}_schedule_with_warmup`.
//!
//! burn's own linear scheduler refuses to begin at 0, where these begin.

use std::f64::consts::PI;

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::optim::LearningRate;
use serde::{Deserialize, Serialize};

/// What the learning rate does after its warmup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// It falls to 0 along half a cosine.
    #[default]
    Cosine,
    /// It falls to 0 in a straight line.
    Linear,
    /// It stays.
    Constant,
}

impl Schedule {
    /// The share of the peak at `num_fallen` of `num_falling` steps after the warmup.
    fn share(self, num_fallen: usize, num_falling: usize) -> f64 {
        let fallen = (num_fallen as f64 / num_falling.max(1) as f64).min(1.0);
        match self {
            Self::Cosine => 0.5 * (1.0 + (PI * fallen).cos()),
            Self::Linear => {
                num_falling.saturating_sub(num_fallen) as f64 / num_falling.max(1) as f64
            }
            Self::Constant => 1.0,
        }
    }
}

/// Up from 0 in a straight line, then along a [`Schedule`].
#[derive(Debug, Clone)]
pub(crate) struct WarmedUp {
    schedule: Schedule,
    peak: LearningRate,
    num_warmup_steps: usize,
    num_steps: usize,
    next_step: usize,
}

impl WarmedUp {
    /// The rates of `num_steps` steps, of which the first `num_warmup_steps` climb. Where those
    /// are all, or more, the rest is never reached.
    pub(crate) fn new(
        schedule: Schedule,
        peak: LearningRate,
        num_warmup_steps: usize,
        num_steps: usize,
    ) -> Self {
        Self { schedule, peak, num_warmup_steps, num_steps, next_step: 0 }
    }

    /// The same rates, `num_steps` steps on.
    pub(crate) fn after(self, num_steps: usize) -> Self {
        Self { next_step: num_steps, ..self }
    }

    /// The rate of one step, counted from 0: the first step of a warmup has rate 0.
    fn rate(&self, step: usize) -> LearningRate {
        if step < self.num_warmup_steps {
            return self.peak * step as f64 / self.num_warmup_steps as f64;
        }
        let num_falling = self.num_steps.saturating_sub(self.num_warmup_steps);
        self.peak * self.schedule.share(step - self.num_warmup_steps, num_falling)
    }
}

impl LrScheduler for WarmedUp {
    fn step(&mut self) -> LearningRate {
        let rate = self.rate(self.next_step);
        self.next_step += 1;
        rate
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar("next_step", self.next_step as u64)
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        if let Some(step) = record.scalar::<u64>("next_step") {
            self.next_step = step as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(mut rates: WarmedUp, expected: &[f64]) {
        for (step, expected) in expected.iter().enumerate() {
            let rate = rates.step();
            // Sixteen digits of numbers near 1.
            assert!((rate - expected).abs() < 1e-12, "step {step}: {rate}, not {expected}");
        }
    }

    /// transformers 5.23, by Python, with `get_constant_schedule_with_warmup(optimizer, 3)` for the
    /// last:
    /// ```python
    /// optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    /// scheduler = get_cosine_schedule_with_warmup(optimizer, 3, 10)  # or linear
    /// for _ in range(11):
    ///     print(scheduler.get_last_lr()[0]); optimizer.step(); scheduler.step()
    /// ```
    #[test]
    fn the_rates_are_those_of_transformers() {
        let rates = |schedule| WarmedUp::new(schedule, 2.0, 3, 10);
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
    fn a_warm_up_may_be_absent_or_everything() {
        for schedule in [Schedule::Cosine, Schedule::Linear, Schedule::Constant] {
            assert_eq!(WarmedUp::new(schedule, 1.0, 0, 10).step(), 1.0);
            check(WarmedUp::new(schedule, 1.0, 4, 4), &[0.0, 0.25, 0.5, 0.75]);
            check(WarmedUp::new(schedule, 1.0, 8, 4), &[0.0, 0.125, 0.25, 0.375]);
        }
    }

    #[test]
    fn past_the_end_the_rate_does_not_rise_again() {
        // transformers' cosine does: such steps are not planned, there or here.
        check(WarmedUp::new(Schedule::Cosine, 1.0, 1, 2), &[0.0, 1.0, 0.0, 0.0, 0.0]);
        check(WarmedUp::new(Schedule::Linear, 1.0, 1, 2), &[0.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_record_and_a_number_of_steps_resume_it() {
        let mut rates = WarmedUp::new(Schedule::Cosine, 1.0, 4, 20);
        for _ in 0..7 {
            rates.step();
        }
        let mut after = WarmedUp::new(Schedule::Cosine, 1.0, 4, 20).after(7);
        let mut resumed = WarmedUp::new(Schedule::Cosine, 1.0, 4, 20);
        resumed.load_record(rates.to_record());
        let next = rates.step();
        assert_eq!((resumed.step(), after.step()), (next, next));
    }
}
