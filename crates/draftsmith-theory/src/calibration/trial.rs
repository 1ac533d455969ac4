//! Chooses a calibration, or none, by cross-validation over prompts.

use super::{Calibration, CalibrationKind, JudgedPrediction};
use crate::head_metrics::binary_cross_entropy;
use crate::{HeadMetrics, HeadScores, ReliabilityBin};

/// The number of cross-validation folds; fewer with fewer prompts.
const MAX_FOLDS: usize = 10;

/// The cross-validated scores of one form of calibration.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationTrial {
    /// The form; None for uncalibrated predictions.
    pub kind: Option<CalibrationKind>,
    /// The scores of predictions, each calibrated by a map that was fitted without its prompt.
    pub scores: HeadScores,
    /// Reliability bins of the same predictions.
    pub reliability: Vec<ReliabilityBin>,
    /// The weighted cross-entropy of each prompt, summed, in nats.
    losses: Vec<f64>,
}

impl CalibrationTrial {
    /// Whether this form is significantly better than a simpler one: the difference of their
    /// cross-entropies exceeds its standard error over prompts (the paired one-standard-error rule).
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

/// Scores no calibration and then each form, the simpler first. `prompts` holds the judged
/// predictions of each prompt. None if fewer than two prompts have predictions with weight, because
/// cross-validation needs two.
pub fn try_calibrations(prompts: &[Vec<JudgedPrediction>]) -> Option<Vec<CalibrationTrial>> {
    let has_weight =
        |prompt: &&Vec<JudgedPrediction>| prompt.iter().any(|judged| judged.weight > 0.0);
    let prompts: Vec<&Vec<JudgedPrediction>> = prompts.iter().filter(has_weight).collect();
    let kinds = [None, Some(CalibrationKind::Platt), Some(CalibrationKind::Isotonic)];
    (prompts.len() >= 2).then(|| kinds.into_iter().map(|kind| tried(&prompts, kind)).collect())
}

/// The trial to use: a form replaces a simpler one only if it is significantly better.
///
/// # Panics
/// If `trials` is empty.
pub fn preferred_calibration(trials: &[CalibrationTrial]) -> &CalibrationTrial {
    let (first, rest) = trials.split_first().expect("there is a trial");
    rest.iter().fold(first, |best, trial| if trial.beats(best) { trial } else { best })
}

fn tried(prompts: &[&Vec<JudgedPrediction>], kind: Option<CalibrationKind>) -> CalibrationTrial {
    let num_folds = prompts.len().min(MAX_FOLDS);
    // One map per fold, fitted to the other folds, which hold a prompt with weight.
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
    fn a_shift_prefers_platt_a_step_isotonic_and_calibrated_predictions_neither() {
        check(true_of_weighted_six, Some(CalibrationKind::Platt));
        check(|prob| if prob < 0.5 { 0.3 } else { 0.7 }, Some(CalibrationKind::Isotonic));
        check(|prob| prob, None);
    }

    #[test]
    fn scores_are_cross_validated() {
        // Every prompt has one outcome, and the two prompts differ: a map fitted to one misleads on
        // the other.
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
            // A hundred terms summed in a different order.
            assert!((total / 100.0 - trial.scores.bce).abs() < 1e-12 * total);
        }
    }

    #[test]
    fn one_prompt_is_too_few_to_validate() {
        let mut prompts = prompts(5, 1, |prob| prob);
        assert_eq!(try_calibrations(&prompts), None);
        prompts.push(Vec::new());
        assert_eq!(try_calibrations(&prompts), None);
    }
}
