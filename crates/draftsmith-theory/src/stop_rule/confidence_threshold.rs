//! Kangaroo's stop rule, which reads the draft's own confidence and needs no head.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings, SettingKind, Sweep};
use super::{
    Bounds, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, StopRule, StopRuleEntry,
    StopRuleName,
};
use crate::TheoryError;

const NEEDED: &str = "drafters give the signals a rule needs";

/// Kangaroo's rule (section 3.2, the second early exit), which stops when the draft's largest
/// probability is at most the threshold.
///
/// The target still verifies the drawn candidate. The paper compares with ≤, its code with <.
///
/// With `before_draw` it is llama.cpp's `--spec-draft-p-min`. The ten largest probabilities are
/// normalised to a sum of 1, and no candidate is drawn if the largest is below the threshold. That
/// wastes a draft forward but saves a verified row. No drawn candidate is withheld, so the output
/// stays lossless. With a minimum length of 0 a round may have no candidates. With `by_head` the
/// probability is the prediction of a head of [`HeadTiming::BeforeDraw`](super::HeadTiming::BeforeDraw)
/// instead, as llama.cpp does for DSpark drafters. Each candidate is judged by itself, not by the
/// product of the round. Other heads end the round as soon as they have predicted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceThresholdConfig {
    /// The threshold η, a probability. 0.6 is best in the paper, with at most 6 candidates. 0 never
    /// stops, and 1 always does.
    pub confidence_threshold: f64,
    /// Whether the rule decides before a candidate is drawn, by the ten largest probabilities.
    #[serde(default)]
    pub before_draw: bool,
    /// Whether the rule reads the drafter's confidence head. Only with `before_draw`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_head: bool,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl ConfidenceThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[
        StopRuleEntry {
            name: StopRuleName::ConfidenceThreshold,
            file_name: "confidence",
            text: "confidence",
            family: RuleFamily::Confidence,
            heads: &[],
            settings: RuleSettings::Grid(Grid {
                doc: "Kangaroo's η: a round ends when the largest probability is at most this",
                values: SettingKind::Probability,
                default: &[],
                self_draft_default: &[0.2, 0.4, 0.6, 0.8],
                options: &[],
                sweep: Sweep::Probabilities,
                config: |confidence_threshold, _, bounds| {
                    let (before_draw, by_head) = (false, false);
                    Self { confidence_threshold, before_draw, by_head, bounds }.into()
                },
            }),
        },
        StopRuleEntry {
            name: StopRuleName::ConfidenceHead,
            file_name: "confidence-head",
            text: "confidence head",
            family: RuleFamily::Head,
            heads: &[HeadTiming::BeforeDraw],
            settings: RuleSettings::Grid(Grid {
                doc: "llama.cpp's `--spec-draft-p-min` for a block drafter with a confidence head: no candidate is drawn whose predicted acceptance is below this",
                values: SettingKind::Probability,
                default: &[],
                self_draft_default: &[],
                options: &[],
                sweep: Sweep::Probabilities,
                config: |confidence_threshold, _, bounds| {
                    let (before_draw, by_head) = (true, true);
                    let bounds = Bounds { min: 0, ..bounds };
                    Self { confidence_threshold, before_draw, by_head, bounds }.into()
                },
            }),
        },
    ];
}

impl RuleConfig for ConfidenceThresholdConfig {
    fn form(&self) -> usize {
        usize::from(self.by_head)
    }

    fn check(&self) -> Result<(), TheoryError> {
        TheoryError::check_probability("confidence_threshold", self.confidence_threshold)
    }

    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(*self)
    }

    fn parameter(&self) -> f64 {
        self.confidence_threshold
    }
}

impl StopRule for ConfidenceThresholdConfig {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        let prob = match signals.acceptance_prob {
            _ if !self.before_draw => return false,
            _ if !self.by_head => signals.confidence_of_ten.expect(NEEDED),
            Some(HeadEstimate::OfDrawn(prob)) => prob,
            // A head may have read the token before the round, which is not a candidate.
            Some(HeadEstimate::OfRead(prob)) if !candidates.is_empty() => prob,
            Some(HeadEstimate::OfRead(_)) | None => return false,
        };
        prob < self.confidence_threshold
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        match signals.acceptance_prob {
            Some(HeadEstimate::OfDrawn(prob)) if self.by_head => prob < self.confidence_threshold,
            _ if self.before_draw => false,
            _ => signals.confidence.expect(NEEDED) <= self.confidence_threshold,
        }
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds {
            acceptance_prob: self.by_head,
            confidence: !self.before_draw,
            confidence_of_ten: self.before_draw && !self.by_head,
            ..SignalNeeds::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn rule(confidence_threshold: f64, before_draw: bool) -> ConfidenceThresholdConfig {
        let bounds = Bounds { min: usize::from(!before_draw), max: 20 };
        ConfidenceThresholdConfig { confidence_threshold, before_draw, by_head: false, bounds }
    }

    fn length(mut rule: ConfidenceThresholdConfig, confidences: &[f64]) -> Option<usize> {
        let signals = |confidence: &f64| DraftSignals {
            confidence: Some(*confidence),
            confidence_of_ten: Some(*confidence),
            ..DraftSignals::default()
        };
        round_length(&mut rule, &confidences.iter().map(signals).collect::<Vec<_>>())
    }

    #[test]
    fn low_confidence_stops_at_the_first_candidate_too_and_equality_stops() {
        assert_eq!(length(rule(0.6, false), &[0.59]), Some(1));
        assert_eq!(length(rule(0.6, false), &[0.6]), Some(1));
        assert_eq!(length(rule(0.6, false), &[0.61]), None);
        assert_eq!(length(rule(1.0, false), &[1.0]), Some(1));
        assert_eq!(length(rule(0.0, false), &[1e-9]), None);
    }

    #[test]
    fn before_the_draw_an_unsure_candidate_is_not_drawn() {
        assert_eq!(length(rule(0.6, true), &[0.9, 0.6, 0.5]), Some(2));
        assert_eq!(length(rule(0.6, true), &[0.5]), Some(0));
        assert_eq!(length(rule(0.0, true), &[0.1; 5]), None);
    }

    #[test]
    fn by_the_head_each_candidate_is_judged_by_itself_before_its_draw() {
        let by_head = || ConfidenceThresholdConfig { by_head: true, ..rule(0.6, true) };
        let length = |probs: &[f64]| {
            let mut rule = by_head();
            let sure = |prob: &f64| DraftSignals {
                acceptance_prob: Some(HeadEstimate::OfDrawn(*prob)),
                confidence_of_ten: Some(0.0),
                ..DraftSignals::default()
            };
            let mut drawn = Vec::new();
            for signals in probs.iter().map(sure) {
                if rule.stops_before_draw(&drawn, &signals) {
                    return Some(drawn.len());
                }
                drawn.push(0);
                assert!(!rule.stops(&drawn, &signals));
            }
            None
        };
        // The product falls below the threshold at the second candidate.
        assert_eq!(length(&[0.7, 0.7, 0.6, 0.59]), Some(3));
        assert_eq!(length(&[0.5]), Some(0));
        assert_eq!(length(&[0.6; 5]), None);
        let head = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
        assert_eq!(by_head().needs(), head);
    }

    #[test]
    fn it_needs_confidence_and_checks_its_threshold() {
        let confidence = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.6, false).needs(), confidence);
        let of_ten = SignalNeeds { confidence_of_ten: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.6, true).needs(), of_ten);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(rule(threshold, false).check().is_err());
        }
    }
}
