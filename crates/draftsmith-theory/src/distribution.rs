//! Raw distributions over the vocabulary: softmax at temperature 1, overlap, entropies.
//!
//! Logits are the model's f32; everything computed from them is f64. `sampling` warps distributions.

use crate::exponentials;

/// Natural logarithms of the softmax of `logits`, computed in f64; a logit of −∞ stays −∞.
///
/// # Panics
/// If no logit is finite, or any is NaN or +∞.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = checked_max(logits);
    let (total, _) = exponentials::sums(logits, largest);
    assert!(total.is_finite(), "logits must not be NaN");
    let log_total = f64::from(largest) + total.ln();
    logits.iter().map(|&logit| f64::from(logit) - log_total).collect()
}

/// The index of the largest of `logits`; among equals the first, as in common greedy decoders.
///
/// # Panics
/// If no logit is finite, or the largest is +∞.
pub fn argmax(logits: &[f32]) -> u32 {
    let largest = checked_max(logits);
    let index = logits
        .iter()
        .position(|&logit| logit == largest)
        .expect("the maximum is one of the logits");
    u32::try_from(index).expect("a vocabulary is smaller than 2^32")
}

/// Σ min(p, q) = 1 − TVD(p, q): the expected acceptance probability of a token drawn from either,
/// proposed to the other.
///
/// # Panics
/// If the lengths differ.
pub fn overlap(p: &[f64], q: &[f64]) -> f64 {
    assert_eq!(p.len(), q.len(), "both distributions must be over one vocabulary");
    p.iter().zip(q).map(|(p, q)| p.min(*q)).sum()
}

/// Entropy −Σ q log q in nats, from natural log-probabilities; a log-probability of −∞ adds 0.
pub fn entropy_of_log_probs(log_probs: &[f64]) -> f64 {
    cross_entropy(log_probs, log_probs)
}

/// Cross-entropy H(q, p) = −Σ q log p in nats, both given as natural log-probabilities; +∞ where q
/// has mass and p has none. SVIP bounds acceptance from below by 1 − √((H(q, p) − H(q)) / 2) with q
/// the draft and p the target.
///
/// # Panics
/// If the lengths differ.
pub fn cross_entropy(q_log_probs: &[f64], p_log_probs: &[f64]) -> f64 {
    assert_eq!(
        q_log_probs.len(),
        p_log_probs.len(),
        "both distributions must be over one vocabulary"
    );
    let terms = q_log_probs.iter().zip(p_log_probs).map(|(q_log_prob, p_log_prob)| {
        let q = q_log_prob.exp();
        // 0 · −∞ is 0 here, not NaN.
        if q == 0.0 { 0.0 } else { q * -p_log_prob }
    });
    terms.sum()
}

/// The largest logit, checked to be finite. NaNs are skipped; checks of the sum find them.
pub(crate) fn checked_max(logits: &[f32]) -> f32 {
    let (sixteens, rest) = logits.as_chunks::<16>();
    // Lanes, and a plain comparison instead of `f32::max`, so that the compiler can use wide
    // registers; by index, so that it need not inline iterators first.
    let mut lanes = [f32::NEG_INFINITY; 16];
    for sixteen in sixteens {
        for lane in 0..16 {
            lanes[lane] = if sixteen[lane] > lanes[lane] { sixteen[lane] } else { lanes[lane] };
        }
    }
    let largest = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    assert!(largest.is_finite(), "the largest logit must be finite, not {largest}");
    largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draws, SeededDraws};

    fn random_logits(draws: &mut SeededDraws, len: usize) -> Vec<f32> {
        (0..len)
            .map(|_| {
                if draws.bernoulli(0.1) {
                    f32::NEG_INFINITY
                } else {
                    (draws.uniform() * 40.0 - 20.0) as f32
                }
            })
            .chain([1.0])
            .collect()
    }

    #[test]
    fn log_softmax_is_normalised_and_keeps_differences() {
        let mut draws = SeededDraws::new(1, &["log-softmax"]);
        for len in [0, 1, 15, 16, 17, 1000] {
            let logits = random_logits(&mut draws, len);
            let log_probs = log_softmax(&logits);
            let total: f64 = log_probs.iter().map(|log_prob| log_prob.exp()).sum();
            // A thousand f64 terms.
            assert!((total - 1.0).abs() < 1e-12);
            for (log_prob, &logit) in log_probs.iter().zip(&logits) {
                let expected = log_probs[len] + f64::from(logit) - 1.0;
                assert!(*log_prob == expected || (log_prob - expected).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn log_softmax_survives_large_logits() {
        let log_probs = log_softmax(&[1000.0, 1000.0, f32::NEG_INFINITY]);
        // The logits are exact; the sum 1000 + ln 2 is rounded at 1e-13.
        assert!((log_probs[0] + 2f64.ln()).abs() < 1e-12);
        assert_eq!(log_probs[2], f64::NEG_INFINITY);
    }

    #[test]
    fn argmax_takes_the_first_of_equals() {
        assert_eq!(argmax(&[0.0, 2.0, 2.0, 1.0]), 1);
        let mut logits = vec![-1.0f32; 100];
        logits[97] = 0.5;
        logits[41] = 0.5;
        assert_eq!(argmax(&logits), 41);
        assert_eq!(argmax(&[f32::NEG_INFINITY, -5.0]), 1);
    }

    #[test]
    #[should_panic(expected = "largest logit must be finite")]
    fn a_row_without_a_finite_logit_is_a_bug() {
        argmax(&[f32::NEG_INFINITY, f32::NAN]);
    }

    #[test]
    #[should_panic(expected = "must not be NaN")]
    fn a_nan_logit_is_a_bug() {
        log_softmax(&[0.0, f32::NAN]);
    }

    #[test]
    fn overlap_is_one_minus_total_variation() {
        let p = [0.5, 0.25, 0.25, 0.0];
        let q = [0.25, 0.25, 0.0, 0.5];
        assert_eq!(overlap(&p, &q), 0.5);
        assert_eq!(overlap(&p, &p), 1.0);
        let variation: f64 = p.iter().zip(&q).map(|(p, q)| (p - q).abs()).sum::<f64>() / 2.0;
        assert_eq!(overlap(&q, &p), 1.0 - variation);
    }

    #[test]
    fn entropies_match_hand_computation() {
        let q = log_softmax(&[0.0, 0.0, f32::NEG_INFINITY]);
        let p = log_softmax(&[0.0, 0.0, 0.0]);
        // One rounding a term.
        assert!((entropy_of_log_probs(&q) - 2f64.ln()).abs() < 1e-15);
        assert!((cross_entropy(&q, &p) - 3f64.ln()).abs() < 1e-15);
        assert_eq!(cross_entropy(&p, &q), f64::INFINITY);
        assert_eq!(entropy_of_log_probs(&[0.0, f64::NEG_INFINITY]), 0.0);
    }

    #[test]
    fn cross_entropy_is_least_at_equality() {
        let mut draws = SeededDraws::new(2, &["gibbs"]);
        for _ in 0..50 {
            let q = log_softmax(&random_logits(&mut draws, 20));
            let p = log_softmax(&random_logits(&mut draws, 20));
            assert!(cross_entropy(&q, &p) >= entropy_of_log_probs(&q));
        }
    }

    #[test]
    fn overlap_is_bounded_by_the_entropies() {
        // Pinsker, as SVIP uses it: overlap >= 1 − √((H(q, p) − H(q)) / 2).
        let mut draws = SeededDraws::new(3, &["pinsker"]);
        let exp = |log_probs: &[f64]| {
            log_probs.iter().map(|log_prob| log_prob.exp()).collect::<Vec<f64>>()
        };
        for scale in [0.01, 0.1, 1.0, 5.0] {
            let mut row = || {
                log_softmax(&(0..30).map(|_| (draws.uniform() * scale) as f32).collect::<Vec<_>>())
            };
            let (q, p) = (row(), row());
            let divergence = cross_entropy(&q, &p) - entropy_of_log_probs(&q);
            assert!(overlap(&exp(&p), &exp(&q)) >= 1.0 - (divergence / 2.0).sqrt());
        }
    }
}
