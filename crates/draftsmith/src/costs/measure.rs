//! Measuring the costs: rounds of every length on real prompts, again and again until they are known well enough.

use anyhow::{Result, bail};
use draftsmith_theory::{
    Bounds, Decoding, DraftSignals, Draws, Round, RoundCosts, SeededDraws, SignalNeeds, StopRule,
    Trace,
};

use super::Costs;
use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::results::DrafterName;

/// The round lengths that are timed; rounds of one length have the target read that many rows and one.
const LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 13];
/// The round length at which signals are timed.
const SIGNAL_LENGTH: usize = 4;
/// How often prompts are decoded a pass with rounds of changing lengths.
const MIXED_REPEATS: usize = 2;
/// Passes over all prompts and lengths, at least.
const LEAST_PASSES: usize = 5;
/// Passes at most: a machine that is too noisy is not measured better by waiting.
const MOST_PASSES: usize = 25;
/// Half the 95 % interval of each cost, relative to it, at which measuring ends.
const CLOSE_ENOUGH: f64 = 0.02;
/// New tokens a prompt and pass.
const NUM_TOKENS: usize = 32;

/// Costs, and how well they are known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measurement {
    pub(crate) costs: Costs,
    /// Half the 95 % interval of the worst known of a draft forward's time and those of verifications, relative to it.
    pub(crate) uncertainty: f64,
    /// Passes taken.
    pub(crate) num_passes: usize,
}

/// Measures a drafter's costs over `prompts`, whose first pass is not counted.
///
/// # Errors
/// If there is no prompt, a model fails, or Ctrl-C is met.
pub(crate) fn measure(
    decoders: &mut Decoders<'_>,
    drafter: DrafterName,
    decoding: &Decoding,
    prompts: &[Vec<u32>],
    console: &Console,
) -> Result<Measurement> {
    if prompts.is_empty() {
        bail!("there is no prompt to measure costs on");
    }
    let all = decoders.limits.max_new_tokens;
    decoders.limits.max_new_tokens = all.min(NUM_TOKENS);
    let measured = passes(decoders, drafter, decoding, prompts, console);
    decoders.limits.max_new_tokens = all;
    measured
}

fn passes(
    decoders: &mut Decoders<'_>,
    drafter: DrafterName,
    decoding: &Decoding,
    prompts: &[Vec<u32>],
    console: &Console,
) -> Result<Measurement> {
    // The first forwards of a process touch pages and pick kernels.
    Pass::run(decoders, drafter, decoding, prompts)?;
    let mut passes: Vec<Pass> = Vec::new();
    loop {
        if console.is_interrupted() {
            return Err(Interrupted.into());
        }
        passes.push(Pass::run(decoders, drafter, decoding, prompts)?);
        if passes.len() >= LEAST_PASSES {
            let measurement = Measurement::of(&passes)?;
            if measurement.uncertainty <= CLOSE_ENOUGH || passes.len() >= MOST_PASSES {
                return Ok(measurement);
            }
        }
    }
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
        let plain_seconds = verify[0].1.median;
        let costs = Costs {
            rounds: RoundCosts::from_points(draft.median, points)?,
            mixed_rounds: mixed_costs(passes, plain_seconds)?,
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
        // The standard deviation by the median distance, which a few slow passes do not move; a median's own standard
        // error is 1.2533 of a mean's.
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
    ) -> Result<Self> {
        let has_head = decoders.has_head_for(drafter);
        let mut time = |length, needs| -> Result<Timed> {
            let mut timed = Timed::default();
            for (number, prompt) in prompts.iter().enumerate() {
                let mut draws = SeededDraws::new(number as u64, &["costs"]);
                let found = if length == 0 {
                    decoders.decode_plain(decoding, prompt, &mut draws)?
                } else {
                    let mut rule = Probe { lengths: Lengths::One(length), length, needs };
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
        for repeat in 0..MIXED_REPEATS {
            for (number, prompt) in prompts.iter().enumerate() {
                let mut draws = SeededDraws::new(number as u64, &["costs"]);
                let order = SeededDraws::new((repeat * prompts.len() + number) as u64, &["mixed"]);
                let mut rule =
                    Probe { lengths: Lengths::Mixed(Box::new(order)), length: 1, needs: none };
                let found = decoders.decode(drafter, &mut rule, decoding, prompt, &mut draws)?;
                mixed_rounds.extend(found.trace.rounds);
            }
        }
        Ok(Self {
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

/// Rounds whose signals are asked for and not looked at.
#[derive(Debug, Clone)]
struct Probe {
    lengths: Lengths,
    /// This round's.
    length: usize,
    needs: SignalNeeds,
}

/// How long rounds are.
#[derive(Debug, Clone)]
enum Lengths {
    /// All the same.
    One(usize),
    /// Each any of those that are measured.
    Mixed(Box<SeededDraws>),
}

impl StopRule for Probe {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: LENGTHS[LENGTHS.len() - 1] }
    }

    fn begin_round(&mut self) {
        self.length = match &mut self.lengths {
            Lengths::One(length) => *length,
            Lengths::Mixed(draws) => LENGTHS[draws.categorical(&[1.0; LENGTHS.len()])],
        };
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.length
    }

    fn needs(&self) -> SignalNeeds {
        self.needs
    }
}

/// The medians over rounds of changing lengths; of one row, `plain_seconds`.
fn mixed_costs(passes: &[Pass], plain_seconds: f64) -> Result<RoundCosts> {
    let rounds = || passes.iter().flat_map(|pass| &pass.mixed_rounds);
    let verify = |length: usize| {
        let alike = rounds().filter(|round| round.num_drafted == length);
        let seconds = median_of(alike.map(|round| round.verify_time.as_secs_f64()))?;
        Some((length + 1, seconds))
    };
    let mut points = vec![(1, plain_seconds)];
    points.extend(LENGTHS.into_iter().filter_map(verify));
    let draft_seconds = median_of(rounds().filter_map(forward_seconds)).unwrap_or(0.0);
    Ok(RoundCosts::from_points(draft_seconds, points)?)
}

#[cfg(test)]
mod tests {
    use super::*;

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
