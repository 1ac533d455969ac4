//! Tests whether sampled answers follow a reference's distribution.
//!
//! Many answers to one prompt, each with its own seed, form a tree of prefixes. At every prefix
//! with enough answers, we compare the next tokens with the reference's probabilities by the
//! likelihood ratio G = 2 Σ n ln(n / e). A second test combines all prefixes of a prompt. A third
//! compares the mean log-probability of tokens with its expectation, which finds a wrong
//! temperature with few answers. p-values come from simulating the reference's distribution, with
//! log-probabilities that change as much as rounding explains. Holm's
//! method corrects for the number of tests, and a failed test counts only if it fails again with
//! new seeds. [`super::full_length`] tests tokens that few answers reach by the same prefix.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use draftsmith_served::{CompletionAsk, Listener};
use draftsmith_theory::SeededDraws;
use serde::Serialize;

use super::token_counts::{Fit, Simulated, TokenNode};
use super::{Completing, Result, Verdict, best_after, complete_all, greedy_ask};

/// The significance levels: for all first tests together, and for a repeated test (`REFUTED`).
pub(super) const SUSPECTED: f64 = 0.01;
const REFUTED: f64 = 0.001;
/// The number of short answers for each one of full length.
const DRAWS_PER_ANSWER: usize = 25;
/// The minimum number of answers for a prefix to be tested.
const LEAST_VISITS: usize = 200;
/// The numbers of simulations per test: few at first, then many if the p-value is small.
const NUM_SIMULATED: [usize; 2] = [400, 20_000];
/// The p-value above which a test needs no more simulations.
const UNSUSPICIOUS: f64 = 0.05;

/// The plan of the sampled test.
#[derive(Debug, Clone)]
pub struct SampledPlan {
    /// The number of answers to each prompt.
    pub num_draws: usize,
    /// The server's number of candidates per round. The test covers one more position.
    pub num_candidates: usize,
    /// The maximum number of prompts, or of prompts with a part of their answer. Those with the most
    /// informative answers are chosen.
    pub num_prompts: usize,
    /// The sampling temperature.
    pub temperature: f64,
    /// The number of most probable tokens to sample from. `None` means all tokens, at temperature 1
    /// only: at other temperatures, the distribution is known for at most
    /// [`NUM_LOG_PROBS`](draftsmith_served::NUM_LOG_PROBS) tokens.
    pub top_k: Option<usize>,
    /// The tokens that end answers. They count as one token.
    pub eos_token_ids: Vec<u32>,
    /// The seed of answers and simulations.
    pub seed: u64,
}

impl SampledPlan {
    /// Returns the number of answers of full length.
    pub fn num_full_length(&self) -> usize {
        self.num_draws.div_ceil(DRAWS_PER_ANSWER)
    }
}

/// The result of the sampled test.
#[derive(Debug, Clone, Serialize)]
pub struct SampledReport {
    /// The number of prompts.
    pub num_prompts: usize,
    /// The number of answers.
    pub num_draws: usize,
    /// The number of tested prefixes.
    pub num_prefixes: usize,
    /// For each position of a round, from 1, the number of tested tokens. The last position is the
    /// token that follows when all candidates are accepted.
    pub num_by_position: Vec<usize>,
    /// For each position of a round, the smallest total variation found with probability 0.9, at the
    /// prefix where it is smallest; null without a tested prefix.
    pub detectable: Vec<Option<f64>>,
    /// The tests with the smallest p-values, at most 20, in ascending order.
    pub tests: Vec<DistributionTest>,
    /// The tests of answers of full length.
    pub full_length: Vec<FullLengthTest>,
    /// Whether a test failed and failed again with new seeds.
    pub is_refuted: bool,
}

/// A test of the sampled tokens from one place of an answer on.
#[derive(Debug, Clone, Serialize)]
pub struct FullLengthTest {
    /// The index of the first tested token.
    pub from: usize,
    /// What was tested.
    pub what: TestedWhat,
    /// The number of tokens.
    pub num: usize,
    /// The smallest change found with probability 0.9: of the share of tokens that are the most
    /// probable one, or of the mean log-probability in nats.
    pub detectable: f64,
    /// The probability of a deviation at least as large if the server's output is the target's.
    pub p_value: f64,
    /// The p-value with new seeds; `None` if the first test did not fail.
    pub again: Option<f64>,
}

/// A test of one distribution.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DistributionTest {
    /// The index of the prompt.
    pub prompt: usize,
    /// The number of tokens of the reference's greedy answer that were given after the prompt.
    pub num_given: usize,
    /// What was tested.
    pub what: TestedWhat,
    /// The number of tokens.
    pub num: usize,
    /// The probability of a fit at least as bad if the server's output is the target's.
    pub p_value: f64,
    /// The p-value with new seeds; `None` if the first test did not fail.
    pub again: Option<f64>,
}

/// What a test compares with the reference.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TestedWhat {
    /// The tokens that follow this prefix.
    After(Vec<u32>),
    /// The tokens that follow all tested prefixes together.
    All,
    /// The mean log-probability of tokens.
    LogProbs,
    /// How many tokens are the most probable ones.
    MostProbable,
}

impl SampledReport {
    pub(super) fn verdict(&self) -> Verdict {
        match (self.is_refuted, self.num_prefixes) {
            (true, _) => Verdict::Refuted,
            (false, 0) => Verdict::Inconclusive,
            (false, _) => Verdict::NotRefuted,
        }
    }
}

/// Tests a server's sampled answers, from any of the first `num_tokens` tokens of greedy answers on.
/// `tie_gap` is the gap between two log-probabilities that rounding explains, in nats.
///
/// # Errors
/// If a server fails, or the listener asks to stop.
pub(super) fn test(
    server: &dyn Completing,
    reference: &dyn Completing,
    prompts: &[Vec<u32>],
    (plan, tie_gap, num_tokens): (&SampledPlan, f64, usize),
    concurrency: usize,
    listener: &(dyn Listener + Sync),
) -> Result<SampledReport> {
    // A tie is a gap of two log-probabilities, of which each may change by half.
    let rounding = tie_gap / 2.0 / plan.temperature;
    let sampling = SampledTest { server, reference, plan, concurrency, listener, rounding };
    let mut tests = Vec::new();
    let (mut num_prefixes, mut num_by_position) = (0, vec![0; plan.num_candidates + 1]);
    let mut detectable: Vec<Option<f64>> = vec![None; plan.num_candidates + 1];
    let chosen = sampling.choose(prompts, num_tokens)?;
    let mut references: BTreeMap<Origin, References> = BTreeMap::new();
    for (origin, prompt) in &chosen {
        let mut known = References::new();
        let (own, nodes) = sampling.tests(*origin, prompt, "first", &mut known)?;
        num_prefixes += nodes.len();
        for node in &nodes {
            let (at, distance) = (node.prefix.len() - 1, node.detectable(rounding));
            num_by_position[at] += node.num();
            detectable[at] = Some(detectable[at].map_or(distance, |least| least.min(distance)));
        }
        tests.extend(own);
        references.insert(*origin, known);
        listener.advance();
    }
    tests.sort_by(|one, other| one.p_value.total_cmp(&other.p_value));
    // Holm's method compares the smallest p-value with the level over the number of tests, the next
    // with the level over one test fewer, and so on.
    let num_tests = tests.len();
    let suspicious = tests.iter().enumerate();
    let suspicious =
        suspicious.take_while(|(nth, it)| it.p_value <= SUSPECTED / (num_tests - nth) as f64);
    let num_suspicious = suspicious.count();
    let mut is_refuted = false;
    let mut repeated: BTreeMap<Origin, Vec<DistributionTest>> = BTreeMap::new();
    for it in &mut tests[..num_suspicious] {
        let origin = (it.prompt, it.num_given);
        let own = match repeated.entry(origin) {
            Entry::Occupied(own) => own.into_mut(),
            Entry::Vacant(place) => {
                let known = references.entry(origin).or_default();
                place.insert(sampling.tests(origin, &chosen[&origin], "again", known)?.0)
            }
        };
        let again = own.iter().find(|other| other.what == it.what).map(|other| other.p_value);
        it.again = again;
        is_refuted |= again.is_some_and(|p| p <= REFUTED);
    }
    tests.truncate(20);
    let full_length = sampling.full_length(prompts, num_tokens)?;
    is_refuted |= full_length.iter().any(|test| test.again.is_some_and(|p| p <= REFUTED));
    let num_draws = chosen.len() * plan.num_draws;
    Ok(SampledReport {
        num_prompts: chosen.len(),
        num_draws,
        num_prefixes,
        num_by_position,
        detectable,
        tests,
        full_length,
        is_refuted,
    })
}

/// Where sampled answers begin: the index of a prompt, and the number of tokens of the reference's
/// greedy answer that are given after it.
type Origin = (usize, usize);

/// The reference's next-token probabilities, by prefix.
type References = BTreeMap<Vec<u32>, BTreeMap<u32, f64>>;

/// How informative answers are at one position.
struct Openness {
    /// The share of answers that have the most probable tokens up to there.
    reached: f64,
    /// The chance that another than the most probable token follows.
    uncertain: f64,
}

impl Openness {
    /// Computes the openness at each position from the probabilities of the most probable tokens.
    /// The first token comes from the prefill and is not speculated.
    fn along(best: &[f64]) -> Vec<Self> {
        let reached = best.iter().scan(1.0, |reached, best| {
            *reached *= best;
            Some(*reached)
        });
        let next = best.iter().skip(1);
        reached.zip(next).map(|(reached, best)| Self { reached, uncertain: 1.0 - best }).collect()
    }
}

pub(super) struct SampledTest<'a> {
    pub(super) server: &'a dyn Completing,
    pub(super) reference: &'a dyn Completing,
    pub(super) plan: &'a SampledPlan,
    pub(super) concurrency: usize,
    pub(super) listener: &'a (dyn Listener + Sync),
    /// The change of a log-probability that rounding explains, in nats.
    pub(super) rounding: f64,
}

impl SampledTest<'_> {
    /// Chooses where answers begin: after a prompt and any part of the reference's greedy answer.
    /// Answers are informative at a position if they often share a prefix up to there whose next
    /// token is uncertain. Positions that no earlier choice tests count most.
    fn choose(
        &self,
        prompts: &[Vec<u32>],
        num_tokens: usize,
    ) -> Result<BTreeMap<Origin, Vec<u32>>> {
        let num_positions = self.plan.num_candidates + 1;
        let num_tokens = num_tokens.max(num_positions + 1);
        let ask = |prompt| CompletionAsk { with_log_probs: true, ..greedy_ask(prompt, num_tokens) };
        let asks: Vec<CompletionAsk<'_>> = prompts.iter().map(|prompt| ask(prompt)).collect();
        let answers = complete_all(self.reference, &asks, self.concurrency, self.listener)?;
        let mut candidates: Vec<(Origin, Vec<Openness>)> = Vec::new();
        for (number, answer) in answers.iter().enumerate() {
            let best: Vec<f64> = answer.known.iter().map(|known| self.largest(known)).collect();
            for (num_given, best) in best.windows(num_positions + 1).enumerate() {
                candidates.push(((number, num_given), Openness::along(best)));
            }
            if best.len() <= num_positions && !best.is_empty() {
                candidates.push(((number, 0), Openness::along(&best)));
            }
        }
        let mut is_tested = vec![false; num_positions];
        let mut chosen = BTreeMap::new();
        while chosen.len() < self.plan.num_prompts {
            let worth = |open: &[Openness]| -> f64 {
                let of = |(open, is_tested): (&Openness, &bool)| {
                    open.reached * open.uncertain * if *is_tested { 0.1 } else { 1.0 }
                };
                open.iter().zip(&is_tested).map(of).sum()
            };
            let free = candidates.iter().filter(|(origin, _)| !chosen.contains_key(origin));
            let best = free.max_by(|(_, one), (_, other)| worth(one).total_cmp(&worth(other)));
            let Some((origin, open)) = best else { break };
            for (is_tested, open) in is_tested.iter_mut().zip(open) {
                let num = open.reached * self.plan.num_draws as f64;
                *is_tested |= num > 2.0 * LEAST_VISITS as f64 && open.uncertain > 0.05;
            }
            let (number, num_given) = *origin;
            let prompt = [&prompts[number], &answers[number].ids[..num_given]].concat();
            chosen.insert(*origin, prompt);
        }
        Ok(chosen)
    }

    /// Returns the largest probability with which a token is drawn.
    fn largest(&self, known: &[(u32, f32)]) -> f64 {
        let probs = drawn_from(known.to_vec(), self.plan.temperature, self.plan.top_k);
        probs.iter().map(|(_, prob)| *prob).fold(0.0, f64::max)
    }

    /// Samples and tests answers to a prompt. Returns the tests and the tested prefixes.
    fn tests(
        &self,
        origin: Origin,
        prompt: &[u32],
        name: &str,
        known: &mut References,
    ) -> Result<(Vec<DistributionTest>, Vec<TokenNode>)> {
        let plan = self.plan;
        let stream = [name, &format!("{}+{}", origin.0, origin.1), "certify"];
        let mut draws = SeededDraws::new(plan.seed, &stream);
        // The server cuts candidates at the end of an answer, so answers are longer than the tested
        // part.
        let num_tokens = plan.num_candidates + 3;
        let asks: Vec<CompletionAsk<'_>> =
            (0..plan.num_draws).map(|_| self.ask(prompt, num_tokens, &mut draws)).collect();
        let answers = complete_all(self.server, &asks, self.concurrency, self.listener)?;
        let mut visits: BTreeMap<&[u32], Vec<u32>> = BTreeMap::new();
        for answer in &answers {
            for depth in 1..=(plan.num_candidates + 1).min(answer.ids.len().saturating_sub(1)) {
                visits
                    .entry(&answer.ids[..depth])
                    .or_default()
                    .push(self.joined(answer.ids[depth]));
            }
        }
        let mut nodes = Vec::new();
        for (prefix, next) in visits.into_iter().filter(|(_, next)| next.len() >= LEAST_VISITS) {
            if !known.contains_key(prefix) {
                let best = best_after(self.reference, &[prompt, prefix].concat())?;
                known.insert(prefix.to_vec(), self.probabilities(best));
            }
            nodes.extend(TokenNode::of(prefix, &next, &known[prefix]));
        }
        Ok((self.judge(origin, &nodes, &mut draws), nodes))
    }

    /// Builds the request for a sampled answer, with a drawn seed.
    pub(super) fn ask<'p>(
        &self,
        prompt: &'p [u32],
        num_tokens: usize,
        draws: &mut SeededDraws,
    ) -> CompletionAsk<'p> {
        let SampledPlan { temperature, top_k, .. } = *self.plan;
        let seed = (draws.uniform() * 2e9) as u32;
        CompletionAsk { prompt, num_tokens, seed, temperature, top_k, with_log_probs: false }
    }

    /// Replaces every end token by the first one, so that they count as one token. Servers differ
    /// in the end token that they use.
    pub(super) fn joined(&self, id: u32) -> u32 {
        let ends = &self.plan.eos_token_ids;
        if ends.contains(&id) { ends[0] } else { id }
    }

    /// Computes the probabilities with which tokens are drawn from log-probabilities at temperature 1.
    pub(super) fn probabilities(&self, known: Vec<(u32, f32)>) -> BTreeMap<u32, f64> {
        let mut probs: BTreeMap<u32, f64> = BTreeMap::new();
        for (id, prob) in drawn_from(known, self.plan.temperature, self.plan.top_k) {
            *probs.entry(self.joined(id)).or_default() += prob;
        }
        probs
    }

    fn judge(
        &self,
        (prompt, num_given): Origin,
        nodes: &[TokenNode],
        draws: &mut SeededDraws,
    ) -> Vec<DistributionTest> {
        let found: Vec<Fit> = nodes.iter().map(|node| node.fit(&node.counts)).collect();
        let total = Fit::sum(&found);
        // What simulations found: by prefix, then for the two totals.
        let mut simulated: Vec<Simulated> =
            found.iter().map(|fit| Simulated::of(fit.ratio)).collect();
        simulated.extend([total.ratio, total.surprise.abs()].map(Simulated::of));
        for num in NUM_SIMULATED {
            let open: Vec<bool> =
                simulated.iter().map(|it| it.num == 0 || it.p_value() <= UNSUSPICIOUS).collect();
            if !open.contains(&true) {
                break;
            }
            let needs_all = open[nodes.len()] || open[nodes.len() + 1];
            for _ in 0..num {
                let mut all = Fit::default();
                for (at, node) in nodes.iter().enumerate().filter(|(at, _)| open[*at] || needs_all)
                {
                    let fit = node.fit(&node.simulate(self.rounding, draws));
                    simulated[at].add(fit.ratio);
                    all = Fit::sum(&[all, fit]);
                }
                if needs_all {
                    simulated[nodes.len()].add(all.ratio);
                    simulated[nodes.len() + 1].add(all.surprise.abs());
                }
            }
        }
        let num_all: usize = nodes.iter().map(TokenNode::num).sum();
        let totals = [(TestedWhat::All, num_all), (TestedWhat::LogProbs, num_all)];
        let named = nodes.iter().map(|node| (TestedWhat::After(node.prefix.clone()), node.num()));
        let named = named.chain(totals.into_iter().filter(|_| !nodes.is_empty()));
        let judged = named.zip(&simulated).map(|((what, num), simulated)| DistributionTest {
            prompt,
            num_given,
            what,
            num,
            p_value: simulated.p_value(),
            again: None,
        });
        judged.collect()
    }
}

/// Computes token probabilities at a temperature from log-probabilities at temperature 1. With
/// `top_k`, the last of the `top_k` tokens is left out and counts as one of the rest, because
/// rounding may swap it with the next one.
fn drawn_from(
    mut known: Vec<(u32, f32)>,
    temperature: f64,
    top_k: Option<usize>,
) -> Vec<(u32, f64)> {
    known.sort_by(|one, other| other.1.total_cmp(&one.1));
    let weight = |log_prob: f32| (f64::from(log_prob) / temperature).exp();
    let Some(top_k) = top_k else {
        return known.into_iter().map(|(id, log_prob)| (id, weight(log_prob))).collect();
    };
    known.truncate(top_k);
    let total: f64 = known.iter().map(|(_, log_prob)| weight(*log_prob)).sum();
    if known.len() > 2 {
        known.pop();
    }
    known.into_iter().map(|(id, log_prob)| (id, weight(log_prob) / total)).collect()
}
