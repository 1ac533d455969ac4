//! Statistics with confidence intervals from a seeded percentile bootstrap (Efron 1979).
//!
//! Callers resample whole prompts, because the tokens of one response are not independent.
//! [`Estimate::agrees_with`] compares two statistics from different prompts.

use serde::Serialize;

use crate::serialized::deserialize_by_new;
use crate::{Result, SeededDraws, TheoryError};

/// A number and its confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The value of the statistic over all items.
    pub value: f64,
    /// The interval's lower end, at most `value`.
    pub low: f64,
    /// The interval's upper end, at least `value`.
    pub high: f64,
}

deserialize_by_new!(Estimate { value: f64, low: f64, high: f64 });

impl Estimate {
    /// Creates an estimate from a number and the ends of its interval.
    ///
    /// # Errors
    /// Unless all three are finite and `low` <= `value` <= `high`.
    pub fn new(value: f64, low: f64, high: f64) -> Result<Self> {
        // Between finite ends the value is finite too.
        let is_valid = low.is_finite() && high.is_finite() && low <= value && value <= high;
        TheoryError::ensure(is_valid, || {
            format!(
                "an interval must be finite and hold its value, not `{value}` in `{low}` to `{high}`"
            )
        })?;
        Ok(Self { value, low, high })
    }

    /// Applies an increasing function to the value and both ends.
    #[must_use]
    pub fn map(self, increasing: impl Fn(f64) -> f64) -> Self {
        let Self { value, low, high } = self;
        Self { value: increasing(value), low: increasing(low), high: increasing(high) }
    }

    /// Returns whether two independent statistics may be equal. They may be if the confidence
    /// interval of their difference contains 0, at the same level as their own intervals.
    ///
    /// The interval of the difference follows from the two intervals (MOVER; Zou and Donner 2008).
    /// Its half-width is √(a² + b²), where a and b are the distances from each value to the
    /// interval end that faces the other value. So estimates with overlapping intervals may still
    /// disagree.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let (lower, upper) = if self.value <= other.value { (self, other) } else { (other, self) };
        let slack = (lower.high - lower.value).hypot(upper.value - upper.low);
        upper.value - lower.value <= slack
    }
}

/// Computes the percentile bootstrap interval of `statistic` over `num_items` items.
///
/// `statistic` gets indices of items. For [`Estimate::value`] these are all indices in order; for a
/// resample, `num_items` indices drawn with replacement. Resamples whose statistic is NaN (a rate
/// over nothing) are ignored. The interval leaves (1 − `level`) / 2 of the resamples outside each
/// end, so `num_resamples` should be a large multiple of 2 / (1 − `level`).
///
/// With no item or one item, both ends of the interval equal the value. The interval always
/// contains the value, even if all resamples lie on one side of it, as for a maximum.
///
/// # Panics
/// If `level` is not between 0 and 1.
///
/// ```
/// use draftsmith_theory::bootstrap;
/// let (accepted, drafted) = ([3.0, 1.0, 4.0], [4.0, 4.0, 5.0]);
/// let sum = |items: &[usize], of: &[f64]| items.iter().map(|item| of[*item]).sum::<f64>();
/// let rate = bootstrap(3, 2000, 0, 0.95, |items| sum(items, &accepted) / sum(items, &drafted));
/// assert_eq!(rate.value, 8.0 / 13.0);
/// assert!(rate.low < rate.value && rate.value < rate.high);
/// ```
pub fn bootstrap(
    num_items: usize,
    num_resamples: usize,
    seed: u64,
    level: f64,
    statistic: impl Fn(&[usize]) -> f64,
) -> Estimate {
    assert!((0.0..=1.0).contains(&level), "level must lie between 0 and 1, not {level}");
    let mut items: Vec<usize> = (0..num_items).collect();
    let value = statistic(&items);
    let mut draws = SeededDraws::new(seed, &["bootstrap"]);
    let num_resamples = if num_items > 1 { num_resamples } else { 0 };
    let mut found = Vec::with_capacity(num_resamples);
    for _ in 0..num_resamples {
        // The product rounds to less than `num_items`: the largest uniform is 1 − 2^-53.
        items.fill_with(|| (draws.uniform() * num_items as f64) as usize);
        found.push(statistic(&items));
    }
    found.retain(|statistic| !statistic.is_nan());
    found.sort_unstable_by(f64::total_cmp);
    let tail = (1.0 - level) / 2.0;
    Estimate {
        value,
        low: quantile(&found, tail).unwrap_or(value).min(value),
        high: quantile(&found, 1.0 - tail).unwrap_or(value).max(value),
    }
}

/// Interpolates the quantile of sorted numbers at `share` in [0, 1]. None without numbers.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let place = share * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    // The difference of two equal infinities is NaN, so it is avoided.
    Some(if below == above { below } else { below + (above - below) * place.fract() })
}

/// Returns the element with the least number, the first among equals. Returns `None` without elements.
pub fn least_by<T>(all: impl IntoIterator<Item = T>, number: impl Fn(&T) -> f64) -> Option<T> {
    all.into_iter().min_by(|one, other| number(one).total_cmp(&number(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(values: &[f64]) -> impl Fn(&[usize]) -> f64 {
        move |items| items.iter().map(|item| values[*item]).sum::<f64>() / items.len() as f64
    }

    fn uniforms(len: usize, name: &str) -> Vec<f64> {
        let mut draws = SeededDraws::new(1, &["intervals", name]);
        (0..len).map(|_| draws.uniform()).collect()
    }

    #[test]
    fn intervals_of_a_mean_have_the_stated_coverage() {
        let num_cases = 400;
        let covers = |case: usize| {
            let items = uniforms(80, &case.to_string());
            let found = bootstrap(items.len(), 400, case as u64, 0.9, mean(&items));
            found.low <= 0.5 && 0.5 <= found.high
        };
        let share = (0..num_cases).filter(|case| covers(*case)).count() as f64 / 400.0;
        // Four standard deviations of a share of 400 are 0.06; 80 items are few, which adds 0.01.
        assert!((share - 0.9).abs() < 0.07, "{share}");
    }

    #[test]
    fn the_interval_of_a_mean_has_the_width_of_its_standard_error() {
        let items = uniforms(1000, "width");
        let found = bootstrap(items.len(), 2000, 0, 0.95, mean(&items));
        let expected = 2.0 * 1.96 / 12f64.sqrt() / 1000f64.sqrt();
        // A quantile of 2000 resamples has an error of some 3 % of the width.
        assert!(((found.high - found.low) / expected - 1.0).abs() < 0.1, "{found:?}");
        assert_eq!(found.value, items.iter().sum::<f64>() / 1000.0);
    }

    #[test]
    fn the_same_seed_gives_the_same_interval() {
        let items = uniforms(50, "seeds");
        let of = |seed| bootstrap(items.len(), 200, seed, 0.95, mean(&items));
        assert_eq!(of(3), of(3));
        assert_ne!(of(3), of(4));
        assert_eq!(of(3).value, of(4).value);
    }

    #[test]
    fn resamples_draw_every_item_equally_often() {
        let hits = std::cell::RefCell::new([0_usize; 17]);
        bootstrap(17, 1000, 0, 0.5, |items| {
            assert_eq!(items.len(), 17);
            items.iter().for_each(|item| hits.borrow_mut()[*item] += 1);
            0.0
        });
        // One call for the value, and 1000 draws in expectation; five standard deviations.
        assert!(hits.into_inner().iter().all(|hits| hits.abs_diff(1001) < 160));
    }

    #[test]
    fn an_interval_of_nothing_to_draw_is_the_value() {
        let point = |value| Estimate { value, low: value, high: value };
        assert_eq!(bootstrap(1, 500, 0, 0.95, mean(&[0.25])), point(0.25));
        assert_eq!(bootstrap(3, 0, 0, 0.95, mean(&[0.25, 0.5, 0.75])), point(0.5));
        assert_eq!(bootstrap(3, 500, 0, 0.95, mean(&[0.5; 3])), point(0.5));
        let empty = bootstrap(0, 500, 0, 0.95, mean(&[]));
        assert!(empty.value.is_nan() && empty.low.is_nan() && empty.high.is_nan());
        assert_eq!(bootstrap(2, 9, 0, 0.95, |_| f64::INFINITY), point(f64::INFINITY));
    }

    #[test]
    fn nan_resamples_are_ignored_and_the_value_is_always_inside() {
        // A rate that is NaN unless the second item is drawn.
        let sum = |items: &[usize]| items.iter().sum::<usize>() as f64;
        let rate = bootstrap(2, 500, 0, 0.95, |items| sum(items) / sum(items));
        assert_eq!(rate, Estimate { value: 1.0, low: 1.0, high: 1.0 });
        let largest = bootstrap(40, 50, 0, 0.1, |items| {
            items.iter().copied().max().expect("some item") as f64
        });
        assert!(largest.low <= 39.0 && largest.high == 39.0, "{largest:?}");
    }

    #[test]
    fn numbers_agree_within_the_hypotenuse_of_their_half_widths() {
        let around =
            |value: f64, half: f64| Estimate { value, low: value - half, high: value + half };
        assert!(around(0.0, 3.0).agrees_with(&around(4.9, 4.0)));
        assert!(!around(0.0, 3.0).agrees_with(&around(5.1, 4.0)));
        assert!(!around(5.1, 4.0).agrees_with(&around(0.0, 3.0)));
        // Only the ends that face each other count.
        let lopsided = Estimate { value: 1.0, low: -9.0, high: 1.5 };
        assert!(
            !lopsided.agrees_with(&around(2.0, 0.1)) && around(0.0, 0.1).agrees_with(&lopsided)
        );
        assert!(around(1.0, 0.0).agrees_with(&around(1.0, 0.0)));
    }

    #[test]
    fn an_interval_that_does_not_hold_its_value_is_an_error() {
        assert!(Estimate::new(0.5, 0.5, 0.5).is_ok());
        for (value, low, high) in
            [(0.4, 0.5, 0.6), (0.7, 0.5, 0.6), (f64::NAN, 0.0, 1.0), (0.5, 0.0, f64::INFINITY)]
        {
            assert!(Estimate::new(value, low, high).is_err(), "{value} in {low} to {high}");
        }
    }
}
