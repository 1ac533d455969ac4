//! Step functions fitted to what was recorded.

use crate::StepFunction;
use crate::isotonic::{Block, Observed, isotonic_blocks};

/// The most steps of a fitted function.
const MAX_STEPS: usize = 16;
/// The fewest observations a step stands on.
const MIN_OBSERVATIONS: f64 = 25.0;

/// Fits a monotone step function to pairs of a signal and an outcome: about equally many pairs a
/// step, then neighbours that stand in the wrong order pooled (isotonic regression). Rising or
/// falling, whichever the pairs do on the whole.
///
/// None without pairs.
pub(super) fn fit_steps(mut pairs: Vec<(f64, f64)>) -> Option<StepFunction> {
    pairs.retain(|(signal, _)| signal.is_finite());
    let rises = covariance(&pairs) >= 0.0;
    let observed = pairs.into_iter().map(|(at, outcome)| Observed { at, outcome, weight: 1.0 });
    let blocks = isotonic_blocks(observed.collect(), MAX_STEPS, MIN_OBSERVATIONS, rises);
    let edges = blocks.iter().skip(1).map(|block| block.from).collect();
    StepFunction::new(edges, blocks.iter().map(Block::mean).collect()).ok()
}

fn covariance(pairs: &[(f64, f64)]) -> f64 {
    let count = pairs.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / count;
    let (signal, outcome) = (mean(|pair| pair.0), mean(|pair| pair.1));
    pairs.iter().map(|pair| (pair.0 - signal) * (pair.1 - outcome)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draws, SeededDraws};

    #[test]
    fn a_chance_that_rises_with_the_signal_is_found_again() {
        let mut draws = SeededDraws::new(1, &["steps"]);
        for falls in [false, true] {
            let pairs: Vec<(f64, f64)> = (0..40_000)
                .map(|_| {
                    let chance = draws.uniform();
                    let outcome = f64::from(u8::from(draws.bernoulli(chance)));
                    (if falls { -chance } else { chance }, outcome)
                })
                .collect();
            let steps = fit_steps(pairs).expect("pairs");
            for chance in [0.05, 0.3, 0.5, 0.7, 0.95] {
                let found = steps.at(if falls { -chance } else { chance });
                // Half a step of a sixteenth, and four standard deviations of a mean over 2,500
                // coins.
                assert!((found - chance).abs() < 0.032 + 0.04, "{found} for {chance}");
            }
        }
    }

    #[test]
    fn few_pairs_give_one_step_and_none_gives_none() {
        let steps = fit_steps(vec![(0.1, 1.0), (0.9, 0.0), (0.5, 0.5)]).expect("pairs");
        assert_eq!(steps, StepFunction::constant(0.5).expect("finite"));
        assert_eq!(fit_steps(Vec::new()), None);
    }

    #[test]
    fn the_function_is_monotone_whatever_the_noise() {
        let mut draws = SeededDraws::new(2, &["steps"]);
        let pairs: Vec<(f64, f64)> =
            (0..2000).map(|_| (draws.uniform(), draws.uniform())).collect();
        let steps = fit_steps(pairs.clone()).expect("pairs");
        let values: Vec<f64> = (0..100).map(|x| steps.at(f64::from(x) / 100.0)).collect();
        assert!(values.is_sorted() || values.is_sorted_by(|a, b| a >= b));
        let mean = pairs.iter().map(|pair| pair.1).sum::<f64>() / 2000.0;
        assert!(values.iter().all(|value| (value - mean).abs() < 0.2));
    }
}
