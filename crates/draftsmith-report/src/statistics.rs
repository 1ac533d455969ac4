//! Bootstrap intervals over prompts, and medians.

use draftsmith_theory::{Estimate, bootstrap};

/// The number of resamples of a displayed interval.
const NUM_RESAMPLES: usize = 2000;
/// The confidence level of a displayed interval.
const LEVEL: f64 = 0.95;
/// The confidence level of a promised acceptance rate, which `check` compares with measurements. It
/// is so high that a measurement outside the interval means a fault and not chance.
const PROMISE_LEVEL: f64 = 0.9999;
/// The number of resamples of a promised interval. Ten of them lie outside the interval.
const NUM_PROMISE_RESAMPLES: usize = 100_000;

/// Computes a statistic over prompts with its 95 % interval.
pub fn shown_interval(
    num_prompts: usize,
    seed: u64,
    statistic: impl Fn(&[usize]) -> f64,
) -> Estimate {
    bootstrap(num_prompts, NUM_RESAMPLES, seed, LEVEL, statistic)
}

/// Computes a statistic over prompts with its 99.99 % interval.
pub fn promise_interval(
    num_prompts: usize,
    seed: u64,
    statistic: impl Fn(&[usize]) -> f64,
) -> Estimate {
    bootstrap(num_prompts, NUM_PROMISE_RESAMPLES, seed, PROMISE_LEVEL, statistic)
}

/// Returns the median; `None` without values.
pub fn median_of(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}
