//! Fits [`CostOptimalConfig`] to recordings: the acceptance estimates, and λ by fixed-point
//! iteration.

use std::ops::Range;

use super::{RecordedCandidate, RecordedPlace, Recordings, seconds_per_token};
use crate::{
    AcceptanceSignal, Bounds, CostOptimalConfig, Result, RoundCosts, StepFunction, StopRuleConfig,
    TheoryError,
};

/// The maximum number of fixed-point iterations. A few suffice.
const MAX_ITERATIONS: usize = 30;
/// The costs of a verified row that are tried, as fractions of the mean cost of a row.
const ROW_SHARES: [f64; 4] = [1.0, 0.75, 0.5, 0.25];
/// The relative change of λ that counts as converged.
const TOLERANCE: f64 = 1e-9;
/// The maximum number of steps of a fitted function.
const MAX_STEPS: usize = 16;
/// The minimum number of observations in a step.
const MIN_OBSERVATIONS: usize = 25;

/// A fitted rule and the seconds per token that it achieves.
#[derive(Debug, Clone, PartialEq)]
pub struct CostOptimum {
    /// The settings of the rule.
    pub config: CostOptimalConfig,
    /// λ: the modelled seconds per token on the recordings of the fit.
    pub seconds_per_token: f64,
}

/// Fits a [`CostOptimalConfig`] that reads `signal`. It estimates the acceptance probabilities
/// given the signal, and iterates to the seconds per token λ at which the rule for λ achieves λ.
/// Returns the best rule of the iteration. None if too few candidates are accepted to estimate the
/// acceptance of the candidates after them.
///
/// # Errors
/// If the recordings are empty, lack a head that `signal` needs, or are shorter than `bounds`, or
/// if `costs` lacks their drafter.
pub fn cost_optimal(
    recordings: &Recordings,
    signal: AcceptanceSignal,
    costs: &RoundCosts,
    bounds: Bounds,
) -> Result<Option<CostOptimum>> {
    recordings.check_head(signal.needs())?;
    let fit = |signal_of: &dyn Fn(&RecordedPlace) -> Option<f64>, outcome| {
        fit_steps(outcomes(recordings, signal_of, outcome))
    };
    let own = |place: &RecordedPlace| signal.of(place.drafted());
    let estimate = fit(&own, 0..1).ok_or_else(|| {
        TheoryError::invalid(
            "no candidate was recorded, so no rule can be fitted; hint: allow more new tokens: the last token of a \
             response is the target's and has no candidate",
        )
    })?;
    // A head that predicts after the draft model has read the candidate lags by one candidate. The
    // next candidate can be drawn at once, and another forward gives the second next. Other signals
    // belong to the candidate being drawn, and another forward gives the next.
    let outlooks = match (signal, recordings.head) {
        (AcceptanceSignal::AcceptanceProb, Some(head)) if head.looks_ahead() => {
            fit(&own, 1..2).map(|next| (next.clone(), next, 1.0))
        }
        (AcceptanceSignal::AcceptanceProb, _) => fit(&own, 1..2)
            .zip(fit(&own, 1..3))
            .zip(mean(&outcomes(recordings, &|_| Some(0.0), 0..2)))
            .map(|((next, both), initial)| (next, both, initial)),
        (AcceptanceSignal::Confidence | AcceptanceSignal::Entropy, _) => {
            fit(&own, 1..2).map(|next| (estimate.clone(), next, 1.0))
        }
    };
    let Some((draw_outlook, outlook, initial_outlook)) = outlooks else { return Ok(None) };

    let draft_seconds = costs.draft_seconds(recordings.drafter)?;
    let plain = seconds_per_token(&recordings.plain(costs));
    let mut best: Option<CostOptimum> = None;
    // A row has no single cost if costs rise in steps with the number of rows, so several are
    // tried.
    for row_share in ROW_SHARES {
        let row_seconds = row_share * costs.row_seconds();
        let mut lambda = plain;
        for _ in 0..MAX_ITERATIONS {
            let config = CostOptimalConfig {
                signal,
                least_worth: (draft_seconds + row_seconds) / lambda,
                least_draw_worth: row_seconds / lambda,
                estimate: estimate.clone(),
                draw_outlook: draw_outlook.clone(),
                outlook: outlook.clone(),
                initial_outlook,
                bounds,
            };
            let rule = StopRuleConfig::CostOptimal(config.clone());
            let found = seconds_per_token(&recordings.replay(&rule, costs)?);
            let change = (found / lambda - 1.0).abs();
            lambda = found;
            if best.as_ref().is_none_or(|best| found < best.seconds_per_token) {
                best = Some(CostOptimum { config, seconds_per_token: found });
            }
            if change < TOLERANCE {
                break;
            }
        }
        if row_seconds == 0.0 {
            break;
        }
    }
    Ok(best)
}

/// Fits a monotone step function to pairs of a signal and an outcome, by isotonic regression over
/// blocks of about equally many pairs. The function rises if the covariance of the pairs is at
/// least 0 and falls otherwise. None without pairs.
fn fit_steps(mut pairs: Vec<(f64, f64)>) -> Option<StepFunction> {
    pairs.retain(|(signal, _)| signal.is_finite());
    let rises = covariance(&pairs) >= 0.0;
    let steps = pooled(blocks(pairs), rises);
    let edges = steps.iter().skip(1).map(|block| block.from).collect();
    StepFunction::new(edges, steps.iter().map(PooledPairs::mean).collect()).ok()
}

/// A block of adjacent pairs that share one step of the function.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PooledPairs {
    /// The smallest signal in the block.
    from: f64,
    count: usize,
    sum: f64,
}

impl PooledPairs {
    /// Computes the mean outcome.
    fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// Merges the next block into this one.
    fn merge(&mut self, next: &Self) {
        self.count += next.count;
        self.sum += next.sum;
    }
}

/// Sorts pairs by signal and divides them into at most [`MAX_STEPS`] blocks of about equal size,
/// each of at least [`MIN_OBSERVATIONS`] pairs unless there are fewer in total. Equal signals share
/// a block.
fn blocks(mut pairs: Vec<(f64, f64)>) -> Vec<PooledPairs> {
    pairs.sort_by(|one, other| one.0.total_cmp(&other.0));
    let num_blocks = (pairs.len() / MIN_OBSERVATIONS).clamp(1, MAX_STEPS);
    let mut blocks: Vec<PooledPairs> = Vec::with_capacity(num_blocks);
    for equals in pairs.chunk_by(|one, other| one.0 == other.0) {
        let sum = equals.iter().map(|(_, outcome)| outcome).sum();
        let tied = PooledPairs { from: equals[0].0, count: equals.len(), sum };
        match blocks.last_mut() {
            Some(last) if last.count * num_blocks < pairs.len() => last.merge(&tied),
            _ => blocks.push(tied),
        }
    }
    if let [.., before, last] = &mut blocks[..]
        && last.count < MIN_OBSERVATIONS
    {
        before.merge(last);
        blocks.pop();
    }
    blocks
}

/// Merges adjacent blocks until the block means rise (or fall, if `rises` is false) strictly, with
/// the pool-adjacent-violators algorithm. Among monotone functions, the result has the least
/// squared error.
fn pooled(blocks: Vec<PooledPairs>, rises: bool) -> Vec<PooledPairs> {
    let mut pooled: Vec<PooledPairs> = Vec::with_capacity(blocks.len());
    for mut block in blocks {
        while let Some(last) = pooled.last_mut()
            && (if rises { last.mean() >= block.mean() } else { last.mean() <= block.mean() })
        {
            last.merge(&block);
            block = *last;
            pooled.pop();
        }
        pooled.push(block);
    }
    pooled
}

fn covariance(pairs: &[(f64, f64)]) -> f64 {
    let count = pairs.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / count;
    let (signal, outcome) = (mean(|pair| pair.0), mean(|pair| pair.1));
    pairs.iter().map(|pair| (pair.0 - signal) * (pair.1 - outcome)).sum()
}

/// Pairs each position's signal with 1 if the candidates at the offsets `ahead` of a round that
/// begins there are all accepted, else with 0. Positions without a signal are skipped. So are
/// positions where a candidate before `ahead` is rejected.
fn outcomes(
    recordings: &Recordings,
    signal_of: &dyn Fn(&RecordedPlace) -> Option<f64>,
    ahead: Range<usize>,
) -> Vec<(f64, f64)> {
    let mut pairs = Vec::new();
    for response in &recordings.responses {
        // Nothing is drafted for the last position within the limit.
        let num_drafted = response.places.len().min(response.limit - 1);
        for at in 0..num_drafted.saturating_sub(ahead.end - 1) {
            let num_accepted = response.num_accepted(at);
            if num_accepted < ahead.start {
                continue;
            }
            if let Some(signal) = signal_of(&response.places[at]) {
                pairs.push((signal, f64::from(u8::from(num_accepted >= ahead.end))));
            }
        }
    }
    pairs
}

fn mean(pairs: &[(f64, f64)]) -> Option<f64> {
    let total: f64 = pairs.iter().map(|(_, outcome)| outcome).sum();
    (!pairs.is_empty()).then(|| total / pairs.len() as f64)
}

impl AcceptanceSignal {
    fn of(self, candidate: &RecordedCandidate) -> Option<f64> {
        match self {
            Self::AcceptanceProb => candidate.predicted_acceptance_prob,
            Self::Confidence => Some(candidate.confidence),
            Self::Entropy => Some(candidate.entropy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_recordings::random;
    use super::*;
    use crate::HeadTiming;
    use crate::replay::Recording;
    use crate::{CostModel, Counts, DrafterId, Draws, FixedLengthConfig, SeededDraws};

    fn rounds(line: CostModel) -> RoundCosts {
        RoundCosts::from_line(DrafterId::DRAFT, line).expect("times")
    }

    const COSTS: CostModel = CostModel::PAPER;

    fn cost(recordings: &Recordings, rule: &StopRuleConfig, costs: CostModel) -> f64 {
        seconds_per_token(&recordings.replay(rule, &rounds(costs)).expect("replays"))
    }

    fn bounds() -> Bounds {
        Bounds { min: 1, max: 8 }
    }

    fn fitted(recordings: &Recordings, signal: AcceptanceSignal, costs: CostModel) -> CostOptimum {
        let found = cost_optimal(recordings, signal, &rounds(costs), bounds());
        found.expect("recorded").expect("accepted")
    }

    #[test]
    fn it_beats_every_fixed_length_if_signals_are_informative() {
        let recordings = random(1, 400, 0.75);
        let fixed = (1..=8)
            .map(|candidate_length| {
                let rule = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
                cost(&recordings, &rule, COSTS)
            })
            .fold(f64::INFINITY, f64::min);
        use AcceptanceSignal::{AcceptanceProb, Confidence, Entropy};
        for signal in [AcceptanceProb, Confidence, Entropy] {
            let found = fitted(&recordings, signal, COSTS);
            assert!(found.seconds_per_token < fixed, "{signal:?}: {found:?} against {fixed}");
            let again = cost(&recordings, &StopRuleConfig::CostOptimal(found.config), COSTS);
            assert_eq!(again, found.seconds_per_token);
        }
    }

    #[test]
    fn a_look_ahead_head_gains_more_than_the_same_predictions_later() {
        let late = random(1, 400, 0.75);
        let ahead = Recordings { head: Some(HeadTiming::AtDraw), ..late.clone() };
        let [late, ahead] = [late, ahead].map(|recordings| {
            let signal = AcceptanceSignal::AcceptanceProb;
            fitted(&recordings, signal, COSTS)
        });
        assert!(ahead.seconds_per_token < late.seconds_per_token, "{ahead:?} for {late:?}");
    }

    #[test]
    fn costlier_drafting_drafts_less() {
        let recordings = random(2, 100, 0.75);
        let num_drafted = |draft_seconds| {
            let costs = CostModel { draft_seconds, ..COSTS };
            let found = fitted(&recordings, AcceptanceSignal::Confidence, costs);
            let rule = StopRuleConfig::CostOptimal(found.config);
            let counts: Counts =
                recordings.replay_counts(&rule).expect("replays").into_iter().sum();
            counts.num_drafted
        };
        let counts = [0.0, 0.005, 0.02, 0.05, 0.1].map(num_drafted);
        assert!(counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
        assert!(counts[0] > counts[4]);
    }

    #[test]
    fn costly_rows_leave_free_candidates_undrawn() {
        let recordings = random(3, 200, 0.7);
        let costs = CostModel { row_seconds: 0.03, draft_seconds: 0.005, ..COSTS };
        for signal in [AcceptanceSignal::AcceptanceProb, AcceptanceSignal::Confidence] {
            let found = fitted(&recordings, signal, costs);
            let seconds = |config: CostOptimalConfig| {
                let rule = StopRuleConfig::CostOptimal(config);
                cost(&recordings, &rule, costs)
            };
            let drawn = CostOptimalConfig { least_draw_worth: 0.0, ..found.config.clone() };
            assert!(seconds(found.config) < seconds(drawn), "{signal:?}");
        }
    }

    #[test]
    fn nothing_recorded_fits_nothing() {
        let recordings = Recordings { responses: Vec::new(), ..random(4, 1, 0.5) };
        let refused =
            cost_optimal(&recordings, AcceptanceSignal::Entropy, &rounds(COSTS), bounds());
        assert!(refused.unwrap_err().to_string().starts_with("no candidate was recorded"));
    }

    #[test]
    fn a_drafter_that_is_never_accepted_has_no_such_rule() {
        let recordings = random(4, 20, 0.0);
        let rejected = |place: &RecordedPlace| {
            let other = RecordedCandidate { token_id: 8, ..place.candidate.clone() };
            let rollout = Some(vec![other; recordings.max_length]);
            RecordedPlace { rollout, ..place.clone() }
        };
        let responses = recordings.responses.iter().map(|response| {
            let places = response.places.iter().map(rejected).collect();
            Recording::new(response.prompt.clone(), places, response.limit)
        });
        let never = Recordings { responses: responses.collect(), ..recordings.clone() };
        for signal in [AcceptanceSignal::AcceptanceProb, AcceptanceSignal::Entropy] {
            let found = cost_optimal(&never, signal, &rounds(COSTS), bounds());
            assert_eq!(found, Ok(None), "{signal:?}");
        }
    }

    #[test]
    fn a_chance_that_rises_with_the_signal_is_found_again() {
        let mut draws = SeededDraws::new(1, &["steps"]);
        for falls in [false, true] {
            let pairs: Vec<(f64, f64)> = (0..40_000)
                .map(|_| {
                    let chance = draws.uniform();
                    let outcome = f64::from(u8::from(draws.bernoulli(chance)));
                    (if falls { -chance } else { chance }, outcome)
                })
                .collect();
            let steps = fit_steps(pairs).expect("pairs");
            for chance in [0.05, 0.3, 0.5, 0.7, 0.95] {
                let found = steps.at(if falls { -chance } else { chance });
                // Half a step of a sixteenth, and four standard deviations of a mean over 2,500
                // coins.
                assert!((found - chance).abs() < 0.032 + 0.04, "{found} for {chance}");
            }
        }
    }

    /// Draws blocks with means on a grid, so that some are equal, and unequal counts.
    fn random_blocks(seed: u64) -> Vec<PooledPairs> {
        let mut draws = SeededDraws::new(seed, &["isotonic"]);
        let mut block = |at: usize| {
            let count = 1 + (draws.uniform() * 4.0) as usize;
            PooledPairs {
                from: at as f64,
                count,
                sum: count as f64 * (draws.uniform() * 5.0).floor(),
            }
        };
        (0..8).map(&mut block).collect()
    }

    /// Returns the value at every block of the least-squares fit among all partitions whose means
    /// rise.
    fn by_brute_force(blocks: &[PooledPairs]) -> Vec<f64> {
        let mut best: Option<(f64, Vec<f64>)> = None;
        for cuts in 0..1u32 << (blocks.len() - 1) {
            let mut values: Vec<f64> = Vec::new();
            let mut start = 0;
            for end in 1..=blocks.len() {
                if end < blocks.len() && cuts >> (end - 1) & 1 == 0 {
                    continue;
                }
                let count: usize = blocks[start..end].iter().map(|block| block.count).sum();
                let sum: f64 = blocks[start..end].iter().map(|block| block.sum).sum();
                values.extend(vec![sum / count as f64; end - start]);
                start = end;
            }
            let squares = blocks
                .iter()
                .zip(&values)
                .map(|(block, value)| block.count as f64 * (block.mean() - value).powi(2))
                .sum();
            if values.is_sorted() && best.as_ref().is_none_or(|(least, _)| squares < *least) {
                best = Some((squares, values));
            }
        }
        best.expect("one block is always in order").1
    }

    #[test]
    fn pooling_gives_the_least_squares_of_all_monotone_fits() {
        let fitted = |blocks: &[PooledPairs], rises| -> Vec<f64> {
            let pooled = pooled(blocks.to_vec(), rises);
            let at = |from| pooled[pooled.partition_point(|block| block.from <= from) - 1].mean();
            blocks.iter().map(|block| at(block.from)).collect()
        };
        for seed in 0..40 {
            let blocks = random_blocks(seed);
            let rising = fitted(&blocks, true);
            for (found, expected) in rising.iter().zip(by_brute_force(&blocks)) {
                // A mean of numbers below 5, summed in a different order.
                assert!((found - expected).abs() < 1e-12, "{found} for {expected}, seed {seed}");
            }
            let mirrored: Vec<PooledPairs> =
                blocks.iter().map(|block| PooledPairs { sum: -block.sum, ..*block }).collect();
            let falling = fitted(&mirrored, false);
            assert!(falling.iter().zip(&rising).all(|(one, other)| *one == -other));
        }
    }

    #[test]
    fn equal_signals_share_a_block_and_blocks_have_the_minimum_count() {
        let found = blocks((0..300).map(|at| (f64::from(at / 7), f64::from(at))).collect());
        assert!(found.len() > 5);
        assert!(found.windows(2).all(|two| two[0].from < two[1].from));
        assert!(found.iter().all(|block| block.count >= MIN_OBSERVATIONS));
        assert_eq!(blocks((0..5).map(|at| (f64::from(at), 1.0)).collect()).len(), 1);
    }

    #[test]
    fn few_pairs_give_one_step_and_none_gives_none() {
        let steps = fit_steps(vec![(0.1, 1.0), (0.9, 0.0), (0.5, 0.5)]).expect("pairs");
        assert_eq!(steps, StepFunction::constant(0.5).expect("finite"));
        assert_eq!(fit_steps(Vec::new()), None);
    }

    #[test]
    fn the_function_is_monotone_whatever_the_noise() {
        let mut draws = SeededDraws::new(2, &["steps"]);
        let pairs: Vec<(f64, f64)> =
            (0..2000).map(|_| (draws.uniform(), draws.uniform())).collect();
        let steps = fit_steps(pairs.clone()).expect("pairs");
        let values: Vec<f64> = (0..100).map(|x| steps.at(f64::from(x) / 100.0)).collect();
        assert!(values.is_sorted() || values.is_sorted_by(|a, b| a >= b));
        let mean = pairs.iter().map(|pair| pair.1).sum::<f64>() / 2000.0;
        assert!(values.iter().all(|value| (value - mean).abs() < 0.2));
    }
}
