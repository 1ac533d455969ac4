//! Measuring the costs: rounds of every length on real prompts, again and again until they are
//! known well enough.
//!
//! Rounds under a rule differ in length, and a verification takes longer the longer ago the last
//! one was: weights leave the caches. So they are measured by rounds whose lengths are a rule's
//! own, one after the other as it would draft them. Lengths by chance have other times, and too
//! long ones make rules look worse than they are.
//!
//! What else runs on a machine only makes it slower, and not all lengths alike. So the slower half
//! of the passes does not count.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use draftsmith_theory::{
    Bounds, Decoding, DraftSignals, Round, RoundCosts, SeededDraws, SignalNeeds, StopRule, Trace,
};

use super::Costs;
use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::results::DrafterName;

/// The round lengths that are timed; rounds of one length have the target read that many rows and
/// one.
const LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 13];
/// The round length at which signals are timed.
const SIGNAL_LENGTH: usize = 4;
/// How often prompts are decoded a pass with rounds of changing lengths.
const MIXED_REPEATS: usize = 2;
/// Rounds of one length, of changing lengths, that tell what it costs; of fewer it is estimated
/// from all.
const ENOUGH_ROUNDS: usize = 30;
/// Passes over all prompts and lengths, at least.
const LEAST_PASSES: usize = 10;
/// Passes at most: a machine that is too noisy is not measured better by waiting.
const MOST_PASSES: usize = 40;
/// Half the 95 % interval of each cost, relative to it, at which measuring ends.
const CLOSE_ENOUGH: f64 = 0.02;
/// New tokens a prompt and pass.
const NUM_TOKENS: usize = 32;

/// Costs, and how well they are known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measurement {
    pub(crate) costs: Costs,
    /// Half the 95 % interval of the worst known of a draft forward's time and those of
    /// verifications, relative to it.
    pub(crate) uncertainty: f64,
    /// Passes taken.
    pub(crate) num_passes: usize,
}

/// Measures a drafter's costs over `prompts`, whose first pass is not counted. `lengths_under`
/// gives the lengths of rounds, in order, under a rule that would be good if the costs were those:
/// a first estimate, of rounds of one length.
///
/// # Errors
/// If there is no prompt, a model fails, or Ctrl-C is met.
pub(crate) fn measure(
    decoders: &mut Decoders<'_>,
    drafter: DrafterName,
    decoding: &Decoding,
    prompts: &[Vec<u32>],
    lengths_under: &dyn Fn(&Costs) -> Result<Vec<usize>>,
    console: &Console,
) -> Result<Measurement> {
    if prompts.is_empty() {
        bail!("there is no prompt to measure costs on");
    }
    let all = decoders.limits.max_new_tokens;
    decoders.limits.max_new_tokens = all.min(NUM_TOKENS);
    let measured = passes(decoders, drafter, decoding, prompts, lengths_under, console);
    decoders.limits.max_new_tokens = all;
    measured
}

fn passes(
    decoders: &mut Decoders<'_>,
    drafter: DrafterName,
    decoding: &Decoding,
    prompts: &[Vec<u32>],
    lengths_under: &dyn Fn(&Costs) -> Result<Vec<usize>>,
    console: &Console,
) -> Result<Measurement> {
    // The first forwards of a process touch pages and pick kernels; what they cost is near enough
    // to tell how long rounds will be.
    let first = Pass::run(decoders, drafter, decoding, prompts, &mut MixedLengths::default())?;
    let mut lengths = MixedLengths::of(lengths_under(&Measurement::of(&[first])?.costs)?);
    let mut passes: Vec<Pass> = Vec::new();
    loop {
        if console.is_interrupted() {
            return Err(Interrupted.into());
        }
        passes.push(Pass::run(decoders, drafter, decoding, prompts, &mut lengths)?);
        if passes.len() >= LEAST_PASSES {
            let num_passes = passes.len();
            let measurement = Measurement { num_passes, ..Measurement::of(quiet(&mut passes))? };
            if measurement.uncertainty <= CLOSE_ENOUGH || passes.len() >= MOST_PASSES {
                return Ok(measurement);
            }
        }
    }
}

/// The faster half of the passes.
fn quiet(passes: &mut [Pass]) -> &[Pass] {
    passes.sort_by_key(|pass| pass.duration);
    &passes[..passes.len().div_ceil(2)]
}

impl Measurement {
    fn of(passes: &[Pass]) -> Result<Self> {
        let column = |of: &dyn Fn(&Pass) -> f64| Summary::of(passes.iter().map(of).collect());
        let draft = column(&|pass| pass.draft_seconds);
        // Lengths that every pass met.
        let verify = (0..=LENGTHS.len())
            .filter(|index| passes.iter().all(|pass| pass.verify_seconds[*index].is_some()))
            .map(|index| {
                let rows = if index == 0 { 1 } else { LENGTHS[index - 1] + 1 };
                let of = move |pass: &Pass| pass.verify_seconds[index].unwrap_or_default();
                (rows, column(&of))
            })
            .collect::<Vec<_>>();
        if verify.len() < 3 {
            bail!(
                "the prompts' answers are too short to measure costs on: \
                 rounds of two lengths are needed"
            );
        }
        let extra = |of: &dyn Fn(&Pass) -> f64| column(of).median.max(0.0);
        let points = verify.iter().map(|(rows, summary)| (*rows, summary.median)).collect();
        let rounds = RoundCosts::from_points(draft.median, points)?;
        let costs = Costs {
            mixed_rounds: mixed_costs(passes, &rounds)?,
            rounds,
            head_seconds: extra(&|pass| pass.head_seconds),
            confidence_seconds: extra(&|pass| pass.confidence_seconds),
            entropy_seconds: extra(&|pass| pass.entropy_seconds),
        };
        let all = verify.iter().map(|(_, summary)| summary).chain([&draft]);
        let uncertainty = all.map(|known| known.half_width / known.median).fold(0.0, f64::max);
        Ok(Self { costs, uncertainty, num_passes: passes.len() })
    }
}

/// A median over passes and half its 95 % interval.
struct Summary {
    median: f64,
    half_width: f64,
}

impl Summary {
    /// # Panics
    /// If there is no value.
    fn of(values: Vec<f64>) -> Self {
        const MEASURED: &str = "there is a pass to summarise";
        let count = values.len() as f64;
        let median = median_of(values.iter().copied()).expect(MEASURED);
        let distances = values.iter().map(|value| (value - median).abs());
        // The standard deviation by the median distance, which a few slow passes do not move; a
        // median's own standard error is 1.2533 of a mean's.
        let deviation = 1.4826 * median_of(distances).expect(MEASURED);
        Self { median, half_width: 1.96 * 1.2533 * deviation / count.sqrt() }
    }
}

/// The median; None of nothing.
fn median_of(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// Seconds of a draft forward, averaged over its round; None of a round without one.
fn forward_seconds(round: &Round) -> Option<f64> {
    let num_forwards = round.num_draft_forwards;
    (num_forwards > 0).then(|| round.draft_time.as_secs_f64() / num_forwards as f64)
}

/// One pass over all prompts, lengths and signals.
#[derive(Debug, Clone, Default)]
struct Pass {
    /// Of all of it, prefills too.
    duration: Duration,
    draft_seconds: f64,
    /// Of one row, by the target alone, and of each of the lengths; None where no round had it.
    verify_seconds: Vec<Option<f64>>,
    head_seconds: f64,
    confidence_seconds: f64,
    entropy_seconds: f64,
    /// Rounds of changing lengths.
    mixed_rounds: Vec<Round>,
}

impl Pass {
    fn run(
        decoders: &mut Decoders<'_>,
        drafter: DrafterName,
        decoding: &Decoding,
        prompts: &[Vec<u32>],
        mixed: &mut MixedLengths,
    ) -> Result<Self> {
        let begun = Instant::now();
        let has_head = decoders.has_head_for(drafter);
        let mut time = |length, needs| -> Result<Timed> {
            let mut timed = Timed::default();
            for (number, prompt) in prompts.iter().enumerate() {
                let mut draws = SeededDraws::new(number as u64, &["costs"]);
                let found = if length == 0 {
                    decoders.decode_plain(decoding, prompt, &mut draws)?
                } else {
                    let mut one = MixedLengths::of(vec![length]);
                    let mut rule = Probe { lengths: &mut one, length, needs };
                    decoders.decode(drafter, &mut rule, decoding, prompt, &mut draws)?
                };
                timed.add(&found.trace, length);
            }
            Ok(timed)
        };
        let none = SignalNeeds::default();
        let mut verify_seconds = vec![time(0, none)?.verification()];
        let mut draft_seconds = Vec::new();
        let mut plain_draft = 0.0;
        for length in LENGTHS {
            let timed = time(length, none)?;
            verify_seconds.push(timed.verification());
            if let Some(draft) = timed.draft_forward() {
                draft_seconds.push(draft);
                if length == SIGNAL_LENGTH {
                    plain_draft = draft;
                }
            }
        }
        let mut extra = |needs| -> Result<f64> {
            let timed = time(SIGNAL_LENGTH, needs)?;
            Ok(timed.draft_forward().map_or(0.0, |draft| draft - plain_draft))
        };
        let head_seconds =
            if has_head { extra(SignalNeeds { acceptance_prob: true, ..none })? } else { 0.0 };
        let confidence_seconds = extra(SignalNeeds { confidence: true, ..none })?;
        let entropy_seconds = extra(SignalNeeds { entropy: true, ..none })?;
        let mut mixed_rounds = Vec::new();
        let num_repeats = if mixed.lengths.is_empty() { 0 } else { MIXED_REPEATS };
        for prompt_number in (0..num_repeats).flat_map(|_| 0..prompts.len()) {
            let mut draws = SeededDraws::new(prompt_number as u64, &["costs"]);
            let mut rule = Probe { lengths: mixed, length: 0, needs: none };
            let prompt = &prompts[prompt_number];
            let found = decoders.decode(drafter, &mut rule, decoding, prompt, &mut draws)?;
            mixed_rounds.extend(found.trace.rounds);
        }
        Ok(Self {
            duration: begun.elapsed(),
            draft_seconds: median_of(draft_seconds).unwrap_or(0.0),
            verify_seconds,
            head_seconds,
            confidence_seconds,
            entropy_seconds,
            mixed_rounds,
        })
    }
}

/// Times of whole rounds of one length.
#[derive(Debug, Default)]
struct Timed {
    /// A draft forward's, averaged over its round.
    draft: Vec<f64>,
    verify: Vec<f64>,
}

impl Timed {
    fn add(&mut self, trace: &Trace, length: usize) {
        for round in trace.rounds.iter().filter(|round| round.num_drafted == length) {
            self.draft.extend(forward_seconds(round));
            self.verify.push(round.verify_time.as_secs_f64());
        }
    }

    /// The median of a draft forward; None without one.
    fn draft_forward(&self) -> Option<f64> {
        median_of(self.draft.iter().copied())
    }

    /// The median of a verification; None without one.
    fn verification(&self) -> Option<f64> {
        median_of(self.verify.iter().copied())
    }
}

/// Lengths of rounds, one after the other and then from the first again.
#[derive(Debug, Clone, Default)]
struct MixedLengths {
    lengths: Vec<usize>,
    /// The greatest, 1 at least: asked for in each round, while drafting is timed.
    longest: usize,
    next: usize,
}

impl MixedLengths {
    fn of(lengths: Vec<usize>) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(1).max(1);
        Self { lengths, longest, next: 0 }
    }

    /// # Panics
    /// If there are none.
    fn next(&mut self) -> usize {
        let length = self.lengths[self.next];
        self.next = (self.next + 1) % self.lengths.len();
        length
    }
}

/// Rounds whose signals are asked for and not looked at.
#[derive(Debug)]
struct Probe<'a> {
    lengths: &'a mut MixedLengths,
    /// This round's.
    length: usize,
    needs: SignalNeeds,
}

impl StopRule for Probe<'_> {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: self.lengths.longest }
    }

    fn begin_round(&mut self) {
        self.length = self.lengths.next();
    }

    fn skips_drafting(&mut self) -> bool {
        self.length == 0
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.length
    }

    fn needs(&self) -> SignalNeeds {
        self.needs
    }
}

/// The medians over rounds of changing lengths, of each length that was met often enough. Of
/// others, what rounds of that length alone cost, and as much more as rounds of changing lengths
/// cost more on the whole.
fn mixed_costs(passes: &[Pass], alone: &RoundCosts) -> Result<RoundCosts> {
    let rounds = || passes.iter().flat_map(|pass| &pass.mixed_rounds);
    let rows = |round: &Round| round.num_drafted + 1;
    let verify = |round: &Round| round.verify_time.as_secs_f64();
    let dearer = rounds().map(|round| verify(round) / alone.verify_seconds(rows(round)));
    let dearer = median_of(dearer).unwrap_or(1.0);
    let most_rows = LENGTHS[LENGTHS.len() - 1] + 1;
    let points = (1..=most_rows).map(|number| {
        let alike: Vec<f64> = rounds().filter(|round| rows(round) == number).map(verify).collect();
        let met = median_of(alike.iter().copied()).filter(|_| alike.len() >= ENOUGH_ROUNDS);
        met.unwrap_or_else(|| dearer * alone.verify_seconds(number))
    });
    let draft_seconds = mixed_draft_seconds(rounds()).unwrap_or(alone.draft_seconds());
    Ok(RoundCosts::new(draft_seconds, points.collect())?)
}

/// A draft forward's share of the time of rounds of several lengths; None without one. The first
/// forward of a round costs more than the others, so that it is the time of all over the number of
/// all, and no average over rounds.
fn mixed_draft_seconds<'a>(rounds: impl Iterator<Item = &'a Round>) -> Option<f64> {
    let mut by_forwards: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in rounds.filter(|round| round.num_draft_forwards > 0) {
        let alike = by_forwards.entry(round.num_draft_forwards).or_default();
        alike.push(round.draft_time.as_secs_f64());
    }
    let (mut seconds, mut num_forwards) = (0.0, 0);
    for (forwards, times) in by_forwards {
        num_forwards += forwards * times.len();
        // Not the sum itself, which a few slow rounds would move.
        seconds += times.len() as f64 * median_of(times)?;
    }
    (num_forwards > 0).then(|| seconds / num_forwards as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(num_drafted: usize, draft_micros: u64, verify_micros: u64) -> Round {
        Round {
            num_drafted,
            num_draft_forwards: num_drafted,
            num_accepted: 0,
            draft_time: Duration::from_micros(draft_micros),
            verify_time: Duration::from_micros(verify_micros),
        }
    }

    #[test]
    fn a_draft_forward_has_its_share_of_all_drafting() {
        let mut rounds = vec![round(1, 30, 0); 3];
        rounds.extend(vec![round(4, 90, 0); 3]);
        // One that was held up, and one without a forward.
        rounds.extend([round(4, 9000, 0), round(0, 5, 0)]);
        let expected = (3.0 * 30e-6 + 4.0 * 90e-6) / (3.0 + 16.0);
        let found = mixed_draft_seconds(rounds.iter()).expect("there are forwards");
        assert!((found - expected).abs() < 1e-12, "{found}");
        assert_eq!(mixed_draft_seconds([round(0, 5, 0)].iter()), None);
    }

    #[test]
    fn lengths_that_were_seldom_met_cost_more_as_the_others_do() {
        let alone = RoundCosts::new(20e-6, (1..=14).map(|rows| rows as f64 * 100e-6).collect());
        let alone = alone.expect("times");
        let mut mixed_rounds = vec![round(2, 40, 330); ENOUGH_ROUNDS];
        mixed_rounds.extend(vec![round(5, 100, 9000); ENOUGH_ROUNDS - 1]);
        mixed_rounds.extend(vec![round(1, 20, 220); ENOUGH_ROUNDS + 1]);
        let pass = Pass { mixed_rounds, ..Pass::default() };
        let found = mixed_costs(&[pass], &alone).expect("times");
        for (rows, expected) in [(1, 110.0), (2, 220.0), (3, 330.0), (6, 660.0), (14, 1540.0)] {
            let seconds = found.verify_seconds(rows);
            assert!((seconds * 1e6 - expected).abs() < 1e-6, "{rows} rows: {seconds}");
        }
        assert_eq!(mixed_costs(&[Pass::default()], &alone).expect("times"), alone);
    }

    #[test]
    fn the_slower_half_of_the_passes_does_not_count() {
        let pass = |millis| Pass { duration: Duration::from_millis(millis), ..Pass::default() };
        let mut passes = [40, 10, 30, 50, 20].map(pass);
        let durations: Vec<u128> =
            quiet(&mut passes).iter().map(|pass| pass.duration.as_millis()).collect();
        assert_eq!(durations, [10, 20, 30]);
    }

    #[test]
    fn a_slow_pass_does_not_move_the_summary() {
        let even: Vec<f64> = (0..21).map(|i| 1.0 + f64::from(i % 3) * 0.01).collect();
        let mut slow = even.clone();
        slow[4] = 9.0;
        let (even, slow) = (Summary::of(even), Summary::of(slow));
        assert_eq!(even.median, 1.01);
        assert_eq!(slow.median, even.median);
        assert!(slow.half_width <= 1.5 * even.half_width);
    }
}
