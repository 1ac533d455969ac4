//! The heuristic of HF transformers, in which the candidate length follows the number of accepted
//! candidates.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings, SettingKind, Sweep};
use super::{Bounds, DraftSignals, RoundEnd, StopRule, StopRuleEntry, StopRuleName};
use crate::{Result, TheoryError};

/// The settings of the schedule of HF transformers' assisted generation, also a baseline in SVIP.
/// If the target accepts all candidates of a round, the next round has two more candidates,
/// otherwise one fewer.
///
/// Each sequence starts again at the initial length. As in transformers, a round that an end token
/// or the token limit cuts short counts like any other. Looked-up rounds do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeuristicConfig {
    /// The number of candidates in the first round.
    pub initial_length: usize,
    /// The minimum and maximum candidate length. SVIP uses 1 to 40.
    pub bounds: Bounds,
}

impl HeuristicConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::Heuristic,
        file_name: "heuristic",
        text: "transformers\u{2019} heuristic",
        family: RuleFamily::Length,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            doc: "the number in the first round of transformers' heuristic",
            values: SettingKind::Length,
            default: &[],
            self_draft_default: &[],
            options: &[],
            sweep: Sweep::Lengths(&[1, 2, 3, 5, 8, 12]),
            config: |value, _, bounds| {
                Self { initial_length: (value as usize).min(bounds.max), bounds }.into()
            },
        }),
    }];
}

impl RuleConfig for HeuristicConfig {
    fn check(&self) -> Result<()> {
        let Self { initial_length, bounds: Bounds { min, max } } = *self;
        TheoryError::ensure((min..=max).contains(&initial_length), || {
            format!(
                "initial_length `{initial_length}` must lie within the bounds, `{min}` to `{max}`"
            )
        })
    }

    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(Heuristic { config: *self, candidate_length: self.initial_length, applies: false })
    }
}

struct Heuristic {
    config: HeuristicConfig,
    candidate_length: usize,
    /// Whether the rule applies to the current round.
    applies: bool,
}

impl StopRule for Heuristic {
    fn bounds(&self) -> Bounds {
        self.config.bounds
    }

    fn begin_sequence(&mut self) {
        self.candidate_length = self.config.initial_length;
    }

    fn begin_round(&mut self) {
        self.applies = true;
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.candidate_length
    }

    fn end_round(&mut self, end: RoundEnd) {
        if !std::mem::take(&mut self.applies) {
            return;
        }
        let next = if end.num_accepted == self.candidate_length {
            self.candidate_length + 2
        } else {
            self.candidate_length.saturating_sub(1).max(1)
        };
        self.candidate_length = next.clamp(self.config.bounds.min, self.config.bounds.max);
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    #[test]
    fn the_length_grows_by_two_and_shrinks_by_one_within_its_bounds() {
        let bounds = Bounds { min: 1, max: 8 };
        let mut rule = HeuristicConfig { initial_length: 5, bounds }.rule();
        let lengths = |rule: &mut dyn StopRule, accepted: &[usize]| -> Vec<usize> {
            let after = |num_accepted: &usize| {
                rule.end_round(RoundEnd { num_accepted: *num_accepted, num_kept: 1 });
                round_length(rule, &[DraftSignals::default(); 12]).expect("stops")
            };
            accepted.iter().map(after).collect()
        };
        rule.begin_sequence();
        rule.begin_round();
        // 5 of 5 makes 7, 7 of 7 makes 9, cut to 8; then down to 1 and up again.
        assert_eq!(lengths(&mut *rule, &[5, 7, 8, 3, 7]), [7, 8, 8, 7, 8]);
        assert_eq!(lengths(&mut *rule, &[0; 8]), [7, 6, 5, 4, 3, 2, 1, 1]);
        assert_eq!(lengths(&mut *rule, &[1]), [3]);
        rule.begin_sequence();
        assert_eq!(round_length(&mut *rule, &[DraftSignals::default(); 12]), Some(5));
        // The second end is a looked-up round's.
        rule.end_round(RoundEnd { num_accepted: 0, num_kept: 1 });
        rule.end_round(RoundEnd { num_accepted: 9, num_kept: 10 });
        assert_eq!(round_length(&mut *rule, &[DraftSignals::default(); 12]), Some(4));
    }

    #[test]
    fn the_first_length_lies_within_the_bounds() {
        let bounds = Bounds { min: 2, max: 4 };
        for initial_length in [0, 1, 5] {
            let checked = HeuristicConfig { initial_length, bounds }.check();
            assert_eq!(
                checked.unwrap_err().to_string(),
                format!("initial_length `{initial_length}` must lie within the bounds, `2` to `4`")
            );
        }
    }
}
