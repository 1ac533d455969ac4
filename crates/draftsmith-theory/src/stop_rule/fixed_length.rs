//! The same number of candidates in every round.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings, SettingKind, Sweep};
use super::{Bounds, DraftSignals, StopRule, StopRuleEntry, StopRuleName};

/// The baseline rule, with the same number of candidates in every round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FixedLengthConfig {
    /// The number of candidates per round K, at least 1.
    pub candidate_length: usize,
}

impl FixedLengthConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::FixedLength,
        file_name: "fixed",
        text: "fixed length",
        family: RuleFamily::Length,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            doc: "the number of candidates, K",
            values: SettingKind::Length,
            default: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0],
            self_draft_default: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            options: &[],
            sweep: Sweep::Lengths(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]),
            config: |value, _, _| Self { candidate_length: value as usize }.into(),
        }),
    }];
}

impl RuleConfig for FixedLengthConfig {
    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(*self)
    }
}

impl StopRule for FixedLengthConfig {
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
    fn rounds_have_the_fixed_length() {
        let mut rule = FixedLengthConfig { candidate_length: 3 };
        assert_eq!(round_length(&mut rule, &[DraftSignals::default(); 8]), Some(3));
        assert_eq!(StopRule::bounds(&rule), Bounds { min: 3, max: 3 });
        assert_eq!(rule.needs(), super::super::SignalNeeds::default());
    }
}
