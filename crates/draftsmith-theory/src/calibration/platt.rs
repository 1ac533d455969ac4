//! Platt scaling: σ(scale · logit + bias).

use serde::{Deserialize, Serialize};

use super::JudgedPrediction;
use crate::TheoryError;

/// The largest logit that is told from certainty: a prediction within 1e-13 of 0 or 1.
const MAX_LOGIT: f64 = 30.0;
/// The precision of the normal prior on scale and bias about the identity: a standard deviation of
/// 2, twice what a rejection weight of 6 moves a logit. It keeps fits finite where the outcomes are
/// separable or the predictions all alike, and weighs as little as a few observations.
const PRIOR_PRECISION: f64 = 0.25;
/// Newton steps; a handful are enough, as the objective is convex.
const MOST_STEPS: usize = 100;
/// A step shorter than this ends the fit.
const CLOSE_ENOUGH: f64 = 1e-10;

/// A prediction's logit, scaled and moved.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Platt {
    /// What the logit is multiplied with, 0 or more.
    scale: f64,
    /// What is then added, nats of log-odds.
    bias: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    scale: f64,
    bias: f64,
}

impl TryFrom<Unchecked> for Platt {
    type Error = TheoryError;

    fn try_from(unchecked: Unchecked) -> Result<Self, TheoryError> {
        Self::new(unchecked.scale, unchecked.bias)
    }
}

impl Platt {
    /// The map that leaves every prediction as it is.
    const IDENTITY: Self = Self { scale: 1.0, bias: 0.0 };

    /// σ(`scale` · logit + `bias`).
    ///
    /// # Errors
    /// If either is not finite, or the scale is negative, which would turn the order of predictions
    /// round.
    pub fn new(scale: f64, bias: f64) -> Result<Self, TheoryError> {
        if scale >= 0.0 && scale.is_finite() && bias.is_finite() {
            Ok(Self { scale, bias })
        } else {
            Err(TheoryError::Platt { scale, bias })
        }
    }

    /// What the logit is multiplied with.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// What is then added, nats of log-odds.
    pub fn bias(&self) -> f64 {
        self.bias
    }

    /// The least weighted cross-entropy with soft labels, under the prior: Newton's method with
    /// steps halved until they lead down. A best scale below 0 says that the head tells nothing:
    /// then all predictions are worth the same.
    pub(super) fn fit(judged: &[JudgedPrediction]) -> Self {
        let points: Vec<Point> = judged
            .iter()
            .map(|judged| Point {
                logit: logit(judged.predicted_prob),
                label: judged.label,
                weight: judged.weight,
            })
            .collect();
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
                // Down to rounding there is nothing lower.
                if share < 1e-6 {
                    return at;
                }
            }
            if share * scale_step.abs().max(bias_step.abs()) < CLOSE_ENOUGH {
                break;
            }
        }
        at
    }

    fn objective(&self, points: &[Point]) -> f64 {
        let loss = |point: &Point| {
            let moved = self.scale * point.logit + self.bias;
            // ln(1 + e^x) − y x, without overflow.
            let softplus = moved.max(0.0) + (-moved.abs()).exp().ln_1p();
            point.weight * (softplus - point.label * moved)
        };
        let prior = (self.scale - 1.0).powi(2) + self.bias.powi(2);
        points.iter().map(loss).sum::<f64>() + 0.5 * PRIOR_PRECISION * prior
    }

    /// Where the quadratic that touches the objective here is least.
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
    fn scale_and_bias_are_found_again() {
        let truth = Platt::new(0.7, 6f64.ln()).expect("valid");
        let found = Platt::fit(&coins(1, 40_000, |prob| truth.apply(prob)));
        // Standard deviations of about 0.015 each.
        assert!((found.scale - truth.scale).abs() < 0.06, "{found:?}");
        assert!((found.bias - truth.bias).abs() < 0.06, "{found:?}");
    }

    #[test]
    fn soft_labels_that_are_true_give_the_map_itself() {
        let truth = Platt::new(1.4, -0.8).expect("valid");
        let mut judged = coins(2, 20_000, |_| 0.5);
        for judged in &mut judged {
            judged.label = truth.apply(judged.predicted_prob);
        }
        let found = Platt::fit(&judged);
        // The prior's pull against 20,000 observations.
        assert!((found.scale - truth.scale).abs() < 1e-3, "{found:?}");
        assert!((found.bias - truth.bias).abs() < 1e-3, "{found:?}");
    }

    #[test]
    fn what_is_found_is_where_no_direction_leads_down() {
        for judged in
            [coins(3, 300, f64::sqrt), coins(4, 30, |prob| 1.0 - prob), coins(5, 9, |_| 1.0)]
        {
            let found = Platt::fit(&judged);
            let points: Vec<Point> = judged
                .iter()
                .map(|one| Point {
                    logit: logit(one.predicted_prob),
                    label: one.label,
                    weight: one.weight,
                })
                .collect();
            let least = found.objective(&points);
            for (scale, bias) in [(1e-3, 0.0), (-1e-3, 0.0), (0.0, 1e-3), (0.0, -1e-3)] {
                let near = Platt { scale: found.scale + scale, bias: found.bias + bias };
                assert!(near.scale < 0.0 || near.objective(&points) > least, "{found:?}");
            }
        }
    }

    #[test]
    fn the_order_of_predictions_stays_so_auroc_does() {
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
