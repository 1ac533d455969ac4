//! Calibration: maps an acceptance head's predictions to probabilities.
//!
//! A stop rule multiplies predictions, so they must be probabilities and not just scores. Training
//! with a rejection weight w moves a head's logits by −ln w, and a small head has errors besides. A
//! monotone map, fitted on held-out prompts to predictions and their outcomes, corrects both. A
//! temperature could not: it maps ½ to ½.
//!
//! | form | the map | source |
//! |---|---|---|
//! | [`Platt`] | σ(scale · logit + bias): two numbers, smooth | Platt 1999 |
//! | [`PiecewiseLinear`] | straight lines between the blocks of an isotonic regression | Zadrozny and Elkan 2002 |
//!
//! [`CalibrationTrial`] shows which of them, if any, is better on prompts that it was not fitted to.
//! The fits use [`Recordings::judged_predictions`](crate::Recordings::judged_predictions).
//!
//! Rollouts hold the head's uncalibrated predictions. A calibration is applied while decoding (in the
//! decode crate's `acceptance`) or in replay ([`Recordings::calibrated`](crate::Recordings::calibrated)).
//! So a new calibration invalidates no rollout, and none is applied twice.

mod piecewise_linear;
mod platt;
mod trial;

use serde::{Deserialize, Serialize};

pub use piecewise_linear::PiecewiseLinear;
pub use platt::Platt;
pub use trial::{CalibrationTrial, preferred_calibration, try_calibrations};

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

/// The forms of a calibration, the simpler first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CalibrationKind {
    /// [`Platt`].
    Platt,
    /// [`PiecewiseLinear`].
    Isotonic,
}

/// A monotone map from an acceptance head's predictions to probabilities.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Calibration {
    /// A scaled and shifted logit.
    Platt(Platt),
    /// Isotonic regression.
    Isotonic(PiecewiseLinear),
}

impl Calibration {
    /// Fits a calibration to predictions and outcomes by least weighted cross-entropy (Platt) or
    /// squares (isotonic). None if no prediction has weight.
    pub fn fit(kind: CalibrationKind, judged: &[JudgedPrediction]) -> Option<Self> {
        judged.iter().any(|judged| judged.weight > 0.0).then(|| match kind {
            CalibrationKind::Platt => Self::Platt(Platt::fit(judged)),
            CalibrationKind::Isotonic => Self::Isotonic(PiecewiseLinear::fit(judged)),
        })
    }

    /// Its form.
    pub fn kind(&self) -> CalibrationKind {
        match self {
            Self::Platt(_) => CalibrationKind::Platt,
            Self::Isotonic(_) => CalibrationKind::Isotonic,
        }
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
        match self {
            Self::Platt(platt) => platt.apply(predicted_prob),
            Self::Isotonic(map) => map.apply(predicted_prob),
        }
    }
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
    use crate::TheoryError;

    const KINDS: [CalibrationKind; 2] = [CalibrationKind::Platt, CalibrationKind::Isotonic];

    fn fitted(kind: CalibrationKind, judged: &[JudgedPrediction]) -> Calibration {
        Calibration::fit(kind, judged).expect("there is weight")
    }

    #[test]
    fn a_rejection_weight_of_six_is_undone() {
        let judged = coins(1, 40_000, true_of_weighted_six);
        for kind in KINDS {
            let calibration = fitted(kind, &judged);
            for truth in [0.3, 0.5, 0.7, 0.9, 0.97] {
                let found = calibration.apply(weighted_six(truth));
                // About five standard deviations of a block's mean.
                assert!((found - truth).abs() < 0.04, "{kind:?}: {found} for {truth}");
            }
        }
    }

    #[test]
    fn calibrated_predictions_stay_as_they_are() {
        let judged = coins(2, 40_000, |prob| prob);
        for kind in KINDS {
            let calibration = fitted(kind, &judged);
            for prob in [0.05, 0.2, 0.5, 0.8, 0.95] {
                let found = calibration.apply(prob);
                assert!((found - prob).abs() < 0.04, "{kind:?}: {found} for {prob}");
            }
        }
    }

    #[test]
    fn every_map_is_monotone_and_within_0_and_1() {
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
            for kind in KINDS {
                let calibration = fitted(kind, judged);
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
        for kind in KINDS {
            let (one, other) = (fitted(kind, &weighted), fitted(kind, &repeated));
            for prob in [0.0, 0.1, 0.4, 0.6, 0.9, 1.0] {
                // The same sums in another order; Newton's method ends within 1e-10 of the optimum.
                assert!((one.apply(prob) - other.apply(prob)).abs() < 1e-9, "{kind:?}");
            }
        }
        assert_eq!(Calibration::fit(CalibrationKind::Platt, &[]), None);
        let nothing = JudgedPrediction { predicted_prob: 0.5, label: 1.0, weight: 0.0 };
        assert_eq!(Calibration::fit(CalibrationKind::Isotonic, &[nothing]), None);
    }

    #[test]
    fn invalid_calibrations_are_errors() {
        for (scale, bias) in [(-1.0, 0.0), (f64::INFINITY, 0.0), (1.0, f64::NAN)] {
            let refused = Platt::new(scale, bias).expect_err("refused").to_string();
            assert!(refused.contains("scale") && refused.contains("bias"), "{refused}");
        }
        for (predicted, calibrated) in [
            (vec![], vec![]),
            (vec![0.5], vec![0.5, 0.6]),
            (vec![0.5, 0.5], vec![0.5, 0.6]),
            (vec![0.2, 0.5], vec![0.6, 0.5]),
            (vec![0.2, 1.5], vec![0.4, 0.5]),
            (vec![0.2, 0.5], vec![0.4, 1.5]),
            (vec![0.2, f64::NAN], vec![0.4, 0.5]),
        ] {
            let refused = PiecewiseLinear::new(predicted, calibrated);
            assert_eq!(refused, Err(TheoryError::Knots));
        }
    }
}
