//! Closed-form speed-ups of speculative decoding if candidates are accepted independently: the
//! expected tokens per round and the expected walltime improvement of one draft (Leviathan et al.
//! 2023) and of cascades (CS-Drafting, Chen et al. 2023, section 4).
//!
//! In a *vertical* cascade a cheaper draft drafts for the draft; in a *horizontal* one, drafts take
//! turns along one candidate sequence. Real acceptance is neither constant nor independent, so
//! nothing chooses candidate lengths by these formulas. They give known values for tests, and
//! `examples/ewif.rs` prints them. Each formula is computed from positive terms, without loss of
//! digits where the published quotient is 0/0.

/// Computes the expected number of tokens per round, (1 − β^{K+1}) / (1 − β), with β =
/// `acceptance_prob` and K = `candidate_length` (Leviathan et al., Eq. 1); K + 1 at β = 1.
pub fn expected_tokens_per_round(acceptance_prob: f64, candidate_length: usize) -> f64 {
    // Σ β^t for t in 0..=K by Horner's scheme; the quotient loses digits near β = 1.
    (0..candidate_length).fold(1.0, |sum, _| sum * acceptance_prob + 1.0)
}

/// A draft model's acceptance probability and cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftProfile {
    /// α: the probability that the model that reviews this draft accepts a candidate, in \[0, 1\].
    pub acceptance_prob: f64,
    /// c: the time of a forward of this draft divided by that of a *target* forward, even if
    /// another model reviews the draft.
    pub cost_ratio: f64,
}

/// Computes the expected walltime improvement of a vertical cascade over plain decoding
/// (CS-Drafting, Theorem 4.3): (1 − α·φⁿ(α)) / ((1 − α)(1 + n·c_d1 + n·k·c_d2)) with φ = φ_{α′,k}.
///
/// The target reviews the candidates of `draft` (d1). Its acceptance probability α =
/// `draft.acceptance_prob` is the *argument* of φ. d1 in turn reviews the candidates of `inner`
/// (d2). That acceptance probability α′ = `inner.acceptance_prob` is the *parameter* of φ, together
/// with k = `candidate_length`. A round is n = `num_steps` speculative steps of d1, whose tokens
/// the target then reviews in one forward. φ is the generating function of the number of tokens of
/// a step (Theorem 4.1). Its n-th power φⁿ belongs to the sum over n steps. A forward over several
/// rows is assumed to cost as much as one row.
///
/// The formula assumes that a step's number of tokens is independent of the target's acceptance. If
/// the target tends to agree with what the drafts agree on, it is only an approximation.
pub fn vertical_cascade_improvement(
    draft: DraftProfile,
    inner: DraftProfile,
    num_steps: usize,
    candidate_length: usize,
) -> f64 {
    let alpha = draft.acceptance_prob;
    // 1 − φ(α) = (1 − α)·S and 1 − φⁿ = (1 − φ)·Σ φ^j, so 1 − α divides out of the numerator.
    let sum = expected_tokens_per_round(inner.acceptance_prob * alpha, candidate_length);
    let phi = 1.0 - (1.0 - alpha) * sum;
    let powers = if num_steps == 0 { 0.0 } else { expected_tokens_per_round(phi, num_steps - 1) };
    let num_inner_forwards = (num_steps * candidate_length) as f64;
    (1.0 + alpha * sum * powers)
        / (1.0 + num_steps as f64 * draft.cost_ratio + num_inner_forwards * inner.cost_ratio)
}

/// Computes the expected walltime improvement of a horizontal cascade over plain decoding
/// (CS-Drafting, Theorem 4.5): Σ_{i=0..k} ∏_{j≤i} α_j / (1 + Σ c_i), where `candidate_drafts[i]` is
/// the draft that proposes candidate i and the target reviews them all.
///
/// With a single draft this is (1 − α^{k+1}) / ((1 − α)(c·k + 1)) (Leviathan et al., Theorem 3.8).
/// It assumes that verifying k + 1 rows costs as much as one.
pub fn horizontal_cascade_improvement(
    candidate_drafts: impl IntoIterator<Item = DraftProfile>,
) -> f64 {
    let (mut all_accepted_prob, mut tokens, mut cost) = (1.0, 1.0, 1.0);
    for draft in candidate_drafts {
        all_accepted_prob *= draft.acceptance_prob;
        tokens += all_accepted_prob;
        cost += draft.cost_ratio;
    }
    tokens / cost
}

#[cfg(test)]
mod tests;
