//! `certify`: tests by requests alone whether a speculating server's output is its target's.
//!
//! A reference server runs the same target without speculation. Greedy answers must have the same
//! tokens, except where the reference's two best tokens are nearly tied. Sampled answers must
//! follow the reference's distribution, which `sampled.rs` tests. The first token of an answer
//! comes from the prefill and is never speculated, so it is not tested. Of all answers, `past_end.rs`
//! counts those that go on after their end.

mod full_length;
mod past_end;
mod sampled;
#[cfg(test)]
mod tests;
mod token_counts;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use draftsmith_served::{Completed, Completer, CompletionAsk, Listener, ServedError, side_by_side};
use serde::Serialize;

use self::past_end::Watched;

pub use self::past_end::ReachedEnd;
pub use self::sampled::{FullLengthTest, SampledPlan, SampledReport, TestedWhat};

/// The result of a comparison's part.
type Result<T, E = ServedError> = std::result::Result<T, E>;

/// A difference whose gap exceeds the tie gap by this factor is a bug.
const BUG_GAP: f64 = 10.0;
/// The tie gap is at least this factor times the largest change of the reference's own gaps.
const JITTER_FACTOR: f64 = 3.0;
/// The maximum number of prefixes for measuring the reference's jitter.
const NUM_JITTER: usize = 32;
/// The message of an `expect` on a lock.
const HELD: &str = "nobody panics while holding it";
/// The maximum number of differences in one answer. The rest is not compared.
const MOST_RESTARTS: usize = 8;

/// A server whose answers are compared.
pub trait Completing: Sync {
    /// Answers a request.
    ///
    /// # Errors
    /// If the request fails.
    fn complete(&self, ask: CompletionAsk<'_>) -> Result<Completed>;
}

impl Completing for Completer {
    fn complete(&self, ask: CompletionAsk<'_>) -> Result<Completed> {
        Self::complete(self, ask)
    }
}

/// The plan of the comparison.
#[derive(Debug, Clone)]
pub struct CertifyPlan {
    /// The number of tokens in each greedy answer.
    pub num_tokens: usize,
    /// The number of concurrent requests under load.
    pub concurrency: usize,
    /// The smallest gap of log-probabilities, in nats, up to which two tokens always count as tied.
    pub least_tie: f64,
    /// The plan of the sampled test; `None` to compare only greedy answers.
    pub sampled: Option<SampledPlan>,
}

/// Whether a server's output is that of its target. Of several tests, the greatest verdict counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No test found a fault.
    NotRefuted,
    /// The tests do not decide.
    Inconclusive,
    /// The output differs from the target's.
    Refuted,
}

/// The result of a comparison.
#[derive(Debug, Clone, Serialize)]
pub struct Certificate {
    /// The verdict.
    pub verdict: Verdict,
    /// The result of the greedy comparison.
    pub greedy: GreedyReport,
    /// The results of the sampled tests; `None` if they were not requested.
    pub sampled: Option<SampledReport>,
    /// The ends of the server's answers, which they stop at or pass.
    pub ends: Vec<ReachedEnd>,
}

/// The result of the greedy comparison.
#[derive(Debug, Clone, Default, Serialize)]
pub struct GreedyReport {
    /// The number of prompts, each answered alone and under load.
    pub num_prompts: usize,
    /// The number of matching tokens.
    pub num_tokens: usize,
    /// The gap in nats up to which a difference counts as a tie.
    pub tie_gap: f64,
    /// The share of measured positions at which the reference's own two best tokens are tied.
    pub share_near_ties: f64,
    /// All differences between the server's tokens and the reference's.
    pub differences: Vec<Difference>,
}

/// A position at which the server's token differs from the reference's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Difference {
    /// The index of the prompt.
    pub prompt: usize,
    /// The index of the token in the answer.
    pub position: usize,
    /// Whether the prompt was answered under load.
    pub under_load: bool,
    /// The reference's token; `None` if its answer ends here.
    pub expected: Option<u32>,
    /// The server's token; `None` if its answer ends here.
    pub found: Option<u32>,
    /// The reference's log-probability of its best token minus the server's token, in nats.
    /// Infinite (null in JSON) if the server's token is not among the reference's most probable
    /// ones.
    pub gap: f64,
}

impl GreedyReport {
    fn verdict(&self) -> Verdict {
        let is_bug = |difference: &Difference| difference.gap > BUG_GAP * self.tie_gap;
        let is_tie = |difference: &&Difference| difference.gap <= self.tie_gap;
        let num_ties = self.differences.iter().filter(is_tie).count();
        // If the reference is rarely undecided, many differences are not ties.
        let expected = self.share_near_ties * self.num_tokens as f64;
        let has_too_many = num_ties as f64 > 3.0 + 3.0 * expected;
        if self.differences.iter().any(is_bug) {
            Verdict::Refuted
        } else if has_too_many || num_ties < self.differences.len() {
            Verdict::Inconclusive
        } else {
            Verdict::NotRefuted
        }
    }
}

/// Compares a server with a reference server on prompts.
///
/// # Errors
/// If a server fails, or the listener asks to stop.
pub fn certify(
    server: &dyn Completing,
    reference: &dyn Completing,
    prompts: &[Vec<u32>],
    plan: &CertifyPlan,
    listener: &(dyn Listener + Sync),
) -> Result<Certificate> {
    let watched = [server, reference].map(Watched::new);
    let [server, reference] = &watched;
    let greedy = greedy(server, reference, prompts, plan, listener)?;
    let test = |sampled| {
        let sampled = (sampled, greedy.tie_gap, plan.num_tokens);
        sampled::test(server, reference, prompts, sampled, plan.concurrency, listener)
    };
    let sampled = plan.sampled.as_ref().map(test).transpose()?;
    let ends = server.ends(reference, plan.concurrency, listener)?;
    let of_end = |end: &ReachedEnd| match end.reference_stops {
        _ if end.num_past == 0 => Verdict::NotRefuted,
        Some(true) => Verdict::Refuted,
        Some(false) => Verdict::NotRefuted,
        None => Verdict::Inconclusive,
    };
    let of_sampled = sampled.as_ref().map_or(Verdict::NotRefuted, SampledReport::verdict);
    let of_ends = ends.iter().map(of_end);
    let verdict = of_ends.fold(greedy.verdict().max(of_sampled), Verdict::max);
    Ok(Certificate { verdict, greedy, sampled, ends })
}

/// Answers all requests, some concurrently. Returns the answers in the order of the requests.
pub(crate) fn complete_all(
    end: &dyn Completing,
    asks: &[CompletionAsk<'_>],
    concurrency: usize,
    listener: &(dyn Listener + Sync),
) -> Result<Vec<Completed>> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Completed>>> = Mutex::new(vec![None; asks.len()]);
    let work = |(): &()| -> Result<()> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(ask) = asks.get(at) else { return Ok(()) };
            if listener.is_interrupted() {
                return Err(ServedError::Interrupted);
            }
            let completed = end.complete(*ask)?;
            done.lock().expect(HELD)[at] = Some(completed);
        }
    };
    let workers = vec![(); concurrency.clamp(1, asks.len().max(1))];
    side_by_side(Builder::new, &workers, work)?;
    let done = done.into_inner().expect(HELD);
    Ok(done.into_iter().map(Option::unwrap_or_default).collect())
}

fn greedy(
    server: &dyn Completing,
    reference: &dyn Completing,
    prompts: &[Vec<u32>],
    plan: &CertifyPlan,
    listener: &(dyn Listener + Sync),
) -> Result<GreedyReport> {
    let asks: Vec<CompletionAsk<'_>> =
        prompts.iter().map(|prompt| greedy_ask(prompt, plan.num_tokens)).collect();
    let expected = complete_all(reference, &asks, 1, listener)?;
    let (tie_gap, share_near_ties) = jitter(reference, prompts, &expected, plan, listener)?;
    let mut report = GreedyReport {
        num_prompts: prompts.len(),
        tie_gap,
        share_near_ties,
        ..GreedyReport::default()
    };
    for under_load in [false, true] {
        let concurrency = if under_load { plan.concurrency } else { 1 };
        let found = complete_all(server, &asks, concurrency, listener)?;
        for (number, ((prompt, expected), found)) in
            prompts.iter().zip(&expected).zip(found).enumerate()
        {
            let answer = AnswerTo { prompt, number, under_load };
            let servers = [server, reference];
            answer.compare(servers, &expected.ids, found.ids, &mut report)?;
        }
    }
    Ok(report)
}

/// Builds the request for a greedy answer of `num_tokens` tokens.
pub(crate) fn greedy_ask(prompt: &[u32], num_tokens: usize) -> CompletionAsk<'_> {
    let (temperature, top_k) = (0.0, None);
    CompletionAsk { prompt, num_tokens, seed: 0, temperature, top_k, with_log_probs: false }
}

/// The prompt of an answer, and whether other requests ran concurrently.
struct AnswerTo<'a> {
    prompt: &'a [u32],
    number: usize,
    under_load: bool,
}

impl AnswerTo<'_> {
    /// Compares an answer with the reference's. After each difference, asks the server to continue
    /// the reference's answer from there.
    fn compare(
        &self,
        [server, reference]: [&dyn Completing; 2],
        expected: &[u32],
        mut found: Vec<u32>,
        report: &mut GreedyReport,
    ) -> Result<()> {
        let Self { prompt, number, under_load } = *self;
        let mut from = 0;
        for _ in 0..MOST_RESTARTS {
            let rest = &expected[from..];
            let same = rest.iter().zip(&found).take_while(|(one, other)| one == other).count();
            report.num_tokens += same;
            if same == rest.len() && found.len() <= rest.len() {
                return Ok(());
            }
            let position = from + same;
            let prefix = [prompt, &expected[..position]].concat();
            let other = found.get(same).copied();
            report.differences.push(Difference {
                prompt: number,
                position,
                under_load,
                expected: expected.get(position).copied(),
                found: other,
                gap: gap(reference, &prefix, other)?,
            });
            from = position + 1;
            if from >= expected.len() {
                return Ok(());
            }
            let prefix = [prompt, &expected[..from]].concat();
            found = server.complete(greedy_ask(&prefix, expected.len() - from))?.ids;
        }
        Ok(())
    }
}

/// Returns the reference's log-probability of its best token after a prefix, minus that of `token`,
/// in nats. Infinite if `token` is not among the reference's most probable ones.
fn gap(reference: &dyn Completing, prefix: &[u32], token: Option<u32>) -> Result<f64> {
    let known = best_after(reference, prefix)?;
    let best = known.iter().map(|(_, log_prob)| *log_prob).fold(f32::NEG_INFINITY, f32::max);
    let own = known.iter().find(|(id, _)| Some(*id) == token).map(|(_, log_prob)| *log_prob);
    Ok(own.map_or(f64::INFINITY, |own| f64::from(best - own)))
}

/// Builds the request for the log-probabilities of the token after a prefix.
fn known_ask(prefix: &[u32]) -> CompletionAsk<'_> {
    CompletionAsk { with_log_probs: true, ..greedy_ask(prefix, 1) }
}

fn best_after(reference: &dyn Completing, prefix: &[u32]) -> Result<Vec<(u32, f32)>> {
    Ok(reference.complete(known_ask(prefix))?.known.into_iter().next().unwrap_or_default())
}

/// Measures how much the reference's own gaps change under load. Returns the tie gap in nats, and
/// the share of prefixes whose two best tokens are tied.
fn jitter(
    reference: &dyn Completing,
    prompts: &[Vec<u32>],
    expected: &[Completed],
    plan: &CertifyPlan,
    listener: &(dyn Listener + Sync),
) -> Result<(f64, f64)> {
    let positions = prompts.iter().zip(expected).flat_map(|(prompt, answer)| {
        (0..answer.ids.len()).step_by(7).map(move |at| [prompt, &answer.ids[..at]].concat())
    });
    let prefixes: Vec<Vec<u32>> = positions.take(NUM_JITTER).collect();
    let asks: Vec<CompletionAsk<'_>> = prefixes.iter().map(|it| known_ask(it)).collect();
    let gaps = |completed: Vec<Completed>| -> Vec<f64> {
        completed
            .iter()
            .map(|it| second_gap(it.known.first().map_or(&[][..], Vec::as_slice)))
            .collect()
    };
    let alone = gaps(complete_all(reference, &asks, 1, listener)?);
    let beside = gaps(complete_all(reference, &asks, plan.concurrency, listener)?);
    let changes = alone.iter().zip(&beside).map(|(one, other)| (one - other).abs());
    let most = changes.filter(|change| change.is_finite()).fold(0.0, f64::max);
    let tie_gap = plan.least_tie.max(JITTER_FACTOR * most);
    let num_near = alone.iter().filter(|gap| **gap <= tie_gap).count();
    Ok((tie_gap, num_near as f64 / alone.len().max(1) as f64))
}

/// Returns the difference of the two largest log-probabilities, in nats; infinite if one is known.
fn second_gap(known: &[(u32, f32)]) -> f64 {
    let mut sorted: Vec<f32> = known.iter().map(|(_, log_prob)| *log_prob).collect();
    sorted.sort_by(|one, other| other.total_cmp(one));
    match sorted[..] {
        [best, second, ..] => f64::from(best - second),
        _ => f64::INFINITY,
    }
}
