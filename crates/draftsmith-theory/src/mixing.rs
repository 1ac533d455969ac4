//! The mixture of target and draft tokens in a head's training input, and the labels.
//!
//! SpecDec++ mixes as BERT masks: a share of positions keeps the target's token X and has no label;
//! the rest takes the draft's token Y, whose acceptance probability is the label. The authors draw
//! the mixture once, when they build the data set. We draw it again in each epoch, so that one
//! response gives several inputs.

use crate::{Draws, SeededDraws};

/// For each of `len` response positions, whether the training input keeps the target's token X,
/// where the label is ignored (true), or takes the draft's token Y (false).
///
/// Each position keeps X with chance `mixing_ratio` (0.15 in the authors' code). The answer is a function of the
/// arguments alone, and a shorter `len` gives a prefix of it.
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

/// min(1, p/q) = exp(min(0, log p − log q)) at the draft's token, from both models' natural
/// log-probabilities: the label of SpecDec++.
///
/// Never NaN: a target log-probability of −∞ gives 0, whatever the draft's, and a draft
/// log-probability of −∞ alone gives 1.
pub fn acceptance_prob(target_log_prob: f32, draft_log_prob: f32) -> f32 {
    debug_assert!(
        !target_log_prob.is_nan() && !draft_log_prob.is_nan(),
        "log-probabilities are numbers"
    );
    if target_log_prob == f32::NEG_INFINITY {
        return 0.0;
    }
    // In f64, since a difference of f32 logarithms keeps all its digits there; `min` also answers 0
    // to a NaN.
    (f64::from(target_log_prob) - f64::from(draft_log_prob)).min(0.0).exp() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_is_a_function_of_seed_epoch_and_row() {
        let reference = keep_target(1, 0, "alpaca#7", 0.5, 64);
        assert_eq!(reference, keep_target(1, 0, "alpaca#7", 0.5, 64));
        assert_ne!(reference, keep_target(2, 0, "alpaca#7", 0.5, 64));
        assert_ne!(reference, keep_target(1, 1, "alpaca#7", 0.5, 64));
        assert_ne!(reference, keep_target(1, 0, "alpaca#8", 0.5, 64));
        // Row "0#x" in epoch 1 and row "#x" in epoch 10 are named by the same letters.
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
            // Two f32 logarithms of up to 14 carry an absolute error of about 1e-6 into the
            // exponent.
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
}
