//! Decides by cross-validation over prompts whether a calibration helps.

use super::{Calibration, JudgedPrediction};
use crate::head_metrics::binary_cross_entropy;
use crate::{HeadMetrics, HeadScores};

/// The number of cross-validation folds; fewer with fewer prompts.
const MAX_FOLDS: usize = 10;

/// The scores of predictions without and with a calibration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CalibrationTrial {
    /// The scores of the uncalibrated predictions.
    pub before: HeadScores,
    /// The scores of predictions, each calibrated by a map that was fitted without its prompt.
    pub after: HeadScores,
    /// Whether calibrated predictions are significantly better: the difference of the cross-entropies
    /// exceeds its standard error over prompts (the paired one-standard-error rule).
    pub is_better: bool,
}

/// Tries a calibration. `prompts` holds the judged predictions of each prompt. None if fewer than two
/// prompts have predictions with weight, because cross-validation needs two.
pub fn try_calibration(prompts: &[Vec<JudgedPrediction>]) -> Option<CalibrationTrial> {
    let has_weight =
        |prompt: &&Vec<JudgedPrediction>| prompt.iter().any(|judged| judged.weight > 0.0);
    let prompts: Vec<&Vec<JudgedPrediction>> = prompts.iter().filter(has_weight).collect();
    if prompts.len() < 2 {
        return None;
    }
    let num_folds = prompts.len().min(MAX_FOLDS);
    // One map per fold, fitted to the other folds, which hold a prompt with weight.
    let maps: Vec<Option<Calibration>> = (0..num_folds)
        .map(|fold| {
            let others = prompts.iter().enumerate().filter(|(index, _)| index % num_folds != fold);
            let others = others.flat_map(|(_, prompt)| prompt.iter().copied());
            Calibration::fit(&others.collect::<Vec<_>>())
        })
        .collect();
    let (before, raw_losses) = scored(&prompts, &[None]);
    let (after, losses) = scored(&prompts, &maps);
    let gains: Vec<f64> = raw_losses.iter().zip(&losses).map(|(raw, loss)| raw - loss).collect();
    let (count, total) = (gains.len() as f64, gains.iter().sum::<f64>());
    let squares: f64 = gains.iter().map(|gain| (gain - total / count).powi(2)).sum();
    let is_better = total > (squares * count / (count - 1.0)).sqrt();
    Some(CalibrationTrial { before, after, is_better })
}

/// Scores predictions under the map of their prompt's fold. Also returns each prompt's weighted
/// cross-entropy, summed, in nats.
fn scored(
    prompts: &[&Vec<JudgedPrediction>],
    maps: &[Option<Calibration>],
) -> (HeadScores, Vec<f64>) {
    let mut metrics = HeadMetrics::default();
    let losses = prompts.iter().enumerate().map(|(index, prompt)| {
        let map = &maps[index % maps.len()];
        let judge = |judged: &JudgedPrediction| {
            let JudgedPrediction { predicted_prob, label, weight } = *judged;
            let prob = map.as_ref().map_or(predicted_prob, |map| map.apply(predicted_prob));
            metrics.update_weighted(prob, label, weight);
            weight * binary_cross_entropy(prob, label)
        };
        prompt.iter().map(judge).sum()
    });
    let losses = losses.collect();
    (metrics.finish(), losses)
}

#[cfg(test)]
mod tests {
    use super::super::test_predictions::{coins, true_of_weighted_six};
    use super::*;

    fn prompts(seed: u64, count: usize, truth: fn(f64) -> f64) -> Vec<Vec<JudgedPrediction>> {
        coins(seed, 50 * count, truth).chunks(50).map(<[_]>::to_vec).collect()
    }

    #[test]
    fn a_shift_is_better_calibrated_and_a_calibrated_head_is_not() {
        for seed in 0..3 {
            let trial = |truth| try_calibration(&prompts(seed, 60, truth)).expect("prompts");
            let (shifted, calibrated) = (trial(true_of_weighted_six), trial(|prob| prob));
            assert!(shifted.is_better, "{shifted:?}");
            assert!(!calibrated.is_better, "{calibrated:?}");
        }
    }

    #[test]
    fn scores_are_cross_validated() {
        // Every prompt has one outcome, and the two prompts differ: a map fitted to one misleads on
        // the other.
        let mut prompts = prompts(4, 2, |prob| prob);
        for (prompt, label) in prompts.iter_mut().zip([0.0, 1.0]) {
            prompt.iter_mut().for_each(|judged| judged.label = label);
        }
        let trial = try_calibration(&prompts).expect("prompts");
        assert!(trial.after.bce > trial.before.bce && !trial.is_better, "{trial:?}");
        let (scores, losses) = scored(&prompts.iter().collect::<Vec<_>>(), &[None]);
        assert_eq!(scores, trial.before);
        let total: f64 = losses.iter().sum();
        // A hundred terms summed in a different order.
        assert!((total / 100.0 - scores.bce).abs() < 1e-12 * total);
    }

    #[test]
    fn one_prompt_is_too_few_to_validate() {
        let mut prompts = prompts(5, 1, |prob| prob);
        assert_eq!(try_calibration(&prompts), None);
        prompts.push(Vec::new());
        assert_eq!(try_calibration(&prompts), None);
    }
}
