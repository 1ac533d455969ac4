//! transformers: stopping by the probability of the candidate that was drawn.

use serde::{Deserialize, Serialize};

use super::bounds::check_probability;
use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{
    Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleConfig, StopRuleEntry, StopRuleName,
};
use crate::TheoryError;

/// Settings of [`CandidateProbThreshold`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CandidateProbThresholdConfig {
    /// A probability.
    pub confidence_threshold: f64,
    /// The candidate lengths.
    pub bounds: Bounds,
}

impl CandidateProbThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::CandidateProbThreshold,
        file_name: "candidate-prob",
        symbol: "q",
        text: "candidate\u{2019}s probability",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            key: RecipeKey {
                name: "candidate_prob_thresholds",
                doc: "transformers' `assistant_confidence_threshold`",
                values: KeyValues::Probabilities,
                default: &[],
            },
            self_draft_key: None,
            options: &[],
            sweep: Sweep::Probabilities,
            config: |value, _, bounds| {
                StopRuleConfig::CandidateProbThreshold(Self { confidence_threshold: value, bounds })
            },
        }),
    }];
}

impl RuleConfig for CandidateProbThresholdConfig {
    fn name(&self) -> StopRuleName {
        StopRuleName::CandidateProbThreshold
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        Ok(Box::new(CandidateProbThreshold::new(self.confidence_threshold, self.bounds)?))
    }

    fn parameter(&self) -> f64 {
        self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { candidate_prob: true, ..SignalNeeds::default() }
    }
}

/// transformers' `assistant_confidence_threshold`: stops when the chance that the draft gave the
/// drawn candidate lies below the threshold. The candidate still goes to the target.
///
/// A greedy candidate is the most probable token, so that this is then [`ConfidenceThreshold`](super::ConfidenceThreshold) but
/// for the comparison, which is <.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateProbThreshold {
    confidence_threshold: f64,
    bounds: Bounds,
}

impl CandidateProbThreshold {
    /// The rule with a threshold between 0 and 1; transformers' default is 0.4, with at most 20
    /// candidates.
    ///
    /// # Errors
    /// If `confidence_threshold` is not between 0 and 1, or `bounds` are not valid.
    pub fn new(confidence_threshold: f64, bounds: Bounds) -> Result<Self, TheoryError> {
        check_probability(confidence_threshold, TheoryError::ConfidenceThreshold)?;
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { confidence_threshold, bounds })
    }
}

impl StopRule for CandidateProbThreshold {
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
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn drawn(confidence: f64, candidate_prob: f64) -> DraftSignals {
        DraftSignals {
            confidence: Some(confidence),
            candidate_prob: Some(candidate_prob),
            ..DraftSignals::default()
        }
    }

    #[test]
    fn the_drawn_candidates_own_chance_must_lie_below() {
        let mut rule = CandidateProbThreshold::new(0.4, Bounds::default()).expect("valid");
        let greedy = [0.9, 0.4, 0.39, 0.9].map(|prob| drawn(prob, prob));
        assert_eq!(round_length(&mut rule, &greedy), Some(3));
        // An improbable draw stops although the draft was sure of another token.
        assert_eq!(round_length(&mut rule, &[drawn(0.9, 0.9), drawn(0.9, 0.05)]), Some(2));
    }

    #[test]
    fn it_asks_for_that_chance_and_refuses_what_is_no_probability() {
        let bounds = Bounds { min: 1, max: 6 };
        let candidate = SignalNeeds { candidate_prob: true, ..SignalNeeds::default() };
        assert_eq!(CandidateProbThreshold::new(0.6, bounds).expect("valid").needs(), candidate);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(CandidateProbThreshold::new(threshold, bounds).is_err());
        }
    }
}
