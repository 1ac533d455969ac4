//! The ranges of a recipe's settings, and the error that names what is outside its own.

use crate::error::TrainError;
use crate::section::Section;

/// What a number may be. NaN and the infinities are in no range.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Range {
    /// Above 0.
    Positive,
    /// Above 0 in f32 too, where the optimizer computes.
    PositiveInF32,
    /// 0 or more.
    NotNegative,
    /// From 0 to below 1.
    BelowOne,
    /// From 0 to 1.
    UpToOne,
    /// Above 0 and below 1.
    BetweenZeroAndOne,
}

impl Range {
    fn contains(self, x: f64) -> bool {
        match self {
            Self::Positive => x > 0.0 && x.is_finite(),
            Self::PositiveInF32 => x >= f64::from(f32::MIN_POSITIVE) && x.is_finite(),
            Self::NotNegative => x >= 0.0 && x.is_finite(),
            Self::BelowOne => (0.0..1.0).contains(&x),
            Self::UpToOne => (0.0..=1.0).contains(&x),
            Self::BetweenZeroAndOne => x > 0.0 && x < 1.0,
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Positive => "a number above 0",
            Self::PositiveInF32 => "a number above 1.2e-38",
            Self::NotNegative => "0 or more",
            Self::BelowOne => "0 to below 1",
            Self::UpToOne => "0 to 1",
            Self::BetweenZeroAndOne => "a number between 0 and 1",
        }
    }
}

/// Checks the numbers of a recipe's section, in order.
///
/// # Errors
/// [`TrainError::Setting`] with the first one outside its range.
pub(crate) fn check_numbers(
    section: Section,
    numbers: &[(&'static str, f64, Range)],
) -> Result<(), TrainError> {
    match numbers.iter().find(|(_, value, range)| !range.contains(*value)) {
        Some((key, value, range)) => Err(TrainError::Setting {
            section,
            key,
            value: value.to_string(),
            expected: range.expected(),
        }),
        None => Ok(()),
    }
}

/// Checks that no count of a recipe's section is 0.
///
/// # Errors
/// [`TrainError::Setting`] with the first one that is.
pub(crate) fn check_counts(
    section: Section,
    counts: &[(&'static str, usize)],
) -> Result<(), TrainError> {
    match counts.iter().find(|(_, value)| *value == 0) {
        Some((key, value)) => Err(TrainError::Setting {
            section,
            key,
            value: value.to_string(),
            expected: "1 or more",
        }),
        None => Ok(()),
    }
}
