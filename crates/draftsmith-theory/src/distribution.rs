//! Raw distributions (softmax at temperature 1), their entropies, their overlap and bounds on it.
//!
//! Logits are the model's f32; everything computed from them is f64. The module `sampling` applies
//! temperature and filters.
//!
//! The overlap β = Σ min(p, q) = 1 − TVD(p, q) is the expected acceptance probability. It is
//! symmetric in p and q, so the KL divergence in either direction gives a lower bound. SVIP (Zhang
//! et al. 2024, §2) starts from such a bound and replaces the divergence, which the draft model
//! cannot know, by the draft's entropy. The result is an estimate, not a bound. Divergences and
//! entropies are in nats. `draftsmith inspect` shows the bound, the estimate and the measured
//! overlap.

use crate::exponentials;

/// Computes the natural logarithms of the softmax of `logits` in f64; a logit of −∞ stays −∞.
///
/// # Panics
/// If no logit is finite, or any is NaN or +∞.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = checked_max(logits);
    let (_, total) = exponentials::weights(logits, largest, 1.0);
    assert!(total.is_finite(), "logits must not be NaN");
    let log_total = f64::from(largest) + total.ln();
    logits.iter().map(|&logit| f64::from(logit) - log_total).collect()
}

/// Returns the index of the largest logit, the first among equals, as in common greedy decoders.
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

/// Computes the overlap Σ min(p, q) = 1 − TVD(p, q): the expected acceptance probability of a token
/// drawn from one of the distributions and proposed to the other.
///
/// # Panics
/// If the lengths differ.
pub fn overlap(p: &[f64], q: &[f64]) -> f64 {
    assert_eq!(p.len(), q.len(), "both distributions must be over one vocabulary");
    p.iter().zip(q).map(|(p, q)| p.min(*q)).sum()
}

/// Computes the entropy −Σ q log q in nats from natural log-probabilities; one of −∞ adds 0.
pub fn entropy_of_log_probs(log_probs: &[f64]) -> f64 {
    cross_entropy(log_probs, log_probs)
}

/// Computes the cross-entropy H(q, p) = −Σ q log p in nats from natural log-probabilities. It is +∞
/// if q has mass where p has none. With q the draft and p the target, SVIP's lower bound on
/// acceptance is 1 − √((H(q, p) − H(q)) / 2).
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

/// Computes Pinsker's lower bound on the overlap: β ≥ 1 − √(KL/2), with `kl_nats` = KL(q‖p) or
/// KL(p‖q); it is 0 from 2 nats on.
///
/// Below 1.594 nats it beats [`bretagnolle_huber_bound`]. A divergence rounded below 0 counts as 0.
///
/// # Panics
/// If the divergence is NaN.
pub fn pinsker_bound(kl_nats: f64) -> f64 {
    (1.0 - (checked(kl_nats) / 2.0).sqrt()).max(0.0)
}

/// Computes Bretagnolle and Huber's lower bound on the overlap: β ≥ 1 − √(1 − e^{−KL}), with
/// `kl_nats` = KL(q‖p) or KL(p‖q); it is positive for any finite KL.
///
/// Above 1.594 nats it is better than [`pinsker_bound`]. A divergence rounded below 0 counts as 0.
///
/// # Panics
/// If the divergence is NaN.
pub fn bretagnolle_huber_bound(kl_nats: f64) -> f64 {
    let kl_nats = checked(kl_nats);
    // With e = e^−KL, 1 − √(1 − e) equals e / (1 + √(1 − e)), which loses no digits at large KL. At
    // small KL, exp_m1 loses none.
    (-kl_nats).exp() / (1.0 + (-(-kl_nats).exp_m1()).sqrt())
}

/// Computes the better of two lower bounds on the overlap β, Pinsker's and Bretagnolle and Huber's,
/// from the divergences in both directions.
///
/// `draft_to_target_kl_nats` is KL(q‖p) = H(q, p) − H(q) and `target_to_draft_kl_nats` is KL(p‖q),
/// with q the draft and p the target. Pass +∞ for an unknown divergence.
///
/// # Panics
/// If a divergence is NaN.
pub fn overlap_lower_bound(draft_to_target_kl_nats: f64, target_to_draft_kl_nats: f64) -> f64 {
    // Both bounds fall as the divergence grows, so the smaller divergence gives the better bound.
    let kl_nats = checked(draft_to_target_kl_nats).min(checked(target_to_draft_kl_nats));
    pinsker_bound(kl_nats).max(bretagnolle_huber_bound(kl_nats))
}

/// Computes SVIP's estimate of β, 1 − √(c·H(q)), with c = `entropy_scale` and H(q) =
/// `draft_entropy_nats` (Zhang et al. 2024, §2); at least 0.
///
/// It is Pinsker's bound with 2c·H(q) in place of the divergence H(q, p) − H(q). The true β may be
/// smaller or larger. For example, a confident but wrong draft has low entropy and low overlap. The
/// authors' code has c = 0.15; the paper absorbs c into the threshold.
///
/// # Panics
/// If the entropy or the scale is negative or NaN.
pub fn entropy_overlap_estimate(draft_entropy_nats: f64, entropy_scale: f64) -> f64 {
    assert!(
        draft_entropy_nats >= 0.0 && entropy_scale >= 0.0,
        "an entropy and its scale are not negative: {draft_entropy_nats}, {entropy_scale}"
    );
    (1.0 - (entropy_scale * draft_entropy_nats).sqrt()).max(0.0)
}

fn checked(kl_nats: f64) -> f64 {
    assert!(!kl_nats.is_nan(), "a divergence must not be NaN");
    kl_nats.max(0.0)
}

/// Returns the largest logit and panics unless it is finite. NaNs are skipped here. Callers find
/// them when they check the sum of the exponentials.
pub(crate) fn checked_max(logits: &[f32]) -> f32 {
    let (sixteens, rest) = logits.as_chunks::<16>();
    // Sixteen lanes and a plain comparison instead of `f32::max` let the compiler use wide
    // registers. Indices spare it from inlining iterators first.
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

    /// The divergence at which the bounds of Pinsker and of Bretagnolle and Huber are equal, in
    /// nats: the positive root of KL/2 = 1 − e^{−KL}, which is 2 + W(−2e^{−2}). Both are 0.107
    /// there.
    const BOUNDS_CROSS_AT_NATS: f64 = 1.593_624_260_040_04;

    /// Draws the log-probabilities of a random distribution: near uniform at sharpness 0, nearly
    /// one-hot at 20.
    fn random_log_probs(rng: &mut SeededDraws, len: usize, sharpness: f64) -> Vec<f64> {
        let logits: Vec<f64> = (0..len).map(|_| sharpness * rng.uniform()).collect();
        let log_total = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        logits.iter().map(|logit| logit - log_total).collect()
    }

    fn overlap_of(p_log_probs: &[f64], q_log_probs: &[f64]) -> f64 {
        let probs = |log_probs: &[f64]| log_probs.iter().map(|lp| lp.exp()).collect::<Vec<_>>();
        overlap(&probs(p_log_probs), &probs(q_log_probs))
    }

    /// Computes KL(q‖p) in nats.
    fn divergence(q_log_probs: &[f64], p_log_probs: &[f64]) -> f64 {
        cross_entropy(q_log_probs, p_log_probs) - entropy_of_log_probs(q_log_probs)
    }

    #[test]
    fn the_bounds_hold_in_both_directions() {
        let mut rng = SeededDraws::new(1, &["acceptance-bounds"]);
        let (mut num_small, mut num_large, mut least_slack) = (0, 0, f64::INFINITY);
        for case in 0..2000 {
            let len = 2 + case % 9;
            let sharpness = 20.0 * rng.uniform() * rng.uniform();
            let p = random_log_probs(&mut rng, len, sharpness);
            let q = random_log_probs(&mut rng, len, sharpness);
            let beta = overlap_of(&p, &q);
            let (kl, reverse_kl) = (divergence(&q, &p), divergence(&p, &q));
            // Pinsker's bound is tight as KL goes to 0, where a rounding error of 1e-15 in KL moves
            // √KL by 3e-8.
            let most = beta + 1e-7;
            for kl in [kl, reverse_kl] {
                assert!(pinsker_bound(kl) <= most && bretagnolle_huber_bound(kl) <= most);
            }
            let best = overlap_lower_bound(kl, reverse_kl);
            assert!((0.0..=most).contains(&best), "{best} does not bound {beta}");
            assert_eq!(best, overlap_lower_bound(reverse_kl, kl));
            assert!(best >= overlap_lower_bound(kl, f64::INFINITY));
            least_slack = least_slack.min(beta - best);
            num_small += usize::from(kl < BOUNDS_CROSS_AT_NATS);
            num_large += usize::from(kl > BOUNDS_CROSS_AT_NATS);
        }
        assert!(num_small > 100 && num_large > 100, "both regimes occur");
        assert!(least_slack < 0.01, "the bound is nearly reached: {least_slack}");
    }

    #[test]
    fn pinsker_is_tight_for_small_divergences() {
        for shift in [1e-2, 1e-3, 1e-4] {
            let (p, q) = ([0.5f64, 0.5], [0.5 + shift, 0.5 - shift]);
            let logs = |probs: [f64; 2]| probs.map(f64::ln);
            let kl = divergence(&logs(q), &logs(p));
            // KL is 2·shift² up to fourth order; in f64 it has eight digits at a shift of 1e-4.
            assert!((pinsker_bound(kl) - overlap(&p, &q)).abs() < shift.powi(2));
        }
    }

    #[test]
    fn pinsker_is_better_below_the_crossing_and_bretagnolle_huber_above() {
        for step in 1..2000 {
            let kl = 0.005 * f64::from(step);
            let (pinsker, huber) = (pinsker_bound(kl), bretagnolle_huber_bound(kl));
            assert_eq!(pinsker > huber, kl < BOUNDS_CROSS_AT_NATS, "{pinsker}, {huber} at {kl}");
            assert_eq!(overlap_lower_bound(kl, f64::INFINITY), pinsker.max(huber));
        }
    }

    #[test]
    fn the_bounds_are_equal_at_the_crossing() {
        let residue = |kl: f64| kl / 2.0 + (-kl).exp_m1();
        // Two ulps of a number near 1.6: the constant is the root to its last digits.
        assert!(residue(BOUNDS_CROSS_AT_NATS - 5e-16) <= 0.0);
        assert!(residue(BOUNDS_CROSS_AT_NATS + 5e-16) >= 0.0);
        let [pinsker, huber] =
            [pinsker_bound, bretagnolle_huber_bound].map(|f| f(BOUNDS_CROSS_AT_NATS));
        // One subtraction in each, of numbers near 1.
        assert!((pinsker - huber).abs() < 1e-15 && (pinsker - 0.107).abs() < 5e-4);
    }

    #[test]
    fn the_ends_are_exact() {
        for bound in [pinsker_bound, bretagnolle_huber_bound] {
            assert_eq!(bound(0.0), 1.0);
            assert_eq!(bound(-1e-17), 1.0, "rounding");
            assert_eq!(bound(f64::INFINITY), 0.0);
        }
        assert_eq!(pinsker_bound(2.0), 0.0);
        // The first term is e^{−KL}/2, and the next has a relative size of e^{−40}/4.
        let ratio = bretagnolle_huber_bound(40.0) / (0.5 * (-40.0f64).exp());
        assert!((ratio - 1.0).abs() < 1e-15);
    }

    #[test]
    fn disjoint_distributions_have_a_bound_of_zero() {
        let (p, q) = ([0.0, f64::NEG_INFINITY], [f64::NEG_INFINITY, 0.0]);
        assert_eq!(divergence(&q, &p), f64::INFINITY);
        assert_eq!(overlap_lower_bound(divergence(&q, &p), divergence(&p, &q)), 0.0);
        assert_eq!(overlap_of(&p, &q), 0.0);
    }

    #[test]
    fn the_entropy_estimate_is_pinsker_where_the_divergence_is_a_share_of_the_entropy() {
        for entropy in [0.0, 0.1, 0.6, 3.0, 20.0] {
            let bound = pinsker_bound(2.0 * 0.15 * entropy);
            // 2·c·H/2 and c·H differ by rounding.
            assert!((entropy_overlap_estimate(entropy, 0.15) - bound).abs() < 1e-15);
        }
    }

    #[test]
    fn the_entropy_estimate_does_not_bound_the_overlap() {
        let logs = |probs: [f64; 2]| probs.map(f64::ln);
        let (sure, other, uniform) = (logs([0.999, 0.001]), logs([0.001, 0.999]), logs([0.5; 2]));
        let estimate = |q: [f64; 2]| entropy_overlap_estimate(entropy_of_log_probs(&q), 0.15);
        assert!(estimate(sure) > 0.96 && overlap_of(&other, &sure) < 0.01, "confident and wrong");
        assert!(
            estimate(uniform) < 0.7 && overlap_of(&uniform, &uniform) == 1.0,
            "unsure and right"
        );
    }

    #[test]
    #[should_panic(expected = "a divergence must not be NaN")]
    fn a_nan_divergence_is_a_bug() {
        overlap_lower_bound(0.1, f64::NAN);
    }
}
