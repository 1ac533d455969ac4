//! The learning rate of each step: Hugging Face's `get_cosine_schedule_with_warmup`.
//!
//! burn's own linear scheduler refuses to begin at 0, where this one begins.

use std::f64::consts::PI;

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::optim::LearningRate;

/// Up from 0 in a straight line, then down to 0 along half a cosine.
#[derive(Debug, Clone)]
pub(crate) struct CosineWithWarmUp {
    peak: LearningRate,
    num_warm_up_steps: usize,
    num_steps: usize,
    next_step: usize,
}

impl CosineWithWarmUp {
    /// A schedule of `num_steps` steps, of which ⌈`warm_up_share` · `num_steps`⌉ climb.
    pub(crate) fn new(peak: LearningRate, warm_up_share: f64, num_steps: usize) -> Self {
        let num_warm_up_steps = (num_steps as f64 * warm_up_share).ceil() as usize;
        Self { peak, num_warm_up_steps, num_steps, next_step: 0 }
    }

    /// The same schedule, `num_steps` steps on.
    pub(crate) fn after(self, num_steps: usize) -> Self {
        Self { next_step: num_steps, ..self }
    }

    /// The rate of one step, counted from 0: the first step of a warm-up has rate 0.
    fn rate(&self, step: usize) -> LearningRate {
        if step < self.num_warm_up_steps {
            return self.peak * step as f64 / self.num_warm_up_steps as f64;
        }
        let num_falling = self.num_steps.saturating_sub(self.num_warm_up_steps).max(1);
        let share = (step - self.num_warm_up_steps) as f64 / num_falling as f64;
        self.peak * 0.5 * (1.0 + (PI * share.min(1.0)).cos())
    }
}

impl LrScheduler for CosineWithWarmUp {
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

    #[test]
    fn the_rates_are_those_of_transformers() {
        // transformers' formula for 3 warm-up steps of 10 on a rate of 1, by Python:
        // [s / 3 if s < 3 else 0.5 * (1 + math.cos(math.pi * min(1, (s - 3) / 7))) for s in range(12)]
        let expected = [
            0.0,
            1.0 / 3.0,
            2.0 / 3.0,
            1.0,
            0.950_484_433_951_209_6,
            0.811_744_900_929_366_9,
            0.611_260_466_978_157_2,
            0.388_739_533_021_842_8,
            0.188_255_099_070_633_2,
            0.049_515_566_048_790_4,
            0.0,
            0.0,
        ];
        let mut schedule = CosineWithWarmUp::new(2.0, 0.3, 10);
        for (step, expected) in expected.into_iter().enumerate() {
            let rate = schedule.step();
            // Sixteen digits of numbers near 1.
            assert!((rate - 2.0 * expected).abs() < 1e-12, "step {step}: {rate}");
        }
    }

    #[test]
    fn the_warm_up_is_rounded_up_and_may_be_absent_or_everything() {
        assert_eq!(CosineWithWarmUp::new(1.0, 0.03, 101).num_warm_up_steps, 4);
        assert_eq!(CosineWithWarmUp::new(1.0, 0.0, 10).step(), 1.0);
        let mut only = CosineWithWarmUp::new(1.0, 1.0, 4);
        assert_eq!([(); 5].map(|()| only.step()), [0.0, 0.25, 0.5, 0.75, 1.0]);
    }

    #[test]
    fn a_record_and_a_number_of_steps_resume_it() {
        let mut schedule = CosineWithWarmUp::new(1.0, 0.2, 20);
        for _ in 0..7 {
            schedule.step();
        }
        let mut after = CosineWithWarmUp::new(1.0, 0.2, 20).after(7);
        let mut resumed = CosineWithWarmUp::new(1.0, 0.2, 20);
        resumed.load_record(schedule.to_record());
        let next = schedule.step();
        assert_eq!((resumed.step(), after.step()), (next, next));
    }
}
