//! SpecDec++'s stop rule, which reads an acceptance head's predictions.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings};
use super::{
    Bounds, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, StopRule, StopRuleEntry,
    StopRuleName,
};

/// The settings of SpecDec++'s rule (Algorithm 2). It stops when 1 − ∏ p̂, the predicted
/// probability that some candidate is rejected, strictly exceeds the threshold.
///
/// In the paper the product covers all candidates but the last, whose p̂ is not known yet. At the
/// first candidate it is 1 (the paper's e_0 is undefined), so the rule never ends a round at one
/// candidate. With `without_lag` the rule decides when a draft forward has read the last candidate,
/// and can stop before the next draw. The round then takes as many draft forwards, but has one
/// candidate and one verified row less.
///
/// With a head that [looks ahead](HeadTiming::looks_ahead) the product covers all candidates, and a round ends one
/// draft forward earlier than in either form. `without_lag` then makes no difference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RejectionThresholdConfig {
    /// The threshold h, a probability. 0.7 is best in the paper.
    pub stop_threshold: f64,
    /// Whether the rule decides about a candidate before the next one is drawn.
    #[serde(default)]
    pub without_lag: bool,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl RejectionThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[
        StopRuleEntry {
            name: StopRuleName::RejectionThreshold,
            file_name: "head",
            text: "acceptance head",
            family: RuleFamily::Head,
            heads: &[HeadTiming::AfterRead, HeadTiming::AtDraw, HeadTiming::BeforeDraw],
            settings: RuleSettings::Grid(Grid {
                default: &[0.1, 0.3, 0.5, 0.7, 0.9],
                self_draft_default: &[0.1, 0.3, 0.5, 0.7, 0.9],
                ..Grid::of_probabilities(
                    "SpecDec++'s h: a round ends when the predicted probability of a rejection exceeds it; needs a head",
                    |stop_threshold, _, bounds| {
                        Self { stop_threshold, without_lag: false, bounds }.into()
                    },
                )
            }),
        },
        StopRuleEntry {
            name: StopRuleName::RejectionThresholdWithoutLag,
            file_name: "head-without-lag",
            text: "acceptance head, no lag",
            family: RuleFamily::Head,
            // With a head that looks ahead both forms are the same.
            heads: &[HeadTiming::AfterRead],
            settings: RuleSettings::Grid(Grid::of_probabilities(
                "SpecDec++'s h without the paper's lag of one candidate",
                |stop_threshold, _, bounds| {
                    Self { stop_threshold, without_lag: true, bounds }.into()
                },
            )),
        },
    ];
}

impl RuleConfig for RejectionThresholdConfig {
    fn form(&self) -> usize {
        usize::from(self.without_lag)
    }

    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(RejectionThreshold { config: *self, all_accepted_prob: 1.0 })
    }
}

#[derive(Clone, Copy)]
struct RejectionThreshold {
    config: RejectionThresholdConfig,
    /// The product ∏ p̂ of the predictions so far in this round.
    all_accepted_prob: f64,
}

impl RejectionThreshold {
    fn exceeds_with(&mut self, acceptance_prob: f64) -> bool {
        self.all_accepted_prob *= acceptance_prob;
        1.0 - self.all_accepted_prob > self.config.stop_threshold
    }
}

impl StopRule for RejectionThreshold {
    fn bounds(&self) -> Bounds {
        self.config.bounds
    }

    fn begin_round(&mut self) {
        self.all_accepted_prob = 1.0;
    }

    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        match signals.acceptance_prob {
            Some(HeadEstimate::OfDrawn(prob)) => self.exceeds_with(prob),
            // No draft forward has read a candidate of this round yet.
            _ if candidates.len() == 1 => false,
            Some(HeadEstimate::OfRead(prob)) => !self.config.without_lag && self.exceeds_with(prob),
            None => panic!("a rule that needs an acceptance head is run with one"),
        }
    }

    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        match signals.acceptance_prob {
            Some(HeadEstimate::OfRead(prob))
                if self.config.without_lag && !candidates.is_empty() =>
            {
                self.exceeds_with(prob)
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
    use super::super::StopRuleConfig;
    use super::super::rule::test_rounds::round_length;
    use super::*;
    use crate::TheoryError;

    fn config(stop_threshold: f64) -> RejectionThresholdConfig {
        let bounds = Bounds::default();
        RejectionThresholdConfig { stop_threshold, without_lag: false, bounds }
    }

    fn without_lag(stop_threshold: f64) -> RejectionThresholdConfig {
        RejectionThresholdConfig { without_lag: true, ..config(stop_threshold) }
    }

    /// Returns the candidate length of a round in which the head predicts `acceptance_probs` for
    /// candidates 1, 2, …; None if the rule never stops.
    fn length(config: RejectionThresholdConfig, acceptance_probs: &[f64]) -> Option<usize> {
        let mut signals = vec![DraftSignals::default()];
        signals.extend(acceptance_probs.iter().map(|prob| with(HeadEstimate::OfRead(*prob))));
        round_length(&mut *config.rule(), &signals)
    }

    fn with(estimate: HeadEstimate) -> DraftSignals {
        DraftSignals { acceptance_prob: Some(estimate), ..DraftSignals::default() }
    }

    #[test]
    fn without_lag_or_with_a_look_ahead_head_a_round_is_one_candidate_shorter() {
        for threshold in [0.1, 0.3, 0.55, 0.7] {
            for acceptance_probs in [[0.5, 0.5, 0.5], [0.95, 0.2, 0.9], [0.99, 0.98, 0.05]] {
                let lagged = length(config(threshold), &acceptance_probs);
                let shorter = lagged.map(|length| length - 1);
                assert_eq!(length(without_lag(threshold), &acceptance_probs), shorter);
                let ahead = acceptance_probs.map(|prob| with(HeadEstimate::OfDrawn(prob)));
                for config in [config(threshold), without_lag(threshold)] {
                    assert_eq!(round_length(&mut *config.rule(), &ahead), shorter, "{threshold}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "run with one")]
    fn a_rule_without_its_head_is_a_bug() {
        round_length(&mut *config(0.5).rule(), &[DraftSignals::default(); 2]);
    }

    #[test]
    fn the_product_reaches_the_threshold_one_token_late() {
        // Candidate 2 brings 1 − p̂₁ = 0.5, candidate 3 brings 1 − p̂₁p̂₂ = 0.75 > 0.7.
        assert_eq!(length(config(0.7), &[0.5, 0.5, 0.5]), Some(3));
        assert_eq!(length(config(0.3), &[0.5, 0.5]), Some(2));
        assert_eq!(length(config(0.7), &[1.0, 1.0, 1.0]), None);
    }

    #[test]
    fn the_inequality_is_strict() {
        assert_eq!(length(config(0.5), &[0.5]), None);
        assert_eq!(length(config(0.75), &[0.5, 0.5]), None);
        assert_eq!(length(config(1.0), &[0.0, 0.0]), None);
        assert_eq!(length(config(0.0), &[1.0, 0.999]), Some(3));
        assert_eq!(length(without_lag(0.5), &[0.5]), None);
    }

    #[test]
    fn the_first_candidate_never_ends_a_lagged_round_by_threshold() {
        let mut rule = config(0.0).rule();
        assert!(!rule.stops(&[5], &DraftSignals::default()));
        // A head may have read the token before the round, which is not a candidate.
        let read_before = with(HeadEstimate::OfRead(0.0));
        assert!(!rule.stops(&[5], &read_before));
        assert!(!without_lag(0.0).rule().stops_before_draw(&[], &read_before));
        assert!(without_lag(0.0).rule().stops_before_draw(&[5], &read_before));
    }

    #[test]
    fn rounds_do_not_leak_into_each_other() {
        let mut rule = config(0.7).rule();
        for signals in [HeadEstimate::OfRead(0.6), HeadEstimate::OfDrawn(0.6)].map(with) {
            let first = round_length(&mut *rule, &[signals; 4]);
            assert_eq!(first, round_length(&mut *rule, &[signals; 4]));
            assert_eq!(first, round_length(&mut *rule, &[signals; 4]));
        }
    }

    #[test]
    fn a_lower_threshold_never_drafts_longer() {
        let acceptance_probs = [0.95, 0.8, 0.99, 0.7, 0.6, 0.9, 0.3];
        let lengths: Vec<usize> = (0..=10)
            .map(|tenths| config(f64::from(tenths) / 10.0))
            .map(|config| length(config, &acceptance_probs).unwrap_or(99))
            .collect();
        assert!(lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn invalid_settings_are_errors() {
        for (min, max) in [(0, 0), (6, 5)] {
            let expected = TheoryError::Invalid(format!(
                "candidate length bounds must satisfy min <= max and 1 <= max, not min `{min}`, max `{max}`"
            ));
            assert_eq!(Bounds::new(min, max).as_ref(), Err(&expected));
            let config = RejectionThresholdConfig { bounds: Bounds { min, max }, ..config(0.5) };
            let refused = StopRuleConfig::from(config).init().err();
            assert_eq!(refused, Some(expected));
        }
        for stop_threshold in [-0.1, 1.1, f64::NAN] {
            assert!(StopRuleConfig::from(config(stop_threshold)).init().is_err());
        }
        assert!(config(0.5).rule().needs().acceptance_prob);
    }
}
