//! The rows and inputs that a head is trained on: the validation split, the mixture of target and
//! draft tokens, and the labels.
//!
//! SpecDec++ mixes tokens in the way that BERT masks them. A share of the positions keeps the
//! target's token X and has no label. The other positions take the draft's token Y, whose
//! acceptance probability is the label. The authors draw the mixture once, when they build the data
//! set. We draw it again in each epoch, so that one response gives several inputs.

use sha2::{Digest, Sha256};

use crate::{Draws, SeededDraws};

/// Decides for each of `len` response positions whether the training input keeps the target's token
/// X, which has no label (true), or takes the draft's token Y (false).
///
/// Each position keeps X with probability `mixing_ratio` (0.15 in the authors' code). The result
/// depends only on the arguments, and a shorter `len` gives a prefix.
///
/// # Panics
/// If `mixing_ratio` is not between 0 and 1.
pub fn keep_target(
    seed: u64,
    epoch: u64,
    row_id: &str,
    mixing_ratio: f64,
    len: usize,
) -> Vec<bool> {
    assert!(
        (0.0..=1.0).contains(&mixing_ratio),
        "mixing_ratio must lie between 0 and 1, not {mixing_ratio}"
    );
    let mut draws = SeededDraws::new(seed, &["mixing", &epoch.to_string(), row_id]);
    (0..len).map(|_| draws.bernoulli(mixing_ratio)).collect()
}

/// Computes min(1, p/q) = exp(min(0, log p − log q)) at the draft's token, from both models'
/// natural log-probabilities: the label of SpecDec++.
///
/// The result is never NaN. A target log-probability of −∞ gives 0. Otherwise a draft
/// log-probability of −∞ gives 1.
pub fn acceptance_prob(target_log_prob: f32, draft_log_prob: f32) -> f32 {
    debug_assert!(
        !target_log_prob.is_nan() && !draft_log_prob.is_nan(),
        "log-probabilities are numbers"
    );
    if target_log_prob == f32::NEG_INFINITY {
        return 0.0;
    }
    // In f64 the difference of two f32 logarithms is exact; `min` turns NaN into 0.
    (f64::from(target_log_prob) - f64::from(draft_log_prob)).min(0.0).exp() as f32
}

/// Returns whether the rows with this `id` are held out for validation. A `share` of all ids is.
///
/// The answer depends only on the SHA-256 of the id and on `share`. So adding data moves no old
/// row, and a larger share holds out a superset. Rows that must stay together, such as the turns of
/// one conversation, need the same id.
///
/// # Panics
/// If `share` is not between 0 and 1.
pub fn in_validation(id: &str, share: f64) -> bool {
    assert!((0.0..=1.0).contains(&share), "share must lie between 0 and 1, not {share}");
    let digest: [u8; 32] = Sha256::digest(id.as_bytes()).into();
    let place = digest[..8].iter().fold(0u64, |place, byte| place << 8 | u64::from(*byte));
    // An f64 holds 53 bits exactly, so that a share of 1 holds out everything.
    ((place >> 11) as f64) < share * (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_depends_on_seed_epoch_and_row() {
        let reference = keep_target(1, 0, "alpaca#7", 0.5, 64);
        assert_eq!(reference, keep_target(1, 0, "alpaca#7", 0.5, 64));
        assert_ne!(reference, keep_target(2, 0, "alpaca#7", 0.5, 64));
        assert_ne!(reference, keep_target(1, 1, "alpaca#7", 0.5, 64));
        assert_ne!(reference, keep_target(1, 0, "alpaca#8", 0.5, 64));
        // Row "0#x" in epoch 1 and row "#x" in epoch 10 would concatenate to the same name.
        assert_ne!(keep_target(1, 1, "0#x", 0.5, 64), keep_target(1, 10, "#x", 0.5, 64));
    }

    #[test]
    fn a_shorter_row_is_a_prefix() {
        let long = keep_target(3, 2, "row", 0.15, 100);
        assert_eq!(keep_target(3, 2, "row", 0.15, 40), long[..40]);
        assert!(keep_target(3, 2, "row", 0.15, 0).is_empty());
    }

    #[test]
    fn a_larger_ratio_keeps_a_superset() {
        let few = keep_target(3, 2, "row", 0.15, 500);
        let many = keep_target(3, 2, "row", 0.4, 500);
        assert!(few.iter().zip(&many).all(|(few, many)| *many || !*few));
    }

    #[test]
    fn the_share_kept_is_the_mixing_ratio() {
        let num_kept = keep_target(5, 0, "row", 0.15, 40_000).iter().filter(|kept| **kept).count();
        // Four standard deviations: 4 · √(40,000 · 0.15 · 0.85) = 286.
        assert!(num_kept.abs_diff(6000) < 286, "{num_kept}");
        assert!(keep_target(5, 0, "row", 0.0, 1000).iter().all(|kept| !*kept));
        assert!(keep_target(5, 0, "row", 1.0, 1000).iter().all(|kept| *kept));
    }

    #[test]
    fn acceptance_prob_is_the_clipped_ratio() {
        for (p, q) in [(0.2f32, 0.4f32), (0.4, 0.2), (1.0, 1.0), (1e-6, 0.9), (0.3, 0.3)] {
            let expected = (p / q).min(1.0);
            // Two f32 logarithms of up to 14 have an absolute error of about 1e-6.
            assert!((acceptance_prob(p.ln(), q.ln()) - expected).abs() <= 2e-6 * expected);
        }
    }

    #[test]
    fn acceptance_prob_is_never_nan() {
        let nothing = f32::NEG_INFINITY;
        assert_eq!(acceptance_prob(nothing, -1.0), 0.0);
        assert_eq!(acceptance_prob(nothing, nothing), 0.0);
        assert_eq!(acceptance_prob(-1.0, nothing), 1.0);
        assert_eq!(acceptance_prob(-1e30, 0.0), 0.0);
        assert_eq!(acceptance_prob(0.0, -1e30), 1.0);
    }

    fn ids() -> impl Iterator<Item = String> {
        (0..20_000).map(|n| format!("alpaca#{n}"))
    }

    #[test]
    fn the_share_held_out_is_the_given_share() {
        let num_held_out = ids().filter(|id| in_validation(id, 0.05)).count();
        // Four standard deviations: 4 · √(20,000 · 0.05 · 0.95) = 123.
        assert!(num_held_out.abs_diff(1000) < 123, "{num_held_out}");
        assert!(ids().all(|id| in_validation(&id, 1.0) && !in_validation(&id, 0.0)));
    }

    #[test]
    fn a_larger_share_holds_out_a_superset() {
        assert!(ids().all(|id| in_validation(&id, 0.2) || !in_validation(&id, 0.1)));
    }

    #[test]
    fn the_split_never_moves() {
        // `printf abc | sha256sum` begins ba7816bf: 0xba7816bf / 2^32 = 0.7284.
        assert!(in_validation("abc", 0.729));
        assert!(!in_validation("abc", 0.728));
    }
}
