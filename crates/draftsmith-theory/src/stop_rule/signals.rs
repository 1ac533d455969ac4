//! The signals that a stop rule may read, and how they are computed from logits.

use serde::{Deserialize, Serialize};

use crate::distribution::checked_max;
use crate::exponentials;
use crate::select::kth_largest;

/// The drafter's signals for the candidate that it has just drawn. A signal is None unless the rule
/// needs it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DraftSignals {
    /// The acceptance head's estimate. None also without a head, and before the head's first
    /// prediction in the round.
    pub acceptance_prob: Option<HeadEstimate>,
    /// The largest probability of the raw distribution that this candidate was drawn from: at
    /// temperature 1, before top-k and top-p. A greedily chosen candidate has this probability
    /// itself.
    pub confidence: Option<f64>,
    /// The largest probability after the ten largest raw probabilities are normalised to a sum of
    /// 1, which llama.cpp calls p.
    pub confidence_of_ten: Option<f64>,
    /// The probability with which the candidate was drawn, after temperature and filters; for a
    /// greedily chosen candidate, its raw probability. The decoding loop sets it after the draw.
    pub candidate_prob: Option<f64>,
    /// The entropy, in nats, of the raw distribution that this candidate was drawn from.
    pub entropy: Option<f64>,
}

/// An acceptance head's estimate of min(1, p/q) for one candidate of the round.
///
/// The variants name the candidate relative to the draft forward that gave the signals, so they
/// mean the same before the draw from that forward and after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeadEstimate {
    /// An estimate for the candidate that the draft forward has just read. The paper's head works
    /// like this, with a lag of one token (SpecDec++, Algorithm 2). At step s the draft forward
    /// reads candidate s − 1, whose hidden state gives that candidate's acceptance probability. The
    /// same forward yields q_s, from which candidate s is drawn.
    OfRead(f64),
    /// An estimate for the candidate drawn from the draft forward. Such a look-ahead head needs no
    /// forward that reads the candidate. It predicts after the draw, or before it if it does not
    /// read the candidate ([`HeadTiming::BeforeDraw`]).
    OfDrawn(f64),
}

impl HeadEstimate {
    /// Returns an estimate for the candidate that the draft forward has read.
    pub fn of_read(self) -> Option<f64> {
        match self {
            Self::OfRead(prob) => Some(prob),
            Self::OfDrawn(_) => None,
        }
    }

    /// Returns an estimate for the candidate drawn from the draft forward.
    pub fn of_drawn(self) -> Option<f64> {
        match self {
            Self::OfDrawn(prob) => Some(prob),
            Self::OfRead(_) => None,
        }
    }
}

/// The time at which an acceptance head predicts a candidate's acceptance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadTiming {
    /// The time at which a draft forward has read the candidate: [`HeadEstimate::OfRead`].
    AfterRead,
    /// The time at which the candidate is drawn: [`HeadEstimate::OfDrawn`].
    AtDraw,
    /// Before the draw: [`HeadEstimate::OfDrawn`]. A block drafter's confidence head does not read
    /// the candidate.
    BeforeDraw,
}

impl HeadTiming {
    /// Returns the timing of an acceptance head that reads the candidate, with or without looking
    /// ahead.
    pub fn of_reader(looks_ahead: bool) -> Self {
        if looks_ahead { Self::AtDraw } else { Self::AfterRead }
    }

    /// Returns whether the head predicts without a draft forward that reads the candidate.
    pub fn looks_ahead(self) -> bool {
        self != Self::AfterRead
    }
}

/// The signals that a rule reads. Drafters compute only these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SignalNeeds {
    /// Whether the rule reads [`DraftSignals::acceptance_prob`], for which the drafter must run an
    /// acceptance head.
    pub acceptance_prob: bool,
    /// Whether the rule reads [`DraftSignals::confidence`].
    pub confidence: bool,
    /// Whether the rule reads [`DraftSignals::confidence_of_ten`].
    pub confidence_of_ten: bool,
    /// Whether the rule reads [`DraftSignals::candidate_prob`].
    pub candidate_prob: bool,
    /// Whether the rule reads [`DraftSignals::entropy`].
    pub entropy: bool,
}

impl SignalNeeds {
    /// Returns whether a rule reads no signal.
    pub fn is_nothing(self) -> bool {
        self == Self::default()
    }

    /// Computes the needed signals that depend only on a candidate's raw logits. The other signals
    /// stay None. The drafter or the decoding loop sets them.
    ///
    /// # Panics
    /// If a signal is needed and no logit is finite, or any is NaN or +∞.
    pub fn signals_of_logits(self, logits: &[f32]) -> DraftSignals {
        let mut signals = DraftSignals::default();
        if self.entropy || self.confidence {
            let softmax = SoftmaxSummary::of(logits);
            signals.entropy = self.entropy.then_some(softmax.entropy);
            signals.confidence = self.confidence.then_some(softmax.largest_prob);
        }
        if self.confidence_of_ten {
            signals.confidence_of_ten = Some(largest_prob_of_ten(logits));
        }
        signals
    }
}

/// The signal from which a candidate's acceptance is estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AcceptanceSignal {
    /// The acceptance head's prediction, made after the candidate is read or when it is drawn.
    AcceptanceProb,
    /// The draft's confidence when the candidate is drawn.
    Confidence,
    /// The draft's entropy when the candidate is drawn.
    Entropy,
}

impl AcceptanceSignal {
    /// Returns the needs of a rule that reads only this signal.
    pub fn needs(self) -> SignalNeeds {
        let none = SignalNeeds::default();
        match self {
            Self::AcceptanceProb => SignalNeeds { acceptance_prob: true, ..none },
            Self::Confidence => SignalNeeds { confidence: true, ..none },
            Self::Entropy => SignalNeeds { entropy: true, ..none },
        }
    }
}

/// Normalises the ten largest probabilities of the softmax of `logits` to a sum of 1 and returns
/// the largest; with fewer than ten tokens, normalises all.
///
/// # Panics
/// If no logit is finite, or any is NaN or +∞.
fn largest_prob_of_ten(logits: &[f32]) -> f64 {
    const TEN: usize = 10;
    let largest = checked_max(logits);
    let weight = |logit: f32| f64::from(logit - largest).exp();
    if logits.len() <= TEN {
        return logits.iter().map(|logit| weight(*logit)).sum::<f64>().recip();
    }
    let tenth = kth_largest(logits, TEN);
    let greater = logits.iter().filter(|logit| **logit > tenth);
    let (count, total) =
        greater.fold((0, 0.0), |(count, total), logit| (count + 1, total + weight(*logit)));
    // The tokens equal to the tenth fill the remaining places.
    (total + (TEN - count) as f64 * weight(tenth)).recip()
}

/// Properties of the softmax of logits, with relative errors of about 1e-6.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftmaxSummary {
    /// The largest probability.
    pub largest_prob: f64,
    /// The entropy, in nats.
    pub entropy: f64,
    /// The logarithm log Σ e^logit.
    log_total: f64,
}

impl SoftmaxSummary {
    /// Summarises the softmax of `logits`. The entropy is log Σ e^d − Σ d e^d / Σ e^d, with d a
    /// logit minus the largest logit.
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

    /// Computes the log-probability of a token with this logit.
    pub fn log_prob(&self, logit: f32) -> f64 {
        f64::from(logit) - self.log_total
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
        // Exponentials in f32, whose unit in the last place is 6e-8.
        assert!((found - largest).abs() < 1e-6, "{found} for {largest}");
        assert_eq!(SignalNeeds::default().signals_of_logits(&logits), DraftSignals::default());
        let both = SignalNeeds { confidence: true, entropy: true, ..SignalNeeds::default() };
        let both = both.signals_of_logits(&logits);
        assert_eq!(both.confidence, Some(found));
        let entropy = crate::entropy_of_log_probs(&log_probs);
        assert!((both.entropy.expect("needed") - entropy).abs() < 1e-6, "{both:?} for {entropy}");
        let ten = SignalNeeds { confidence_of_ten: true, ..SignalNeeds::default() };
        let of_ten = |logits: &[f32]| ten.signals_of_logits(logits).confidence_of_ten;
        // With fewer than ten tokens, all count.
        assert!((of_ten(&logits).expect("needed") - largest).abs() < 1e-6);
        assert_eq!(of_ten(&[2.0; 40]), Some(0.1));
        let many: Vec<f32> = (0..100).map(|i| -0.25 * (i * 37 % 100) as f32).collect();
        let total: f64 = (0..10).map(|i| (-0.25 * f64::from(i)).exp()).sum();
        assert!((of_ten(&many).expect("needed") - 1.0 / total).abs() < 1e-12);
        let softmax = SoftmaxSummary::of(&logits);
        for (logit, log_prob) in logits.iter().zip(&log_probs) {
            let found = softmax.log_prob(*logit);
            assert!(found == *log_prob || (found - log_prob).abs() < 1e-6, "{found}, {log_prob}");
        }
    }
}
