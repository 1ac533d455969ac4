//! The ranges of numeric settings in a recipe.

use crate::error::{Result, Section, TrainError};

/// The range of a numeric setting. NaN and the infinities are outside every range.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Range {
    Positive,
    /// Numbers that are positive after rounding to f32, the optimizer's type.
    PositiveInF32,
    /// The interval \[0, 1).
    BelowOne,
    /// The interval (0, 1).
    BetweenZeroAndOne,
    /// A range from a minimum to a maximum, both included. The text is the range in words.
    Within(f64, f64, &'static str),
}

impl Range {
    pub(crate) const NOT_NEGATIVE: Self = Self::Within(0.0, f64::MAX, "0 or more");
    pub(crate) const AT_LEAST_ONE: Self = Self::Within(1.0, f64::MAX, "1 or more");
    pub(crate) const AT_LEAST_TWO: Self = Self::Within(2.0, f64::MAX, "2 or more");

    /// Returns whether `x` is in the range, and the range in words.
    fn check(self, x: f64) -> (bool, &'static str) {
        match self {
            Self::Positive => (x > 0.0, "a number above 0"),
            Self::PositiveInF32 => (x >= f64::from(f32::MIN_POSITIVE), "a number above 1.2e-38"),
            Self::BelowOne => ((0.0..1.0).contains(&x), "0 to below 1"),
            Self::BetweenZeroAndOne => (x > 0.0 && x < 1.0, "a number between 0 and 1"),
            Self::Within(least, most, expected) => ((least..=most).contains(&x), expected),
        }
    }
}

/// Checks the numbers of a recipe's section against their ranges. Each number comes with its key.
///
/// # Errors
/// If a number is outside its range. The error names the first one.
pub(crate) fn check_numbers(
    section: Section,
    numbers: &[(&'static str, f64, Range)],
) -> Result<()> {
    for &(key, value, range) in numbers {
        let (is_inside, expected) = range.check(value);
        if !(is_inside && value.is_finite()) {
            return Err(TrainError::setting(section, key, value, expected));
        }
    }
    Ok(())
}
