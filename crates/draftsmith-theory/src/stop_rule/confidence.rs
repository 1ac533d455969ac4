//! Stopping by how sure the draft is of itself: no head is needed.

use super::{Bounds, DraftSignals, SignalNeeds, StopRule, check_probability};
use crate::TheoryError;

const GIVEN: &str = "drafters give the signals a rule needs";

/// Kangaroo (section 3.2, the second early exit): stops when the draft's largest probability falls
/// to the threshold.
///
/// The candidate just drawn still goes to the target. The comparison is the paper's ≤; the authors'
/// code has <.
///
/// The form [before the draw](Self::before_draw) is llama.cpp's `--draft-p-min`: no candidate is
/// drawn where the draft is less sure than that, strictly. The forward is spent, a verified row
/// saved. It does not look at the candidate, so nothing is withheld because of its own value; with
/// a minimum of 0 a round may end without any.
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
        self.is_before_draw && signals.confidence.expect(GIVEN) < self.confidence_threshold
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        !self.is_before_draw && signals.confidence.expect(GIVEN) <= self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

/// transformers' `assistant_confidence_threshold`: stops when the chance that the draft gave the
/// drawn candidate lies below the threshold. The candidate still goes to the target.
///
/// A greedy candidate is the most probable token, so that this is then [`ConfidenceThreshold`] but
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
        signals.candidate_prob.expect(GIVEN) < self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { candidate_prob: true, ..SignalNeeds::default() }
    }
}

/// Stops when the product of the round's confidences falls to the threshold: what
/// [`ConfidenceThreshold`] asks of one candidate, asked of all of them together. The candidate just
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
        self.joint *= signals.confidence.expect(GIVEN);
        self.joint <= self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_rounds::round_length;
    use super::*;

    fn confident(confidence: f64) -> DraftSignals {
        DraftSignals {
            confidence: Some(confidence),
            candidate_prob: Some(confidence),
            ..DraftSignals::default()
        }
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
    fn the_drawn_candidates_own_chance_must_lie_below() {
        let mut rule = CandidateProbThreshold::new(0.4, Bounds::default()).expect("valid");
        assert_eq!(length(&mut rule, &[0.9, 0.4, 0.39, 0.9]), Some(3));
        // An improbable draw stops although the draft was sure of another token.
        let improbable = DraftSignals {
            confidence: Some(0.9),
            candidate_prob: Some(0.05),
            ..DraftSignals::default()
        };
        assert_eq!(round_length(&mut rule, &[confident(0.9), improbable]), Some(2));
    }

    #[test]
    fn the_joint_rule_multiplies_and_begins_anew_each_round() {
        let mut rule = JointConfidence::new(0.5, Bounds::default()).expect("valid");
        assert_eq!(length(&mut rule, &[0.9, 0.8, 0.6, 0.9]), Some(3));
        assert_eq!(length(&mut rule, &[0.5]), Some(1));
        assert_eq!(length(&mut rule, &[0.9, 0.8]), None);
    }

    #[test]
    fn each_asks_for_the_signal_it_reads_and_refuses_what_is_no_probability() {
        let bounds = Bounds { min: 1, max: 6 };
        let confidence = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        let candidate = SignalNeeds { candidate_prob: true, ..SignalNeeds::default() };
        assert_eq!(ConfidenceThreshold::new(0.6, bounds).expect("valid").needs(), confidence);
        assert_eq!(JointConfidence::new(0.6, bounds).expect("valid").needs(), confidence);
        assert_eq!(CandidateProbThreshold::new(0.6, bounds).expect("valid").needs(), candidate);
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(ConfidenceThreshold::new(threshold, bounds).is_err());
            assert!(JointConfidence::new(threshold, bounds).is_err());
            assert!(CandidateProbThreshold::new(threshold, bounds).is_err());
        }
        let refused = ConfidenceThreshold::new(0.5, Bounds { min: 2, max: 1 });
        assert_eq!(refused, Err(TheoryError::Bounds { min: 2, max: 1 }));
    }
}
