//! Which calibration, if any: judged by cross-validation on prompts that a calibration was not
//! fitted to.

use super::{Calibration, CalibrationKind, JudgedPrediction};
use crate::head_metrics::binary_cross_entropy;
use crate::{HeadMetrics, HeadScores, ReliabilityBin};

/// The parts that prompts are dealt into, or as many as there are prompts.
const MOST_FOLDS: usize = 10;

/// How one form of calibration does on prompts that it was not fitted to.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationTrial {
    /// The form; None for predictions as the head says them.
    pub kind: Option<CalibrationKind>,
    /// The calibrated predictions' scores, each calibrated by a map that was fitted without its
    /// prompt.
    pub scores: HeadScores,
    /// The same predictions, bin by bin.
    pub reliability: Vec<ReliabilityBin>,
    /// Weighted cross-entropy of each prompt, summed, nats.
    losses: Vec<f64>,
}

impl CalibrationTrial {
    /// Whether this is better than a simpler one for more than the luck of the prompts: the
    /// difference of their cross-entropies exceeds its own standard error over prompts (the
    /// one-standard-error rule, paired).
    fn beats(&self, simpler: &Self) -> bool {
        let differences: Vec<f64> =
            simpler.losses.iter().zip(&self.losses).map(|(simple, own)| simple - own).collect();
        let count = differences.len() as f64;
        let total: f64 = differences.iter().sum();
        let squares: f64 =
            differences.iter().map(|difference| (difference - total / count).powi(2)).sum();
        total > (squares * count / (count - 1.0)).sqrt()
    }
}

/// Tries no calibration, then every form, the simpler first, by `prompts`: the judged predictions
/// of each. None of fewer than two prompts that have any, where there is nothing to validate with.
pub fn try_calibrations(prompts: &[Vec<JudgedPrediction>]) -> Option<Vec<CalibrationTrial>> {
    let has_weight =
        |prompt: &&Vec<JudgedPrediction>| prompt.iter().any(|judged| judged.weight > 0.0);
    let prompts: Vec<&Vec<JudgedPrediction>> = prompts.iter().filter(has_weight).collect();
    let kinds = [None, Some(CalibrationKind::Platt), Some(CalibrationKind::Isotonic)];
    (prompts.len() >= 2).then(|| kinds.into_iter().map(|kind| tried(&prompts, kind)).collect())
}

/// The trial that convinces: a form is preferred to a simpler one only where it is better for more
/// than the luck of the prompts.
///
/// # Panics
/// If there is no trial.
pub fn preferred_calibration(trials: &[CalibrationTrial]) -> &CalibrationTrial {
    let (first, rest) = trials.split_first().expect("there is a trial");
    rest.iter().fold(first, |best, trial| if trial.beats(best) { trial } else { best })
}

fn tried(prompts: &[&Vec<JudgedPrediction>], kind: Option<CalibrationKind>) -> CalibrationTrial {
    let num_folds = prompts.len().min(MOST_FOLDS);
    // One map a fold, fitted to all others; every fold leaves a prompt with weight.
    let maps: Vec<Option<Calibration>> = (0..num_folds)
        .map(|fold| {
            let others = prompts.iter().enumerate().filter(|(index, _)| index % num_folds != fold);
            let others: Vec<JudgedPrediction> =
                others.flat_map(|(_, prompt)| prompt.iter().copied()).collect();
            kind.and_then(|kind| Calibration::fit(kind, &others))
        })
        .collect();
    let mut metrics = HeadMetrics::default();
    let losses = prompts.iter().enumerate().map(|(index, prompt)| {
        let map = &maps[index % num_folds];
        let judge = |judged: &JudgedPrediction| {
            let JudgedPrediction { predicted_prob, label, weight } = *judged;
            let prob = map.as_ref().map_or(predicted_prob, |map| map.apply(predicted_prob));
            metrics.update_weighted(prob, label, weight);
            weight * binary_cross_entropy(prob, label)
        };
        prompt.iter().map(judge).sum()
    });
    let losses = losses.collect();
    CalibrationTrial { kind, reliability: metrics.reliability(), scores: metrics.finish(), losses }
}

#[cfg(test)]
mod tests {
    use super::super::test_predictions::{coins, true_of_weighted_six};
    use super::*;

    fn prompts(seed: u64, count: usize, truth: fn(f64) -> f64) -> Vec<Vec<JudgedPrediction>> {
        coins(seed, 50 * count, truth).chunks(50).map(<[_]>::to_vec).collect()
    }

    #[track_caller]
    fn check(truth: fn(f64) -> f64, expected: Option<CalibrationKind>) {
        for seed in 0..3 {
            let trials = try_calibrations(&prompts(seed, 60, truth)).expect("prompts");
            let preferred = preferred_calibration(&trials);
            assert_eq!(preferred.kind, expected, "{trials:#?}");
        }
    }

    #[test]
    fn an_offset_asks_for_platt_a_bend_for_isotonic_and_calibrated_predictions_for_neither() {
        check(true_of_weighted_six, Some(CalibrationKind::Platt));
        check(|prob| if prob < 0.5 { 0.3 } else { 0.7 }, Some(CalibrationKind::Isotonic));
        check(|prob| prob, None);
    }

    #[test]
    fn scores_are_of_predictions_that_were_not_fitted_to() {
        // What came of each prompt's predictions is all its own: a map learns one prompt from
        // others only to its harm.
        let mut prompts = prompts(4, 2, |prob| prob);
        for (prompt, label) in prompts.iter_mut().zip([0.0, 1.0]) {
            prompt.iter_mut().for_each(|judged| judged.label = label);
        }
        let trials = try_calibrations(&prompts).expect("prompts");
        let [raw, platt, isotonic] = &trials[..] else { panic!("three trials") };
        assert!(platt.scores.bce > raw.scores.bce && isotonic.scores.bce > raw.scores.bce);
        assert_eq!(preferred_calibration(&trials).kind, None);
        for trial in &trials {
            let total: f64 = trial.losses.iter().sum();
            // A hundred terms, summed in another order.
            assert!((total / 100.0 - trial.scores.bce).abs() < 1e-12 * total);
        }
    }

    #[test]
    fn one_prompt_validates_nothing() {
        let mut prompts = prompts(5, 1, |prob| prob);
        assert_eq!(try_calibrations(&prompts), None);
        prompts.push(Vec::new());
        assert_eq!(try_calibrations(&prompts), None);
    }
}
