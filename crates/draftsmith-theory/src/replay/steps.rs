//! Step functions fitted to what was recorded.

use crate::StepFunction;

/// The most steps of a fitted function.
const MOST_STEPS: usize = 16;
/// The fewest observations a step stands on.
const LEAST_OBSERVATIONS: usize = 25;

/// Fits a monotone step function to pairs of a signal and an outcome: equally many pairs a step, then neighbours that
/// stand in the wrong order pooled (isotonic regression). Rising or falling, whichever the pairs do on the whole.
///
/// None without pairs.
pub(super) fn fit_steps(mut pairs: Vec<(f64, f64)>) -> Option<StepFunction> {
    pairs.retain(|(signal, _)| signal.is_finite());
    pairs.sort_by(|one, other| one.0.total_cmp(&other.0));
    let num_steps = (pairs.len() / LEAST_OBSERVATIONS).clamp(1, MOST_STEPS);
    let per_step = pairs.len().div_ceil(num_steps).max(1);
    let mut steps: Vec<Step> = Vec::with_capacity(num_steps);
    for chunk in pairs.chunks(per_step) {
        let step = Step {
            from: chunk[0].0,
            weight: chunk.len() as f64,
            total: chunk.iter().map(|(_, outcome)| outcome).sum(),
        };
        match steps.last_mut() {
            // Equal signals belong to one step.
            Some(last) if last.from == step.from => last.take_in(&step),
            _ => steps.push(step),
        }
    }
    let rises = covariance(&pairs) >= 0.0;
    let mut pooled: Vec<Step> = Vec::with_capacity(steps.len());
    for mut step in steps {
        while let Some(last) = pooled.last()
            && (if rises { last.mean() >= step.mean() } else { last.mean() <= step.mean() })
        {
            let from = last.from;
            step.take_in(last);
            step.from = from;
            pooled.pop();
        }
        pooled.push(step);
    }
    let edges = pooled.iter().skip(1).map(|step| step.from).collect();
    let values: Vec<f64> = pooled.iter().map(Step::mean).collect();
    StepFunction::new(edges, values).ok()
}

#[derive(Debug)]
struct Step {
    from: f64,
    weight: f64,
    total: f64,
}

impl Step {
    fn mean(&self) -> f64 {
        self.total / self.weight
    }

    fn take_in(&mut self, other: &Self) {
        self.weight += other.weight;
        self.total += other.total;
    }
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
                // Half a step of a sixteenth, and four standard deviations of a mean over 2,500 coins.
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
