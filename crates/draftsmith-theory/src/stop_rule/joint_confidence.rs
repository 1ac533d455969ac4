//! Stopping by the product of a round's confidences.

use serde::{Deserialize, Serialize};

use super::bounds::check_probability;
use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{
    Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleConfig, StopRuleEntry, StopRuleName,
};
use crate::TheoryError;

/// Settings of [`JointConfidence`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JointConfidenceConfig {
    /// A probability.
    pub confidence_threshold: f64,
    /// The candidate lengths.
    pub bounds: Bounds,
}

impl JointConfidenceConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::JointConfidence,
        file_name: "joint-confidence",
        symbol: "joint eta",
        text: "joint confidence",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            key: RecipeKey {
                name: "joint_confidence_thresholds",
                doc: "thresholds of the product of a round's confidences",
                values: KeyValues::Probabilities,
                default: &[],
            },
            self_draft_key: None,
            options: &[],
            sweep: Sweep::Probabilities,
            config: |value, _, bounds| {
                StopRuleConfig::JointConfidence(Self { confidence_threshold: value, bounds })
            },
        }),
    }];
}

impl RuleConfig for JointConfidenceConfig {
    fn name(&self) -> StopRuleName {
        StopRuleName::JointConfidence
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        Ok(Box::new(JointConfidence::new(self.confidence_threshold, self.bounds)?))
    }

    fn parameter(&self) -> f64 {
        self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

/// Stops when the product of the round's confidences falls to the threshold: what
/// [`ConfidenceThreshold`](super::ConfidenceThreshold) asks of one candidate, asked of all of them together. The candidate just
/// drawn still goes to the target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JointConfidence {
    confidence_threshold: f64,
    bounds: Bounds,
    /// ∏ confidence so far this round.
    joint: f64,
}

impl JointConfidence {
    /// The rule with a threshold between 0 and 1.
    ///
    /// # Errors
    /// If `confidence_threshold` is not between 0 and 1, or `bounds` are not valid.
    pub fn new(confidence_threshold: f64, bounds: Bounds) -> Result<Self, TheoryError> {
        check_probability(confidence_threshold, TheoryError::ConfidenceThreshold)?;
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { confidence_threshold, bounds, joint: 1.0 })
    }
}

impl StopRule for JointConfidence {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn begin_round(&mut self) {
        self.joint = 1.0;
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        self.joint *= signals.confidence.expect("drafters give the signals a rule needs");
        self.joint <= self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn length(rule: &mut JointConfidence, confidences: &[f64]) -> Option<usize> {
        let sure = |c: &f64| DraftSignals { confidence: Some(*c), ..DraftSignals::default() };
        round_length(rule, &confidences.iter().map(sure).collect::<Vec<_>>())
    }

    #[test]
    fn the_joint_rule_multiplies_and_begins_anew_each_round() {
        let mut rule = JointConfidence::new(0.5, Bounds::default()).expect("valid");
        assert_eq!(length(&mut rule, &[0.9, 0.8, 0.6, 0.9]), Some(3));
        assert_eq!(length(&mut rule, &[0.5]), Some(1));
        assert_eq!(length(&mut rule, &[0.9, 0.8]), None);
    }

    #[test]
    fn it_asks_for_confidence_and_refuses_what_is_no_probability() {
        let bounds = Bounds { min: 1, max: 6 };
        let confidence = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        assert_eq!(JointConfidence::new(0.6, bounds).expect("valid").needs(), confidence);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(JointConfidence::new(threshold, bounds).is_err());
        }
    }
}
