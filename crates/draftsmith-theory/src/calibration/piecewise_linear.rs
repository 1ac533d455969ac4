//! Isotonic calibration: straight lines between the blocks of an isotonic regression.
//!
//! The regression itself is a step function, which gives all predictions of a block the same
//! probability and so loses the head's order within the block. Lines between the blocks' centres
//! (centred isotonic regression, Oron and Flournoy 2017) keep that order, and have smaller errors
//! where the truth rises smoothly. Below the first centre and above the last the map is constant.

use serde::Serialize;

use super::JudgedPrediction;
use crate::TheoryError;
use crate::isotonic::{Observed, isotonic_blocks};
use crate::serialized::deserialize_by_new;

/// The maximum number of blocks.
const MAX_BLOCKS: usize = 32;
/// The minimum weight of a block.
const MIN_WEIGHT: f64 = 25.0;

/// A function through knots, linear between them and constant beyond the first and the last.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PiecewiseLinear {
    /// The knots' predictions, ascending, within 0 to 1.
    predicted: Vec<f64>,
    /// The knots' probabilities, not descending, within 0 to 1.
    calibrated: Vec<f64>,
}

deserialize_by_new!(PiecewiseLinear { predicted: Vec<f64>, calibrated: Vec<f64> });

impl PiecewiseLinear {
    /// The function through (`predicted[i]`, `calibrated[i]`).
    ///
    /// # Errors
    /// Unless there is at least one knot, predictions ascend, probabilities do not descend, and all
    /// lie between 0 and 1.
    pub fn new(predicted: Vec<f64>, calibrated: Vec<f64>) -> Result<Self, TheoryError> {
        let is_prob = |prob: &f64| (0.0..=1.0).contains(prob);
        let is_valid = !predicted.is_empty()
            && predicted.len() == calibrated.len()
            && predicted.iter().chain(&calibrated).all(is_prob)
            && predicted.is_sorted_by(|one, other| one < other)
            && calibrated.is_sorted();
        if is_valid { Ok(Self { predicted, calibrated }) } else { Err(TheoryError::Knots) }
    }

    /// The number of knots.
    pub fn num_knots(&self) -> usize {
        self.predicted.len()
    }

    /// Fits predictions with a positive total weight W.
    ///
    /// Probabilities stay at least 1 / (W + 2) away from 0 and 1 (Laplace's rule of succession): an
    /// outcome that was never seen is not impossible.
    pub(super) fn fit(judged: &[JudgedPrediction]) -> Self {
        let observed = judged.iter().map(|judged| Observed {
            at: judged.predicted_prob,
            outcome: judged.label,
            weight: judged.weight,
        });
        let blocks = isotonic_blocks(observed.collect(), MAX_BLOCKS, MIN_WEIGHT, true);
        let weight: f64 = blocks.iter().map(|block| block.weight).sum();
        let least = 1.0 / (weight + 2.0);
        // A mean of equal numbers may round past them.
        let knots = blocks
            .iter()
            .map(|block| (block.centre().clamp(0.0, 1.0), block.mean().clamp(least, 1.0 - least)));
        let (predicted, calibrated) = knots.unzip();
        Self { predicted, calibrated }
    }

    pub(super) fn apply(&self, predicted_prob: f64) -> f64 {
        let above = self.predicted.partition_point(|knot| *knot <= predicted_prob);
        if above == 0 {
            return self.calibrated[0];
        }
        let (low, from) = (self.predicted[above - 1], self.calibrated[above - 1]);
        match self.predicted.get(above) {
            None => from,
            Some(high) => {
                let to = self.calibrated[above];
                let share = (predicted_prob - low) / (high - low);
                (from + share * (to - from)).min(to)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_predictions::coins;
    use super::*;

    #[test]
    fn it_is_linear_between_knots_and_constant_beyond() {
        let map = PiecewiseLinear::new(vec![0.25, 0.5, 0.75], vec![0.125, 0.5, 0.625])
            .expect("valid knots");
        let at = [0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0].map(|prob| map.apply(prob));
        assert_eq!(at, [0.125, 0.125, 0.3125, 0.5, 0.5625, 0.625, 0.625]);
        assert_eq!(PiecewiseLinear::new(vec![0.5], vec![0.25]).expect("valid").apply(0.9), 0.25);
    }

    #[test]
    fn it_fits_a_bend_that_no_scaled_logit_has() {
        // The head is right below ½, and the truth is constant above.
        let truth = |prob: f64| prob.min(0.5);
        let map = PiecewiseLinear::fit(&coins(1, 40_000, truth));
        for prob in [0.1, 0.3, 0.6, 0.8, 0.97] {
            // Four standard deviations of a mean of 1,250 outcomes.
            assert!((map.apply(prob) - truth(prob)).abs() < 0.057, "{map:?} at {prob}");
        }
    }

    #[test]
    fn few_observations_give_few_knots_and_no_certainty() {
        let map = PiecewiseLinear::fit(&coins(2, 60, |_| 1.0));
        assert_eq!(map.num_knots(), 1);
        assert_eq!(map.apply(0.5), 1.0 - 1.0 / 62.0);
        let map = PiecewiseLinear::fit(&coins(3, 60, |prob| f64::from(u8::from(prob > 0.5))));
        assert_eq!(map.num_knots(), 2);
    }
}
