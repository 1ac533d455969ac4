//! How sure a number over prompts is: the percentile bootstrap (Efron 1979), seeded.
//!
//! Prompts are what is drawn anew, because tokens of one response are not independent. Whether two
//! numbers that were found on different prompts agree is asked of their intervals together
//! ([`Interval::agrees_with`]).

use crate::{SeededDraws, TheoryError};

/// A number and an interval around it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Over all items as they are.
    pub value: f64,
    /// The interval's lower end, at most `value`.
    pub low: f64,
    /// The interval's upper end, at least `value`.
    pub high: f64,
}

impl Interval {
    /// A number with its interval.
    ///
    /// # Errors
    /// Unless all are finite and `low` <= `value` <= `high`.
    pub fn new(value: f64, low: f64, high: f64) -> Result<Self, TheoryError> {
        // Finite ends and an order leave nothing else for the value.
        if low.is_finite() && high.is_finite() && low <= value && value <= high {
            Ok(Self { value, low, high })
        } else {
            Err(TheoryError::Interval { value, low, high })
        }
    }

    /// Whether two independent numbers may be one and the same: whether the interval of their
    /// difference holds 0, at the level of their own intervals.
    ///
    /// The ends of that interval are recovered from the two (MOVER; Zou and Donner 2008): the
    /// distances to the ends that face each other, as the legs of a right triangle. Intervals that
    /// meet may thus still disagree.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let (lower, upper) = if self.value <= other.value { (self, other) } else { (other, self) };
        let slack = (lower.high - lower.value).hypot(upper.value - upper.low);
        upper.value - lower.value <= slack
    }
}

/// The percentile bootstrap interval of `statistic` over `num_items` items.
///
/// `statistic` is told which items to look at, by index: each once, in order, for
/// [`Interval::value`], and otherwise `num_items` of them drawn with replacement. The list is one
/// buffer, filled anew; a statistic of sums need not copy anything either. A resample for which it
/// is no number (a rate over nothing) is left out. The interval leaves (1 − `level`) / 2 of the
/// resamples beyond each end, so that `num_resamples` should be a good multiple of 2 / (1 −
/// `level`).
///
/// Without items, or with a single one, there is nothing to draw: the interval is the value alone.
/// It also holds the value where no resample came out there, as may happen to a largest or a
/// smallest of items.
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
) -> Interval {
    assert!((0.0..=1.0).contains(&level), "level must lie between 0 and 1, not {level}");
    let mut items: Vec<usize> = (0..num_items).collect();
    let value = statistic(&items);
    let mut draws = SeededDraws::new(seed, &["bootstrap"]);
    let num_resamples = if num_items > 1 { num_resamples } else { 0 };
    let mut found = Vec::with_capacity(num_resamples);
    for _ in 0..num_resamples {
        // Below `num_items`, also when rounded: the greatest uniform is 1 − 2^-53.
        items.fill_with(|| (draws.uniform() * num_items as f64) as usize);
        found.push(statistic(&items));
    }
    found.retain(|statistic| !statistic.is_nan());
    found.sort_unstable_by(f64::total_cmp);
    let tail = (1.0 - level) / 2.0;
    Interval {
        value,
        low: quantile(&found, tail).unwrap_or(value).min(value),
        high: quantile(&found, 1.0 - tail).unwrap_or(value).max(value),
    }
}

/// The quantile of sorted numbers, between two of them by a straight line; None of nothing.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let place = share * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    // Equal infinities have no difference.
    Some(if below == above { below } else { below + (above - below) * place.fract() })
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
    fn intervals_of_a_mean_hold_the_true_one_as_often_as_they_say() {
        let num_cases = 400;
        let covers = |case: usize| {
            let items = uniforms(80, &case.to_string());
            let found = bootstrap(items.len(), 400, case as u64, 0.9, mean(&items));
            found.low <= 0.5 && 0.5 <= found.high
        };
        let share = (0..num_cases).filter(|case| covers(*case)).count() as f64 / 400.0;
        // Four standard deviations of a share of 400, 0.06, and a point that 80 items are few.
        assert!((share - 0.9).abs() < 0.07, "{share}");
    }

    #[test]
    fn the_interval_of_a_mean_is_as_wide_as_its_standard_error_says() {
        let items = uniforms(1000, "width");
        let found = bootstrap(items.len(), 2000, 0, 0.95, mean(&items));
        let expected = 2.0 * 1.96 / 12f64.sqrt() / 1000f64.sqrt();
        // A quantile of 2000 resamples is known to some 3 % of the width.
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
    fn a_statistic_is_told_as_many_items_as_there_are_and_each_as_often() {
        let hits = std::cell::RefCell::new([0_usize; 17]);
        bootstrap(17, 1000, 0, 0.5, |items| {
            assert_eq!(items.len(), 17);
            items.iter().for_each(|item| hits.borrow_mut()[*item] += 1);
            0.0
        });
        // The value's own call and 1000 draws in expectation; five standard deviations.
        assert!(hits.into_inner().iter().all(|hits| hits.abs_diff(1001) < 160));
    }

    #[test]
    fn nothing_to_draw_from_leaves_the_value_alone() {
        let point = |value| Interval { value, low: value, high: value };
        assert_eq!(bootstrap(1, 500, 0, 0.95, mean(&[0.25])), point(0.25));
        assert_eq!(bootstrap(3, 0, 0, 0.95, mean(&[0.25, 0.5, 0.75])), point(0.5));
        assert_eq!(bootstrap(3, 500, 0, 0.95, mean(&[0.5; 3])), point(0.5));
        let empty = bootstrap(0, 500, 0, 0.95, mean(&[]));
        assert!(empty.value.is_nan() && empty.low.is_nan() && empty.high.is_nan());
        assert_eq!(bootstrap(2, 9, 0, 0.95, |_| f64::INFINITY), point(f64::INFINITY));
    }

    #[test]
    fn resamples_without_a_number_are_left_out_and_the_value_is_always_inside() {
        // A rate over items that count for nothing: defined where the second was drawn.
        let sum = |items: &[usize]| items.iter().sum::<usize>() as f64;
        let rate = bootstrap(2, 500, 0, 0.95, |items| sum(items) / sum(items));
        assert_eq!(rate, Interval { value: 1.0, low: 1.0, high: 1.0 });
        let largest = bootstrap(40, 50, 0, 0.1, |items| {
            items.iter().copied().max().expect("some item") as f64
        });
        assert!(largest.low <= 39.0 && largest.high == 39.0, "{largest:?}");
    }

    #[test]
    fn numbers_agree_within_the_root_of_both_squared_halves() {
        let around =
            |value: f64, half: f64| Interval { value, low: value - half, high: value + half };
        assert!(around(0.0, 3.0).agrees_with(&around(4.9, 4.0)));
        assert!(!around(0.0, 3.0).agrees_with(&around(5.1, 4.0)));
        assert!(!around(5.1, 4.0).agrees_with(&around(0.0, 3.0)));
        // Only the sides that face each other count.
        let lopsided = Interval { value: 1.0, low: -9.0, high: 1.5 };
        assert!(
            !lopsided.agrees_with(&around(2.0, 0.1)) && around(0.0, 0.1).agrees_with(&lopsided)
        );
        assert!(around(1.0, 0.0).agrees_with(&around(1.0, 0.0)));
    }

    #[test]
    fn ends_that_do_not_hold_the_value_are_refused() {
        assert!(Interval::new(0.5, 0.5, 0.5).is_ok());
        for (value, low, high) in
            [(0.4, 0.5, 0.6), (0.7, 0.5, 0.6), (f64::NAN, 0.0, 1.0), (0.5, 0.0, f64::INFINITY)]
        {
            assert!(Interval::new(value, low, high).is_err(), "{value} in {low} to {high}");
        }
    }
}
