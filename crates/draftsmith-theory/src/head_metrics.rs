//! Metrics that score an acceptance head's predictions against soft labels.
//!
//! A label y is the acceptance probability min(1, p/q). Every score counts a row as positive with
//! weight y and negative with weight 1 − y, without the training loss's rejection weight. A head
//! trained with a rejection weight above 1 predicts less than the label: its logit is shifted by a
//! known amount. To compare heads with different rejection weights, use AUROC and
//! [`HeadScores::unshifted_kl`].

use serde::{Deserialize, Serialize};

use crate::replay::JudgedPrediction;

/// The number of equal-width bins of [`HeadScores::ece`].
const NUM_BINS: usize = 15;

/// The minimum of a logarithm, as in PyTorch's binary cross-entropy: a wrong prediction of exactly
/// 0 or 1 costs 100 nats, not infinity.
const MIN_LOG: f64 = -100.0;

/// An accumulator of predictions and labels. The AUROC needs every row, 24 bytes per label.
#[derive(Debug, Clone, Default)]
pub struct HeadMetrics {
    rejection_weight: Option<f64>,
    rows: Vec<ScoredRow>,
    weight: f64,
    sum_kl: f64,
    sum_unshifted_kl: f64,
    sum_bce: f64,
    sum_squares: f64,
    bins: [Bin; NUM_BINS],
}

#[derive(Debug, Clone, Copy)]
struct ScoredRow {
    predicted_prob: f64,
    label: f64,
    weight: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    num_labels: usize,
    weight: f64,
    sum_predicted: f64,
    sum_label: f64,
}

/// A bin of predictions and labels, which is one point of a reliability diagram. The points of a
/// calibrated head lie on the diagonal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReliabilityBin {
    /// The mean prediction.
    pub mean_predicted: f64,
    /// The mean label.
    pub mean_label: f64,
    /// The bin's share of the total weight.
    pub share: f64,
    /// The number of labels.
    pub num_labels: usize,
}

/// The scores of one head on one set of labels. Means are weighted; without labels they are NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadScores {
    /// The number of labels.
    pub num_labels: usize,
    /// The mean binary KL(label ‖ prediction) in nats, which is 0 for a perfect head. SpecDec++'s
    /// code calls it `KL`.
    pub kl: f64,
    /// The value of `kl` after ln w is added to each logit, with w the loss's rejection weight. The
    /// weighted loss has its minimum at odds of y / (w (1 − y)) instead of y / (1 − y). Adding ln w
    /// undoes this shift, so that heads trained with different weights are comparable. Equals `kl`
    /// at w = 1; None if w is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unshifted_kl: Option<f64>,
    /// The mean binary cross-entropy in nats, which is `kl` plus the mean entropy of the labels.
    pub bce: f64,
    /// The probability that an accepted token has a higher prediction than a rejected one, with
    /// ties counting half; 0.5 for a head without information. None if all labels are equal to 0,
    /// or all to 1.
    pub auroc: Option<f64>,
    /// The mean squared difference between prediction and label.
    pub brier: f64,
    /// The expected calibration error: |mean label − mean prediction| of each bin, averaged over 15
    /// equal-width bins of the prediction by their share of the weight.
    pub ece: f64,
    /// The mean label, which is the acceptance rate.
    pub mean_label: f64,
    /// The mean prediction.
    pub mean_predicted: f64,
}

impl HeadScores {
    /// Returns the score by which heads and epochs are compared, where lower is better. It is
    /// `unshifted_kl`, or `kl` if the rejection weight is unknown.
    pub fn comparable_kl(&self) -> f64 {
        self.unshifted_kl.unwrap_or(self.kl)
    }
}

impl HeadMetrics {
    /// Creates an accumulator for a head that was trained with this rejection weight. Its scores
    /// include [`HeadScores::unshifted_kl`].
    ///
    /// # Panics
    /// If the weight is not above 0.
    pub fn unshifting(rejection_weight: f64) -> Self {
        assert!(rejection_weight > 0.0, "a weight is above 0, not {rejection_weight}");
        Self { rejection_weight: Some(rejection_weight), ..Self::default() }
    }

    /// Collects judged predictions, each changed by `predict`.
    ///
    /// # Panics
    /// If one is not between 0 and 1 afterwards.
    pub fn of(judged: &[JudgedPrediction], predict: &dyn Fn(f64) -> f64) -> Self {
        let mut metrics = Self::default();
        for judged in judged {
            metrics.update_weighted(predict(judged.predicted_prob), judged.label, judged.weight);
        }
        metrics
    }

    /// Adds a prediction and its label, both probabilities.
    ///
    /// # Panics
    /// If either is not between 0 and 1.
    pub fn update(&mut self, predicted_prob: f64, label: f64) {
        self.update_weighted(predicted_prob, label, 1.0);
    }

    /// Adds a prediction and its label with the weight of `weight` rows.
    ///
    /// # Panics
    /// If prediction or label is not between 0 and 1, or the weight is negative or not finite.
    pub fn update_weighted(&mut self, predicted_prob: f64, label: f64, weight: f64) {
        assert!(
            weight >= 0.0 && weight.is_finite(),
            "a weight is finite and not negative: {weight}"
        );
        assert!(
            (0.0..=1.0).contains(&predicted_prob),
            "a prediction is a probability, not {predicted_prob}"
        );
        assert!((0.0..=1.0).contains(&label), "a label is a probability, not {label}");
        let bce = binary_cross_entropy(predicted_prob, label);
        let entropy = binary_entropy(label);
        self.weight += weight;
        self.sum_bce += weight * bce;
        // Rounding can make this negative if the prediction equals the label.
        self.sum_kl += weight * (bce - entropy).max(0.0);
        if let Some(rejection_weight) = self.rejection_weight {
            let accepted = rejection_weight * predicted_prob;
            let unshifted = accepted / (accepted + (1.0 - predicted_prob));
            let kl = binary_cross_entropy(unshifted, label) - entropy;
            self.sum_unshifted_kl += weight * kl.max(0.0);
        }
        self.sum_squares += weight * (predicted_prob - label).powi(2);
        let bin = &mut self.bins[((predicted_prob * NUM_BINS as f64) as usize).min(NUM_BINS - 1)];
        bin.num_labels += 1;
        bin.weight += weight;
        bin.sum_predicted += weight * predicted_prob;
        bin.sum_label += weight * label;
        self.rows.push(ScoredRow { predicted_prob, label, weight });
    }

    /// Returns the bins of [`HeadScores::ece`] that hold weight, by ascending prediction.
    pub fn reliability(&self) -> Vec<ReliabilityBin> {
        let bins = self.bins.iter().filter(|bin| bin.weight > 0.0);
        bins.map(|bin| ReliabilityBin {
            mean_predicted: bin.sum_predicted / bin.weight,
            mean_label: bin.sum_label / bin.weight,
            share: bin.weight / self.weight,
            num_labels: bin.num_labels,
        })
        .collect()
    }

    /// Computes the scores over all rows added so far.
    pub fn finish(mut self) -> HeadScores {
        let num_labels = self.rows.len();
        let mean = |sum: f64| sum / self.weight;
        HeadScores {
            num_labels,
            kl: mean(self.sum_kl),
            unshifted_kl: self.rejection_weight.map(|_| mean(self.sum_unshifted_kl)),
            bce: mean(self.sum_bce),
            auroc: auroc(&mut self.rows),
            brier: mean(self.sum_squares),
            // A bin's share times the difference of its means is the difference of its sums over
            // the total weight.
            ece: mean(self.bins.iter().map(|bin| (bin.sum_label - bin.sum_predicted).abs()).sum()),
            mean_label: mean(self.bins.iter().map(|bin| bin.sum_label).sum()),
            mean_predicted: mean(self.bins.iter().map(|bin| bin.sum_predicted).sum()),
        }
    }
}

/// Computes the binary cross-entropy −y ln p̂ − (1 − y) ln(1 − p̂), with both logarithms at least
/// [`MIN_LOG`].
pub(crate) fn binary_cross_entropy(predicted_prob: f64, label: f64) -> f64 {
    -(label * predicted_prob.ln().max(MIN_LOG)
        + (1.0 - label) * (-predicted_prob).ln_1p().max(MIN_LOG))
}

/// Computes the binary entropy −y ln y − (1 − y) ln(1 − y), 0 at both ends.
fn binary_entropy(prob: f64) -> f64 {
    if prob == 0.0 || prob == 1.0 {
        0.0
    } else {
        -(prob * prob.ln() + (1.0 - prob) * (-prob).ln_1p())
    }
}

/// Computes the AUROC, Σᵢⱼ wᵢ yᵢ wⱼ (1 − yⱼ) ([p̂ᵢ > p̂ⱼ] + ½ [p̂ᵢ = p̂ⱼ]) / (Σ w y · Σ w (1 − y)),
/// in one pass over the sorted predictions.
fn auroc(rows: &mut [ScoredRow]) -> Option<f64> {
    rows.sort_unstable_by(|a, b| a.predicted_prob.total_cmp(&b.predicted_prob));
    let (mut positive, mut negative, mut ordered) = (0.0, 0.0, 0.0);
    for equals in rows.chunk_by(|a, b| a.predicted_prob == b.predicted_prob) {
        let equal_positive: f64 = equals.iter().map(|row| row.weight * row.label).sum();
        let equal_negative: f64 = equals.iter().map(|row| row.weight * (1.0 - row.label)).sum();
        ordered += equal_positive * (negative + 0.5 * equal_negative);
        positive += equal_positive;
        negative += equal_negative;
    }
    (positive > 0.0 && negative > 0.0).then(|| ordered / (positive * negative))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draws, SeededDraws};

    fn scores(pairs: &[(f64, f64)]) -> HeadScores {
        let mut metrics = HeadMetrics::default();
        for &(predicted_prob, label) in pairs {
            metrics.update(predicted_prob, label);
        }
        metrics.finish()
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        // Sums of a few hundred f64 terms of order one.
        assert!((found - expected).abs() < 1e-12, "{found} != {expected}");
    }

    fn random_pairs(len: usize) -> Vec<(f64, f64)> {
        let mut draws = SeededDraws::new(4, &["pairs"]);
        // Predictions on a grid, so that there are ties; a third of the labels are hard.
        let label = |draws: &mut SeededDraws| {
            [0.0, 1.0, draws.uniform()][draws.categorical(&[1.0, 1.0, 4.0])]
        };
        (0..len).map(|_| ((draws.uniform() * 20.0).floor() / 20.0, label(&mut draws))).collect()
    }

    #[test]
    fn auroc_is_the_probability_of_the_right_order() {
        let pairs = random_pairs(200);
        let (mut ordered, mut total) = (0.0, 0.0);
        for (high, positive) in &pairs {
            for (low, label) in &pairs {
                let weight = positive * (1.0 - label);
                let share = if high > low {
                    1.0
                } else if high == low {
                    0.5
                } else {
                    0.0
                };
                ordered += weight * share;
                total += weight;
            }
        }
        close(scores(&pairs).auroc.expect("both classes are present"), ordered / total);
    }

    #[test]
    fn auroc_of_hard_labels() {
        let auroc = |pairs: &[(f64, f64)]| scores(pairs).auroc;
        assert_eq!(auroc(&[(0.1, 0.0), (0.4, 1.0), (0.35, 0.0), (0.8, 1.0)]), Some(1.0));
        assert_eq!(auroc(&[(0.1, 0.0), (0.4, 0.0), (0.35, 1.0), (0.8, 1.0)]), Some(0.75));
        assert_eq!(auroc(&[(0.5, 0.0), (0.5, 1.0)]), Some(0.5));
        assert_eq!(auroc(&[(0.9, 0.0), (0.1, 1.0)]), Some(0.0));
        assert_eq!(auroc(&[(0.9, 1.0), (0.1, 1.0)]), None);
        assert_eq!(auroc(&[]), None);
    }

    #[test]
    fn divergences_match_hand_computation() {
        // KL(½ ‖ ¼) = ½ ln 2 + ½ ln ⅔; KL(1 ‖ ¼) = ln 4.
        let found = scores(&[(0.25, 0.5), (0.25, 1.0)]);
        let (first, second) = (0.5 * 2f64.ln() + 0.5 * (2f64 / 3.0).ln(), 4f64.ln());
        close(found.kl, (first + second) / 2.0);
        close(found.bce, (first + 2f64.ln() + second) / 2.0);
        close(found.brier, (0.25f64.powi(2) + 0.75f64.powi(2)) / 2.0);
        close(found.mean_label, 0.75);
        close(found.mean_predicted, 0.25);
        close(found.ece, 0.5);
    }

    #[test]
    fn a_perfect_head_has_no_divergence() {
        let pairs: Vec<(f64, f64)> =
            random_pairs(300).iter().map(|(_, label)| (*label, *label)).collect();
        let found = scores(&pairs);
        close(found.kl, 0.0);
        close(found.ece, 0.0);
        assert_eq!(found.brier, 0.0);
        assert!(found.bce > 0.1, "soft labels have entropy");
    }

    #[test]
    fn the_calibration_error_adds_up_bins() {
        // Errors cancel within a bin and not between bins. 1 belongs to the last bin.
        close(scores(&[(0.51, 1.0), (0.51, 0.02)]).ece, 0.0);
        close(scores(&[(0.2, 0.3), (0.8, 0.7)]).ece, 0.1);
        close(scores(&[(1.0, 0.9), (0.96, 1.0)]).ece, 0.03);
    }

    #[test]
    fn a_weight_counts_as_that_many_rows() {
        let mut draws = SeededDraws::new(5, &["weights"]);
        let (mut weighted, mut repeated) = (HeadMetrics::default(), HeadMetrics::default());
        for (predicted_prob, label) in random_pairs(200) {
            let count = draws.categorical(&[1.0; 4]);
            weighted.update_weighted(predicted_prob, label, count as f64);
            (0..count).for_each(|_| repeated.update(predicted_prob, label));
        }
        for (one, other) in weighted.reliability().iter().zip(repeated.reliability()) {
            close(one.mean_predicted, other.mean_predicted);
            close(one.mean_label, other.mean_label);
            close(one.share, other.share);
            assert!(one.num_labels > 0 && other.num_labels > 0);
        }
        let (one, other) = (weighted.finish(), repeated.finish());
        assert_eq!(one.num_labels, 200);
        let numbers = |scores: HeadScores| {
            let HeadScores { kl, bce, auroc, brier, ece, mean_label, mean_predicted, .. } = scores;
            let auroc = auroc.expect("both classes are present");
            [kl, bce, auroc, brier, ece, mean_label, mean_predicted]
        };
        for (one, other) in numbers(one).into_iter().zip(numbers(other)) {
            close(one, other);
        }
    }

    #[test]
    fn the_calibration_error_follows_from_the_reliability_bins() {
        let mut metrics = HeadMetrics::default();
        for (predicted_prob, label) in random_pairs(300) {
            metrics.update(predicted_prob, label);
        }
        let bins = metrics.reliability();
        assert!(bins.is_sorted_by(|a, b| a.mean_predicted < b.mean_predicted));
        assert_eq!(bins.iter().map(|bin| bin.num_labels).sum::<usize>(), 300);
        let apart = |bin: &ReliabilityBin| bin.share * (bin.mean_label - bin.mean_predicted).abs();
        close(bins.iter().map(apart).sum(), metrics.finish().ece);
        assert_eq!(HeadMetrics::default().reliability(), []);
    }

    #[test]
    fn certain_predictions_stay_finite() {
        let found = scores(&[(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (1.0, 0.5)]);
        close(found.bce, (100.0 + 100.0 + 50.0) / 5.0);
        assert!(found.kl.is_finite() && found.kl < found.bce);
    }

    #[test]
    fn the_shift_of_a_rejection_weight_is_undone() {
        let mut draws = SeededDraws::new(5, &["shift"]);
        for weight in [0.5_f64, 1.0, 6.0, 12.0] {
            let [mut shifted, mut plain] =
                [HeadMetrics::unshifting(weight), HeadMetrics::unshifting(1.0)];
            for _ in 0..200 {
                let (predicted_prob, label) = (draws.uniform(), draws.uniform());
                plain.update(predicted_prob, label);
                // The prediction of a head whose logit is lower by ln w.
                let logit = (predicted_prob / (1.0 - predicted_prob)).ln() - weight.ln();
                shifted.update(1.0 / (1.0 + (-logit).exp()), label);
            }
            // The minimum of the weighted loss at a label of 0.7, by grid search.
            let loss = |p: f64| -(weight * 0.3 * (1.0 - p).ln() + 0.7 * p.ln());
            let least = (1..10_000).map(|n| n as f64 / 1e4);
            let least = least.min_by(|a, b| loss(*a).total_cmp(&loss(*b))).unwrap();
            let mut optimal = HeadMetrics::unshifting(weight);
            optimal.update(least, 0.7);
            // The error is the square of the grid's step of 1e-4.
            assert!(optimal.finish().unshifted_kl.unwrap() < 1e-6, "w {weight}");
            let (shifted, plain) = (shifted.finish(), plain.finish());
            assert_eq!(plain.unshifted_kl, Some(plain.kl));
            let unshifted = shifted.unshifted_kl.unwrap();
            // Logarithms and exponentials of f64.
            assert!((unshifted - plain.kl).abs() < 1e-9, "w {weight}");
            assert!(weight == 1.0 || shifted.kl > unshifted + 0.01, "w {weight}");
        }
    }
}
