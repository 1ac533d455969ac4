//! Platt scaling: σ(scale · logit + bias).

use serde::Serialize;

use super::JudgedPrediction;
use crate::TheoryError;
use crate::serialized::deserialize_by_new;

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

/// Scales and shifts a prediction's logit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Platt {
    /// Multiplies the logit; at least 0.
    scale: f64,
    /// Is then added, in nats of log-odds.
    bias: f64,
}

deserialize_by_new!(Platt { scale: f64, bias: f64 });

impl Platt {
    /// The map that changes no prediction.
    const IDENTITY: Self = Self { scale: 1.0, bias: 0.0 };

    /// σ(`scale` · logit + `bias`).
    ///
    /// # Errors
    /// If either is not finite, or the scale is negative, which would reverse the order of
    /// predictions.
    pub fn new(scale: f64, bias: f64) -> Result<Self, TheoryError> {
        if scale >= 0.0 && scale.is_finite() && bias.is_finite() {
            Ok(Self { scale, bias })
        } else {
            Err(TheoryError::Platt { scale, bias })
        }
    }

    /// The factor of the logit.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The shift of the scaled logit, in nats of log-odds.
    pub fn bias(&self) -> f64 {
        self.bias
    }

    /// Minimises the weighted cross-entropy with soft labels, plus the prior, by Newton's method with
    /// step halving. If the best scale is below 0, the head has learned nothing, and the fit maps all
    /// predictions to one probability.
    pub(super) fn fit(judged: &[JudgedPrediction]) -> Self {
        let points: Vec<Point> = judged.iter().map(Point::of).collect();
        let best = Self::minimise(&points, Self::IDENTITY, true);
        if best.scale >= 0.0 {
            best
        } else {
            Self::minimise(&points, Self { scale: 0.0, bias: 0.0 }, false)
        }
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

    pub(super) fn apply(&self, predicted_prob: f64) -> f64 {
        sigmoid(self.scale * logit(predicted_prob) + self.bias)
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

#[cfg(test)]
mod tests {
    use super::super::test_predictions::coins;
    use super::*;
    use crate::HeadMetrics;

    #[test]
    fn the_fit_recovers_scale_and_bias() {
        let truth = Platt::new(0.7, 6f64.ln()).expect("valid");
        let found = Platt::fit(&coins(1, 40_000, |prob| truth.apply(prob)));
        // Standard deviations of about 0.015 each.
        assert!((found.scale - truth.scale).abs() < 0.06, "{found:?}");
        assert!((found.bias - truth.bias).abs() < 0.06, "{found:?}");
    }

    #[test]
    fn the_fit_recovers_the_map_from_true_soft_labels() {
        let truth = Platt::new(1.4, -0.8).expect("valid");
        let mut judged = coins(2, 20_000, |_| 0.5);
        for judged in &mut judged {
            judged.label = truth.apply(judged.predicted_prob);
        }
        let found = Platt::fit(&judged);
        // The effect of the prior, against 20,000 observations.
        assert!((found.scale - truth.scale).abs() < 1e-3, "{found:?}");
        assert!((found.bias - truth.bias).abs() < 1e-3, "{found:?}");
    }

    #[test]
    fn the_fit_is_a_local_minimum() {
        for judged in
            [coins(3, 300, f64::sqrt), coins(4, 30, |prob| 1.0 - prob), coins(5, 9, |_| 1.0)]
        {
            let found = Platt::fit(&judged);
            let points: Vec<Point> = judged.iter().map(Point::of).collect();
            let least = found.objective(&points);
            for (scale, bias) in [(1e-3, 0.0), (-1e-3, 0.0), (0.0, 1e-3), (0.0, -1e-3)] {
                let near = Platt { scale: found.scale + scale, bias: found.bias + bias };
                assert!(near.scale < 0.0 || near.objective(&points) > least, "{found:?}");
            }
        }
    }

    #[test]
    fn the_map_keeps_auroc() {
        let judged = coins(6, 2000, f64::sqrt);
        let platt = Platt::fit(&judged);
        let auroc = |map: &dyn Fn(f64) -> f64| {
            let mut metrics = HeadMetrics::default();
            for one in &judged {
                metrics.update(map(one.predicted_prob), one.label);
            }
            metrics.finish().auroc.expect("both classes are present")
        };
        assert_eq!(auroc(&|prob| prob), auroc(&|prob| platt.apply(prob)));
    }
}
