//! Closed forms for speculative decoding if candidates are accepted independently: expected tokens a round
//! and expected walltime improvement of one draft (Leviathan et al. 2023) and of cascades (CS-Drafting,
//! Chen et al. 2023, section 4).
//!
//! In a *vertical* cascade a cheaper draft drafts for the draft; in a *horizontal* one, drafts take turns
//! along one candidate sequence. Real acceptance is neither constant nor independent, so nothing chooses
//! lengths by these formulas; they are known values for tests, and `examples/ewif.rs` prints them. Each
//! is computed as a sum or product of positive terms, which loses no digits where the published quotients
//! are 0/0.

/// E\[tokens a round\] = (1 − β^{K+1}) / (1 − β), with β = `acceptance_prob` and K =
/// `candidate_length` (Leviathan et al., Eq. 1); K + 1 at β = 1.
pub fn expected_tokens_per_round(acceptance_prob: f64, candidate_length: usize) -> f64 {
    // Σ β^t for t in 0..=K by Horner's scheme; the quotient loses digits near β = 1.
    (0..candidate_length).fold(1.0, |sum, _| sum * acceptance_prob + 1.0)
}

/// Expected walltime improvement factor (1 − α^{k+1}) / ((1 − α)(c·k + 1)) over plain decoding, with α =
/// `acceptance_prob`, k = `candidate_length` and c = `cost_ratio` = t_draft / t_target (Leviathan et al.,
/// Theorem 3.8). It assumes that verifying k + 1 rows costs as much as one.
pub fn expected_walltime_improvement(
    acceptance_prob: f64,
    candidate_length: usize,
    cost_ratio: f64,
) -> f64 {
    expected_tokens_per_round(acceptance_prob, candidate_length)
        / (cost_ratio * candidate_length as f64 + 1.0)
}

/// A draft's acceptance probability and cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftProfile {
    /// α: the probability that the model that reviews this draft accepts a candidate, in \[0, 1\].
    pub acceptance_prob: f64,
    /// c: seconds of a forward of this draft over seconds of a forward of the *target*, even if another
    /// model reviews the draft.
    pub cost_ratio: f64,
}

/// A horizontal cascade and its improvement.
#[derive(Debug, Clone, PartialEq)]
pub struct HorizontalPlan {
    /// Candidates of each draft in one round, in order of their turns.
    pub candidate_lengths: Vec<usize>,
    /// Expected walltime improvement over plain decoding.
    pub improvement: f64,
}

/// Expected walltime improvement of a vertical cascade over plain decoding (CS-Drafting, Theorem
/// 4.3): (1 − α·φⁿ(α)) / ((1 − α)(1 + n·c_d1 + n·k·c_d2)) with φ = φ_{α′,k}.
///
/// The target reviews `draft` (d1): α = `draft.acceptance_prob` is α(target, d1). It is the
/// *argument* of φ. d1 reviews `inner` (d2): α′ = `inner.acceptance_prob` is α(d1, d2). It is the
/// *parameter* of φ, together with k = `candidate_length`. A round is n = `num_steps` speculative
/// steps of d1, whose tokens the target then reviews in one forward; φⁿ is the n-th power, because the
/// steps' token counts add up. φ is the generating function of a step's tokens (Theorem 4.1). Reviewing
/// several rows costs as much as one.
///
/// The formula assumes that a step's number of tokens is independent of the target's acceptance. If the
/// target tends to agree with what the drafts agree on, it is only an approximation.
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

/// Expected walltime improvement of a horizontal cascade over plain decoding (CS-Drafting,
/// Theorem 4.5): Σ_{i=0..k} ∏_{j≤i} α_j / (1 + Σ c_i), where `candidate_drafts[i]` is the draft
/// that proposes candidate i and the target reviews them all.
///
/// With a single draft this is
/// [`expected_walltime_improvement`](crate::expected_walltime_improvement).
pub fn horizontal_cascade_improvement(
    candidate_drafts: impl IntoIterator<Item = DraftProfile>,
) -> f64 {
    candidate_drafts.into_iter().fold(HorizontalRound::EMPTY, HorizontalRound::with).improvement()
}

/// The best horizontal cascade in which `drafts` take turns in the given order, with at most
/// `max_candidates` candidates in total; among equals, the one with the fewest candidates of the first
/// draft, then of the second, and so on.
///
/// With a single draft, this finds the best fixed candidate length. It tries every split of the
/// candidates, about max^D / D! of them for D drafts.
pub fn best_horizontal_cascade(drafts: &[DraftProfile], max_candidates: usize) -> HorizontalPlan {
    let mut best = HorizontalPlan { candidate_lengths: vec![0; drafts.len()], improvement: 1.0 };
    try_splits(drafts, max_candidates, &mut Vec::new(), HorizontalRound::EMPTY, &mut best);
    best
}

/// Tries every split of at most `max_candidates` candidates among `drafts`, after the `round` so
/// far.
fn try_splits(
    drafts: &[DraftProfile],
    max_candidates: usize,
    candidate_lengths: &mut Vec<usize>,
    mut round: HorizontalRound,
    best: &mut HorizontalPlan,
) {
    let Some((&draft, later)) = drafts.split_first() else {
        if round.improvement() > best.improvement {
            best.candidate_lengths.clone_from(candidate_lengths);
            best.improvement = round.improvement();
        }
        return;
    };
    for candidate_length in 0..=max_candidates {
        candidate_lengths.push(candidate_length);
        try_splits(later, max_candidates - candidate_length, candidate_lengths, round, best);
        candidate_lengths.pop();
        round = round.with(draft);
    }
}

/// A round: the probability that all its candidates are accepted, its expected tokens, and its cost in
/// target forwards.
#[derive(Clone, Copy)]
struct HorizontalRound {
    all_accepted_prob: f64,
    tokens: f64,
    cost: f64,
}

impl HorizontalRound {
    const EMPTY: Self = Self { all_accepted_prob: 1.0, tokens: 1.0, cost: 1.0 };

    fn with(self, draft: DraftProfile) -> Self {
        let all_accepted_prob = self.all_accepted_prob * draft.acceptance_prob;
        Self {
            all_accepted_prob,
            tokens: self.tokens + all_accepted_prob,
            cost: self.cost + draft.cost_ratio,
        }
    }

    fn improvement(self) -> f64 {
        self.tokens / self.cost
    }
}

#[cfg(test)]
mod tests;
