//! What a stop rule may read of a candidate, and how it is worked out from logits.

use serde::{Deserialize, Serialize};

use crate::distribution::checked_max;
use crate::exponentials;
use crate::select::kth_largest;

/// What the drafter knows when it has just drawn a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DraftSignals {
    /// The acceptance head's estimate. None without a head, where the head has predicted nothing of
    /// the round's candidates yet, and unless the rule needs it.
    pub acceptance_prob: Option<HeadEstimate>,
    /// The largest probability of the distribution this candidate was drawn from, raw: at
    /// temperature 1, before top-k and top-p. Of a greedy candidate it is the candidate's own. None
    /// unless the rule needs it.
    pub confidence: Option<f64>,
    /// The same among the ten largest of those probabilities, scaled to a sum of 1: what llama.cpp
    /// calls p. None unless the rule needs it.
    pub confidence_of_ten: Option<f64>,
    /// The candidate's own probability under what it was drawn from, as served; raw where it is
    /// greedy. The round loop fills it in, once the candidate is drawn. None unless the rule needs
    /// it.
    pub candidate_prob: Option<f64>,
    /// The entropy, in nats, of the raw distribution this candidate was drawn from. None unless the
    /// rule needs it.
    pub entropy: Option<f64>,
}

/// An acceptance head's prediction for one candidate of the round: min(1, p/q), estimated.
///
/// Which candidate that is, is told relative to the draft forward that the signals are of, and so
/// it is the same before the draw from it and after.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeadEstimate {
    /// Of the candidate that the forward has read, the one before the one drawn from it: the
    /// paper's head, with its lag of one token (SpecDec++, Algorithm 2). At step s the draft's
    /// forward reads candidate s − 1, whose hidden state gives that candidate's acceptance
    /// probability, and yields q_s, from which candidate s is drawn at no further cost.
    OfRead(f64),
    /// Of the candidate that was drawn from the forward. Such a head looks ahead: it needs no
    /// forward that reads the candidate, and predicts nothing before the draw.
    OfDrawn(f64),
}

/// When an acceptance head predicts a candidate's acceptance.
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
    /// [`DraftSignals::confidence_of_ten`].
    pub confidence_of_ten: bool,
    /// [`DraftSignals::candidate_prob`].
    pub candidate_prob: bool,
    /// [`DraftSignals::entropy`].
    pub entropy: bool,
}

impl SignalNeeds {
    /// Whether a rule reads nothing but how rounds went.
    pub fn is_nothing(self) -> bool {
        self == Self::default()
    }

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
        if self.confidence_of_ten {
            signals.confidence_of_ten = Some(largest_prob_of_ten(logits));
        }
        signals
    }
}

/// What an estimate of a candidate's acceptance is read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AcceptanceSignal {
    /// The acceptance head, which predicts once the draft has read the candidate, or as it is drawn.
    AcceptanceProb,
    /// The draft's confidence where the candidate is drawn.
    Confidence,
    /// The draft's entropy where the candidate is drawn.
    Entropy,
}

impl AcceptanceSignal {
    /// The signals that are read.
    pub fn needs(self) -> SignalNeeds {
        let none = SignalNeeds::default();
        match self {
            Self::AcceptanceProb => SignalNeeds { acceptance_prob: true, ..none },
            Self::Confidence => SignalNeeds { confidence: true, ..none },
            Self::Entropy => SignalNeeds { entropy: true, ..none },
        }
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

/// The largest of the ten largest probabilities of the softmax of `logits`, which are scaled to a sum of
/// 1; of fewer tokens, of them all.
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
    // Of those as large as the tenth, as many as are left.
    (total + (TEN - count) as f64 * weight(tenth)).recip()
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
        let ten = SignalNeeds { confidence_of_ten: true, ..SignalNeeds::default() };
        let of_ten = |logits: &[f32]| ten.signals_of_logits(logits).confidence_of_ten;
        // Of few tokens, they are all.
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
