//! What speculative decoding yields if every candidate is accepted independently with one
//! probability.
//!
//! Leviathan et al. (2023). Real acceptance is neither constant nor independent; these are the
//! yardstick, and tests' known answers.

/// E\[tokens a round\] = (1 − β^{K+1}) / (1 − β), with β = `acceptance_prob` and K =
/// `candidate_length` (Leviathan et al., Eq. 1); K + 1 at β = 1.
pub fn expected_tokens_per_round(acceptance_prob: f64, candidate_length: usize) -> f64 {
    // The sum Σ β^t for t in 0..=K, by Horner: the quotient loses its digits near β = 1.
    (0..candidate_length).fold(1.0, |sum, _| sum * acceptance_prob + 1.0)
}

/// Expected walltime improvement factor (1 − α^{k+1}) / ((1 − α)(c·k + 1)) over the target alone,
/// with α = `acceptance_prob`, k = `candidate_length` and c = `cost_ratio` = t_draft / t_target
/// (Leviathan et al., Theorem 3.8). Verifying k + 1 rows is taken to cost as much as one.
pub fn expected_walltime_improvement(
    acceptance_prob: f64,
    candidate_length: usize,
    cost_ratio: f64,
) -> f64 {
    expected_tokens_per_round(acceptance_prob, candidate_length)
        / (cost_ratio * candidate_length as f64 + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enumerate;
    use crate::verify::verify_chain;

    #[test]
    fn expected_tokens_equal_the_enumerated_rounds() {
        for (acceptance_prob, candidate_length) in [(0.8, 4), (0.25, 6), (0.5, 1), (0.9, 0)] {
            let draft_probs = vec![[1.0, 0.0]; candidate_length];
            let target_probs = vec![[acceptance_prob, 1.0 - acceptance_prob]; candidate_length + 1];
            let candidates = vec![0; candidate_length];
            let rounds =
                enumerate(|draws| verify_chain(&candidates, &draft_probs, &target_probs, draws));
            let mean: f64 =
                rounds.iter().map(|(commit, prob)| prob * (commit.path.len() + 1) as f64).sum();
            // At most a dozen products of f64 below 10.
            assert!(
                (mean - expected_tokens_per_round(acceptance_prob, candidate_length)).abs() < 1e-13
            );
        }
    }

    #[test]
    fn expected_tokens_equal_the_quotient() {
        for acceptance_prob in [0.0f64, 0.3, 0.8, 0.99] {
            for candidate_length in [0, 1, 5, 20] {
                let quotient =
                    (1.0 - acceptance_prob.powi(candidate_length + 1)) / (1.0 - acceptance_prob);
                let found = expected_tokens_per_round(acceptance_prob, candidate_length as usize);
                // The quotient cancels two digits at 0.99.
                assert!((found - quotient).abs() < 1e-12);
            }
        }
        assert_eq!(expected_tokens_per_round(1.0, 20), 21.0);
        // The value the literature quotes for β = 0.8 and 10 candidates, to its two decimals.
        assert!((expected_tokens_per_round(0.8, 10) - 4.57).abs() < 0.005);
    }

    #[test]
    fn walltime_improvement_matches_published_settings() {
        // CS-Drafting, Table 1 (simulated): single-draft speed-ups, printed to two decimals.
        for (acceptance_prob, cost_ratio, candidate_length, published) in [
            (0.65, 0.0069, 9, 2.65),
            (0.73, 0.022, 8, 2.96),
            (0.75, 0.0069, 12, 3.61),
            (0.80, 0.022, 11, 3.75),
        ] {
            let found =
                expected_walltime_improvement(acceptance_prob, candidate_length, cost_ratio);
            assert!((found - published).abs() < 0.005, "{found} != {published}");
        }
        assert_eq!(expected_walltime_improvement(0.5, 0, 0.1), 1.0);
    }
}
