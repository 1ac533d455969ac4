//! Measuring the costs: rounds of every length on real prompts, again and again until they are known well enough.

use anyhow::{Result, bail};
use draftsmith_theory::{
    Bounds, CostModel, Decoding, DraftSignals, SeededDraws, SignalNeeds, StopRule, Trace,
};

use super::Costs;
use crate::console::{Console, Interrupted};
use crate::decoders::Decoders;
use crate::results::DrafterName;

/// The round lengths that are timed; rounds of one length have the target read that many rows and one.
const LENGTHS: [usize; 6] = [1, 2, 3, 4, 6, 8];
/// The round length at which signals are timed.
const SIGNAL_LENGTH: usize = 4;
/// Passes over all prompts and lengths, at least.
const LEAST_PASSES: usize = 5;
/// Passes at most: a machine that is too noisy is not measured better by waiting.
const MOST_PASSES: usize = 40;
/// Half the 95 % interval of each cost, relative to it, at which measuring ends.
const CLOSE_ENOUGH: f64 = 0.02;
/// New tokens a prompt and pass.
const NUM_TOKENS: usize = 32;

/// Costs, and how well they are known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Measurement {
    pub(crate) costs: Costs,
    /// Half the 95 % interval of the worst known of t_draft, t_target and t_row, relative to it.
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
            let measurement = Measurement::of(&passes);
            if measurement.uncertainty <= CLOSE_ENOUGH || passes.len() >= MOST_PASSES {
                return Ok(measurement);
            }
        }
    }
}

impl Measurement {
    fn of(passes: &[Pass]) -> Self {
        let column = |of: fn(&Pass) -> f64| Summary::of(passes.iter().map(of).collect());
        let draft = column(|pass| pass.draft_seconds);
        let target = column(|pass| pass.target_seconds);
        let row = column(|pass| pass.row_seconds);
        let extra = |of: fn(&Pass) -> f64| column(of).median.max(0.0);
        let costs = Costs {
            model: CostModel {
                draft_seconds: draft.median,
                target_seconds: target.median,
                row_seconds: row.median,
            },
            head_seconds: extra(|pass| pass.head_seconds),
            confidence_seconds: extra(|pass| pass.confidence_seconds),
            entropy_seconds: extra(|pass| pass.entropy_seconds),
        };
        // The row's cost is small where forwards are dear: what counts is what it adds to a round.
        let round = target.median + row.median;
        let of_round = |summary: &Summary| summary.half_width / round;
        let uncertainty =
            (draft.half_width / draft.median).max(of_round(&target)).max(of_round(&row));
        Self { costs, uncertainty, num_passes: passes.len() }
    }
}

/// A median over passes and half its 95 % interval.
struct Summary {
    median: f64,
    half_width: f64,
}

impl Summary {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let median = median(&values);
        let mut distances: Vec<f64> = values.iter().map(|value| (value - median).abs()).collect();
        distances.sort_by(f64::total_cmp);
        // The standard deviation by the median distance, which a few slow passes do not move; a median's own standard
        // error is 1.2533 of a mean's.
        let deviation = 1.4826 * self::median(&distances);
        Self { median, half_width: 1.96 * 1.2533 * deviation / count.sqrt() }
    }
}

/// The median of sorted values.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// One pass over all prompts, lengths and signals.
#[derive(Debug, Clone, Copy, Default)]
struct Pass {
    draft_seconds: f64,
    target_seconds: f64,
    row_seconds: f64,
    head_seconds: f64,
    confidence_seconds: f64,
    entropy_seconds: f64,
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
                let mut rule = Probe { length, needs };
                let found = decoders.decode(drafter, &mut rule, decoding, prompt, &mut draws)?;
                timed.add(&found.trace, length);
            }
            Ok(timed.sorted())
        };
        let none = SignalNeeds::default();
        let mut points = Vec::with_capacity(LENGTHS.len());
        let mut draft_seconds = Vec::new();
        let mut plain_draft = 0.0;
        for length in LENGTHS {
            let timed = time(length, none)?;
            if let Some((draft, verify)) = timed.medians() {
                points.push(((length + 1) as f64, verify));
                draft_seconds.push(draft);
                if length == SIGNAL_LENGTH {
                    plain_draft = draft;
                }
            }
        }
        if points.len() < 2 {
            bail!(
                "the prompts' answers are too short to measure costs on: \
                 rounds of two lengths are needed"
            );
        }
        let mut extra = |needs| -> Result<f64> {
            let timed = time(SIGNAL_LENGTH, needs)?;
            Ok(timed.medians().map_or(0.0, |(draft, _)| draft - plain_draft))
        };
        let (target_seconds, row_seconds) = line(&points);
        draft_seconds.sort_by(f64::total_cmp);
        Ok(Self {
            draft_seconds: median(&draft_seconds),
            target_seconds,
            row_seconds,
            head_seconds: if has_head {
                extra(SignalNeeds { acceptance_prob: true, ..none })?
            } else {
                0.0
            },
            confidence_seconds: extra(SignalNeeds { confidence: true, ..none })?,
            entropy_seconds: extra(SignalNeeds { entropy: true, ..none })?,
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
            self.draft.push(round.draft_time.as_secs_f64() / round.num_draft_forwards as f64);
            self.verify.push(round.verify_time.as_secs_f64());
        }
    }

    fn sorted(mut self) -> Self {
        self.draft.sort_by(f64::total_cmp);
        self.verify.sort_by(f64::total_cmp);
        self
    }

    /// Of a draft forward and a verification; None without rounds.
    fn medians(&self) -> Option<(f64, f64)> {
        (!self.draft.is_empty()).then(|| (median(&self.draft), median(&self.verify)))
    }
}

/// Intercept and slope, neither negative, of the line through points with the least squared relative errors.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let weight = |y: f64| 1.0 / (y * y);
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        points.iter().map(|(x, y)| weight(*y) * of(*x, *y)).sum()
    };
    let (w, x, y) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|_, y| y));
    let (xx, xy) = (sum(&|x, _| x * x), sum(&|x, y| x * y));
    let slope = ((w * xy - x * y) / (w * xx - x * x)).max(0.0);
    let intercept = (y - slope * x) / w;
    if intercept >= 0.0 { (intercept, slope) } else { (0.0, xy / xx) }
}

/// Rounds of one length whose signals are asked for and not looked at.
#[derive(Debug, Clone, Copy)]
struct Probe {
    length: usize,
    needs: SignalNeeds,
}

impl StopRule for Probe {
    fn bounds(&self) -> Bounds {
        Bounds { min: self.length, max: self.length }
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.length
    }

    fn needs(&self) -> SignalNeeds {
        self.needs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again_and_never_costs_less_than_nothing() {
        let points = [2.0, 3.0, 5.0, 9.0].map(|x| (x, 0.2 + 0.05 * x));
        let (intercept, slope) = line(&points);
        // Four points of a line, in f64.
        assert!((intercept - 0.2).abs() < 1e-12 && (slope - 0.05).abs() < 1e-12);
        let (intercept, slope) = line(&[(2.0, 1.0), (4.0, 0.9)]);
        assert!(slope == 0.0 && intercept > 0.9);
        let (intercept, slope) = line(&[(2.0, 1.0), (4.0, 3.0)]);
        assert!(intercept == 0.0 && slope > 0.5);
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
