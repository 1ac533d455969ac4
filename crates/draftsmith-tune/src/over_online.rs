//! Comparison of acceptance heads with vLLM's online estimator of acceptance probabilities, which
//! needs no training.

use std::collections::HashMap;

use anyhow::{Context, Result};
use draftsmith_data::{DataSet, ResponseRow};
use draftsmith_model::{AcceptanceHead, DrafterModel};
use draftsmith_report::{LogLosses, shown_interval};
use draftsmith_theory::{AcceptanceModel, DrafterId, Estimate, HeadTiming, Recordings};
use draftsmith_train::{HeadTraining, StatesSource, is_held_out, predictions_along};

use crate::rollouts::TrainingRollouts;

/// The lower bound on probabilities in a log-loss.
const LEAST_PROB: f64 = 1e-6;
/// The number of candidates in a round.
const ROUND_LENGTH: usize = 4;
/// The maximum number of held-out responses for the comparison of a trained head.
const MOST_RESPONSES: usize = 256;

/// Computes the log-losses of the head and of the online estimator, in nats per candidate. They are
/// averaged over the judged candidates of rounds of the recorded length. The estimator begins each
/// response with the coefficients in `start`.
pub(crate) fn log_losses(recordings: &Recordings, start: &AcceptanceModel, seed: u64) -> LogLosses {
    let sums = recordings.round_predictions(start).into_iter().map(|predictions| {
        let (mut sums, mut num) = ([0.0; 2], 0.0);
        for it in predictions {
            let Some(head) = it.head_prob else { continue };
            for (sum, prob) in sums.iter_mut().zip([head, it.online_prob]) {
                let prob = if it.is_accepted { prob } else { 1.0 - prob };
                *sum -= prob.max(LEAST_PROB).ln();
            }
            num += 1.0;
        }
        (sums, num)
    });
    let ([head, online], gain) = mean_losses(&sums.collect::<Vec<_>>(), seed);
    LogLosses { head, online, gain }
}

/// Computes mean losses from each response's sums of losses and of weights, and by how much the first
/// mean is smaller than the second, with an interval over responses.
pub(crate) fn mean_losses<const N: usize>(
    sums: &[([f64; N], f64)],
    seed: u64,
) -> ([f64; N], Estimate) {
    let mean = |which: usize, some: &[usize]| {
        let loss: f64 = some.iter().map(|at| sums[*at].0[which]).sum();
        loss / some.iter().map(|at| sums[*at].1).sum::<f64>()
    };
    let all: Vec<usize> = (0..sums.len()).collect();
    let gain = shown_interval(all.len(), seed, |some| mean(1, some) - mean(0, some));
    (std::array::from_fn(|which| mean(which, &all)), gain)
}

/// Computes the log-losses of a trained head and of the online estimator along the responses that
/// the head's training held out. The estimator's initial coefficients are learned from the other
/// responses. `source` is as in [`predictions_along`]. Returns `None` without held-out responses.
///
/// # Errors
/// If the rollouts do not belong to the data, or the source fails.
pub fn trained_log_losses(
    (id, drafter): (DrafterId, &DrafterModel),
    (head, training): (&AcceptanceHead, &HeadTraining),
    (data, rollouts): (&DataSet, &TrainingRollouts),
    source: Option<&dyn StatesSource>,
    seed: u64,
) -> Result<Option<LogLosses>> {
    let set = rollouts.recordings(data, id, ROUND_LENGTH);
    let mut held_out = Recordings { responses: Vec::new(), ..set.recordings.clone() };
    let mut learned_from = held_out.clone();
    let rows: HashMap<&str, &ResponseRow> =
        data.rows.iter().map(|row| (row.id.as_str(), row)).collect();
    let share = training.optimizer.validation_fraction;
    for (id, response) in set.ids.iter().zip(set.recordings.responses) {
        let row = rows.get(id.as_str()).context("rollouts are of the data")?;
        match is_held_out(row, share) {
            true if held_out.responses.len() < MOST_RESPONSES => held_out.responses.push(response),
            true => {}
            false => learned_from.responses.push(response),
        }
    }
    if held_out.responses.is_empty() {
        return Ok(None);
    }
    let predicted = predictions_along(drafter, &[head], &held_out, source)?.remove(0);
    // `AtDraw` gives every candidate a prediction, including the last recorded one, which
    // `AfterRead` would leave out.
    let held_out = held_out.with_head(HeadTiming::AtDraw, &predicted);
    Ok(Some(log_losses(&held_out, &learned_from.learned_acceptance(), seed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judging::tests::recordings;

    /// Compares a head with the estimator on recordings whose confidence says nothing. The head gives accepted
    /// candidates `accepted` and others the rest.
    fn losses(accepted: f32) -> LogLosses {
        let set = recordings([40, 30], 0.7, ["over online", "set"]);
        let mut predicted = Vec::new();
        for response in &set.responses {
            predicted.extend(response.places.iter().map(|_| accepted));
            let rejected = response.places.iter().flat_map(|place| place.rollout.iter().flatten());
            predicted.extend(rejected.map(|_| 1.0 - accepted));
        }
        let set = set.with_head(HeadTiming::AtDraw, &predicted);
        log_losses(&set, &set.learned_acceptance(), 1)
    }

    #[test]
    fn only_a_head_that_knows_more_than_the_estimator_pays() {
        let (knowing, guessing) = (losses(0.9), losses(0.5));
        assert!((knowing.head + 0.9_f64.ln()).abs() < 1e-6, "{knowing:?}");
        assert!((guessing.head - 2.0_f64.ln()).abs() < 1e-12, "{guessing:?}");
        // The best that anything can say without reading a candidate is the entropy of 0.7.
        let entropy = -(0.7 * 0.7_f64.ln() + 0.3 * 0.3_f64.ln());
        assert!((knowing.online - entropy).abs() < 0.05, "{knowing:?} beside {entropy}");
        assert_eq!(knowing.online, guessing.online);
        assert!(knowing.pays() && !guessing.pays(), "{knowing:?} {guessing:?}");
        assert!((knowing.gain.value - (knowing.online - knowing.head)).abs() < 1e-12);
    }
}
