//! The exact output distribution of any code that takes `Draws`, computed by visiting every outcome
//! of positive probability.
//!
//! Tests prove losslessness with it: the shipped decoding loop runs over a probability table, once
//! for every sequence of random decisions. The distribution of its output must equal the target's.

use std::collections::BTreeMap;

use crate::Draws;

/// A source of draws that repeats recorded decisions and then takes the first untried outcome.
#[derive(Debug)]
pub struct Enumerator {
    path: Vec<DrawBranch>,
    depth: usize,
}

/// A random decision with several possible outcomes.
#[derive(Debug, PartialEq)]
struct DrawBranch {
    /// The outcomes of positive probability, each with its probability.
    outcomes: Vec<(usize, f64)>,
    /// The index into `outcomes` that the current run takes.
    taken: usize,
}

/// Runs `run` once for every path of draws of positive probability and returns each result with the
/// path's probability.
///
/// The probabilities sum to one. A result that several paths reach appears several times;
/// [`distribution_of`] merges them. A decision with only one possible outcome does not branch. The
/// number of runs grows exponentially with the number of draws in a run.
///
/// # Panics
/// If `run` is not a deterministic function of its draws.
///
/// ```
/// use draftsmith_theory::{Draws, enumerate};
/// let mut outcomes = enumerate(|draws| draws.bernoulli(0.25));
/// assert_eq!(outcomes, [(true, 0.25), (false, 0.75)]);
/// ```
pub fn enumerate<T>(mut run: impl FnMut(&mut Enumerator) -> T) -> Vec<(T, f64)> {
    let mut draws = Enumerator { path: Vec::new(), depth: 0 };
    let mut results = Vec::new();
    loop {
        draws.depth = 0;
        let result = run(&mut draws);
        assert_eq!(
            draws.depth,
            draws.path.len(),
            "the run must be a deterministic function of its draws"
        );
        let prob = draws.path.iter().map(|branch| branch.outcomes[branch.taken].1).product();
        results.push((result, prob));
        if !draws.advance() {
            return results;
        }
    }
}

/// Sums the probabilities of enumerated outcomes for each distinct result.
pub fn distribution_of<T: Ord>(outcomes: impl IntoIterator<Item = (T, f64)>) -> BTreeMap<T, f64> {
    let mut probs = BTreeMap::new();
    for (outcome, prob) in outcomes {
        *probs.entry(outcome).or_insert(0.0) += prob;
    }
    probs
}

impl Enumerator {
    /// Moves to the next path, depth first. Returns false if there is none.
    fn advance(&mut self) -> bool {
        while let Some(branch) = self.path.last_mut() {
            branch.taken += 1;
            if branch.taken < branch.outcomes.len() {
                return true;
            }
            self.path.pop();
        }
        false
    }

    fn choose(&mut self, outcomes: Vec<(usize, f64)>) -> usize {
        if let [(outcome, _)] = outcomes[..] {
            return outcome;
        }
        if self.depth == self.path.len() {
            self.path.push(DrawBranch { outcomes, taken: 0 });
        } else {
            assert_eq!(
                self.path[self.depth].outcomes, outcomes,
                "the run must be a deterministic function of its draws"
            );
        }
        let branch = &self.path[self.depth];
        self.depth += 1;
        branch.outcomes[branch.taken].0
    }
}

impl Draws for Enumerator {
    fn bernoulli(&mut self, prob: f64) -> bool {
        assert!(!prob.is_nan(), "a probability is a number");
        if prob >= 1.0 {
            return true;
        }
        if prob <= 0.0 {
            return false;
        }
        self.choose(vec![(1, prob), (0, 1.0 - prob)]) == 1
    }

    fn categorical(&mut self, weights: &[f64]) -> usize {
        let total: f64 = weights.iter().sum();
        assert!(
            total > 0.0 && total.is_finite(),
            "weights must have a positive finite sum, not {total}"
        );
        let positive = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
        self.choose(positive.map(|(index, weight)| (index, weight / total)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws a path whose later draws depend on its earlier ones.
    fn branching_run(draws: &mut impl Draws) -> Vec<usize> {
        let mut path = vec![draws.categorical(&[0.2, 0.0, 0.3, 0.5])];
        while path.len() < 4 && draws.bernoulli(0.1 + 0.2 * path[path.len() - 1] as f64) {
            path.push(draws.categorical(&[1.0, 2.0]));
        }
        path
    }

    #[test]
    fn probabilities_sum_to_one() {
        let outcomes = enumerate(branching_run);
        assert!(outcomes.iter().all(|(_, prob)| *prob > 0.0));
        // Sums of a few dozen f64 products.
        assert!((outcomes.iter().map(|(_, prob)| prob).sum::<f64>() - 1.0).abs() < 1e-14);
    }

    #[test]
    fn every_path_is_visited_once() {
        let outcomes =
            enumerate(|draws| (0..3).map(|_| draws.categorical(&[1.0, 1.0])).collect::<Vec<_>>());
        let paths = distribution_of(outcomes.iter().cloned());
        assert_eq!(outcomes.len(), 8);
        assert_eq!(paths.len(), 8);
        assert!(paths.values().all(|prob| *prob == 0.125));
    }

    #[test]
    fn seeded_draws_approach_the_distribution() {
        let exact = distribution_of(enumerate(branching_run));
        let mut draws = crate::SeededDraws::new(1, &["frequencies"]);
        let sampled =
            distribution_of((0..40_000).map(|_| (branching_run(&mut draws), 1.0 / 40_000.0)));
        for (path, prob) in &exact {
            let share = sampled.get(path).copied().unwrap_or(0.0);
            // Five standard deviations of a share of 40,000.
            assert!(
                (share - prob).abs() < 5.0 * (prob * (1.0 - prob) / 40_000.0).sqrt(),
                "{path:?}"
            );
        }
        assert!(sampled.keys().all(|path| exact.contains_key(path)));
    }

    #[test]
    fn certain_draws_do_not_branch() {
        let outcomes = enumerate(|draws| {
            (
                draws.bernoulli(0.0),
                draws.bernoulli(1.0),
                draws.bernoulli(1.5),
                draws.categorical(&[0.0, 3.0, 0.0]),
            )
        });
        assert_eq!(outcomes, [((false, true, true, 1), 1.0)]);
    }

    #[test]
    #[should_panic(expected = "deterministic function of its draws")]
    fn hidden_state_is_detected() {
        let mut num_runs = 0;
        enumerate(|draws| {
            num_runs += 1;
            draws.bernoulli(0.5 / num_runs as f64);
            draws.bernoulli(0.5);
        });
    }
}
