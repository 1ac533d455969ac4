//! SpecDec++: stopping by what an acceptance head predicts.

use serde::{Deserialize, Serialize};

use super::bounds::check_probability;
use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{
    Bounds, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, StopRule, StopRuleConfig,
    StopRuleEntry, StopRuleName,
};
use crate::TheoryError;

/// Settings of [`RejectionThreshold`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RejectionThresholdConfig {
    /// h, a probability.
    pub stop_threshold: f64,
    /// Ask about a candidate before the next is drawn.
    #[serde(default)]
    pub without_lag: bool,
    /// The candidate lengths.
    pub bounds: Bounds,
}

impl RejectionThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[
        StopRuleEntry {
            name: StopRuleName::RejectionThreshold,
            file_name: "head",
            symbol: "h",
            text: "acceptance head",
            family: RuleFamily::Head,
            heads: &[HeadTiming::AfterRead, HeadTiming::AtDraw],
            settings: RuleSettings::Grid(Grid {
                key: RecipeKey {
                    name: "stop_thresholds",
                    doc: "thresholds h of heads, the draft's and adapters', on calibrated predictions",
                    values: KeyValues::Probabilities,
                    default: &[0.1, 0.3, 0.5, 0.7, 0.9],
                },
                self_draft_key: None,
                options: &[],
                sweep: Sweep::Probabilities,
                config: |value, _, bounds| Self::at(value, false, bounds),
            }),
        },
        StopRuleEntry {
            name: StopRuleName::RejectionThresholdWithoutLag,
            file_name: "head-without-lag",
            symbol: "lagless h",
            text: "acceptance head, no lag",
            family: RuleFamily::Head,
            // With a head that looks ahead it is the other form.
            heads: &[HeadTiming::AfterRead],
            settings: RuleSettings::Grid(Grid {
                key: RecipeKey {
                    name: "stop_thresholds_without_lag",
                    doc: "the same, without the paper's lag of one candidate",
                    values: KeyValues::Probabilities,
                    default: &[],
                },
                self_draft_key: None,
                options: &[],
                sweep: Sweep::Probabilities,
                config: |value, _, bounds| Self::at(value, true, bounds),
            }),
        },
    ];

    fn at(stop_threshold: f64, without_lag: bool, bounds: Bounds) -> StopRuleConfig {
        StopRuleConfig::RejectionThreshold(Self { stop_threshold, without_lag, bounds })
    }
}

impl RuleConfig for RejectionThresholdConfig {
    fn name(&self) -> StopRuleName {
        if self.without_lag {
            StopRuleName::RejectionThresholdWithoutLag
        } else {
            StopRuleName::RejectionThreshold
        }
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        let rule = RejectionThreshold::new(self.stop_threshold, self.bounds)?;
        Ok(Box::new(if self.without_lag { rule.without_lag() } else { rule }))
    }

    fn parameter(&self) -> f64 {
        self.stop_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() }
    }
}

/// SpecDec++ (Algorithm 2): stops when the predicted chance that some candidate is rejected, 1 − ∏
/// p̂, exceeds the threshold, strictly.
///
/// In the paper's form the product runs over the candidates before the last, whose own p̂ is not
/// known yet; its factor at the first candidate is 1 (the paper's e_0 is undefined), so a round
/// never stops at one candidate of its own accord. The form [without lag](Self::without_lag) asks
/// once the draft has read the last candidate, and then draws no further one: the same draft
/// forwards, one verified row fewer, and one candidate that came for free not drawn.
///
/// With a head that looks ahead the product runs over all candidates, the last included, and both
/// forms are one: a round ends one draft forward earlier than in either.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RejectionThreshold {
    stop_threshold: f64,
    bounds: Bounds,
    is_lagged: bool,
    /// ∏ p̂ so far this round.
    all_accepted_prob: f64,
}

impl RejectionThreshold {
    /// The paper's rule with threshold h = `stop_threshold`; its best is 0.7, within the default
    /// bounds.
    ///
    /// # Errors
    /// If `stop_threshold` is not between 0 and 1, or `bounds` are not valid.
    pub fn new(stop_threshold: f64, bounds: Bounds) -> Result<Self, TheoryError> {
        check_probability(stop_threshold, TheoryError::StopThreshold)?;
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { stop_threshold, bounds, is_lagged: true, all_accepted_prob: 1.0 })
    }

    /// The same rule, asked about every candidate before the next is drawn.
    pub fn without_lag(self) -> Self {
        Self { is_lagged: false, ..self }
    }

    fn takes_in(&mut self, acceptance_prob: f64) -> bool {
        self.all_accepted_prob *= acceptance_prob;
        1.0 - self.all_accepted_prob > self.stop_threshold
    }
}

impl StopRule for RejectionThreshold {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn begin_round(&mut self) {
        self.all_accepted_prob = 1.0;
    }

    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        match signals.acceptance_prob {
            Some(HeadEstimate::OfDrawn(prob)) => self.takes_in(prob),
            // What was read before the round's first candidate is none.
            _ if candidates.len() == 1 => false,
            Some(HeadEstimate::OfRead(prob)) => self.is_lagged && self.takes_in(prob),
            None => panic!("a rule that needs an acceptance head is run with one"),
        }
    }

    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        match signals.acceptance_prob {
            Some(HeadEstimate::OfRead(prob)) if !self.is_lagged && !candidates.is_empty() => {
                self.takes_in(prob)
            }
            _ => false,
        }
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn threshold(stop_threshold: f64) -> RejectionThreshold {
        RejectionThreshold::new(stop_threshold, Bounds::default()).expect("a valid threshold")
    }

    /// The candidate length of a round in which the head says `acceptance_probs` of candidates 1,
    /// 2, …
    fn length(mut rule: RejectionThreshold, acceptance_probs: &[f64]) -> Option<usize> {
        let mut signals = vec![DraftSignals::default()];
        signals.extend(acceptance_probs.iter().map(|prob| heard(HeadEstimate::OfRead(*prob))));
        round_length(&mut rule, &signals)
    }

    fn heard(estimate: HeadEstimate) -> DraftSignals {
        DraftSignals { acceptance_prob: Some(estimate), ..DraftSignals::default() }
    }

    #[test]
    fn a_head_that_looks_ahead_ends_a_round_with_the_candidate_it_doubts() {
        for stop_threshold in [0.1, 0.3, 0.55, 0.7] {
            for acceptance_probs in [[0.5, 0.5, 0.5], [0.95, 0.2, 0.9], [0.99, 0.98, 0.05]] {
                let lagged = length(threshold(stop_threshold), &acceptance_probs);
                let ahead = acceptance_probs.map(|prob| heard(HeadEstimate::OfDrawn(prob)));
                for mut rule in [threshold(stop_threshold), threshold(stop_threshold).without_lag()]
                {
                    let own = round_length(&mut rule, &ahead);
                    assert_eq!(own, lagged.map(|length| length - 1), "{stop_threshold}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "run with one")]
    fn a_rule_without_its_head_is_a_bug() {
        round_length(&mut threshold(0.5), &[DraftSignals::default(); 2]);
    }

    #[test]
    fn the_threshold_is_met_by_the_product_one_token_late() {
        // Candidate 2 brings 1 − p̂₁ = 0.5, candidate 3 brings 1 − p̂₁p̂₂ = 0.75 > 0.7.
        assert_eq!(length(threshold(0.7), &[0.5, 0.5, 0.5]), Some(3));
        assert_eq!(length(threshold(0.3), &[0.5, 0.5]), Some(2));
        assert_eq!(length(threshold(0.7), &[1.0, 1.0, 1.0]), None);
    }

    #[test]
    fn without_lag_a_round_is_one_candidate_shorter() {
        for stop_threshold in [0.1, 0.3, 0.55, 0.7] {
            for acceptance_probs in [[0.5, 0.5, 0.5], [0.95, 0.2, 0.9], [0.99, 0.98, 0.05]] {
                let lagged = length(threshold(stop_threshold), &acceptance_probs);
                let own = length(threshold(stop_threshold).without_lag(), &acceptance_probs);
                assert_eq!(own, lagged.map(|length| length - 1), "{stop_threshold}");
            }
        }
    }

    #[test]
    fn the_inequality_is_strict() {
        assert_eq!(length(threshold(0.5), &[0.5]), None);
        assert_eq!(length(threshold(0.75), &[0.5, 0.5]), None);
        assert_eq!(length(threshold(1.0), &[0.0, 0.0]), None);
        assert_eq!(length(threshold(0.0), &[1.0, 0.999]), Some(3));
        assert_eq!(length(threshold(0.5).without_lag(), &[0.5]), None);
    }

    #[test]
    fn the_first_candidate_never_ends_a_lagged_round_by_threshold() {
        let mut rule = threshold(0.0);
        assert!(!rule.stops(&[5], &DraftSignals::default()));
        // A head may have read the token before the round; it is no candidate and does not count.
        let read_before = heard(HeadEstimate::OfRead(0.0));
        assert!(!rule.stops(&[5], &read_before));
        assert!(!rule.without_lag().stops_before_draw(&[], &read_before));
        assert!(rule.without_lag().stops_before_draw(&[5], &read_before));
    }

    #[test]
    fn rounds_do_not_leak_into_each_other() {
        let mut rule = threshold(0.7);
        for heard in [HeadEstimate::OfRead(0.6), HeadEstimate::OfDrawn(0.6)].map(heard) {
            let first = round_length(&mut rule, &[heard; 4]);
            assert_eq!(first, round_length(&mut rule, &[heard; 4]));
            assert_eq!(first, round_length(&mut rule, &[heard; 4]));
        }
    }

    #[test]
    fn a_lower_threshold_never_drafts_longer() {
        let acceptance_probs = [0.95, 0.8, 0.99, 0.7, 0.6, 0.9, 0.3];
        let lengths: Vec<usize> = (0..=10)
            .map(|tenths| threshold(f64::from(tenths) / 10.0))
            .map(|rule| length(rule, &acceptance_probs).unwrap_or(99))
            .collect();
        assert!(lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn impossible_settings_are_refused() {
        for (min, max) in [(0, 0), (6, 5)] {
            assert_eq!(Bounds::new(min, max), Err(TheoryError::Bounds { min, max }));
            let refused = RejectionThreshold::new(0.5, Bounds { min, max });
            assert_eq!(refused, Err(TheoryError::Bounds { min, max }));
        }
        for stop_threshold in [-0.1, 1.1, f64::NAN] {
            assert!(RejectionThreshold::new(stop_threshold, Bounds::default()).is_err());
        }
        assert!(threshold(0.5).needs().acceptance_prob);
    }
}
