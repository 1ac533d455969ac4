//! When a draft phase ends: the stop rules and what they may read.
//!
//! The round loop draws a candidate, includes it, and then asks. So a rule can end a round only
//! *after* the last drawn candidate: withholding a candidate because of its own value would bias
//! the output (with p = q = (½, ½) and token 1 withheld, token 0 comes out with chance ¾). The loop
//! also applies the rule's bounds, so a rule need not count.
//!
//! | rule | reads |
//! |---|---|
//! | [`FixedLength`], [`Heuristic`] | nothing; the heuristic how the last round went |
//! | [`RejectionThreshold`] (SpecDec++), with the paper's lag of one candidate or without | an acceptance head |
//! | [`ConfidenceThreshold`] (Kangaroo), [`JointConfidence`] | the draft's largest probability |
//! | [`CandidateProbThreshold`] (transformers) | the candidate's own probability |
//! | [`EntropyThreshold`] (SVIP) | the draft's entropy |
//! | [`CostOptimal`] | a head, the confidence or the entropy |
//! | [`Oracle`] (SpecDec++, Lemma 2.1) | the answers |

mod confidence;
mod config;
mod cost_optimal;
mod entropy_threshold;
mod fixed_length;
mod oracle;
mod rejection_threshold;

use serde::{Deserialize, Serialize};

use crate::TheoryError;
use crate::distribution::checked_max;
use crate::exponentials;

pub use confidence::{CandidateProbThreshold, ConfidenceThreshold, JointConfidence};
pub use config::StopRuleConfig;
pub use cost_optimal::{AcceptanceSignal, CostOptimal, CostOptimalConfig, StepFunction};
pub use entropy_threshold::EntropyThreshold;
pub use fixed_length::{FixedLength, Heuristic};
pub use oracle::Oracle;
pub use rejection_threshold::RejectionThreshold;

/// What the drafter knows when it has just drawn a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DraftSignals {
    /// The acceptance head's estimate. None without a head, where the head has yet to speak of a
    /// candidate of the round, and unless the rule needs it.
    pub acceptance_prob: Option<HeadEstimate>,
    /// The largest probability of the distribution this candidate was drawn from, raw: at
    /// temperature 1, before top-k and top-p. Of a greedy candidate it is the candidate's own. None
    /// unless the rule needs it.
    pub confidence: Option<f64>,
    /// The candidate's own probability under what it was drawn from, as served; raw where it is
    /// greedy. The round loop fills it in, once the candidate is drawn. None unless the rule needs
    /// it.
    pub candidate_prob: Option<f64>,
    /// The entropy, in nats, of the raw distribution this candidate was drawn from. None unless the
    /// rule needs it.
    pub entropy: Option<f64>,
}

/// An acceptance head's word on one candidate of the round: min(1, p/q), estimated.
///
/// Which candidate that is, is said in terms of the draft forward that the signals are of, and so
/// it is the same before the draw from it and after.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeadEstimate {
    /// Of the candidate that the forward has read, the one before the one drawn from it: the
    /// paper's head, with its lag of one token (SpecDec++, Algorithm 2). At step s the draft's
    /// forward reads candidate s − 1, whose hidden state gives that candidate's acceptance
    /// probability, and yields q_s, from which candidate s is drawn at no further cost.
    OfRead(f64),
    /// Of the candidate that was drawn from the forward. Such a head looks ahead: it needs no
    /// forward that reads the candidate, and there is none of its words before the draw.
    OfDrawn(f64),
}

/// When an acceptance head speaks of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadTiming {
    /// Once the draft has read it: [`HeadEstimate::OfRead`].
    AfterRead,
    /// As soon as it is drawn: [`HeadEstimate::OfDrawn`].
    AtDraw,
}

/// Which signals a rule reads. Drafters give these and need not work out the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SignalNeeds {
    /// [`DraftSignals::acceptance_prob`], for which the drafter must run an acceptance head.
    pub acceptance_prob: bool,
    /// [`DraftSignals::confidence`].
    pub confidence: bool,
    /// [`DraftSignals::candidate_prob`].
    pub candidate_prob: bool,
    /// [`DraftSignals::entropy`].
    pub entropy: bool,
}

impl SignalNeeds {
    /// The needed signals that are functions of a candidate's raw logits alone, the same for every
    /// drafter. What asks for more than logits is left None for the drafter or the round loop to
    /// fill in.
    ///
    /// # Panics
    /// If a signal is needed and no logit is finite, or any is NaN or +∞.
    pub fn signals_of_logits(self, logits: &[f32]) -> DraftSignals {
        let mut signals = DraftSignals::default();
        if self.entropy {
            let softmax = SoftmaxSummary::of(logits);
            signals.entropy = Some(softmax.entropy);
            signals.confidence = self.confidence.then_some(softmax.largest_prob);
        } else if self.confidence {
            signals.confidence = Some(largest_prob(logits));
        }
        signals
    }
}

/// The largest probability of the softmax of `logits`, to within a millionth: one pass for the
/// maximum, one for the sum. It is that of the greedy candidate.
///
/// # Panics
/// If no logit is finite, or any is NaN or +∞.
pub fn largest_prob(logits: &[f32]) -> f64 {
    let (total, _) = exponentials::coarse_sums(logits, checked_max(logits));
    assert!(total.is_finite(), "logits must not be NaN");
    total.recip()
}

/// What one pass over logits tells of their softmax, to within some millionths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftmaxSummary {
    /// The largest probability.
    pub largest_prob: f64,
    /// The entropy, in nats.
    pub entropy: f64,
    /// log Σ e^logit.
    log_total: f64,
}

impl SoftmaxSummary {
    /// The summary of the softmax of `logits`. The entropy is log Σ e^d − Σ d e^d / Σ e^d with d a
    /// logit's distance to the largest.
    ///
    /// # Panics
    /// If no logit is finite, or any is NaN or +∞.
    pub fn of(logits: &[f32]) -> Self {
        let largest = checked_max(logits);
        let (total, weighted) = exponentials::coarse_sums(logits, largest);
        assert!(total.is_finite(), "logits must not be NaN");
        Self {
            largest_prob: total.recip(),
            entropy: total.ln() - weighted / total,
            log_total: f64::from(largest) + total.ln(),
        }
    }

    /// The log-probability of the token with this logit.
    pub fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit) - self.log_total
    }
}

/// How a round went, as a rule may learn from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundEnd {
    /// Leading candidates the target accepted.
    pub num_accepted: usize,
    /// Tokens kept, after any cut by an end token or the limit.
    pub num_kept: usize,
}

fn check_probability(
    threshold: f64,
    error: impl FnOnce(f64) -> TheoryError,
) -> Result<(), TheoryError> {
    if (0.0..=1.0).contains(&threshold) { Ok(()) } else { Err(error(threshold)) }
}

/// The least and the greatest number of candidates a round, both inclusive, `min` <= `max`, 1 <=
/// `max`.
///
/// The round loop applies them: below `min` it draws on whatever the rule says, at `max` it stops.
/// A minimum of 0 lets a rule that stops before a draw end a round without candidates; for others
/// it is 1. It may also stop early for reasons of its own, such as an end-of-sequence candidate or
/// the token limit.
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
    /// 1 to 20 candidates. The authors' code says 2 to 20, but its minimum changes nothing, since
    /// step 1 never stops.
    fn default() -> Self {
        Self { min: 1, max: 20 }
    }
}

impl Bounds {
    /// Bounds from `min` to `max` candidates.
    ///
    /// # Errors
    /// Unless `min` <= `max` and 1 <= `max`.
    pub fn new(min: usize, max: usize) -> Result<Self, TheoryError> {
        if 1 <= max && min <= max {
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

    /// Forgets the last sequence. Called before a sequence's first round.
    fn begin_sequence(&mut self) {}

    /// Forgets the last round. Called before a round's first candidate.
    fn begin_round(&mut self) {}

    /// True makes this a round without candidates, which the bounds do not forbid: the target
    /// decodes alone. Asked before the round's first draft forward.
    fn skips_drafting(&mut self) -> bool {
        false
    }

    /// True ends the round after the last of `candidates`, the round's candidates so far.
    ///
    /// Called once after every candidate, also below the minimum, where the answer is not heeded: a
    /// rule may accumulate.
    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool;

    /// True ends the round after the last of `candidates` although the draft has read it and could
    /// name another: that one is not drawn, so it is not withheld either.
    ///
    /// `signals` are those of the draft forward that read the last candidate, which is the one that
    /// [`HeadEstimate::OfRead`] is about. Called before every draw, also below the minimum, where
    /// the answer is not heeded.
    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        let _ = (candidates, signals);
        false
    }

    /// How the round went.
    fn end_round(&mut self, end: RoundEnd) {
        let _ = end;
    }

    /// The signals the rule reads; the same in every round.
    fn needs(&self) -> SignalNeeds {
        SignalNeeds::default()
    }
}

/// Rounds as the round loop asks about them.
#[cfg(test)]
mod test_rounds {
    use super::{DraftSignals, HeadEstimate, StopRule};

    /// The candidate length of a round whose draft forwards give `signals`, the first about
    /// candidate 1; None if the rule would go on.
    pub(super) fn round_length(rule: &mut dyn StopRule, signals: &[DraftSignals]) -> Option<usize> {
        rule.begin_round();
        let mut candidates = Vec::new();
        for signals in signals {
            let of_drawn = |estimate: &HeadEstimate| matches!(estimate, HeadEstimate::OfDrawn(_));
            let told = signals.acceptance_prob.filter(|estimate| !of_drawn(estimate));
            let before_draw = DraftSignals { acceptance_prob: told, ..*signals };
            if rule.stops_before_draw(&candidates, &before_draw) {
                return Some(candidates.len());
            }
            candidates.push(0);
            if rule.stops(&candidates, signals) {
                return Some(candidates.len());
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_logits_are_those_of_the_raw_softmax() {
        let needs = SignalNeeds { confidence: true, ..SignalNeeds::default() };
        let confidence = |logits: &[f32]| needs.signals_of_logits(logits).confidence;
        assert_eq!(confidence(&[3.0; 4]), Some(0.25));
        assert_eq!(confidence(&[f32::NEG_INFINITY, -200.0]), Some(1.0));
        let logits = [0.5, -1.25, 80.0, 79.0, f32::NEG_INFINITY];
        let log_probs = crate::log_softmax(&logits);
        let largest = log_probs.iter().copied().map(f64::exp).fold(0.0, f64::max);
        let found = confidence(&logits).expect("needed");
        // Exponentials in f32, whose last place is 6e-8.
        assert!((found - largest).abs() < 1e-6, "{found} for {largest}");
        assert_eq!(SignalNeeds::default().signals_of_logits(&logits), DraftSignals::default());
        let both = SignalNeeds { confidence: true, entropy: true, ..SignalNeeds::default() };
        let both = both.signals_of_logits(&logits);
        assert_eq!(both.confidence, Some(found));
        let entropy = crate::entropy_of_log_probs(&log_probs);
        assert!((both.entropy.expect("needed") - entropy).abs() < 1e-6, "{both:?} for {entropy}");
        let softmax = SoftmaxSummary::of(&logits);
        for (logit, log_prob) in logits.iter().zip(&log_probs) {
            let found = softmax.log_prob(*logit);
            assert!(found == *log_prob || (found - log_prob).abs() < 1e-6, "{found}, {log_prob}");
        }
    }
}
