//! Kangaroo: stopping by the draft's own confidence. No head is needed.

use serde::{Deserialize, Serialize};

use super::bounds::check_probability;
use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{
    Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleConfig, StopRuleEntry, StopRuleName,
};
use crate::TheoryError;

const GIVEN: &str = "drafters give the signals a rule needs";

/// Settings of [`ConfidenceThreshold`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceThresholdConfig {
    /// η, a probability.
    pub confidence_threshold: f64,
    /// Ask before a candidate is drawn, which then is not, and of the ten most probable tokens
    /// alone.
    #[serde(default)]
    pub before_draw: bool,
    /// The candidate lengths.
    pub bounds: Bounds,
}

impl ConfidenceThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::ConfidenceThreshold,
        file_name: "confidence",
        symbol: "eta",
        text: "confidence",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            key: RecipeKey {
                name: "draft_confidence_thresholds",
                doc: "the same, for the separate draft",
                values: KeyValues::Probabilities,
                default: &[],
            },
            self_draft_key: Some(RecipeKey {
                name: "confidence_thresholds",
                doc: "Kangaroo's η, for self-drafts",
                values: KeyValues::Probabilities,
                default: &[0.2, 0.4, 0.6, 0.8],
            }),
            options: &[],
            sweep: Sweep::Probabilities,
            config: |value, _, bounds| {
                StopRuleConfig::ConfidenceThreshold(Self {
                    confidence_threshold: value,
                    before_draw: false,
                    bounds,
                })
            },
        }),
    }];
}

impl RuleConfig for ConfidenceThresholdConfig {
    fn name(&self) -> StopRuleName {
        StopRuleName::ConfidenceThreshold
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        let rule = ConfidenceThreshold::new(self.confidence_threshold, self.bounds)?;
        Ok(Box::new(if self.before_draw { rule.before_draw() } else { rule }))
    }

    fn parameter(&self) -> f64 {
        self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        needs(self.before_draw)
    }
}

fn needs(is_before_draw: bool) -> SignalNeeds {
    SignalNeeds {
        confidence: !is_before_draw,
        confidence_of_ten: is_before_draw,
        ..SignalNeeds::default()
    }
}

/// Kangaroo (section 3.2, the second early exit): stops when the draft's largest probability falls
/// to the threshold.
///
/// The candidate just drawn still goes to the target. The comparison is the paper's ≤; the authors'
/// code has <.
///
/// The form [before the draw](Self::before_draw) is llama.cpp's `--spec-draft-p-min`: no candidate is
/// drawn where the draft is less sure than that, strictly, of the most probable of its ten most
/// probable tokens, beside each other. The forward is spent, a verified row saved. It does not look
/// at the candidate, so nothing is withheld because of its own value; with a minimum of 0 a round may
/// end without any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConfidenceThreshold {
    confidence_threshold: f64,
    bounds: Bounds,
    is_before_draw: bool,
}

impl ConfidenceThreshold {
    /// The rule with threshold η = `confidence_threshold`; the paper's best is 0.6, with at most 6
    /// candidates. 0 never stops of its own accord, 1 always does.
    ///
    /// # Errors
    /// If `confidence_threshold` is not between 0 and 1, or `bounds` are not valid.
    pub fn new(confidence_threshold: f64, bounds: Bounds) -> Result<Self, TheoryError> {
        check_probability(confidence_threshold, TheoryError::ConfidenceThreshold)?;
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { confidence_threshold, bounds, is_before_draw: false })
    }

    /// The same threshold, asked before a candidate is drawn, which then is not.
    pub fn before_draw(self) -> Self {
        Self { is_before_draw: true, ..self }
    }
}

impl StopRule for ConfidenceThreshold {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn stops_before_draw(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        self.is_before_draw && signals.confidence_of_ten.expect(GIVEN) < self.confidence_threshold
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        !self.is_before_draw && signals.confidence.expect(GIVEN) <= self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        needs(self.is_before_draw)
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn confident(confidence: f64) -> DraftSignals {
        let both = Some(confidence);
        DraftSignals { confidence: both, confidence_of_ten: both, ..DraftSignals::default() }
    }

    fn length(rule: &mut dyn StopRule, confidences: &[f64]) -> Option<usize> {
        let signals: Vec<DraftSignals> = confidences.iter().map(|c| confident(*c)).collect();
        round_length(rule, &signals)
    }

    #[test]
    fn low_confidence_stops_at_the_first_candidate_too_and_equality_stops() {
        let stops_at = |threshold, confidence| {
            let mut rule =
                ConfidenceThreshold::new(threshold, Bounds::default()).expect("a valid threshold");
            length(&mut rule, &[confidence]).is_some()
        };
        assert!(stops_at(0.6, 0.59));
        assert!(stops_at(0.6, 0.6));
        assert!(!stops_at(0.6, 0.61));
        assert!(stops_at(1.0, 1.0));
        assert!(!stops_at(0.0, 1e-9));
    }

    #[test]
    fn before_the_draw_the_unsure_candidate_is_not_drawn() {
        let rule = |threshold| {
            let bounds = Bounds { min: 0, max: 20 };
            ConfidenceThreshold::new(threshold, bounds).expect("valid").before_draw()
        };
        assert_eq!(length(&mut rule(0.6), &[0.9, 0.6, 0.5]), Some(2));
        assert_eq!(length(&mut rule(0.6), &[0.5]), Some(0));
        assert_eq!(length(&mut rule(0.0), &[0.1; 5]), None);
    }

    #[test]
    fn it_asks_for_confidence_and_refuses_what_is_no_probability() {
        let bounds = Bounds { min: 1, max: 6 };
        let confidence = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        let rule = ConfidenceThreshold::new(0.6, bounds).expect("valid");
        assert_eq!(rule.needs(), confidence);
        let of_ten = SignalNeeds { confidence_of_ten: true, ..SignalNeeds::default() };
        assert_eq!(rule.before_draw().needs(), of_ten);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(ConfidenceThreshold::new(threshold, bounds).is_err());
        }
        let refused = ConfidenceThreshold::new(0.5, Bounds { min: 2, max: 1 });
        assert_eq!(refused, Err(TheoryError::Bounds { min: 2, max: 1 }));
    }
}
