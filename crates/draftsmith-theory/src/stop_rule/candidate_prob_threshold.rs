//! The stop rule of HF transformers that reads the probability of the drawn candidate.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings};
use super::{Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleEntry, StopRuleName};

/// The rule behind HF transformers' `assistant_confidence_threshold`, which stops when the draft's
/// probability of the drawn candidate is below the threshold. The target still verifies the
/// candidate.
///
/// A greedily chosen candidate is the most probable token. The rule is then
/// [`ConfidenceThresholdConfig`](super::ConfidenceThresholdConfig) with < instead of ≤.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateProbThresholdConfig {
    /// The threshold, a probability. The default in transformers is 0.4, with up to 20 candidates.
    pub confidence_threshold: f64,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl CandidateProbThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::CandidateProbThreshold,
        file_name: "candidate-prob",
        text: "candidate\u{2019}s probability",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid::of_probabilities(
            "transformers' `assistant_confidence_threshold`, for the candidate's own probability",
            |confidence_threshold, _, bounds| Self { confidence_threshold, bounds }.into(),
        )),
    }];
}

impl RuleConfig for CandidateProbThresholdConfig {
    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(*self)
    }
}

impl StopRule for CandidateProbThresholdConfig {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        signals.candidate_prob.expect("drafters give the signals a rule needs")
            < self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { candidate_prob: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::StopRuleConfig;
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn rule(confidence_threshold: f64) -> CandidateProbThresholdConfig {
        CandidateProbThresholdConfig { confidence_threshold, bounds: Bounds::default() }
    }

    fn drawn(confidence: f64, candidate_prob: f64) -> DraftSignals {
        DraftSignals {
            confidence: Some(confidence),
            candidate_prob: Some(candidate_prob),
            ..DraftSignals::default()
        }
    }

    #[test]
    fn a_round_ends_at_a_candidate_below_the_threshold() {
        let greedy = [0.9, 0.4, 0.39, 0.9].map(|prob| drawn(prob, prob));
        assert_eq!(round_length(&mut rule(0.4), &greedy), Some(3));
        // An improbable draw stops although the draft was sure of another token.
        let sampled = [drawn(0.9, 0.9), drawn(0.9, 0.05)];
        assert_eq!(round_length(&mut rule(0.4), &sampled), Some(2));
    }

    #[test]
    fn it_needs_the_candidates_probability_and_checks_its_threshold() {
        let candidate = SignalNeeds { candidate_prob: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.6).needs(), candidate);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(StopRuleConfig::from(rule(threshold)).init().is_err());
        }
    }
}
