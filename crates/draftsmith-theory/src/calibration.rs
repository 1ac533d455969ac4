//! Calibration: maps an acceptance head's predictions to probabilities.
//!
//! A stop rule multiplies predictions, so they must be probabilities and not just scores. Training
//! with a rejection weight w moves a head's logits by −ln w, and a small head has errors besides.
//! Platt scaling (Platt 1999), fitted on held-out prompts to predictions and their outcomes, corrects
//! both. A temperature could not: it maps ½ to ½.
//!
//! [`CalibrationTrial`] shows whether it is better than none on prompts that it was not fitted to.
//! The fits use [`Recordings::judged_predictions`](crate::Recordings::judged_predictions).
//!
//! Rollouts hold the head's uncalibrated predictions. A calibration is applied while decoding (in the
//! decode crate's `acceptance`) or in replay ([`Recordings::calibrated`](crate::Recordings::calibrated)).
//! So a new calibration invalidates no rollout, and none is applied twice.

mod trial;

use serde::{Deserialize, Serialize};

pub use trial::{CalibrationTrial, try_calibration};

use crate::TheoryError;

/// Logits beyond this, of predictions within 1e-13 of 0 or 1, are clamped.
const MAX_LOGIT: f64 = 30.0;
/// The precision of the normal prior on scale and bias around the identity. Its standard deviation of
/// 2 is about the shift of a logit by a rejection weight of 6. It keeps fits finite if outcomes are
/// separable or all predictions equal, and weighs no more than a few observations.
const PRIOR_PRECISION: f64 = 0.25;
/// The maximum number of Newton steps; a handful suffice, because the objective is convex.
const MOST_STEPS: usize = 100;
/// The fit ends with a step shorter than this.
const TOLERANCE: f64 = 1e-10;

/// A prediction and its outcome.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JudgedPrediction {
    /// The head's uncalibrated prediction.
    pub predicted_prob: f64,
    /// Whether the candidate is accepted, 0 or 1, or the probability of it.
    pub label: f64,
    /// The probability that verification reaches the candidate.
    pub weight: f64,
}

/// Platt scaling: σ(scale · logit + bias). The map is monotone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(into = "StoredCalibration", try_from = "StoredCalibration")]
pub struct Calibration {
    /// Multiplies the logit; at least 0.
    scale: f64,
    /// Is then added, in nats of log-odds.
    bias: f64,
}

/// A calibration in a file, with the name of its form.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum StoredCalibration {
    Platt { scale: f64, bias: f64 },
}

impl From<Calibration> for StoredCalibration {
    fn from(Calibration { scale, bias }: Calibration) -> Self {
        Self::Platt { scale, bias }
    }
}

impl TryFrom<StoredCalibration> for Calibration {
    type Error = TheoryError;

    fn try_from(
        StoredCalibration::Platt { scale, bias }: StoredCalibration,
    ) -> Result<Self, TheoryError> {
        Self::new(scale, bias)
    }
}

impl Calibration {
    /// The map that changes no prediction.
    const IDENTITY: Self = Self { scale: 1.0, bias: 0.0 };

    /// σ(`scale` · logit + `bias`).
    ///
    /// # Errors
    /// If either is not finite, or the scale is negative, which would reverse the order of
    /// predictions.
    pub fn new(scale: f64, bias: f64) -> Result<Self, TheoryError> {
        let is_valid = scale >= 0.0 && scale.is_finite();
        TheoryError::check(is_valid, "scale", "be 0 or more and finite", scale)?;
        TheoryError::check(bias.is_finite(), "bias", "be finite", bias)?;
        Ok(Self { scale, bias })
    }

    /// The factor of the logit.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The shift of the scaled logit, in nats of log-odds.
    pub fn bias(&self) -> f64 {
        self.bias
    }

    /// Fits a calibration to predictions and outcomes. None if no prediction has weight.
    ///
    /// Minimises the weighted cross-entropy with soft labels, plus the prior, by Newton's method with
    /// step halving. If the best scale is below 0, the head has learned nothing, and the fit maps all
    /// predictions to one probability.
    pub fn fit(judged: &[JudgedPrediction]) -> Option<Self> {
        let points: Vec<Point> = judged.iter().map(Point::of).collect();
        let best = Self::minimise(&points, Self::IDENTITY, true);
        let found = if best.scale >= 0.0 {
            best
        } else {
            Self::minimise(&points, Self { scale: 0.0, bias: 0.0 }, false)
        };
        judged.iter().any(|judged| judged.weight > 0.0).then_some(found)
    }

    /// The calibrated probability of a prediction.
    ///
    /// # Panics
    /// If the prediction is not between 0 and 1.
    pub fn apply(&self, predicted_prob: f64) -> f64 {
        assert!(
            (0.0..=1.0).contains(&predicted_prob),
            "a prediction is a probability, not {predicted_prob}"
        );
        sigmoid(self.scale * logit(predicted_prob) + self.bias)
    }

    fn minimise(points: &[Point], start: Self, scales: bool) -> Self {
        let mut at = start;
        let mut value = at.objective(points);
        for _ in 0..MOST_STEPS {
            let (scale_step, bias_step) = at.newton_step(points, scales);
            let mut share = 1.0;
            loop {
                let next = Self {
                    scale: at.scale + share * scale_step,
                    bias: at.bias + share * bias_step,
                };
                let next_value = next.objective(points);
                if next_value < value {
                    (at, value) = (next, next_value);
                    break;
                }
                share *= 0.5;
                // This is the minimum, up to rounding.
                if share < 1e-6 {
                    return at;
                }
            }
            if share * scale_step.abs().max(bias_step.abs()) < TOLERANCE {
                break;
            }
        }
        at
    }

    fn objective(&self, points: &[Point]) -> f64 {
        let loss = |point: &Point| {
            let shifted = self.scale * point.logit + self.bias;
            // ln(1 + e^x) − y x, without overflow.
            let softplus = shifted.max(0.0) + (-shifted.abs()).exp().ln_1p();
            point.weight * (softplus - point.label * shifted)
        };
        let prior = (self.scale - 1.0).powi(2) + self.bias.powi(2);
        points.iter().map(loss).sum::<f64>() + 0.5 * PRIOR_PRECISION * prior
    }

    /// The step to the minimum of the objective's second-order Taylor expansion.
    fn newton_step(&self, points: &[Point], scales: bool) -> (f64, f64) {
        let (mut by_scale, mut by_bias) =
            (PRIOR_PRECISION * (self.scale - 1.0), PRIOR_PRECISION * self.bias);
        let (mut scale_scale, mut scale_bias, mut bias_bias) =
            (PRIOR_PRECISION, 0.0, PRIOR_PRECISION);
        for Point { logit, label, weight } in points {
            let prob = sigmoid(self.scale * logit + self.bias);
            let slope = weight * (prob - label);
            let curvature = weight * prob * (1.0 - prob);
            by_scale += slope * logit;
            by_bias += slope;
            scale_scale += curvature * logit * logit;
            scale_bias += curvature * logit;
            bias_bias += curvature;
        }
        if scales {
            // The prior keeps this above 0.
            let determinant = scale_scale * bias_bias - scale_bias * scale_bias;
            (
                (scale_bias * by_bias - bias_bias * by_scale) / determinant,
                (scale_bias * by_scale - scale_scale * by_bias) / determinant,
            )
        } else {
            (0.0, -by_bias / bias_bias)
        }
    }
}

struct Point {
    logit: f64,
    label: f64,
    weight: f64,
}

impl Point {
    fn of(judged: &JudgedPrediction) -> Self {
        let JudgedPrediction { predicted_prob, label, weight } = *judged;
        Self { logit: logit(predicted_prob), label, weight }
    }
}

fn logit(prob: f64) -> f64 {
    (prob.ln() - (-prob).ln_1p()).clamp(-MAX_LOGIT, MAX_LOGIT)
}

fn sigmoid(logit: f64) -> f64 {
    1.0 / (1.0 + (-logit).exp())
}

/// Synthetic predictions.
#[cfg(test)]
mod test_predictions {
    use super::JudgedPrediction;
    use crate::{Draws, SeededDraws};

    /// Uniform predictions, each with an outcome of 1 with probability `truth`(prediction).
    pub(super) fn coins(
        seed: u64,
        len: usize,
        truth: impl Fn(f64) -> f64,
    ) -> Vec<JudgedPrediction> {
        let mut draws = SeededDraws::new(seed, &["judged"]);
        let mut one = |_| {
            let predicted_prob = 0.01 + 0.98 * draws.uniform();
            let label = f64::from(u8::from(draws.bernoulli(truth(predicted_prob))));
            JudgedPrediction { predicted_prob, label, weight: 1.0 }
        };
        (0..len).map(&mut one).collect()
    }

    /// The prediction of a head trained with a rejection weight of 6 if `prob` is true.
    pub(super) fn weighted_six(prob: f64) -> f64 {
        prob / (prob + 6.0 * (1.0 - prob))
    }

    /// The true probability if such a head predicts `prob`.
    pub(super) fn true_of_weighted_six(prob: f64) -> f64 {
        6.0 * prob / (6.0 * prob + 1.0 - prob)
    }
}

#[cfg(test)]
mod tests {
    use super::test_predictions::{coins, true_of_weighted_six, weighted_six};
    use super::*;
    use crate::HeadMetrics;

    fn fitted(judged: &[JudgedPrediction]) -> Calibration {
        Calibration::fit(judged).expect("there is weight")
    }

    #[test]
    fn a_rejection_weight_of_six_is_undone() {
        let judged = coins(1, 40_000, true_of_weighted_six);
        let calibration = fitted(&judged);
        for truth in [0.3, 0.5, 0.7, 0.9, 0.97] {
            let found = calibration.apply(weighted_six(truth));
            // More than five standard deviations of the fit.
            assert!((found - truth).abs() < 0.04, "{found} for {truth}");
        }
    }

    #[test]
    fn calibrated_predictions_stay_as_they_are() {
        let judged = coins(2, 40_000, |prob| prob);
        let calibration = fitted(&judged);
        for prob in [0.05, 0.2, 0.5, 0.8, 0.95] {
            let found = calibration.apply(prob);
            assert!((found - prob).abs() < 0.04, "{found} for {prob}");
        }
    }

    #[test]
    fn the_map_is_monotone_and_within_0_and_1() {
        let one = |predicted_prob, label| JudgedPrediction { predicted_prob, label, weight: 1.0 };
        let sets = [
            coins(3, 500, |prob| prob.sqrt()),
            // Predictions in reverse order.
            coins(4, 500, |prob| 1.0 - prob),
            // Noise, one outcome, separable outcomes, one prediction, and predictions of 0 and 1.
            coins(5, 60, |_| 0.5),
            coins(6, 100, |_| 1.0),
            coins(7, 100, |prob| f64::from(u8::from(prob > 0.4))),
            vec![one(0.25, 1.0); 40],
            vec![one(0.0, 0.0), one(1.0, 1.0), one(1.0, 0.0)],
            vec![one(0.5, 0.75)],
        ];
        for judged in &sets {
            let calibration = fitted(judged);
            let grid = (0..=1000).map(|step| f64::from(step) / 1000.0);
            let ends = [0.0, 1e-300, 1e-20, 1e-9];
            let low = ends.into_iter().chain(grid).chain(ends.map(|end| 1.0 - end));
            let mut probs: Vec<f64> = low.collect();
            probs.sort_by(f64::total_cmp);
            let mapped: Vec<f64> = probs.iter().map(|prob| calibration.apply(*prob)).collect();
            assert!(mapped.iter().all(|prob| (0.0..=1.0).contains(prob)), "{calibration:?}");
            // A logarithm may be off by one unit in the last place.
            let falls = mapped.windows(2).any(|two| two[1] < two[0] - 1e-14);
            assert!(!falls, "{calibration:?}");
        }
    }

    #[test]
    fn a_weight_counts_as_that_many_observations() {
        let mut weighted = coins(8, 600, |prob| prob.powi(2));
        for (at, judged) in weighted.iter_mut().enumerate() {
            judged.weight = (at % 4) as f64;
        }
        let repeated: Vec<JudgedPrediction> = weighted
            .iter()
            .flat_map(|one| vec![JudgedPrediction { weight: 1.0, ..*one }; one.weight as usize])
            .collect();
        let (one, other) = (fitted(&weighted), fitted(&repeated));
        for prob in [0.0, 0.1, 0.4, 0.6, 0.9, 1.0] {
            // The same sums in another order; Newton's method ends within 1e-10 of the optimum.
            assert!((one.apply(prob) - other.apply(prob)).abs() < 1e-9);
        }
        assert_eq!(Calibration::fit(&[]), None);
        let nothing = JudgedPrediction { predicted_prob: 0.5, label: 1.0, weight: 0.0 };
        assert_eq!(Calibration::fit(&[nothing]), None);
    }

    #[test]
    fn invalid_calibrations_are_errors() {
        for (scale, bias, expected) in [
            (-1.0, 0.0, "scale must be 0 or more and finite, not `-1`"),
            (f64::INFINITY, 0.0, "scale must be 0 or more and finite, not `inf`"),
            (1.0, f64::NAN, "bias must be finite, not `NaN`"),
        ] {
            let refused = Calibration::new(scale, bias).expect_err("refused").to_string();
            assert_eq!(refused, expected);
        }
    }

    #[test]
    fn the_fit_recovers_scale_and_bias() {
        let truth = Calibration::new(0.7, 6f64.ln()).expect("valid");
        let found = fitted(&coins(1, 40_000, |prob| truth.apply(prob)));
        // Standard deviations of about 0.015 each.
        assert!((found.scale - truth.scale).abs() < 0.06, "{found:?}");
        assert!((found.bias - truth.bias).abs() < 0.06, "{found:?}");
    }

    #[test]
    fn the_fit_recovers_the_map_from_true_soft_labels() {
        let truth = Calibration::new(1.4, -0.8).expect("valid");
        let mut judged = coins(2, 20_000, |_| 0.5);
        for judged in &mut judged {
            judged.label = truth.apply(judged.predicted_prob);
        }
        let found = fitted(&judged);
        // The effect of the prior, against 20,000 observations.
        assert!((found.scale - truth.scale).abs() < 1e-3, "{found:?}");
        assert!((found.bias - truth.bias).abs() < 1e-3, "{found:?}");
    }

    #[test]
    fn the_fit_is_a_local_minimum() {
        for judged in
            [coins(3, 300, f64::sqrt), coins(4, 30, |prob| 1.0 - prob), coins(5, 9, |_| 1.0)]
        {
            let found = fitted(&judged);
            let points: Vec<Point> = judged.iter().map(Point::of).collect();
            let least = found.objective(&points);
            for (scale, bias) in [(1e-3, 0.0), (-1e-3, 0.0), (0.0, 1e-3), (0.0, -1e-3)] {
                let near = Calibration { scale: found.scale + scale, bias: found.bias + bias };
                assert!(near.scale < 0.0 || near.objective(&points) > least, "{found:?}");
            }
        }
    }

    #[test]
    fn the_map_keeps_auroc() {
        let judged = coins(6, 2000, f64::sqrt);
        let calibration = fitted(&judged);
        let auroc = |map: &dyn Fn(f64) -> f64| {
            let mut metrics = HeadMetrics::default();
            for one in &judged {
                metrics.update(map(one.predicted_prob), one.label);
            }
            metrics.finish().auroc.expect("both classes are present")
        };
        assert_eq!(auroc(&|prob| prob), auroc(&|prob| calibration.apply(prob)));
    }
}
