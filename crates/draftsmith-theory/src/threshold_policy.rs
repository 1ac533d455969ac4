//! When to stop drafting, solved exactly: the decision process of SpecDec++ (Huang et al. 2024,
//! section 3) with known acceptance levels, by dynamic programming. Stop rules are tested against
//! it; it is compiled for tests alone.
//!
//! Each candidate's acceptance probability is one of a few levels, drawn independently of all else.
//! A round that submits K candidates keeps 1 + Σ_j ∏_{i≤j} p_i tokens on average and takes
//! K·t_draft + t_target + (K + 1)·t_row seconds. Rounds are alike, so the policy of fewest seconds
//! per token λ is the one that maximises λ·tokens − seconds in each round, at the λ where that
//! maximum is 0; λ is found by iteration.
//!
//! In the paper's accounts, T = c₁·(N + N_discarded) + c₂·N_target with c₁ = t_draft + t_row, c₂ =
//! t_target − t_draft. Its Theorem 3.1 says that stopping is the better where P(some predicted
//! candidate is rejected) ≥ (c₂ + Δ)/(c₁ + c₂ + Δ). Here Δ is known, see
//! [`Decision::rejection_threshold`].

use std::collections::BTreeMap;

use crate::{Bounds, CostModel};

/// A value an acceptance probability may take, and how often it does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AcceptanceLevel {
    /// The share of candidates at this level, in proportion to the other levels' shares.
    pub(crate) weight: f64,
    /// The probability with which the target accepts such a candidate, given that it reaches it, in
    /// \[0, 1\].
    pub(crate) acceptance_prob: f64,
}

/// Which candidates' acceptance probabilities a decision may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Predicted {
    /// Those of all candidates drawn so far.
    All,
    /// Those of all but the newest, as in the paper's process and under an acceptance head, which
    /// predicts a candidate by the very forward that draws the next one. The first candidate is
    /// drawn unpredicted.
    AllButNewest,
}

/// The best policy among those within the bounds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OptimalPolicy {
    /// λ: seconds per token under the policy.
    pub(crate) seconds_per_token: f64,
    /// Expected tokens a round keeps, the target's own included.
    pub(crate) tokens_per_round: f64,
    /// Expected candidates a round submits.
    pub(crate) candidates_per_round: f64,
    /// Within the bounds, the policy continues exactly while the product of the predicted acceptance
    /// probabilities is at least this: c₁/(λ·m), or c₁/(λ·m²) under [`Predicted::AllButNewest`],
    /// with m the mean acceptance probability. It may be above 1, where the policy always stops. +∞
    /// if m is 0.
    ///
    /// That is: while the chance that the next candidate is accepted is worth its seconds. Looking
    /// one candidate ahead is enough because that chance can only fall as the product does, so
    /// where one more candidate does not pay, no later one will. Levels that depend on the levels
    /// before them may break this: a candidate may then be worth drawing for what its level tells
    /// of those to come.
    pub(crate) least_product: f64,
    /// What is decided in every state between the bounds, by candidates drawn.
    pub(crate) decisions: Vec<Decision>,
}

/// What the best policy does in one state of a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Decision {
    /// Candidates drawn so far: what the target is given if drafting stops here.
    pub(crate) num_candidates: usize,
    /// The product of the predicted candidates' acceptance probabilities.
    pub(crate) all_accepted_prob: f64,
    /// Whether the policy draws another candidate.
    pub(crate) continues: bool,
    /// Theorem 3.1's Δ, in seconds: given that every predicted candidate is accepted, the cost to go
    /// after verifying now less the cost to go of continuing. Costs count as in the theorem, c₁ a
    /// discarded candidate and c₂ a verification. Continuing means one more candidate and the best
    /// policy from there on.
    ///
    /// c₂ + Δ is then what continuing saves, λ·G − c₁·M, with G the tokens it adds to the round and
    /// M >= 1 the candidates it draws, on average. Δ is below 0 where it saves less than a
    /// verification.
    pub(crate) delta_seconds: f64,
    /// Theorem 3.1's (c₂ + Δ)/(c₁ + c₂ + Δ). At or above this chance of a rejection among the
    /// predicted candidates, stopping is at least as good as continuing.
    ///
    /// The theorem has this as a sufficient condition, since a rejection makes continuing waste
    /// M >= 1 candidates and only one is counted. Here it is necessary too: where the policy stops,
    /// it would stop after one more candidate as well, so M = 1, and the threshold is 1 −
    /// [`OptimalPolicy::least_product`] in all those states. Where it continues, the threshold is
    /// at least that.
    pub(crate) rejection_threshold: f64,
}

impl OptimalPolicy {
    /// SpecDec++'s h: the policy stops where the chance 1 − ∏ p of a rejection is above it. None if
    /// it always stops, which no h can say.
    ///
    /// Under [`Predicted::AllButNewest`] this is the threshold for
    /// [`RejectionThresholdConfig`](crate::RejectionThresholdConfig), if the head's estimates are right.
    pub(crate) fn stop_threshold(&self) -> Option<f64> {
        (self.least_product <= 1.0).then_some(1.0 - self.least_product)
    }
}

/// The policy of fewest seconds per token among all that stop within `bounds`, however they use
/// what is `predicted`.
///
/// `levels` is the distribution of every candidate's acceptance probability. The states are the multisets of
/// levels predicted, so work and memory grow as max^L for L levels; a handful of them is meant.
/// Equally good choices continue.
///
/// # Panics
/// Unless the levels' weights are non-negative with a positive sum, their acceptance probabilities
/// in \[0, 1\], a candidate's time t_draft + t_row and t_target positive, no time negative, and 1
/// <= min <= max.
pub(crate) fn optimal_stopping(
    levels: &[AcceptanceLevel],
    predicted: Predicted,
    costs: &CostModel,
    bounds: Bounds,
) -> OptimalPolicy {
    let process = Process::new(levels, predicted, costs, bounds);
    // Dinkelbach's iteration: under a λ that is too large, the best policy has a smaller one. The
    // policies are finitely many, so this ends. It begins above them all: the longest round, for a
    // single token.
    let longest = Yield { tokens: 1.0, candidates: bounds.max as f64 };
    let mut seconds_per_token = process.seconds(&longest);
    loop {
        let (round, decisions) = process.best_round(seconds_per_token);
        let found = process.seconds(&round) / round.tokens;
        if found < seconds_per_token {
            seconds_per_token = found;
            continue;
        }
        return OptimalPolicy {
            seconds_per_token,
            tokens_per_round: round.tokens,
            candidates_per_round: round.candidates,
            least_product: process.candidate_seconds / (seconds_per_token * process.next_prob),
            decisions,
        };
    }
}

/// Tokens and candidates, on average.
#[derive(Debug, Clone, Copy)]
struct Yield {
    tokens: f64,
    candidates: f64,
}

impl Yield {
    const NOTHING: Self = Self { tokens: 0.0, candidates: 0.0 };
}

/// One round's decision process.
struct Process {
    /// Weights sum to one.
    levels: Vec<AcceptanceLevel>,
    /// Candidates drawn but not predicted: 0 or 1.
    num_unpredicted: usize,
    bounds: Bounds,
    /// Given that all predicted candidates are accepted, the chance that the candidate drawn next
    /// will be.
    next_prob: f64,
    mean_prob: f64,
    /// c₁.
    candidate_seconds: f64,
    /// c₂.
    verification_seconds: f64,
}

impl Process {
    fn new(
        levels: &[AcceptanceLevel],
        predicted: Predicted,
        costs: &CostModel,
        bounds: Bounds,
    ) -> Self {
        let total: f64 = levels.iter().map(|level| level.weight).sum();
        assert!(
            total > 0.0 && total.is_finite() && levels.iter().all(|level| level.weight >= 0.0),
            "weights must be non-negative with a positive finite sum"
        );
        assert!(
            levels.iter().all(|level| (0.0..=1.0).contains(&level.acceptance_prob)),
            "an acceptance probability lies between 0 and 1"
        );
        let CostModel { draft_seconds, target_seconds, row_seconds } = *costs;
        let candidate_seconds = draft_seconds + row_seconds;
        assert!(
            draft_seconds >= 0.0 && row_seconds >= 0.0 && candidate_seconds > 0.0,
            "a candidate takes time"
        );
        assert!(target_seconds > 0.0, "a target forward takes time");
        assert!(1 <= bounds.min && bounds.min <= bounds.max, "bounds must be 1 <= min <= max");

        let levels: Vec<_> = levels
            .iter()
            .map(|level| AcceptanceLevel { weight: level.weight / total, ..*level })
            .collect();
        let mean_prob = levels.iter().map(|level| level.weight * level.acceptance_prob).sum();
        let num_unpredicted = match predicted {
            Predicted::All => 0,
            Predicted::AllButNewest => 1,
        };
        Self {
            levels,
            num_unpredicted,
            bounds,
            // An unpredicted candidate must be accepted too before the next one can be.
            next_prob: if num_unpredicted == 0 { mean_prob } else { mean_prob * mean_prob },
            mean_prob,
            candidate_seconds,
            verification_seconds: target_seconds - draft_seconds,
        }
    }

    /// c₁·(N + N_discarded) + c₂·N_target for one round, where N + N_discarded is its candidates
    /// and one more.
    fn seconds(&self, round: &Yield) -> f64 {
        self.candidate_seconds * (round.candidates + 1.0) + self.verification_seconds
    }

    /// The round that maximises λ·tokens − seconds, and the decisions that do it, by backward
    /// induction.
    fn best_round(&self, lambda: f64) -> (Yield, Vec<Decision>) {
        let mut decisions = Vec::new();
        // By state: what the rest of the round adds, its tokens given that all predicted candidates
        // are accepted.
        let mut later: BTreeMap<Vec<usize>, Yield> = BTreeMap::new();
        for num_predicted in (0..=self.bounds.max - self.num_unpredicted).rev() {
            let num_candidates = num_predicted + self.num_unpredicted;
            let mut layer = BTreeMap::new();
            for counts in multisets(self.levels.len(), num_predicted) {
                let added = if num_candidates == self.bounds.max {
                    Yield::NOTHING
                } else {
                    let more = self.one_more(&counts, &later);
                    if num_candidates < self.bounds.min {
                        more
                    } else {
                        let decision = self.decide(num_candidates, &counts, more, lambda);
                        decisions.push(decision);
                        if decision.continues { more } else { Yield::NOTHING }
                    }
                };
                layer.insert(counts, added);
            }
            later = layer;
        }
        decisions.reverse();

        // The target's own token, the first candidate if it is drawn before any decision, and what
        // the policy adds.
        let added = later[&vec![0; self.levels.len()]];
        let num_unpredicted = self.num_unpredicted as f64;
        let tokens = 1.0 + num_unpredicted * self.mean_prob + added.tokens;
        (Yield { tokens, candidates: num_unpredicted + added.candidates }, decisions)
    }

    /// What drawing one more candidate, and going on as in `later`, adds to the round.
    fn one_more(&self, counts: &[usize], later: &BTreeMap<Vec<usize>, Yield>) -> Yield {
        let mut more = Yield { tokens: self.next_prob, candidates: 1.0 };
        for (index, level) in self.levels.iter().enumerate() {
            let mut counts = counts.to_vec();
            counts[index] += 1;
            let Yield { tokens, candidates } = later[&counts];
            more.tokens += level.weight * level.acceptance_prob * tokens;
            more.candidates += level.weight * candidates;
        }
        more
    }

    fn decide(
        &self,
        num_candidates: usize,
        counts: &[usize],
        more: Yield,
        lambda: f64,
    ) -> Decision {
        let powers = self
            .levels
            .iter()
            .zip(counts)
            .map(|(level, &count)| (0..count).map(|_| level.acceptance_prob).product::<f64>());
        let all_accepted_prob: f64 = powers.product();
        let spent = self.candidate_seconds * more.candidates;
        let saved = lambda * more.tokens - spent;
        Decision {
            num_candidates,
            all_accepted_prob,
            continues: lambda * all_accepted_prob * more.tokens >= spent,
            delta_seconds: saved - self.verification_seconds,
            rejection_threshold: saved / (self.candidate_seconds + saved),
        }
    }
}

/// Every way to take `size` things of `num_kinds` kinds, as counts by kind.
fn multisets(num_kinds: usize, size: usize) -> Vec<Vec<usize>> {
    if num_kinds == 1 {
        return vec![vec![size]];
    }
    let mut found = Vec::new();
    for first in 0..=size {
        for mut rest in multisets(num_kinds - 1, size - first) {
            rest.insert(0, first);
            found.push(rest);
        }
    }
    found
}

#[cfg(test)]
mod tests;
