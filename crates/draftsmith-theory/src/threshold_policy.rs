//! SpecDec++'s stop decision (Huang et al. 2024, §3.1), solved exactly to test stop rules against
//! it.
//!
//! Each candidate's acceptance probability is one of a few known levels, drawn independently. A
//! round of K candidates keeps 1 + Σ_j ∏_{i≤j} p_i tokens on average, and costs c₁·(K + 1) + c₂
//! seconds with c₁ = t_draft + t_row and c₂ = t_target − t_draft. The policy with the fewest
//! seconds per token λ maximises λ·tokens − seconds in each round.
//!
//! Theorem 3.1: stopping is optimal if P(a predicted candidate is rejected) ≥ (c₂ + Δ)/(c₁ + c₂ +
//! Δ). Δ is the cost to go of stopping minus that of continuing, given that every predicted
//! candidate is accepted. The theorem counts λ − c₁ per token, so c₂ + Δ = λ·G − c₁·M, where
//! continuing adds G tokens and M candidates on average.

use crate::{
    Bounds, CostModel, DraftSignals, HeadEstimate, RejectionThresholdConfig, SeededDraws,
    StopRuleConfig,
};

/// The decision process of one round.
pub(crate) struct Process {
    /// The share of candidates at each level, summing to 1, and its acceptance probability.
    pub(crate) levels: Vec<(f64, f64)>,
    /// The number of candidates drawn before their acceptance probability is known: 0, or 1 with an
    /// acceptance head that predicts a candidate in the forward that draws the next one.
    pub(crate) num_unpredicted: usize,
    pub(crate) costs: CostModel,
    pub(crate) bounds: Bounds,
}

/// The best policy within the bounds, and its seconds per token λ.
pub(crate) struct Policy {
    pub(crate) seconds_per_token: f64,
    /// The policy continues while ∏ p of the predicted candidates is at least this.
    pub(crate) least_product: f64,
    pub(crate) decisions: Vec<Decision>,
}

/// The best policy's decision in one state of a round.
#[derive(Debug)]
pub(crate) struct Decision {
    pub(crate) num_candidates: usize,
    /// The product ∏ p of the predicted candidates.
    pub(crate) all_accepted_prob: f64,
    pub(crate) continues: bool,
    /// The threshold of Theorem 3.1, (c₂ + Δ)/(c₁ + c₂ + Δ).
    pub(crate) rejection_threshold: f64,
}

/// The mean numbers of tokens and candidates.
#[derive(Clone, Copy, Default)]
struct Yield {
    tokens: f64,
    candidates: f64,
}

/// A decision whether a round continues after the predicted levels, given the yield of that.
type Continues<'a> = dyn FnMut(&[usize], Yield) -> bool + 'a;

impl Process {
    /// Finds the best of all policies by Dinkelbach's iteration over λ.
    pub(crate) fn optimal_policy(&self) -> Policy {
        let c1 = self.costs.draft_seconds + self.costs.row_seconds;
        let mut lambda = f64::INFINITY;
        loop {
            let mut decisions = Vec::new();
            let round = self.round(&mut |predicted, more| {
                let all_accepted_prob: f64 = predicted.iter().map(|i| self.levels[*i].1).product();
                let spent = c1 * more.candidates;
                let saved = lambda * more.tokens - spent;
                let continues = lambda * all_accepted_prob * more.tokens >= spent;
                decisions.push(Decision {
                    num_candidates: predicted.len() + self.num_unpredicted,
                    all_accepted_prob,
                    continues,
                    rejection_threshold: saved / (c1 + saved),
                });
                continues
            });
            let found = self.seconds_per_token(round);
            if found >= lambda {
                let least_product = c1 / (lambda * self.next_prob());
                return Policy { seconds_per_token: lambda, least_product, decisions };
            }
            lambda = found;
        }
    }

    fn seconds_per_token(&self, round: Yield) -> f64 {
        let CostModel { draft_seconds, target_seconds, row_seconds } = self.costs;
        let draft_seconds = draft_seconds * round.candidates;
        (draft_seconds + row_seconds * (round.candidates + 1.0) + target_seconds) / round.tokens
    }

    fn mean_prob(&self) -> f64 {
        self.levels.iter().map(|(share, prob)| share * prob).sum()
    }

    /// Computes the next candidate's acceptance probability, if every predicted one is accepted.
    fn next_prob(&self) -> f64 {
        self.mean_prob().powi(1 + self.num_unpredicted as i32)
    }

    /// Computes a round's yield under a policy.
    fn round(&self, continues: &mut Continues) -> Yield {
        let first = self.num_unpredicted as f64;
        let added = self.rest(&[], continues);
        let tokens = 1.0 + first * self.mean_prob() + added.tokens;
        Yield { tokens, candidates: first + added.candidates }
    }

    /// Computes the yield of the rest of the round, if every predicted candidate is accepted.
    fn rest(&self, predicted: &[usize], continues: &mut Continues) -> Yield {
        let num_candidates = predicted.len() + self.num_unpredicted;
        if num_candidates == self.bounds.max {
            return Yield::default();
        }
        let mut more = Yield { tokens: self.next_prob(), candidates: 1.0 };
        for (level, (share, prob)) in self.levels.iter().enumerate() {
            let later = self.rest(&[predicted, &[level]].concat(), continues);
            more.tokens += share * prob * later.tokens;
            more.candidates += share * later.candidates;
        }
        let goes_on = num_candidates < self.bounds.min || continues(predicted, more);
        if goes_on { more } else { Yield::default() }
    }
}

/// Processes of all kinds, every fifth with SpecDec++'s fitted times (§4.2).
fn processes(num_levels: usize, max: usize) -> impl Iterator<Item = Process> {
    let mut draws = SeededDraws::new(1, &["threshold-policy"]);
    (0..80).map(move |case| {
        let weights: Vec<f64> = (0..num_levels).map(|_| 0.1 + draws.uniform()).collect();
        let total: f64 = weights.iter().sum();
        let mut level = |weight: f64| (weight / total, 1.0 - draws.uniform().powi(2));
        let levels = weights.into_iter().map(&mut level).collect();
        let (draft_seconds, row_seconds) = (0.01 + 0.4 * draws.uniform(), 0.05 * draws.uniform());
        let costs = match case % 5 {
            0 => CostModel::PAPER,
            _ => CostModel { draft_seconds, target_seconds: 1.0, row_seconds },
        };
        let bounds = Bounds { min: 1 + case % 3 / 2, max };
        Process { levels, num_unpredicted: case % 2, costs, bounds }
    })
}

#[test]
fn no_map_from_states_to_stops_is_better() {
    for process in processes(2, 3) {
        let mut best = f64::INFINITY;
        for map in 0..1 << 7_u32 {
            // A state's bit: its levels as binary digits after a leading 1.
            let bit = |predicted: &[usize]| predicted.iter().fold(1, |bit, level| 2 * bit + level);
            let round = process.round(&mut |predicted, _| map >> (bit(predicted) - 1) & 1 == 1);
            best = best.min(process.seconds_per_token(round));
        }
        // Sums of a few f64 products in a different order.
        assert!((best / process.optimal_policy().seconds_per_token - 1.0).abs() < 1e-12);
    }
}

#[test]
fn theorem_3_1_stops_exactly_where_the_best_policy_does() {
    let mut counts = [0, 0];
    for process in processes(3, 7) {
        let policy = process.optimal_policy();
        for decision in &policy.decisions {
            let excess = 1.0 - decision.all_accepted_prob - decision.rejection_threshold;
            // Nearer than this, rounding decides.
            if excess.abs() > 1e-12 {
                assert_eq!(decision.continues, excess < 0.0, "{decision:?}");
                let is_likely = decision.all_accepted_prob >= policy.least_product;
                assert_eq!(decision.continues, is_likely, "{decision:?}");
            }
            counts[usize::from(decision.continues)] += 1;
        }
    }
    assert!(counts.iter().all(|count| *count > 100), "both happen: {counts:?}");
}

#[test]
fn the_heads_rule_at_the_threshold_is_the_best_policy() {
    for process in processes(2, 4).filter(|process| process.num_unpredicted == 1) {
        let Policy { seconds_per_token, least_product, .. } = process.optimal_policy();
        let (stop_threshold, bounds) = (1.0 - least_product, process.bounds);
        let config = RejectionThresholdConfig { stop_threshold, without_lag: false, bounds };
        // A product above 1 always stops, and no threshold has that effect.
        let Ok(mut rule) = StopRuleConfig::from(config).init() else { continue };
        let round = process.round(&mut |predicted, _| {
            rule.begin_round();
            let mut stops = rule.stops(&[0], &DraftSignals::default());
            for (at, level) in predicted.iter().enumerate() {
                let acceptance_prob = Some(HeadEstimate::OfRead(process.levels[*level].1));
                let signals = DraftSignals { acceptance_prob, ..DraftSignals::default() };
                stops = rule.stops(&vec![0; at + 2], &signals);
            }
            !stops
        });
        // Sums of a few f64 products in a different order.
        assert!((process.seconds_per_token(round) / seconds_per_token - 1.0).abs() < 1e-12);
    }
}
