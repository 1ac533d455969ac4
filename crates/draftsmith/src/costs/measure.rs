//! Measuring the costs: rounds of every length on real prompts, again and again until they are
//! known well enough.
//!
//! What else runs on a machine only makes it slower, and not all lengths alike. So the slower half
//! of the passes does not count.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use draftsmith_theory::{Decoding, DrafterId, Round, RoundCosts, SeededDraws, SignalNeeds, Trace};

use super::mixed::{MixedLengths, Probe, mixed_costs};
use super::{Costs, LENGTHS};
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::results::DrafterName;
use crate::statistics::median_of;

/// The round length at which signals are timed.
const SIGNAL_LENGTH: usize = 4;
/// How often prompts are decoded a pass with rounds of one length: plainly, with each length, and
/// with each of three signals.
const NUM_TIMINGS: usize = 1 + LENGTHS.len() + 3;
/// How often prompts are decoded a pass with rounds of changing lengths.
const MIXED_REPEATS: usize = 2;
/// Passes over all prompts and lengths, at least.
const MIN_PASSES: usize = 10;
/// The same where passes take long: the models are large then, and their forwards vary less.
const MIN_LONG_PASSES: usize = 5;
/// How long measuring may take once there are that many.
const MAX_DURATION: Duration = Duration::from_secs(300);
/// Passes at most: a machine that is too noisy is not measured better by waiting.
const MAX_PASSES: usize = 40;
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
    let id = drafter.id().context("the target alone has no draft forwards to measure")?;
    let progress = Progress::new(console, "costs", "answers", 0);
    let mut run = |lengths: &mut MixedLengths| {
        Pass::run(decoders, drafter, decoding, prompts, lengths, console, &progress)
    };
    // The fewest that there may be, until it is known what one takes.
    let answers_a_pass = |mixed_repeats| (prompts.len() * (NUM_TIMINGS + mixed_repeats)) as u64;
    let (of_first, of_other) = (answers_a_pass(0), answers_a_pass(MIXED_REPEATS));
    progress.set_total(of_first + of_other * MIN_LONG_PASSES as u64);
    // The first forwards of a process touch pages and pick kernels; what they cost is near enough
    // to tell how long rounds will be, and passes.
    let first = run(&mut MixedLengths::default())?;
    let max_passes = max_passes(first.duration);
    let mut lengths = MixedLengths::of(lengths_under(&Measurement::of(&[first], id)?.costs)?);
    progress.set_total(of_first + of_other * max_passes as u64);
    let mut passes: Vec<Pass> = Vec::new();
    loop {
        passes.push(run(&mut lengths)?);
        let num_passes = passes.len();
        if num_passes < MIN_LONG_PASSES {
            continue;
        }
        let measurement = Measurement { num_passes, ..Measurement::of(quiet(&mut passes), id)? };
        let uncertainty = measurement.uncertainty;
        progress.message(format!("± {:.1} %", uncertainty * 100.0));
        let is_known = uncertainty <= CLOSE_ENOUGH && num_passes >= MIN_PASSES;
        if is_known || num_passes >= max_passes {
            progress.clear();
            return Ok(measurement);
        }
    }
}

/// So many passes at most, by what one takes.
fn max_passes(of_one: Duration) -> usize {
    // Infinitely many of no time: the cast makes that the greatest number.
    let in_time = (MAX_DURATION.as_secs_f64() / of_one.as_secs_f64()) as usize;
    in_time.clamp(MIN_LONG_PASSES, MAX_PASSES)
}

/// The faster half of the passes.
fn quiet(passes: &mut [Pass]) -> &[Pass] {
    passes.sort_by_key(|pass| pass.duration);
    &passes[..passes.len().div_ceil(2)]
}

impl Measurement {
    /// What is given and not measured.
    pub(crate) fn given(costs: Costs) -> Self {
        Self { costs, uncertainty: 0.0, num_passes: 0 }
    }

    fn of(passes: &[Pass], drafter: DrafterId) -> Result<Self> {
        let column = |of: &dyn Fn(&Pass) -> f64| Spread::of(passes.iter().map(of).collect());
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
        let rounds = RoundCosts::from_points([(drafter, draft.median)].into(), points)?;
        let mixed_rounds = passes.iter().flat_map(|pass| &pass.mixed_rounds);
        let costs = Costs {
            drafter,
            mixed_rounds: mixed_costs(mixed_rounds, &rounds, drafter)?,
            rounds,
            head_seconds: extra(&|pass| pass.head_seconds),
            confidence_seconds: extra(&|pass| pass.confidence_seconds),
            entropy_seconds: extra(&|pass| pass.entropy_seconds),
            draft_rows: None,
        };
        let all = verify.iter().map(|(_, summary)| summary).chain([&draft]);
        let uncertainty = all.map(|known| known.half_width / known.median).fold(0.0, f64::max);
        Ok(Self { costs, uncertainty, num_passes: passes.len() })
    }
}

/// A median over passes and half its 95 % interval.
struct Spread {
    median: f64,
    half_width: f64,
}

impl Spread {
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
        console: &Console,
        progress: &Progress,
    ) -> Result<Self> {
        let begun = Instant::now();
        let has_head = decoders.has_head_for(drafter);
        let go_on = || if console.is_interrupted() { Err(Interrupted) } else { Ok(()) };
        let mut time = |length, needs| -> Result<Timed> {
            let mut timed = Timed::default();
            for (number, prompt) in prompts.iter().enumerate() {
                go_on()?;
                let mut draws = SeededDraws::new(number as u64, &["costs"]);
                let found = if length == 0 {
                    decoders.decode_plain(decoding, prompt, &mut draws)?
                } else {
                    let mut one = MixedLengths::of(vec![length]);
                    let mut rule = Probe::new(&mut one, needs);
                    decoders.decode(drafter, &mut rule, decoding, prompt, &mut draws)?
                };
                timed.add(&found.trace, length);
                progress.advance(1);
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
        let mut head_seconds = 0.0;
        if has_head {
            head_seconds = extra(SignalNeeds { acceptance_prob: true, ..none })?;
        } else {
            progress.advance(prompts.len() as u64);
        }
        let confidence_seconds = extra(SignalNeeds { confidence: true, ..none })?;
        let entropy_seconds = extra(SignalNeeds { entropy: true, ..none })?;
        let mut mixed_rounds = Vec::new();
        let num_repeats = if mixed.is_empty() { 0 } else { MIXED_REPEATS };
        for prompt_number in (0..num_repeats).flat_map(|_| 0..prompts.len()) {
            go_on()?;
            let mut draws = SeededDraws::new(prompt_number as u64, &["costs"]);
            let mut rule = Probe::new(mixed, none);
            let prompt = &prompts[prompt_number];
            let found = decoders.decode(drafter, &mut rule, decoding, prompt, &mut draws)?;
            mixed_rounds.extend(found.trace.rounds);
            progress.advance(1);
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
            let num_forwards = round.num_draft_forwards();
            if num_forwards > 0 {
                self.draft.push(round.draft_time.as_secs_f64() / num_forwards as f64);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_that_take_long_are_fewer() {
        let most = |seconds: f64| max_passes(Duration::from_secs_f64(seconds));
        assert_eq!([0.0, 0.4, 7.5, 10.0, 40.0, 60.0, 900.0].map(most), [40, 40, 40, 30, 7, 5, 5]);
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
        let (even, slow) = (Spread::of(even), Spread::of(slow));
        assert_eq!(even.median, 1.01);
        assert_eq!(slow.median, even.median);
        assert!(slow.half_width <= 1.5 * even.half_width);
    }
}
