//! When a draft phase ends: the stop rules and what they may read.
//!
//! The round loop draws a candidate, includes it, and then asks. So a rule can end a round only *after* the last
//! drawn candidate: withholding a candidate because of its own value would bias the output (with p = q = (½, ½) and
//! token 1 withheld, token 0 comes out with chance ¾). The loop also applies the rule's bounds, so a rule need not
//! count.

use serde::{Deserialize, Serialize};

use crate::TheoryError;
use crate::distribution::checked_max;

/// What the drafter knows when it has just drawn a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DraftSignals {
    /// The acceptance head's estimate for the candidate *before* this one in the round; None at the round's first
    /// candidate, or without a head.
    ///
    /// This one-token lag is the paper's (SpecDec++, Algorithm 2): at step s the draft's forward reads candidate
    /// s − 1, whose hidden state gives that candidate's acceptance probability, and yields q_s, from which
    /// candidate s is drawn at no further cost.
    pub acceptance_prob: Option<f64>,
    /// The largest probability of the distribution this candidate was drawn from, raw: at temperature 1, before top-k
    /// and top-p. Of a greedy candidate it is the candidate's own. None unless the rule needs it.
    pub confidence: Option<f64>,
}

/// Which signals a rule reads. Drafters give these and need not work out the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SignalNeeds {
    /// [`DraftSignals::acceptance_prob`], for which the drafter must run an acceptance head.
    pub acceptance_prob: bool,
    /// [`DraftSignals::confidence`].
    pub confidence: bool,
}

impl SignalNeeds {
    /// The needed signals that are functions of a candidate's raw logits alone, the same for every drafter. What asks
    /// for more than logits is left None for the drafter to fill in.
    ///
    /// # Panics
    /// If a signal is needed and no logit is finite, or any is NaN or +∞.
    pub fn signals_of_logits(self, logits: &[f32]) -> DraftSignals {
        DraftSignals {
            acceptance_prob: None,
            confidence: self.confidence.then(|| largest_prob(logits)),
        }
    }
}

/// The largest probability of the softmax of `logits`, in f64: one pass for the maximum, one for the sum.
fn largest_prob(logits: &[f32]) -> f64 {
    let largest = f64::from(checked_max(logits));
    let total: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    assert!(total.is_finite(), "logits must not be NaN");
    total.recip()
}

/// The least and the greatest number of candidates a round, both inclusive, 1 <= `min` <= `max`.
///
/// The round loop applies them: below `min` it draws on whatever the rule says, at `max` it stops. It may also stop
/// early for reasons of its own, such as an end-of-sequence candidate or the token limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedBounds")]
pub struct Bounds {
    /// The least number of candidates.
    pub min: usize,
    /// The greatest number of candidates.
    pub max: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedBounds {
    min: usize,
    max: usize,
}

impl TryFrom<UncheckedBounds> for Bounds {
    type Error = TheoryError;

    fn try_from(unchecked: UncheckedBounds) -> Result<Self, TheoryError> {
        Self::new(unchecked.min, unchecked.max)
    }
}

impl Default for Bounds {
    /// 1 to 20 candidates. The authors' code says 2 to 20, but its minimum changes nothing, since step 1 never stops.
    fn default() -> Self {
        Self { min: 1, max: 20 }
    }
}

impl Bounds {
    /// Bounds from `min` to `max` candidates.
    ///
    /// # Errors
    /// Unless 1 <= `min` <= `max`.
    pub fn new(min: usize, max: usize) -> Result<Self, TheoryError> {
        if 1 <= min && min <= max {
            Ok(Self { min, max })
        } else {
            Err(TheoryError::Bounds { min, max })
        }
    }
}

/// Decides, after each included candidate, whether the round ends there.
pub trait StopRule {
    /// The candidate lengths the round loop keeps this rule within.
    fn bounds(&self) -> Bounds;

    /// Forgets the last round. Called before a round's first candidate.
    fn begin_round(&mut self);

    /// True ends the round after the last of `candidates`, the round's candidates so far.
    ///
    /// Called once after every candidate, also below the minimum, where the answer is not heeded: a rule may
    /// accumulate.
    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool;

    /// The signals the rule reads; the same in every round.
    fn needs(&self) -> SignalNeeds {
        SignalNeeds::default()
    }
}

/// The same number of candidates every round: the baseline K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FixedLength {
    /// Candidates a round, at least 1.
    pub candidate_length: usize,
}

impl FixedLength {
    /// Rounds of `candidate_length` candidates.
    ///
    /// # Errors
    /// If `candidate_length` is 0.
    pub fn new(candidate_length: usize) -> Result<Self, TheoryError> {
        Bounds::new(candidate_length, candidate_length)?;
        Ok(Self { candidate_length })
    }
}

impl StopRule for FixedLength {
    fn bounds(&self) -> Bounds {
        Bounds { min: self.candidate_length, max: self.candidate_length }
    }

    fn begin_round(&mut self) {}

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.candidate_length
    }
}

/// SpecDec++ (Algorithm 2): stops when the predicted chance that some candidate is rejected, 1 − ∏ p̂, exceeds the
/// threshold, strictly.
///
/// The product runs over the candidates before the last, whose own p̂ is not known yet; its factor at the first
/// candidate is 1 (the paper's e_0 is undefined), so a round never stops at one candidate of its own accord.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RejectionThreshold {
    stop_threshold: f64,
    bounds: Bounds,
    /// ∏ p̂ so far this round.
    all_accepted_prob: f64,
}

impl RejectionThreshold {
    /// The rule with threshold h = `stop_threshold`; the paper's best is 0.7, within the default bounds.
    ///
    /// # Errors
    /// If `stop_threshold` is not between 0 and 1, or `bounds` are not valid.
    pub fn new(stop_threshold: f64, bounds: Bounds) -> Result<Self, TheoryError> {
        if !(0.0..=1.0).contains(&stop_threshold) {
            return Err(TheoryError::StopThreshold(stop_threshold));
        }
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { stop_threshold, bounds, all_accepted_prob: 1.0 })
    }

    /// The threshold h: a probability.
    pub fn stop_threshold(&self) -> f64 {
        self.stop_threshold
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
        if candidates.len() > 1 {
            let previous = signals.acceptance_prob;
            self.all_accepted_prob *=
                previous.expect("a rule that needs an acceptance head is run with one");
        }
        1.0 - self.all_accepted_prob > self.stop_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() }
    }
}

/// Kangaroo (section 3.2, the second early exit): stops when the draft's largest probability falls to the threshold.
///
/// The candidate just drawn still goes to the target. The comparison is the paper's ≤; the authors' code has <.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConfidenceThreshold {
    confidence_threshold: f64,
    bounds: Bounds,
}

impl ConfidenceThreshold {
    /// The rule with threshold η = `confidence_threshold`; the paper's best is 0.6, with at most 6 candidates. 0 never
    /// stops of its own accord, 1 always does.
    ///
    /// # Errors
    /// If `confidence_threshold` is not between 0 and 1, or `bounds` are not valid.
    pub fn new(confidence_threshold: f64, bounds: Bounds) -> Result<Self, TheoryError> {
        if !(0.0..=1.0).contains(&confidence_threshold) {
            return Err(TheoryError::ConfidenceThreshold(confidence_threshold));
        }
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { confidence_threshold, bounds })
    }

    /// The threshold η: a probability.
    pub fn confidence_threshold(&self) -> f64 {
        self.confidence_threshold
    }
}

impl StopRule for ConfidenceThreshold {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn begin_round(&mut self) {}

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        let confidence = signals.confidence.expect("drafters give the signals a rule needs");
        confidence <= self.confidence_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The candidate length of a round in which the head says `acceptance_probs` of candidates 1, 2, …
    fn round_length(rule: &mut dyn StopRule, acceptance_probs: &[f64]) -> Option<usize> {
        rule.begin_round();
        let mut candidates = Vec::new();
        for step in 0..=acceptance_probs.len() {
            candidates.push(0);
            let acceptance_prob = step.checked_sub(1).map(|previous| acceptance_probs[previous]);
            let signals = DraftSignals { acceptance_prob, ..DraftSignals::default() };
            if rule.stops(&candidates, &signals) {
                return Some(candidates.len());
            }
        }
        None
    }

    fn threshold(stop_threshold: f64) -> RejectionThreshold {
        RejectionThreshold::new(stop_threshold, Bounds::default()).expect("a valid threshold")
    }

    #[test]
    fn the_threshold_is_met_by_the_product_one_token_late() {
        // Candidate 2 brings 1 − p̂₁ = 0.5, candidate 3 brings 1 − p̂₁p̂₂ = 0.75 > 0.7.
        assert_eq!(round_length(&mut threshold(0.7), &[0.5, 0.5, 0.5]), Some(3));
        assert_eq!(round_length(&mut threshold(0.3), &[0.5, 0.5]), Some(2));
        assert_eq!(round_length(&mut threshold(0.7), &[1.0, 1.0, 1.0]), None);
    }

    #[test]
    fn the_inequality_is_strict() {
        assert_eq!(round_length(&mut threshold(0.5), &[0.5]), None);
        assert_eq!(round_length(&mut threshold(0.75), &[0.5, 0.5]), None);
        assert_eq!(round_length(&mut threshold(1.0), &[0.0, 0.0]), None);
        assert_eq!(round_length(&mut threshold(0.0), &[1.0, 0.999]), Some(3));
    }

    #[test]
    fn the_first_candidate_never_ends_a_round_by_threshold() {
        let mut rule = threshold(0.0);
        assert!(!rule.stops(&[5], &DraftSignals::default()));
        // A head may have read the token before the round; it is no candidate and does not count.
        let read_before = DraftSignals { acceptance_prob: Some(0.0), ..DraftSignals::default() };
        assert!(!rule.stops(&[5], &read_before));
    }

    #[test]
    fn rounds_do_not_leak_into_each_other() {
        let mut rule = threshold(0.7);
        let first = round_length(&mut rule, &[0.6, 0.6, 0.6]);
        assert_eq!(first, round_length(&mut rule, &[0.6, 0.6, 0.6]));
        assert_eq!(first, round_length(&mut rule, &[0.6, 0.6, 0.6]));
    }

    #[test]
    fn a_lower_threshold_never_drafts_longer() {
        let acceptance_probs = [0.95, 0.8, 0.99, 0.7, 0.6, 0.9, 0.3];
        let lengths: Vec<usize> = (0..=10)
            .map(|tenths| {
                round_length(&mut threshold(f64::from(tenths) / 10.0), &acceptance_probs)
                    .unwrap_or(99)
            })
            .collect();
        assert!(lengths.is_sorted(), "{lengths:?}");
    }

    #[test]
    fn a_fixed_length_is_fixed() {
        let mut rule: Box<dyn StopRule> = Box::new(FixedLength::new(3).expect("a valid length"));
        assert_eq!(round_length(&mut *rule, &[0.0; 8]), Some(3));
        assert_eq!(rule.bounds(), Bounds { min: 3, max: 3 });
        assert_eq!(rule.needs(), SignalNeeds::default());
        assert!(threshold(0.5).needs().acceptance_prob);
    }

    #[test]
    fn impossible_settings_are_refused() {
        for (min, max) in [(0, 5), (0, 0), (6, 5)] {
            assert_eq!(Bounds::new(min, max), Err(TheoryError::Bounds { min, max }));
            let refused = RejectionThreshold::new(0.5, Bounds { min, max });
            assert_eq!(refused, Err(TheoryError::Bounds { min, max }));
        }
        assert!(FixedLength::new(0).is_err());
        for stop_threshold in [-0.1, 1.1, f64::NAN] {
            assert!(RejectionThreshold::new(stop_threshold, Bounds::default()).is_err());
            assert!(ConfidenceThreshold::new(stop_threshold, Bounds::default()).is_err());
        }
        let refused = ConfidenceThreshold::new(0.5, Bounds { min: 2, max: 1 });
        assert_eq!(refused, Err(TheoryError::Bounds { min: 2, max: 1 }));
    }

    /// Whether a round goes no further after a candidate drawn with this confidence.
    fn stops_at(confidence_threshold: f64, confidence: f64) -> bool {
        let mut rule = ConfidenceThreshold::new(confidence_threshold, Bounds::default())
            .expect("a valid threshold");
        rule.begin_round();
        let signals = DraftSignals { confidence: Some(confidence), ..DraftSignals::default() };
        rule.stops(&[7], &signals)
    }

    #[test]
    fn low_confidence_stops_at_the_first_candidate_too_and_equality_stops() {
        assert!(stops_at(0.6, 0.59));
        assert!(stops_at(0.6, 0.6));
        assert!(!stops_at(0.6, 0.61));
        assert!(stops_at(1.0, 1.0));
        assert!(!stops_at(0.0, 1e-9));
    }

    #[test]
    fn a_confidence_rule_asks_for_the_confidence_alone() {
        let bounds = Bounds { min: 1, max: 6 };
        let rule = ConfidenceThreshold::new(0.6, bounds).expect("a valid threshold");
        assert_eq!(rule.needs(), SignalNeeds { acceptance_prob: false, confidence: true });
        assert_eq!((rule.bounds(), rule.confidence_threshold()), (bounds, 0.6));
    }

    #[test]
    fn the_confidence_is_the_largest_raw_probability() {
        let needs = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        let confidence = |logits: &[f32]| needs.signals_of_logits(logits).confidence;
        assert_eq!(confidence(&[3.0; 4]), Some(0.25));
        assert_eq!(confidence(&[f32::NEG_INFINITY, -200.0]), Some(1.0));
        let logits = [0.5, -1.25, 80.0, 79.0, f32::NEG_INFINITY];
        let largest = crate::log_softmax(&logits).into_iter().map(f64::exp).fold(0.0, f64::max);
        let found = confidence(&logits).expect("needed");
        // Two roundings of the same quotient, in f64.
        assert!((found - largest).abs() < 1e-14, "{found} for {largest}");
        assert_eq!(SignalNeeds::default().signals_of_logits(&logits), DraftSignals::default());
    }
}
