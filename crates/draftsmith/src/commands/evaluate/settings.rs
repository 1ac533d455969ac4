//! What is compared: the target alone, fixed candidate lengths, the head's stop thresholds.

use draftsmith_theory::{Bounds, FixedLength, RejectionThreshold, StopRule, TheoryError};

use crate::recipe::EvaluateRecipe;
use crate::results::{DrafterName, StopRuleName};

/// One way of decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Setting {
    /// The target alone.
    Plain,
    /// K candidates a round.
    FixedLength(usize),
    /// SpecDec++ with threshold h and so many candidates at most.
    RejectionThreshold(f64, usize),
}

impl Setting {
    /// All settings of a recipe: plain decoding first, the head's only where there is one.
    pub(super) fn all(evaluate: &EvaluateRecipe, has_head: bool) -> Vec<Self> {
        let fixed = evaluate.candidate_lengths.iter().map(|k| Self::FixedLength(*k));
        let threshold = |h: &f64| Self::RejectionThreshold(*h, evaluate.max_candidate_length);
        let head = evaluate.stop_thresholds.iter().map(threshold).filter(|_| has_head);
        std::iter::once(Self::Plain).chain(fixed).chain(head).collect()
    }

    /// The rule, or none for plain decoding.
    ///
    /// # Errors
    /// If the setting is outside the rule's range.
    pub(super) fn rule(self) -> Result<Option<Box<dyn StopRule>>, TheoryError> {
        Ok(match self {
            Self::Plain => None,
            Self::FixedLength(length) => Some(Box::new(FixedLength::new(length)?)),
            Self::RejectionThreshold(h, most) => {
                Some(Box::new(RejectionThreshold::new(h, Bounds::new(1, most)?)?))
            }
        })
    }

    /// The drafter's name in results.
    pub(super) fn drafter(self) -> DrafterName {
        if self == Self::Plain { DrafterName::None } else { DrafterName::Draft }
    }

    /// The stop rule's name in results.
    pub(super) fn stop_rule(self) -> StopRuleName {
        match self {
            Self::Plain => StopRuleName::None,
            Self::FixedLength(_) => StopRuleName::FixedLength,
            Self::RejectionThreshold(..) => StopRuleName::RejectionThreshold,
        }
    }

    /// The rule's parameter in results: K or h.
    pub(super) fn parameter(self) -> Option<f64> {
        match self {
            Self::Plain => None,
            Self::FixedLength(length) => Some(length as f64),
            Self::RejectionThreshold(h, _) => Some(h),
        }
    }

    /// What files and streams of draws call it: `plain`, `fixed-5`, `head-0.7`.
    pub(super) fn name(self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::FixedLength(length) => format!("fixed-{length}"),
            Self::RejectionThreshold(h, _) => format!("head-{h}"),
        }
    }
}
