//! Bounds on the overlap β = Σ min(p, q) = 1 − TVD(p, q) from a KL divergence, and SVIP's estimate
//! from the draft's entropy.
//!
//! β is the expected acceptance probability. It is symmetric, so either KL divergence bounds it from
//! below. SVIP (Zhang et al. 2024, §2) starts from such a bound and replaces the divergence, which
//! the draft cannot know, by the draft's entropy. The result is an estimate, not a bound.
//! Divergences and entropies are in nats. `draftsmith inspect` shows bound and estimate beside the
//! measured overlap.

/// Pinsker: β ≥ 1 − √(KL/2), with `kl_nats` = KL(q‖p) or KL(p‖q); 0 where that is negative, from 2
/// nats on.
///
/// The better of the two bounds below 1.594 nats. A divergence rounded below 0 counts as 0.
///
/// # Panics
/// If the divergence is NaN.
fn pinsker_bound(kl_nats: f64) -> f64 {
    (1.0 - (checked(kl_nats) / 2.0).sqrt()).max(0.0)
}

/// Bretagnolle–Huber: β ≥ 1 − √(1 − e^{−KL}), with `kl_nats` = KL(q‖p) or KL(p‖q); positive for any
/// finite KL.
///
/// The better of the two bounds above 1.594 nats. A divergence rounded below 0 counts as 0.
///
/// # Panics
/// If the divergence is NaN.
fn bretagnolle_huber_bound(kl_nats: f64) -> f64 {
    let kl_nats = checked(kl_nats);
    // 1 − √(1 − e) is e / (1 + √(1 − e)), which keeps its digits for large KL; exp_m1 keeps those
    // for small.
    (-kl_nats).exp() / (1.0 + (-(-kl_nats).exp_m1()).sqrt())
}

/// The best lower bound on β from the two divergences, by Pinsker or by Bretagnolle and Huber.
///
/// `draft_to_target_kl_nats` is KL(q‖p) = H(q, p) − H(q) and `target_to_draft_kl_nats` is KL(p‖q),
/// with q the draft; +∞ for an unknown direction.
///
/// # Panics
/// If a divergence is NaN.
pub fn overlap_lower_bound(draft_to_target_kl_nats: f64, target_to_draft_kl_nats: f64) -> f64 {
    // Both bounds fall as the divergence grows, so the smaller one decides.
    let kl_nats = checked(draft_to_target_kl_nats).min(checked(target_to_draft_kl_nats));
    pinsker_bound(kl_nats).max(bretagnolle_huber_bound(kl_nats))
}

/// SVIP's estimate of β, 1 − √(c·H(q)), with c = `entropy_scale` and H(q) = `draft_entropy_nats`
/// (Zhang et al. 2024, §2); 0 where that is negative.
///
/// It is Pinsker's bound with 2c·H(q) in place of the divergence H(q, p) − H(q). β may lie on either
/// side: a confident but wrong draft has neither entropy nor overlap. The authors' code has c = 0.15;
/// the paper absorbs c into the threshold.
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
    assert!(!kl_nats.is_nan(), "a divergence is a number");
    kl_nats.max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SeededDraws, cross_entropy, entropy_of_log_probs, overlap};

    /// The divergence at which the bounds of Pinsker and of Bretagnolle and Huber are equal, in
    /// nats: the positive root of KL/2 = 1 − e^{−KL}, which is 2 + W(−2e^{−2}). Both are 0.107
    /// there.
    const BOUNDS_CROSS_AT_NATS: f64 = 1.593_624_260_040_04;

    /// The log-probabilities of a random distribution: near uniform at sharpness 0, nearly one-hot
    /// at 20.
    fn random_log_probs(rng: &mut SeededDraws, len: usize, sharpness: f64) -> Vec<f64> {
        let logits: Vec<f64> = (0..len).map(|_| sharpness * rng.uniform()).collect();
        let log_total = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        logits.iter().map(|logit| logit - log_total).collect()
    }

    fn overlap_of(p_log_probs: &[f64], q_log_probs: &[f64]) -> f64 {
        let probs = |log_probs: &[f64]| log_probs.iter().map(|lp| lp.exp()).collect::<Vec<_>>();
        overlap(&probs(p_log_probs), &probs(q_log_probs))
    }

    /// KL(q‖p) in nats.
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
            assert!((0.0..=most).contains(&best), "{best} is no bound on {beta}");
            assert_eq!(best, overlap_lower_bound(reverse_kl, kl));
            assert!(best >= overlap_lower_bound(kl, f64::INFINITY));
            least_slack = least_slack.min(beta - best);
            num_small += usize::from(kl < BOUNDS_CROSS_AT_NATS);
            num_large += usize::from(kl > BOUNDS_CROSS_AT_NATS);
        }
        assert!(num_small > 100 && num_large > 100, "both regimes were met");
        assert!(least_slack < 0.01, "and the bound was nearly reached: {least_slack}");
    }

    #[test]
    fn pinsker_is_tight_for_small_divergences() {
        for shift in [1e-2, 1e-3, 1e-4] {
            let (p, q) = ([0.5f64, 0.5], [0.5 + shift, 0.5 - shift]);
            let logs = |probs: [f64; 2]| probs.map(f64::ln);
            let kl = divergence(&logs(q), &logs(p));
            // KL is 2·shift² to the fourth order in the shift; f64 leaves it eight digits at a
            // shift of 1e-4.
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
        // Two ulps of a number near 1.6 either way: the constant is the root to its last digits.
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
        // e^{−KL}/2 is the first term, and the next is of relative size e^{−40}/4: the quotient
        // loses nothing.
        let ratio = bretagnolle_huber_bound(40.0) / (0.5 * (-40.0f64).exp());
        assert!((ratio - 1.0).abs() < 1e-15);
    }

    #[test]
    fn disjoint_distributions_are_bounded_by_nothing() {
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
    fn the_entropy_estimate_is_no_bound() {
        let logs = |probs: [f64; 2]| probs.map(f64::ln);
        let (sure, other, uniform) = (logs([0.999, 0.001]), logs([0.001, 0.999]), logs([0.5; 2]));
        let estimate = |q: [f64; 2]| entropy_overlap_estimate(entropy_of_log_probs(&q), 0.15);
        assert!(estimate(sure) > 0.96 && overlap_of(&other, &sure) < 0.01, "sure and wrong");
        assert!(
            estimate(uniform) < 0.7 && overlap_of(&uniform, &uniform) == 1.0,
            "unsure and right"
        );
    }

    #[test]
    #[should_panic(expected = "a divergence is a number")]
    fn a_divergence_that_is_no_number_is_a_bug() {
        overlap_lower_bound(0.1, f64::NAN);
    }
}
