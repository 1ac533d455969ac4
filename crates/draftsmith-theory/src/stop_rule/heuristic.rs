//! The schedule of transformers: the candidate length moves with what is accepted.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{
    Bounds, DraftSignals, RoundEnd, StopRule, StopRuleConfig, StopRuleEntry, StopRuleName,
};
use crate::TheoryError;

/// Settings of [`Heuristic`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeuristicConfig {
    /// Candidates in the first round.
    pub initial_length: usize,
    /// The lengths it moves within.
    pub bounds: Bounds,
}

impl HeuristicConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::Heuristic,
        file_name: "heuristic",
        symbol: "heuristic K",
        text: "transformers\u{2019} heuristic",
        family: RuleFamily::Length,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            key: RecipeKey {
                name: "initial_lengths",
                doc: "first lengths of transformers' heuristic",
                values: KeyValues::Lengths,
                default: &[],
            },
            self_draft_key: None,
            options: &[],
            sweep: Sweep::Lengths(&[1, 2, 3, 5, 8, 12]),
            config: |value, _, bounds| {
                let initial_length = (value as usize).min(bounds.max);
                StopRuleConfig::Heuristic(Self { initial_length, bounds })
            },
        }),
    }];
}

impl RuleConfig for HeuristicConfig {
    fn name(&self) -> StopRuleName {
        StopRuleName::Heuristic
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        Ok(Box::new(Heuristic::new(self.initial_length, self.bounds)?))
    }

    fn parameter(&self) -> f64 {
        self.initial_length as f64
    }
}

/// The schedule of transformers' assisted generation, also a baseline of SVIP: a round whose
/// candidates were all accepted makes the next longer by two, any other makes it shorter by one.
///
/// The length starts anew with every sequence. A round that the limit or an end token kept below
/// the length at hand counts as any other, as in transformers. One whose candidates were looked up
/// says nothing of the draft and does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heuristic {
    initial_length: usize,
    bounds: Bounds,
    candidate_length: usize,
    /// Whether the rule ends the round.
    has_begun: bool,
}

impl Heuristic {
    /// The rule with so many candidates in a sequence's first round; lengths stay within `bounds`
    /// (SVIP: 1 to 40).
    ///
    /// # Errors
    /// If the bounds are not valid or do not hold `initial_length`.
    pub fn new(initial_length: usize, bounds: Bounds) -> Result<Self, TheoryError> {
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        if !(bounds.min..=bounds.max).contains(&initial_length) {
            return Err(TheoryError::InitialLength {
                initial_length,
                min: bounds.min,
                max: bounds.max,
            });
        }
        Ok(Self { initial_length, bounds, candidate_length: initial_length, has_begun: false })
    }
}

impl StopRule for Heuristic {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn begin_sequence(&mut self) {
        self.candidate_length = self.initial_length;
    }

    fn begin_round(&mut self) {
        self.has_begun = true;
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.candidate_length
    }

    fn end_round(&mut self, end: RoundEnd) {
        if !std::mem::take(&mut self.has_begun) {
            return;
        }
        let next = if end.num_accepted == self.candidate_length {
            self.candidate_length + 2
        } else {
            self.candidate_length.saturating_sub(1).max(1)
        };
        self.candidate_length = next.clamp(self.bounds.min, self.bounds.max);
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    #[test]
    fn the_heuristic_grows_by_two_and_shrinks_by_one_within_its_bounds() {
        let bounds = Bounds { min: 1, max: 8 };
        let mut rule = Heuristic::new(5, bounds).expect("valid");
        let lengths = |rule: &mut Heuristic, accepted: &[usize]| -> Vec<usize> {
            let after = |num_accepted: &usize| {
                rule.end_round(RoundEnd { num_accepted: *num_accepted, num_kept: 1 });
                round_length(rule, &[DraftSignals::default(); 12]).expect("stops")
            };
            accepted.iter().map(after).collect()
        };
        rule.begin_sequence();
        rule.begin_round();
        // 5 of 5 makes 7, 7 of 7 makes 9, cut to 8; then down to 1 and up again.
        assert_eq!(lengths(&mut rule, &[5, 7, 8, 3, 7]), [7, 8, 8, 7, 8]);
        assert_eq!(lengths(&mut rule, &[0; 8]), [7, 6, 5, 4, 3, 2, 1, 1]);
        assert_eq!(lengths(&mut rule, &[1]), [3]);
        rule.begin_sequence();
        assert_eq!(round_length(&mut rule, &[DraftSignals::default(); 12]), Some(5));
        // A round that it did not end is none of its own.
        rule.end_round(RoundEnd { num_accepted: 0, num_kept: 1 });
        rule.end_round(RoundEnd { num_accepted: 9, num_kept: 10 });
        assert_eq!(round_length(&mut rule, &[DraftSignals::default(); 12]), Some(4));
    }

    #[test]
    fn the_first_length_lies_within_the_bounds() {
        let bounds = Bounds { min: 2, max: 4 };
        for initial_length in [0, 1, 5] {
            let refused = Heuristic::new(initial_length, bounds);
            assert_eq!(refused, Err(TheoryError::InitialLength { initial_length, min: 2, max: 4 }));
        }
    }
}
