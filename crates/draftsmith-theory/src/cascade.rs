//! Expected walltime improvement of cascades if candidates are accepted independently: CS-Drafting's
//! closed forms (Chen et al. 2023, section 4), and the plans that maximise them.
//!
//! In a *vertical* cascade a cheaper draft drafts for the draft; in a *horizontal* one, drafts take
//! turns along one candidate sequence. Each formula is computed as a sum or product of positive terms,
//! so it loses no digits where the published quotients are 0/0. Nothing chooses lengths by these
//! formulas; `examples/ewif.rs` prints them.

use crate::expected_tokens_per_round;

/// A draft as the formulas see it: how often it is right, and what it costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftProfile {
    /// α: the chance that the model reviewing this draft accepts a candidate of it, in \[0, 1\].
    pub acceptance_prob: f64,
    /// c: seconds of one forward of this draft over seconds of one forward of the *target*, whoever
    /// reviews it.
    pub cost_ratio: f64,
}

/// A vertical cascade, and what it yields.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VerticalPlan {
    /// n: speculative steps of the draft in one round of the target.
    pub num_steps: usize,
    /// k: candidates the inner draft proposes in each of those steps.
    pub candidate_length: usize,
    /// Expected walltime improvement over the target alone.
    pub improvement: f64,
}

/// A horizontal cascade, and what it yields.
#[derive(Debug, Clone, PartialEq)]
pub struct HorizontalPlan {
    /// Candidates of each draft in one round, in the order the drafts take their turns.
    pub candidate_lengths: Vec<usize>,
    /// Expected walltime improvement over the target alone.
    pub improvement: f64,
}

/// φ_{α,k}(x) = Σ P(i tokens)·x^i, the generating function of the tokens one speculative step
/// yields, with α = `acceptance_prob` and k = `candidate_length` (CS-Drafting, Theorem 4.1).
///
/// The paper's form is 1 + (x − 1)(1 − α^{k+1}x^{k+1})/(1 − αx). The quotient is Σ (αx)^i for i in
/// 0..=k, which is what is summed here, so αx = 1 needs no special case. φ(1) = 1, and φ′(1) is
/// [`expected_tokens_per_round`].
pub fn step_tokens_generating_function(
    acceptance_prob: f64,
    candidate_length: usize,
    x: f64,
) -> f64 {
    1.0 + (x - 1.0) * expected_tokens_per_round(acceptance_prob * x, candidate_length)
}

/// Expected walltime improvement of a vertical cascade over the target alone (CS-Drafting, Theorem
/// 4.3): (1 − α·φⁿ(α)) / ((1 − α)(1 + n·c_d1 + n·k·c_d2)) with φ = φ_{α′,k}.
///
/// The target reviews `draft` (d1): α = `draft.acceptance_prob` is α(target, d1). It is the
/// *argument* of φ. d1 reviews `inner` (d2): α′ = `inner.acceptance_prob` is α(d1, d2). It is the
/// *parameter* of φ, together with k = `candidate_length`. A round is n = `num_steps` speculative
/// steps of d1, whose tokens the target then reviews all at once; φⁿ is the n-th power, as the
/// steps' token counts add up. Reviewing several rows costs as much as one.
///
/// The formula assumes that the number of tokens of a step is independent of whether the target
/// accepts them. Where the target tends to agree with what the drafts agree on, it is only an
/// approximation.
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

/// Expected walltime improvement of a horizontal cascade over the target alone (CS-Drafting,
/// Theorem 4.5): Σ_{i=0..k} ∏_{j≤i} α_j / (1 + Σ c_i), where `candidate_drafts[i]` is the draft
/// that proposes candidate i and the target reviews them all.
///
/// With one draft throughout this is
/// [`expected_walltime_improvement`](crate::expected_walltime_improvement).
pub fn horizontal_cascade_improvement(
    candidate_drafts: impl IntoIterator<Item = DraftProfile>,
) -> f64 {
    candidate_drafts.into_iter().fold(HorizontalRound::EMPTY, HorizontalRound::with).improvement()
}

/// The vertical cascade of greatest improvement with at most `max_steps` steps of at most
/// `max_candidates` candidates each; of equals, the one of fewest steps, then fewest candidates.
///
/// Arguments as in [`vertical_cascade_improvement`]. A plan of no steps is the target alone; one of
/// no candidates is `draft` without `inner`, a step being one forward.
pub fn best_vertical_cascade(
    draft: DraftProfile,
    inner: DraftProfile,
    max_steps: usize,
    max_candidates: usize,
) -> VerticalPlan {
    let mut best = VerticalPlan { num_steps: 0, candidate_length: 0, improvement: 1.0 };
    for num_steps in 1..=max_steps {
        for candidate_length in 0..=max_candidates {
            let improvement =
                vertical_cascade_improvement(draft, inner, num_steps, candidate_length);
            if improvement > best.improvement {
                best = VerticalPlan { num_steps, candidate_length, improvement };
            }
        }
    }
    best
}

/// The horizontal cascade of greatest improvement in which `drafts` take turns in the order given,
/// with at most `max_candidates` candidates in all; of equals, the one with fewest candidates of
/// the first draft, and so on.
///
/// With a single draft, this finds the best fixed candidate length. Every split of the candidates
/// is tried: about max^D / D! of them for D drafts.
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

/// A round of some candidates: the chance that all are accepted, its expected tokens, its cost in
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
