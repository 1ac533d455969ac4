//! The candidate lengths that rounds are kept within, and what settings have in common.

use serde::{Deserialize, Serialize};

use crate::TheoryError;

/// The smallest and the greatest number of candidates a round, both inclusive, `min` <= `max`, 1 <=
/// `max`.
///
/// The round loop applies them: below `min` it draws on whatever the rule says, at `max` it stops.
/// A minimum of 0 lets a rule that stops before a draw end a round without candidates; for others
/// it is 1. It may also stop early for reasons of its own, such as an end-of-sequence candidate or
/// the token limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedBounds")]
pub struct Bounds {
    /// The least number of candidates.
    pub min: usize,
    /// The greatest number of candidates.
    pub max: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedBounds {
    min: usize,
    max: usize,
}

impl TryFrom<UncheckedBounds> for Bounds {
    type Error = TheoryError;

    fn try_from(unchecked: UncheckedBounds) -> Result<Self, TheoryError> {
        Self::new(unchecked.min, unchecked.max)
    }
}

impl Default for Bounds {
    /// 1 to 20 candidates. The authors' code says 2 to 20, but its minimum changes nothing, since
    /// step 1 never stops.
    fn default() -> Self {
        Self { min: 1, max: 20 }
    }
}

impl Bounds {
    /// Bounds from `min` to `max` candidates.
    ///
    /// # Errors
    /// Unless `min` <= `max` and 1 <= `max`.
    pub fn new(min: usize, max: usize) -> Result<Self, TheoryError> {
        if 1 <= max && min <= max {
            Ok(Self { min, max })
        } else {
            Err(TheoryError::Bounds { min, max })
        }
    }
}

/// Refuses a threshold that is no probability.
pub(super) fn check_probability(
    threshold: f64,
    error: impl FnOnce(f64) -> TheoryError,
) -> Result<(), TheoryError> {
    if (0.0..=1.0).contains(&threshold) { Ok(()) } else { Err(error(threshold)) }
}
