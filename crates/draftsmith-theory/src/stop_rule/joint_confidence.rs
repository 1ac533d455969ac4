//! A stop rule that reads the product of a round's confidences.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings};
use super::{Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleEntry, StopRuleName};

/// The settings of a rule that stops when the product of the confidences of the round's candidates
/// is at most the threshold. The target still verifies the candidate just drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JointConfidenceConfig {
    /// The threshold, a probability.
    pub confidence_threshold: f64,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl JointConfidenceConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::JointConfidence,
        file_name: "joint-confidence",
        text: "joint confidence",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid::of_probabilities(
            "a round ends when the product of its largest probabilities is at most this",
            |confidence_threshold, _, bounds| Self { confidence_threshold, bounds }.into(),
        )),
    }];
}

impl RuleConfig for JointConfidenceConfig {
    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(JointConfidence { config: *self, joint: 1.0 })
    }
}

struct JointConfidence {
    config: JointConfidenceConfig,
    /// The product of the confidences so far in this round.
    joint: f64,
}

impl StopRule for JointConfidence {
    fn bounds(&self) -> Bounds {
        self.config.bounds
    }

    fn begin_round(&mut self) {
        self.joint = 1.0;
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        self.joint *= signals.confidence.expect("drafters give the signals a rule needs");
        self.joint <= self.config.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::StopRuleConfig;
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn config(confidence_threshold: f64) -> JointConfidenceConfig {
        JointConfidenceConfig { confidence_threshold, bounds: Bounds::default() }
    }

    #[test]
    fn the_rule_multiplies_confidences_and_starts_again_each_round() {
        let mut rule = config(0.5).rule();
        let mut length = |confidences: &[f64]| {
            let sure = |c: &f64| DraftSignals { confidence: Some(*c), ..DraftSignals::default() };
            round_length(&mut *rule, &confidences.iter().map(sure).collect::<Vec<_>>())
        };
        assert_eq!(length(&[0.9, 0.8, 0.6, 0.9]), Some(3));
        assert_eq!(length(&[0.5]), Some(1));
        assert_eq!(length(&[0.9, 0.8]), None);
    }

    #[test]
    fn it_needs_confidence_and_checks_its_threshold() {
        let confidence = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        assert_eq!(config(0.6).rule().needs(), confidence);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(StopRuleConfig::from(config(threshold)).init().is_err());
        }
    }
}
