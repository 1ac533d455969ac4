//! Kangaroo's stop rule, which reads the draft's own confidence and needs no head.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings};
use super::{Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleEntry, StopRuleName};

const NEEDED: &str = "drafters give the signals a rule needs";

/// Kangaroo's rule (section 3.2, the second early exit), which stops when the draft's largest
/// probability is at most the threshold.
///
/// The target still verifies the drawn candidate. The paper compares with ≤, its code with <.
///
/// With `before_draw` it is llama.cpp's `--spec-draft-p-min`. The ten largest probabilities are
/// normalised to a sum of 1, and no candidate is drawn if the largest is below the threshold. That
/// wastes a draft forward but saves a verified row. No drawn candidate is withheld, so the output
/// stays lossless. With a minimum length of 0 a round may have no candidates.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceThresholdConfig {
    /// The threshold η, a probability. 0.6 is best in the paper, with at most 6 candidates. 0 never
    /// stops, and 1 always does.
    pub confidence_threshold: f64,
    /// Whether the rule decides before a candidate is drawn, by the ten largest probabilities.
    #[serde(default)]
    pub before_draw: bool,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl ConfidenceThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::ConfidenceThreshold,
        file_name: "confidence",
        text: "confidence",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            self_draft_default: &[0.2, 0.4, 0.6, 0.8],
            ..Grid::of_probabilities(
                "Kangaroo's η: a round ends when the largest probability is at most this",
                |confidence_threshold, _, bounds| {
                    Self { confidence_threshold, before_draw: false, bounds }.into()
                },
            )
        }),
    }];
}

impl RuleConfig for ConfidenceThresholdConfig {
    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(*self)
    }
}

impl StopRule for ConfidenceThresholdConfig {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn stops_before_draw(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        self.before_draw && signals.confidence_of_ten.expect(NEEDED) < self.confidence_threshold
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        !self.before_draw && signals.confidence.expect(NEEDED) <= self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds {
            confidence: !self.before_draw,
            confidence_of_ten: self.before_draw,
            ..SignalNeeds::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::StopRuleConfig;
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn rule(confidence_threshold: f64, before_draw: bool) -> ConfidenceThresholdConfig {
        let bounds = Bounds { min: usize::from(!before_draw), max: 20 };
        ConfidenceThresholdConfig { confidence_threshold, before_draw, bounds }
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
    fn it_needs_confidence_and_checks_its_threshold() {
        let confidence = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.6, false).needs(), confidence);
        let of_ten = SignalNeeds { confidence_of_ten: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.6, true).needs(), of_ten);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(StopRuleConfig::from(rule(threshold, false)).init().is_err());
        }
    }
}
