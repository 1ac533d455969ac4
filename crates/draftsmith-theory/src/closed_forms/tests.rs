use super::*;
use crate::verify::verify_chain;
use crate::{Draws, distribution_of, enumerate, overlap};

// FLAN-T5 drafts of FLAN-T5-XXL. CS-Drafting's Table 1 does not print its inputs: these are the
// acceptance rates that Leviathan et al. measured for greedy T5, and about the drafts' shares of
// the target's parameters.
const SUMMARY_SMALL: DraftProfile = DraftProfile { acceptance_prob: 0.65, cost_ratio: 0.0069 };
const SUMMARY_BASE: DraftProfile = DraftProfile { acceptance_prob: 0.73, cost_ratio: 0.022 };
const TRANSLATION_SMALL: DraftProfile = DraftProfile { acceptance_prob: 0.75, cost_ratio: 0.0069 };
const TRANSLATION_BASE: DraftProfile = DraftProfile { acceptance_prob: 0.80, cost_ratio: 0.022 };

#[track_caller]
fn close(found: f64, expected: f64) {
    // Sums of at most a few thousand f64 products, all below 100.
    assert!((found - expected).abs() < 1e-12 * expected.max(1.0), "{found} != {expected}");
}

fn free(acceptance_prob: f64) -> DraftProfile {
    DraftProfile { acceptance_prob, cost_ratio: 0.0 }
}

/// The tokens of one review that accepts candidate i with probability `acceptance_probs[i]`, by the
/// shipped verification.
fn review(acceptance_probs: &[f64], draws: &mut impl Draws) -> usize {
    let draft_probs = vec![[1.0, 0.0]; acceptance_probs.len()];
    let mut target_probs: Vec<_> =
        acceptance_probs.iter().map(|prob| [*prob, 1.0 - prob]).collect();
    target_probs.push([1.0, 0.0]);
    let candidates = vec![0; acceptance_probs.len()];
    verify_chain(&candidates, &draft_probs, &target_probs, draws).path.len() + 1
}

/// The tokens of one round of a vertical cascade: n reviewed steps of the draft, then the target's
/// review of them all.
fn vertical_round(
    alpha: f64,
    inner_alpha: f64,
    num_steps: usize,
    candidate_length: usize,
    draws: &mut impl Draws,
) -> usize {
    let inner = vec![inner_alpha; candidate_length];
    let num_candidates = (0..num_steps).map(|_| review(&inner, draws)).sum();
    review(&vec![alpha; num_candidates], draws)
}

fn mean(outcomes: Vec<(usize, f64)>) -> f64 {
    outcomes.into_iter().map(|(tokens, prob)| prob * tokens as f64).sum()
}

/// φ_{α,k}(x) = Σ P(i tokens)·x^i, the generating function of the tokens of one speculative
/// step, with α = `acceptance_prob` and k = `candidate_length` (CS-Drafting, Theorem 4.1).
///
/// The paper's form is 1 + (x − 1)(1 − α^{k+1}x^{k+1})/(1 − αx). The quotient is Σ (αx)^i for i in
/// 0..=k, which is what is summed here, so αx = 1 needs no special case. φ(1) = 1, and φ′(1) is
/// [`expected_tokens_per_round`].
fn step_tokens_generating_function(acceptance_prob: f64, candidate_length: usize, x: f64) -> f64 {
    1.0 + (x - 1.0) * expected_tokens_per_round(acceptance_prob * x, candidate_length)
}

#[test]
fn the_generating_function_equals_that_of_the_enumerated_step() {
    for (alpha, candidate_length) in [(0.8, 4), (0.25, 6), (0.5, 1), (0.9, 0), (1.0, 3), (0.0, 3)] {
        let probs =
            distribution_of(enumerate(|draws| review(&vec![alpha; candidate_length], draws)));
        // At αx = 1 the published quotient is 0/0.
        for x in [-0.5, 0.0, 0.3, 1.0, 1.1, 1.25, 2.0, 4.0] {
            let sum: f64 =
                probs.iter().map(|(tokens, prob)| prob * f64::powi(x, *tokens as i32)).sum();
            let found = step_tokens_generating_function(alpha, candidate_length, x);
            // The largest sums, 2^7 and 4^7 over α^k, are compared relative to themselves.
            assert!((found - sum).abs() < 1e-12 * sum.abs().max(1.0), "{found} != {sum} at {x}");
            let exponent = candidate_length as i32 + 1;
            if alpha * x != 1.0 {
                let quotient =
                    1.0 + (x - 1.0) * (1.0 - (alpha * x).powi(exponent)) / (1.0 - alpha * x);
                assert!((found - quotient).abs() < 1e-12 * sum.abs().max(1.0));
            }
        }
    }
}

#[test]
fn its_slope_at_one_is_the_expected_tokens() {
    for (alpha, candidate_length) in [(0.8, 4), (0.25, 6), (0.5, 1), (0.9, 0), (1.0, 3), (0.0, 3)] {
        let phi = |x| step_tokens_generating_function(alpha, candidate_length, x);
        assert_eq!(phi(1.0), 1.0);
        let slope = (phi(1.0 + 1e-5) - phi(1.0 - 1e-5)) / 2e-5;
        // A central difference: h²·φ‴/6 is below 1e-8 for at most 7 tokens, and so is rounding,
        // 1e-16 / h.
        assert!((slope - expected_tokens_per_round(alpha, candidate_length)).abs() < 1e-8);
    }
}

#[test]
fn a_vertical_cascade_equals_its_enumerated_rounds() {
    for (alpha, inner_alpha) in
        [(0.8, 0.5), (0.5, 0.8), (0.3, 1.0), (1.0, 0.4), (0.9, 0.0), (0.0, 0.7)]
    {
        for (num_steps, candidate_length) in [(0, 3), (1, 3), (2, 2), (3, 1), (4, 0), (3, 3)] {
            let tokens = mean(enumerate(|draws| {
                vertical_round(alpha, inner_alpha, num_steps, candidate_length, draws)
            }));
            let [draft, inner] = [free(alpha), free(inner_alpha)];
            close(vertical_cascade_improvement(draft, inner, num_steps, candidate_length), tokens);

            let phi = step_tokens_generating_function(inner_alpha, candidate_length, alpha);
            let published = (1.0 - alpha * phi.powi(num_steps as i32)) / (1.0 - alpha);
            if alpha < 1.0 {
                close(published, tokens);
            }

            let paid = vertical_cascade_improvement(
                DraftProfile { cost_ratio: 0.1, ..draft },
                DraftProfile { cost_ratio: 0.01, ..inner },
                num_steps,
                candidate_length,
            );
            let cost = 1.0 + 0.1 * num_steps as f64 + 0.01 * (num_steps * candidate_length) as f64;
            close(paid, tokens / cost);
        }
    }
}

#[test]
fn the_argument_and_the_parameter_differ() {
    let right = vertical_cascade_improvement(free(0.8), free(0.5), 3, 2);
    let swapped_phi = step_tokens_generating_function(0.8, 2, 0.5);
    let swapped = (1.0 - 0.8 * swapped_phi.powi(3)) / (1.0 - 0.8);
    assert!((right - swapped).abs() > 0.5, "{right} and {swapped} would tell which is meant");
}

#[test]
fn a_step_without_candidates_is_one_forward_of_the_draft() {
    for draft in [SUMMARY_SMALL, SUMMARY_BASE, TRANSLATION_BASE] {
        for num_steps in 0..12 {
            // Leviathan et al., Theorem 3.8.
            let plain = expected_tokens_per_round(draft.acceptance_prob, num_steps)
                / (draft.cost_ratio * num_steps as f64 + 1.0);
            close(vertical_cascade_improvement(draft, SUMMARY_SMALL, num_steps, 0), plain);
            let candidate_drafts = std::iter::repeat_n(draft, num_steps);
            close(horizontal_cascade_improvement(candidate_drafts), plain);
        }
    }
}

#[test]
fn a_free_inner_draft_never_hurts() {
    // φ(α) < α if the inner draft is ever right, so a statistical draft under a neural one can only
    // help.
    for alpha in [0.1, 0.5, 0.9] {
        for inner_alpha in [0.0, 0.05, 0.5, 1.0] {
            for num_steps in 1..6 {
                let draft = DraftProfile { acceptance_prob: alpha, cost_ratio: 0.05 };
                let with = vertical_cascade_improvement(draft, free(inner_alpha), num_steps, 4);
                let without = vertical_cascade_improvement(draft, free(inner_alpha), num_steps, 0);
                assert!(if inner_alpha > 0.0 { with > without } else { with == without });
            }
        }
    }
}

#[test]
fn the_formula_falls_short_if_the_target_agrees_with_the_drafts() {
    // d2 always drafts 0, d1 draws 0 with probability 0.6, the target with 0.8: α′ = 0.6, α = 0.6 +
    // 0.2 = 0.8. The target accepts every token of d2 that d1 accepts, so acceptance depends on the
    // step's length.
    let (d2, d1, target) = ([1.0, 0.0], [0.6, 0.4], [0.8, 0.2]);
    let tokens = mean(enumerate(|draws| {
        let mut candidates = Vec::new();
        for _ in 0..2 {
            let commit = verify_chain(&[0, 0], &[d2; 2], &[d1; 3], draws);
            candidates.extend(std::iter::repeat_n(0, commit.path.len()));
            candidates.push(commit.next_token);
        }
        let rows = vec![d1; candidates.len()];
        let target_rows = vec![target; candidates.len() + 1];
        verify_chain(&candidates, &rows, &target_rows, draws).path.len() + 1
    }));
    let inner = free(overlap(&d2, &d1));
    let formula = vertical_cascade_improvement(free(overlap(&d1, &target)), inner, 2, 2);
    assert!(tokens > formula + 0.05, "{tokens} against {formula}");
}

#[test]
fn a_horizontal_cascade_equals_its_enumerated_rounds() {
    for alphas in [&[][..], &[0.7], &[0.9, 0.4, 0.6], &[1.0, 0.0, 0.5], &[0.3, 0.8, 0.8, 1.0, 0.2]]
    {
        let tokens = mean(enumerate(|draws| review(alphas, draws)));
        close(horizontal_cascade_improvement(alphas.iter().copied().map(free)), tokens);
        let paid =
            alphas.iter().map(|&acceptance_prob| DraftProfile { acceptance_prob, cost_ratio: 0.1 });
        close(horizontal_cascade_improvement(paid), tokens / (1.0 + 0.1 * alphas.len() as f64));
    }
}

#[test]
fn the_better_draft_goes_first() {
    let (better, worse) = (free(0.8), free(0.6));
    assert!(
        horizontal_cascade_improvement([better, worse])
            > horizontal_cascade_improvement([worse, better])
    );
}

#[test]
fn table_1_is_the_horizontal_cascade() {
    // CS-Drafting, Table 1 (simulated): printed to two decimals. The rows of two drafts are the
    // horizontal formula: the first length is base's, the second small's.
    let row =
        |base: DraftProfile, small: DraftProfile, [first, second]: [usize; 2], published: f64| {
            let drafts = std::iter::repeat_n(base, first).chain(std::iter::repeat_n(small, second));
            let found = horizontal_cascade_improvement(drafts);
            assert!((found - published).abs() < 0.005, "{found} != {published}");
        };
    row(SUMMARY_BASE, SUMMARY_SMALL, [0, 9], 2.65);
    row(SUMMARY_BASE, SUMMARY_SMALL, [8, 0], 2.96);
    row(SUMMARY_BASE, SUMMARY_SMALL, [5, 3], 3.03);
    row(TRANSLATION_BASE, TRANSLATION_SMALL, [0, 12], 3.61);
    row(TRANSLATION_BASE, TRANSLATION_SMALL, [11, 0], 3.75);
    row(TRANSLATION_BASE, TRANSLATION_SMALL, [5, 8], 3.93);
}

#[test]
fn table_1_prints_the_best_lengths_except_in_one_row() {
    let improvement = |drafts: [DraftProfile; 2], lengths: [usize; 2]| {
        let turns = drafts.into_iter().zip(lengths);
        horizontal_cascade_improvement(turns.flat_map(|(draft, length)| vec![draft; length]))
    };
    // Among at most 40 candidates; of equals, the first.
    let best = |drafts: [DraftProfile; 2], is_allowed: fn([usize; 2]) -> bool| {
        let splits = (0..=40).flat_map(|base| (0..=40 - base).map(move |small| [base, small]));
        let value = |lengths| improvement(drafts, lengths);
        let allowed = splits.filter(|lengths| is_allowed(*lengths));
        allowed.reduce(|best, next| if value(next) > value(best) { next } else { best })
    };
    let summary = [SUMMARY_BASE, SUMMARY_SMALL];
    let translation = [TRANSLATION_BASE, TRANSLATION_SMALL];
    assert_eq!(best(summary, |lengths| lengths[0] == 0), Some([0, 9]));
    assert_eq!(best(summary, |lengths| lengths[1] == 0), Some([8, 0]));
    assert_eq!(best(translation, |lengths| lengths[0] == 0), Some([0, 12]));
    assert_eq!(best(translation, |lengths| lengths[1] == 0), Some([11, 0]));
    assert_eq!(best(translation, |_| true), Some([5, 8]));
    // The table prints lengths 5 and 3, worth 3.027; two more cheap candidates are worth 3.044.
    assert_eq!(best(summary, |_| true), Some([5, 5]));
    let worth = improvement(summary, [5, 5]);
    assert!((worth - 3.0437).abs() < 5e-5, "{worth} to four decimals");
}

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
