//! The same number of candidates every round.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{Bounds, DraftSignals, StopRule, StopRuleConfig, StopRuleEntry, StopRuleName};
use crate::TheoryError;

/// Settings of [`FixedLength`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FixedLengthConfig {
    /// K, candidates a round.
    pub candidate_length: usize,
}

impl FixedLengthConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::FixedLength,
        file_name: "fixed",
        symbol: "K",
        text: "fixed length",
        family: RuleFamily::Length,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            key: RecipeKey {
                name: "candidate_lengths",
                doc: "fixed lengths K of the separate draft",
                values: KeyValues::Lengths,
                default: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0],
            },
            self_draft_key: Some(RecipeKey {
                name: "self_draft_lengths",
                doc: "fixed lengths of self-drafts",
                values: KeyValues::Lengths,
                default: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            }),
            options: &[],
            sweep: Sweep::Lengths(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
            config: |value, _, _| {
                StopRuleConfig::FixedLength(Self { candidate_length: value as usize })
            },
        }),
    }];
}

impl RuleConfig for FixedLengthConfig {
    fn name(&self) -> StopRuleName {
        StopRuleName::FixedLength
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        Ok(Box::new(FixedLength::new(self.candidate_length)?))
    }

    fn parameter(&self) -> f64 {
        self.candidate_length as f64
    }
}

/// The same number of candidates every round: the baseline K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FixedLength {
    /// Candidates a round, at least 1.
    pub candidate_length: usize,
}

impl FixedLength {
    /// Rounds of `candidate_length` candidates.
    ///
    /// # Errors
    /// If `candidate_length` is 0.
    pub fn new(candidate_length: usize) -> Result<Self, TheoryError> {
        Bounds::new(candidate_length, candidate_length)?;
        Ok(Self { candidate_length })
    }
}

impl StopRule for FixedLength {
    fn bounds(&self) -> Bounds {
        Bounds { min: self.candidate_length, max: self.candidate_length }
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.candidate_length
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    #[test]
    fn a_fixed_length_is_fixed() {
        let mut rule: Box<dyn StopRule> = Box::new(FixedLength::new(3).expect("a valid length"));
        assert_eq!(round_length(&mut *rule, &[DraftSignals::default(); 8]), Some(3));
        assert_eq!(rule.bounds(), Bounds { min: 3, max: 3 });
        assert_eq!(rule.needs(), super::super::SignalNeeds::default());
        assert!(FixedLength::new(0).is_err());
    }
}
