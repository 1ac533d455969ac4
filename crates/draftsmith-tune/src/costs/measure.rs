//! Measurement of costs. Rounds of every length are timed on real prompts, and repeated until the
//! costs are precise enough.
//!
//! Costs are measured in rounds of one fixed length, and again in rounds of the lengths that the
//! best rule at those costs gives. Other processes on the machine can only slow rounds down, and
//! they affect some lengths more than others. So the slower half of the passes is ignored.
//!
//! Greedy and sampled decoding run the same forwards. So all costs are measured under one way of
//! decoding, and rounds of one length show how much more the other one takes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use draftsmith_report::{DrafterName, median_of};
use draftsmith_theory::{
    Decoding, DrafterId, Round, RoundCosts, SeededDraws, SignalNeeds, StopRule, Trace,
};
use serde::{Deserialize, Serialize};

use super::mixed::{MixedLengths, mixed_costs};
use super::{Costs, LENGTHS};
use crate::decoders::Decoders;
use draftsmith_recipe::{Bar, Watch};

/// The round length at which signals are timed, in candidates.
const SIGNAL_LENGTH: usize = 4;
/// The number of answers to each prompt in a pass with fixed round lengths: plain decoding, each
/// length, and each of three signals.
const NUM_TIMINGS: usize = 1 + LENGTHS.len() + 3;
/// The number of answers to each prompt in a pass with varying round lengths.
const MIXED_REPEATS: usize = 2;
/// The minimum number of passes over all prompts and lengths.
const MIN_PASSES: usize = 5;
/// The minimum number of passes if they are slow. The models are then large, and the times of large
/// models vary less.
const MIN_LONG_PASSES: usize = 3;
/// The default time limit. It does not apply before the minimum number of passes is done.
pub const COSTS_TIME_LIMIT: Duration = Duration::from_secs(300);
/// The maximum number of passes. On a machine that is too noisy, more passes do not improve the
/// measurement.
const MAX_PASSES: usize = 12;
/// The target precision: half the 95 % interval of each cost, relative to the cost.
const CLOSE_ENOUGH: f64 = 0.02;
/// The time after which the minimum number of slow passes suffices.
const LONG_ENOUGH: Duration = Duration::from_secs(20);
/// The number of draws of uncertain costs.
const NUM_DRAWN: usize = 16;
/// The least uncertainty of measured costs: their spread over passes does not show all errors.
const LEAST_UNCERTAINTY: f64 = 0.1;
/// The maximum number of new tokens per answer.
const NUM_TOKENS: usize = 32;

/// Costs with their precision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredCosts {
    /// The costs.
    pub costs: Costs,
    /// Half the 95 % interval of the least certain cost of a draft forward or verification, relative to
    /// that cost.
    pub uncertainty: f64,
    /// The number of passes; 0 for costs that were given.
    pub num_passes: usize,
}

/// A measurement of the costs of one drafter.
pub struct CostProbe<'p, 'm> {
    /// The sessions of the models.
    pub decoders: &'p mut Decoders<'m>,
    /// The drafter.
    pub drafter: DrafterId,
    /// The ways of decoding, at least one. Costs are measured under the first.
    pub decodings: &'p [Decoding],
    /// The prompts, as token ids.
    pub prompts: &'p [Vec<u32>],
    /// The time after which no further pass begins, once the minimum number of passes is done.
    pub time_limit: Duration,
    /// The interface that shows progress to the user and reports interrupts.
    pub watch: &'p dyn Watch,
}

/// A function that returns the round lengths, in order, under a rule that is good at some costs.
pub type LengthsUnder<'f> = &'f dyn Fn(&Costs) -> Result<Vec<usize>>;

impl CostProbe<'_, '_> {
    /// Measures the costs in repeated passes, until they are precise or the time limit is reached. The first pass only gives rough costs, for `lengths_under`. Returns the costs
    /// under each way of decoding.
    ///
    /// # Errors
    /// If there are no prompts, a model fails, or the user presses Ctrl-C.
    pub fn measure(mut self, lengths_under: LengthsUnder<'_>) -> Result<Vec<MeasuredCosts>> {
        ensure!(!self.prompts.is_empty(), "there is no prompt to measure costs on");
        let most = self.decoders.limits.max_new_tokens;
        self.decoders.limits.max_new_tokens = most.min(NUM_TOKENS);
        let measured = self.passes(lengths_under);
        self.decoders.limits.max_new_tokens = most;
        measured
    }

    fn passes(&mut self, lengths_under: LengthsUnder<'_>) -> Result<Vec<MeasuredCosts>> {
        let progress = self.watch.bar("costs", "answers", 0);
        let all = self.prompts;
        let num_timings = NUM_TIMINGS + self.decodings.len() - 1;
        progress.set_total((all.len() * num_timings) as u64);
        // The first forwards of a process are slow, because they touch memory pages and select
        // kernels. Their costs suffice to estimate the lengths of rounds and the time of a pass.
        // One prompt is enough, unless its answer is too short.
        self.prompts = &all[..1];
        let mut first = self.pass(&mut MixedLengths::default(), &*progress)?;
        let mut num_answers = num_timings;
        let mut costs = MeasuredCosts::of(std::slice::from_ref(&first), self.drafter);
        if costs.is_err() {
            self.prompts = all;
            first = self.pass(&mut MixedLengths::default(), &*progress)?;
            num_answers += all.len() * num_timings;
            costs = MeasuredCosts::of(std::slice::from_ref(&first), self.drafter);
        }
        let of_prompt = first.duration.div_f64(self.prompts.len() as f64);
        let is_short = self.prompts.len() == all.len();
        let num_prompts =
            if is_short { all.len() } else { self.num_prompts_in_time(of_prompt, all) };
        self.prompts = &all[..num_prompts];
        let max_passes = max_passes(of_prompt.mul_f64(num_prompts as f64), self.time_limit);
        let mut lengths = MixedLengths::new(lengths_under(&costs?.costs)?, SignalNeeds::default());
        num_answers += num_prompts * (num_timings + MIXED_REPEATS) * max_passes;
        progress.set_total(num_answers as u64);
        let mut passes: Vec<Pass> = Vec::new();
        let begun = Instant::now();
        loop {
            passes.push(self.pass(&mut lengths, &*progress)?);
            let num_passes = passes.len();
            if num_passes < MIN_LONG_PASSES {
                continue;
            }
            let quiet = quiet(&mut passes);
            let measured = MeasuredCosts { num_passes, ..MeasuredCosts::of(quiet, self.drafter)? };
            progress.message(&format!("± {:.1} %", measured.uncertainty * 100.0));
            let each: Vec<MeasuredCosts> =
                (0..self.decodings.len()).map(|nth| measured.clone().under(quiet, nth)).collect();
            let is_long = num_passes >= MIN_PASSES || begun.elapsed() >= LONG_ENOUGH;
            if num_passes >= max_passes || is_long && measured.uncertainty <= CLOSE_ENOUGH {
                return Ok(each);
            }
        }
    }

    /// Returns the number of prompts, at least 1, with which the minimum number of passes takes at
    /// most a quarter of the time limit. `of_prompt` is the time of one prompt in a pass.
    fn num_prompts_in_time(&self, of_prompt: Duration, all: &[Vec<u32>]) -> usize {
        let passes = of_prompt.as_secs_f64() * MIN_LONG_PASSES as f64;
        let in_time = (self.time_limit.as_secs_f64() / 4.0 / passes) as usize;
        in_time.clamp(1, all.len())
    }

    /// Runs one pass over all prompts, lengths and signals, and over rounds with the lengths in
    /// `mixed`.
    fn pass(&mut self, mixed: &mut MixedLengths, progress: &dyn Bar) -> Result<Pass> {
        let begun = Instant::now();
        let none = SignalNeeds::default();
        let mut verify_seconds = vec![self.time(0, 0, none, progress)?.verify];
        let mut draft_seconds = Vec::new();
        let mut plain = RoundTimes::default();
        for length in LENGTHS {
            let timed = self.time(length, 0, none, progress)?;
            verify_seconds.push(timed.verify);
            draft_seconds.extend(timed.draft);
            if length == SIGNAL_LENGTH {
                plain = timed;
            }
        }
        let extra = |probe: &mut Self, needs| -> Result<f64> {
            let timed = probe.time(SIGNAL_LENGTH, 0, needs, progress)?;
            Ok(timed.more_than(&plain)[0])
        };
        let head_seconds = if self.decoders.has_head_for(self.drafter.into()) {
            extra(self, SignalNeeds { acceptance_prob: true, ..none })?
        } else {
            progress.advance(self.prompts.len() as f64);
            0.0
        };
        let confidence_seconds = extra(self, SignalNeeds { confidence: true, ..none })?;
        let entropy_seconds = extra(self, SignalNeeds { entropy: true, ..none })?;
        let others = (1..self.decodings.len()).map(|nth| {
            let timed = self.time(SIGNAL_LENGTH, nth, none, progress)?;
            Ok(timed.more_than(&plain))
        });
        let others = others.collect::<Result<Vec<[f64; 2]>>>()?;
        let mut mixed_rounds = Vec::new();
        let num_repeats = if mixed.is_empty() { 0 } else { MIXED_REPEATS };
        for number in (0..num_repeats).flat_map(|_| 0..self.prompts.len()) {
            mixed_rounds.extend(self.decode(number, 0, Some(mixed), progress)?.rounds);
        }
        Ok(Pass {
            duration: begun.elapsed(),
            draft_seconds: median_of(draft_seconds).unwrap_or(0.0),
            verify_seconds,
            head_seconds,
            confidence_seconds,
            entropy_seconds,
            others,
            mixed_rounds,
        })
    }

    /// Times full rounds of one length under the way of decoding with this index. Signals are
    /// computed and ignored. Length 0 times plain decoding.
    fn time(
        &mut self,
        length: usize,
        decoding: usize,
        needs: SignalNeeds,
        progress: &dyn Bar,
    ) -> Result<RoundTimes> {
        let (mut draft, mut verify) = (Vec::new(), Vec::new());
        for number in 0..self.prompts.len() {
            let mut rule = MixedLengths::new(vec![length], needs);
            let rule = (length > 0).then_some(&mut rule);
            let trace = self.decode(number, decoding, rule, progress)?;
            for round in trace.rounds.iter().filter(|round| round.num_drafted == length) {
                let num_forwards = round.num_draft_forwards();
                if num_forwards > 0 {
                    draft.push(round.draft_time.as_secs_f64() / num_forwards as f64);
                }
                verify.push(round.verify_time.as_secs_f64());
            }
        }
        Ok(RoundTimes { draft: median_of(draft), verify: median_of(verify) })
    }

    /// Decodes the prompt with this index, with rounds of the given lengths, or plainly if
    /// `lengths` is `None`.
    fn decode(
        &mut self,
        number: usize,
        decoding: usize,
        lengths: Option<&mut MixedLengths>,
        progress: &dyn Bar,
    ) -> Result<Trace> {
        self.watch.check_interrupted()?;
        let Self { decoders, drafter, prompts, .. } = self;
        let decoding = &self.decodings[decoding];
        let mut draws = SeededDraws::new(number as u64, &["costs"]);
        let (prompt, draws) = (&prompts[number], &mut draws);
        let name = lengths.as_ref().map_or(DrafterName::None, |_| (*drafter).into());
        let rule = lengths.map(|rule| rule as &mut dyn StopRule);
        let found = decoders.decode(name, rule, decoding, prompt, draws)?;
        progress.advance(1.0);
        Ok(found.trace)
    }
}

/// Returns the number of passes that fit into `limit` if each takes `of_one`, clamped to the
/// minimum and maximum numbers of passes.
fn max_passes(of_one: Duration, limit: Duration) -> usize {
    // If `of_one` is zero, the quotient is infinite and the cast saturates.
    let in_time = (limit.as_secs_f64() / of_one.as_secs_f64()) as usize;
    in_time.clamp(MIN_LONG_PASSES, MAX_PASSES)
}

/// Sorts the passes by duration and returns the faster half.
fn quiet(passes: &mut [Pass]) -> &[Pass] {
    passes.sort_by_key(|pass| pass.duration);
    &passes[..passes.len().div_ceil(2)]
}

impl MeasuredCosts {
    /// Wraps costs that the user gives, which have no uncertainty.
    pub fn given(costs: Costs) -> Self {
        Self { costs, uncertainty: 0.0, num_passes: 0 }
    }

    /// Creates the costs of target forwards from the times of each number of rows, in seconds.
    ///
    /// # Errors
    /// Without times.
    pub fn of_target(times: BTreeMap<usize, Vec<f64>>) -> Result<Self> {
        let num_passes = times.values().map(Vec::len).min().unwrap_or(0);
        let points: Vec<(usize, (f64, f64))> =
            times.into_iter().map(|(rows, all)| (rows, median_and_half_width(all))).collect();
        let rounds = points.iter().map(|(rows, (median, _))| (*rows, *median)).collect();
        let costs = Costs::of_target(rounds)?;
        let widths = points.iter().map(|(_, (median, half_width))| half_width / median);
        Ok(Self { costs, uncertainty: widths.fold(0.0, f64::max), num_passes })
    }

    /// Returns the costs, followed by some that are drawn within their uncertainty if they were
    /// measured.
    pub fn drawn(&self, seed: u64) -> Vec<Costs> {
        let mut draws = SeededDraws::new(seed, &["costs"]);
        let num_drawn = if self.num_passes == 0 { 0 } else { NUM_DRAWN };
        let drawn = (0..num_drawn).map(|_| self.draw(&mut draws));
        std::iter::once(self.costs.clone()).chain(drawn).collect()
    }

    /// Draws costs within their uncertainty. Draft forwards, verifications, their slope over rows,
    /// rounds of varying lengths and each signal err independently.
    fn draw(&self, draws: &mut SeededDraws) -> Costs {
        // The sum of three uniform numbers has a variance of a quarter.
        let mut factor = || {
            let normal = 2.0 * (draws.uniform() + draws.uniform() + draws.uniform() - 1.5);
            (normal * self.uncertainty.max(LEAST_UNCERTAINTY) / 1.96).exp()
        };
        let [draft, verify, slope, mixed_draft, mixed_verify] = std::array::from_fn(|_| factor());
        // The slope's factor applies in full at 8 rows, and not at one.
        let tilted = |by: f64| {
            move |rows: usize, seconds: f64| seconds * by * slope.powf((rows as f64).log2() / 3.0)
        };
        let costs = self.costs.clone();
        Costs {
            rounds: costs.rounds.map(|seconds| seconds * draft, tilted(verify)),
            mixed_rounds: costs.mixed_rounds.map(|it| it * mixed_draft, tilted(mixed_verify)),
            head_seconds: costs.head_seconds * factor(),
            confidence_seconds: costs.confidence_seconds * factor(),
            entropy_seconds: costs.entropy_seconds * factor(),
            ..costs
        }
    }

    /// Returns the costs under the way of decoding with this index.
    fn under(mut self, passes: &[Pass], nth: usize) -> Self {
        let more = |of: usize| {
            let all = passes.iter().filter_map(|pass| pass.others.get(nth.checked_sub(1)?));
            median_of(all.map(|more| more[of])).unwrap_or(0.0)
        };
        let [draft_seconds, row_seconds] = [more(0), more(1)];
        self.costs = self.costs.map(
            |draft| draft + draft_seconds,
            |num_rows, verify| verify + num_rows as f64 * row_seconds,
        );
        self
    }

    fn of(passes: &[Pass], drafter: DrafterId) -> Result<Self> {
        let column = |of: &dyn Fn(&Pass) -> f64| -> (f64, f64) {
            median_and_half_width(passes.iter().map(of).collect())
        };
        let draft = column(&|pass| pass.draft_seconds);
        // Only lengths that occurred in every pass are used.
        let verify: Vec<(usize, (f64, f64))> = (0..=LENGTHS.len())
            .filter(|index| passes.iter().all(|pass| pass.verify_seconds[*index].is_some()))
            .map(|index| {
                let rows = if index == 0 { 1 } else { LENGTHS[index - 1] + 1 };
                let of = move |pass: &Pass| pass.verify_seconds[index].unwrap_or_default();
                (rows, column(&of))
            })
            .collect();
        ensure!(
            verify.len() >= 3,
            "the prompts' answers are too short to measure costs on: \
             rounds of two lengths are needed"
        );
        let extra = |of: &dyn Fn(&Pass) -> f64| column(of).0.max(0.0);
        let points = verify.iter().map(|(rows, (median, _))| (*rows, *median)).collect();
        let rounds = RoundCosts::from_points([(drafter, draft.0)].into(), points)?;
        let mixed_rounds = passes.iter().flat_map(|pass| &pass.mixed_rounds);
        let costs = Costs {
            drafter,
            mixed_rounds: mixed_costs(mixed_rounds, &rounds, drafter)?,
            rounds,
            head_seconds: extra(&|pass| pass.head_seconds),
            confidence_seconds: extra(&|pass| pass.confidence_seconds),
            entropy_seconds: extra(&|pass| pass.entropy_seconds),
        };
        let all = verify.iter().map(|(_, known)| known).chain([&draft]);
        let uncertainty = all.map(|(median, half_width)| half_width / median).fold(0.0, f64::max);
        Ok(Self { costs, uncertainty, num_passes: passes.len() })
    }
}

/// Computes the median of values and half its 95 % interval.
///
/// # Panics
/// If there are no values.
fn median_and_half_width(values: Vec<f64>) -> (f64, f64) {
    const MEASURED: &str = "there is a pass to summarise";
    let count = values.len() as f64;
    let median = median_of(values.iter().copied()).expect(MEASURED);
    let distances = values.iter().map(|value| (value - median).abs());
    // The median distance times 1.4826 estimates the standard deviation, and is robust against a
    // few slow passes. The standard error of a median is 1.2533 times that of a mean.
    let deviation = 1.4826 * median_of(distances).expect(MEASURED);
    (median, 1.96 * 1.2533 * deviation / count.sqrt())
}

/// The measurements of one pass over all prompts, lengths and signals.
#[derive(Debug, Clone, Default)]
struct Pass {
    /// The duration of the pass, including prefills.
    duration: Duration,
    draft_seconds: f64,
    /// How many more seconds a draft forward and each verified row take under every way of decoding
    /// but the first.
    others: Vec<[f64; 2]>,
    /// The seconds of a target forward in plain decoding, then of the verification in rounds of
    /// each length; `None` if there was no such round.
    verify_seconds: Vec<Option<f64>>,
    head_seconds: f64,
    confidence_seconds: f64,
    entropy_seconds: f64,
    /// The timed rounds of varying lengths.
    mixed_rounds: Vec<Round>,
}

/// The median times in rounds of one length, in seconds; `None` without such rounds.
#[derive(Debug, Default)]
struct RoundTimes {
    /// The time of a draft forward.
    draft: Option<f64>,
    /// The time of a verification.
    verify: Option<f64>,
}

impl RoundTimes {
    /// Computes how many more seconds a draft forward and each verified row take than in `plain`.
    /// Both times are of rounds with [`SIGNAL_LENGTH`] candidates.
    fn more_than(&self, plain: &Self) -> [f64; 2] {
        let more = |own: Option<f64>, plain: Option<f64>| {
            own.zip(plain).map_or(0.0, |(own, plain)| own - plain)
        };
        let num_rows = (SIGNAL_LENGTH + 1) as f64;
        [more(self.draft, plain.draft), more(self.verify, plain.verify) / num_rows]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_that_take_long_are_fewer() {
        let most = |seconds: f64| max_passes(Duration::from_secs_f64(seconds), COSTS_TIME_LIMIT);
        assert_eq!([0.0, 0.4, 7.5, 10.0, 40.0, 60.0, 900.0].map(most), [12, 12, 12, 12, 7, 5, 3]);
        let one = Duration::from_secs(2);
        assert_eq!(
            [1, 20, 1000].map(|limit| max_passes(one, Duration::from_secs(limit))),
            [3, 10, 12]
        );
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
        let (even, slow) = (median_and_half_width(even), median_and_half_width(slow));
        assert_eq!(even.0, 1.01);
        assert_eq!(slow.0, even.0);
        assert!(slow.1 <= 1.5 * even.1);
    }
}
