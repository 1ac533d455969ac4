//! Tests of sampled answers against a reference's distribution.
//!
//! Many answers to one prompt, each with its own seed, form a tree of prefixes. At every prefix that enough of them
//! reach, the tokens that follow are compared with the reference's probabilities by the likelihood ratio
//! G = 2 Σ n ln(n / e). All prefixes of a prompt together give a second test, and the mean log-probability of tokens
//! against its expectation a third, which finds a wrong temperature with few answers. p-values come from simulating
//! the reference's distribution. They are judged by Holm's rule over all tests, and a test that fails is repeated with
//! new seeds before it counts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use draftsmith_served::{Completed, CompletionAsk, Listener, ServedError};
use draftsmith_theory::SeededDraws;
use serde::Serialize;

use super::{Completing, Verdict, best_after, complete_all, greedy_ask};

/// The chance that a sound server is suspected, and then refuted by the repetition.
const SUSPECTED: f64 = 0.01;
const REFUTED: f64 = 0.001;
/// The fewest answers that reach a tested prefix.
const LEAST_VISITS: usize = 200;
/// The fewest expected answers of a cell; tokens with fewer are one cell.
const LEAST_EXPECTED: f64 = 5.0;
/// Simulated answers of a test: few, and many where the few leave doubt.
const NUM_SIMULATED: [usize; 2] = [400, 20_000];
/// A p-value above this needs no further simulations.
const UNSUSPICIOUS: f64 = 0.05;

/// What is sampled.
#[derive(Debug, Clone)]
pub struct SampledPlan {
    /// Answers to each prompt.
    pub num_draws: usize,
    /// Candidates per round of the server: as many positions after the first are tested, and one more.
    pub num_candidates: usize,
    /// The most prompts; those whose answers say most are taken.
    pub num_prompts: usize,
    /// The temperature.
    pub temperature: f64,
    /// Only this many of the most probable tokens are drawn from. From all tokens the distribution is only known at
    /// temperature 1, from [`NUM_LOG_PROBS`](draftsmith_served::NUM_LOG_PROBS) or fewer at any.
    pub top_k: Option<usize>,
    /// Tokens that end answers: they count as one.
    pub eos_token_ids: Vec<u32>,
    /// Seed of answers and simulations.
    pub seed: u64,
}

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct SampledReport {
    /// Prompts.
    pub num_prompts: usize,
    /// Answers.
    pub num_draws: usize,
    /// Prefixes that were tested.
    pub num_prefixes: usize,
    /// The smallest total variation at the most visited prefix that is found with probability 0.9.
    pub detectable: f64,
    /// The tests, those with the smallest p-values first; at most 20.
    pub tests: Vec<DistributionTest>,
    /// Whether a test failed, and failed again with new seeds.
    pub is_refuted: bool,
}

/// A test of one distribution.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DistributionTest {
    /// The prompt's number, from 0.
    pub prompt: usize,
    /// What was tested: tokens after a prefix, all of them together, or the mean log-probability.
    pub what: TestedWhat,
    /// Tokens.
    pub num: usize,
    /// The chance of a worse fit if the server's output is the target's.
    pub p_value: f64,
    /// The p-value with new seeds, if the first was suspicious.
    pub again: Option<f64>,
}

/// What a test is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TestedWhat {
    /// The tokens after these.
    After(Vec<u32>),
    /// The tokens after all tested prefixes.
    All,
    /// The mean log-probability of tokens.
    LogProbs,
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

/// Tests a server.
///
/// # Errors
/// If a server fails, or the listener asks to stop.
pub(super) fn test(
    server: &dyn Completing,
    reference: &dyn Completing,
    prompts: &[Vec<u32>],
    plan: &SampledPlan,
    concurrency: usize,
    listener: &(dyn Listener + Sync),
) -> Result<SampledReport, ServedError> {
    let sampling = SampledTest { server, reference, plan, concurrency, listener };
    let mut tests = Vec::new();
    let (mut num_prefixes, mut detectable) = (0, f64::NAN);
    let chosen = sampling.choose(prompts)?;
    let mut references: BTreeMap<usize, References> = BTreeMap::new();
    for number in &chosen {
        let (number, prompt, mut known) = (*number, &prompts[*number], References::new());
        let (own, nodes) = sampling.tests(number, prompt, "first", &mut known)?;
        num_prefixes += nodes.len();
        let power = nodes.iter().map(TokenNode::detectable);
        detectable = power.fold(detectable, f64::min);
        tests.extend(own);
        references.insert(number, known);
        listener.advance();
    }
    tests.sort_by(|one, other| one.p_value.total_cmp(&other.p_value));
    // Holm: the smallest p-value is judged against all tests, the next against all but one, and so on.
    let num_tests = tests.len();
    let suspicious = tests.iter().enumerate();
    let suspicious =
        suspicious.take_while(|(nth, it)| it.p_value <= SUSPECTED / (num_tests - nth) as f64);
    let num_suspicious = suspicious.count();
    let mut is_refuted = false;
    let mut repeated: BTreeMap<usize, Vec<DistributionTest>> = BTreeMap::new();
    for it in &mut tests[..num_suspicious] {
        let prompt = it.prompt;
        let own = match repeated.entry(prompt) {
            Entry::Occupied(own) => own.into_mut(),
            Entry::Vacant(place) => {
                let known = references.entry(prompt).or_default();
                place.insert(sampling.tests(prompt, &prompts[prompt], "again", known)?.0)
            }
        };
        let again = own.iter().find(|other| other.what == it.what).map(|other| other.p_value);
        it.again = again;
        is_refuted |= again.is_some_and(|p| p <= REFUTED);
    }
    tests.truncate(20);
    let num_draws = chosen.len() * plan.num_draws;
    Ok(SampledReport {
        num_prompts: chosen.len(),
        num_draws,
        num_prefixes,
        detectable,
        tests,
        is_refuted,
    })
}

/// The reference's probabilities after prefixes.
type References = BTreeMap<Vec<u32>, BTreeMap<u32, f64>>;

struct SampledTest<'a> {
    server: &'a dyn Completing,
    reference: &'a dyn Completing,
    plan: &'a SampledPlan,
    concurrency: usize,
    listener: &'a (dyn Listener + Sync),
}

/// A tested prefix: how many answers went on in each cell, and the cells' probabilities.
struct TokenNode {
    prefix: Vec<u32>,
    counts: Vec<usize>,
    probs: Vec<f64>,
    /// The mean log-probability of a cell's tokens.
    log_probs: Vec<f64>,
}

impl SampledTest<'_> {
    /// Chooses the prompts whose answers say most: those that stay on common prefixes whose next tokens are uncertain.
    /// The measure sums, along the most probable answer, the chance to reach each prefix times the chance to leave it
    /// there.
    fn choose(&self, prompts: &[Vec<u32>]) -> Result<Vec<usize>, ServedError> {
        let num_tokens = self.plan.num_candidates + 2;
        let ask = |prompt| CompletionAsk { with_log_probs: true, ..greedy_ask(prompt, num_tokens) };
        let asks: Vec<CompletionAsk<'_>> = prompts.iter().map(|prompt| ask(prompt)).collect();
        let answers = complete_all(self.reference, &asks, self.concurrency, self.listener)?;
        let openness = |answer: &Completed| {
            let (mut reached, mut sum) = (1.0, 0.0);
            for (nth, known) in answer.known.iter().enumerate() {
                let probs = drawn_from(known.clone(), self.plan.temperature, self.plan.top_k);
                let best = probs.iter().map(|(_, prob)| *prob).fold(0.0, f64::max);
                // The first token is not speculated.
                sum += if nth > 0 { reached * (1.0 - best) } else { 0.0 };
                reached *= best;
            }
            sum
        };
        let openness: Vec<f64> = answers.iter().map(openness).collect();
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        order.sort_by(|one, other| openness[*other].total_cmp(&openness[*one]));
        order.truncate(self.plan.num_prompts);
        Ok(order)
    }

    /// Draws the server's answers to a prompt and tests them. Returns the tests and the tested prefixes.
    fn tests(
        &self,
        number: usize,
        prompt: &[u32],
        name: &str,
        known: &mut References,
    ) -> Result<(Vec<DistributionTest>, Vec<TokenNode>), ServedError> {
        let plan = self.plan;
        let stream = [name, &number.to_string(), "certify"];
        let mut draws = SeededDraws::new(plan.seed, &stream);
        let seeds: Vec<u32> = (0..plan.num_draws).map(|_| (draws.uniform() * 2e9) as u32).collect();
        // The last candidates of an answer are cut off, so it is longer than what is tested.
        let num_tokens = plan.num_candidates + 3;
        let ask = |seed: &u32| CompletionAsk {
            prompt,
            num_tokens,
            seed: *seed,
            temperature: plan.temperature,
            top_k: plan.top_k,
            with_log_probs: false,
        };
        let asks: Vec<CompletionAsk<'_>> = seeds.iter().map(ask).collect();
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
                known.insert(prefix.to_vec(), self.probabilities(prompt, prefix)?);
            }
            nodes.extend(TokenNode::of(prefix, &next, &known[prefix]));
        }
        Ok((self.judge(number, &nodes, &mut draws), nodes))
    }

    /// Replaces every end token by the first, so that they count as one token: servers choose among them by their own
    /// lists.
    fn joined(&self, id: u32) -> u32 {
        let ends = &self.plan.eos_token_ids;
        if ends.contains(&id) { ends[0] } else { id }
    }

    fn probabilities(
        &self,
        prompt: &[u32],
        prefix: &[u32],
    ) -> Result<BTreeMap<u32, f64>, ServedError> {
        let whole = [prompt, prefix].concat();
        let known = best_after(self.reference, &whole)?;
        let mut probs: BTreeMap<u32, f64> = BTreeMap::new();
        for (id, prob) in drawn_from(known, self.plan.temperature, self.plan.top_k) {
            *probs.entry(self.joined(id)).or_default() += prob;
        }
        Ok(probs)
    }

    fn judge(
        &self,
        prompt: usize,
        nodes: &[TokenNode],
        draws: &mut SeededDraws,
    ) -> Vec<DistributionTest> {
        let found: Vec<Fit> = nodes.iter().map(|node| node.fit(&node.counts)).collect();
        let total = Fit::sum(&found);
        // How many simulations are at least as bad: by prefix, and the two totals.
        let mut num_worse = vec![0; nodes.len() + 2];
        let mut num_simulated = vec![0; nodes.len() + 2];
        for num in NUM_SIMULATED {
            let p = |worse: usize, simulated: usize| (worse + 1) as f64 / (simulated + 1) as f64;
            let open: Vec<bool> = num_worse
                .iter()
                .zip(&num_simulated)
                .map(|(worse, simulated)| *simulated == 0 || p(*worse, *simulated) <= UNSUSPICIOUS)
                .collect();
            if !open.contains(&true) {
                break;
            }
            let needs_all = open[nodes.len()] || open[nodes.len() + 1];
            for _ in 0..num {
                let fits: Vec<Option<Fit>> = nodes
                    .iter()
                    .zip(&open)
                    .map(|(node, open)| {
                        (*open || needs_all).then(|| node.fit(&node.simulate(draws)))
                    })
                    .collect();
                for (at, fit) in fits.iter().enumerate() {
                    if let Some(fit) = fit {
                        num_worse[at] += usize::from(fit.ratio >= found[at].ratio);
                        num_simulated[at] += 1;
                    }
                }
                if needs_all {
                    let all = Fit::sum(&fits.into_iter().flatten().collect::<Vec<_>>());
                    num_worse[nodes.len()] += usize::from(all.ratio >= total.ratio);
                    num_worse[nodes.len() + 1] +=
                        usize::from(all.surprise.abs() >= total.surprise.abs());
                    num_simulated[nodes.len()] += 1;
                    num_simulated[nodes.len() + 1] += 1;
                }
            }
        }
        let num_all: usize = nodes.iter().map(TokenNode::num).sum();
        let totals = [(TestedWhat::All, num_all), (TestedWhat::LogProbs, num_all)];
        let named = nodes.iter().map(|node| (TestedWhat::After(node.prefix.clone()), node.num()));
        let named: Vec<(TestedWhat, usize)> =
            named.chain(totals.into_iter().filter(|_| !nodes.is_empty())).collect();
        named
            .into_iter()
            .enumerate()
            .map(|(at, (what, num))| {
                let p_value = (num_worse[at] + 1) as f64 / (num_simulated[at] + 1) as f64;
                DistributionTest { prompt, what, num, p_value, again: None }
            })
            .collect()
    }
}

/// Computes the probabilities of tokens at a temperature from their log-probabilities at temperature 1. If only the
/// `top_k` most probable tokens are drawn from, the last of them is left out, so that it counts among all others:
/// rounding may exchange it with the next.
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

/// How counts fit probabilities.
#[derive(Clone, Copy, Default)]
struct Fit {
    /// G.
    ratio: f64,
    /// The sum of log-probabilities less its expectation.
    surprise: f64,
}

impl Fit {
    fn sum(all: &[Self]) -> Self {
        all.iter().fold(Self::default(), |sum, it| Self {
            ratio: sum.ratio + it.ratio,
            surprise: sum.surprise + it.surprise,
        })
    }
}

impl TokenNode {
    /// Divides the tokens after a prefix into cells: tokens that are expected often enough, and all others as one.
    /// `None` if one cell is left.
    fn of(prefix: &[u32], next: &[u32], probs: &BTreeMap<u32, f64>) -> Option<Self> {
        let num = next.len() as f64;
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        next.iter().for_each(|id| *counts.entry(*id).or_default() += 1);
        let mut node = Self {
            prefix: prefix.to_vec(),
            counts: Vec::new(),
            probs: Vec::new(),
            log_probs: Vec::new(),
        };
        let mut rest = 1.0;
        for (id, prob) in probs.iter().filter(|(_, prob)| **prob * num >= LEAST_EXPECTED) {
            node.counts.push(counts.remove(id).unwrap_or(0));
            node.probs.push(*prob);
            node.log_probs.push(prob.ln());
            rest -= prob;
        }
        // Rounded probabilities may exceed 1, and a rest without probability may still be chosen by rounding.
        let rest = rest.max(1e-6);
        node.counts.push(counts.into_values().sum());
        node.probs.push(rest);
        node.log_probs.push(rest.ln());
        let total: f64 = node.probs.iter().sum();
        node.probs.iter_mut().for_each(|prob| *prob /= total);
        (node.counts.len() > 1).then_some(node)
    }

    fn num(&self) -> usize {
        self.counts.iter().sum()
    }

    fn fit(&self, counts: &[usize]) -> Fit {
        let num: usize = counts.iter().sum();
        let mut fit = Fit::default();
        for ((count, prob), log_prob) in counts.iter().zip(&self.probs).zip(&self.log_probs) {
            let (count, expected) = (*count as f64, *prob * num as f64);
            if count > 0.0 {
                fit.ratio += 2.0 * count * (count / expected).ln();
            }
            fit.surprise += (count - expected) * log_prob;
        }
        fit
    }

    /// Simulates as many tokens from the reference's distribution as the prefix has, and counts them by cell.
    fn simulate(&self, draws: &mut SeededDraws) -> Vec<usize> {
        // One cell after another, each a share of what is left.
        let (mut left, mut mass) = (self.num(), 1.0);
        let mut counts = Vec::with_capacity(self.probs.len());
        for prob in &self.probs {
            let share = (prob / mass).clamp(0.0, 1.0);
            let count = draws.binomial(left, share);
            counts.push(count);
            left -= count;
            mass = (mass - prob).max(f64::MIN_POSITIVE);
        }
        // Rounding may leave some for the last cell.
        if let Some(last) = counts.last_mut() {
            *last += left;
        }
        counts
    }

    /// Computes the total variation that a test at level 0.001 finds with probability 0.9, from the numbers of cells
    /// and tokens.
    fn detectable(&self) -> f64 {
        // λ of the non-central χ² by degrees of freedom, for this level and power.
        const LAMBDA: [(f64, f64); 7] = [
            (1.0, 20.9),
            (2.0, 23.8),
            (4.0, 27.7),
            (9.0, 34.1),
            (19.0, 42.6),
            (29.0, 49.1),
            (49.0, 59.1),
        ];
        let freedom = (self.probs.len() - 1) as f64;
        let above = LAMBDA.iter().position(|(df, _)| *df >= freedom).unwrap_or(LAMBDA.len() - 1);
        let ((low, from), (high, to)) = (LAMBDA[above.saturating_sub(1)], LAMBDA[above]);
        let share = if high > low { ((freedom - low) / (high - low)).clamp(0.0, 1.0) } else { 0.0 };
        let lambda = from + share * (to - from);
        (lambda / (4.0 * self.num() as f64)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detectable_distances_are_those_of_the_table() {
        // 3,410 answers and 10 cells: a total variation of 0.05 at level 0.001 and power 0.9.
        let node = TokenNode {
            prefix: vec![],
            counts: vec![341; 10],
            probs: vec![0.1; 10],
            log_probs: vec![0.0; 10],
        };
        assert!((node.detectable() - 0.05).abs() < 1e-3, "{}", node.detectable());
    }
}
