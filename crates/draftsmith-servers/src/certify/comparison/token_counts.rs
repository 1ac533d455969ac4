//! The likelihood ratio of token counts at a tested prefix, its simulation, and the smallest
//! difference that it detects. [`super::sampled`] asks the servers.

use std::collections::BTreeMap;

use draftsmith_theory::SeededDraws;

/// The minimum expected number of answers in a cell. Less frequent tokens share one cell.
const LEAST_EXPECTED: f64 = 5.0;

/// A tested prefix: the number of answers in each cell of next tokens, and its probability.
pub(super) struct TokenNode {
    pub(super) prefix: Vec<u32>,
    pub(super) counts: Vec<usize>,
    probs: Vec<f64>,
    /// The mean log-probability of the tokens in each cell.
    log_probs: Vec<f64>,
}

/// A statistic of the answers, beside the same statistic of simulated answers.
pub(super) struct Simulated {
    found: f64,
    pub(super) num: usize,
    /// The number of simulations in which the statistic was at least as large.
    num_worse: usize,
    sum: f64,
    sum_of_squares: f64,
}

impl Simulated {
    pub(super) fn of(found: f64) -> Self {
        Self { found, num: 0, num_worse: 0, sum: 0.0, sum_of_squares: 0.0 }
    }

    pub(super) fn add(&mut self, value: f64) {
        self.num += 1;
        self.num_worse += usize::from(value >= self.found);
        self.sum += value;
        self.sum_of_squares += value * value;
    }

    /// Computes the probability of a statistic at least as large. If no simulation reached it, we
    /// take the tail of a scaled χ² with the simulations' mean and variance (Satterthwaite). Such a
    /// p-value can be small enough to stay significant when many tests share one error rate.
    pub(super) fn p_value(&self) -> f64 {
        let least = (self.num_worse + 1) as f64 / (self.num + 1) as f64;
        if self.num_worse > 0 || self.num < 2 {
            return least;
        }
        let mean = self.sum / self.num as f64;
        let variance = self.sum_of_squares / self.num as f64 - mean * mean;
        if mean <= 0.0 || variance <= 0.0 {
            return least;
        }
        // Wilson and Hilferty's approximation, with 2·mean²/variance degrees of freedom.
        let spread = variance / (9.0 * mean * mean);
        let normal = ((self.found / mean).cbrt() - (1.0 - spread)) / spread.sqrt();
        least.min(0.5 * libm::erfc(normal / std::f64::consts::SQRT_2))
    }
}

/// The fit of token counts to probabilities.
#[derive(Clone, Copy, Default)]
pub(super) struct Fit {
    /// The likelihood ratio G.
    pub(super) ratio: f64,
    /// The sum of log-probabilities minus its expectation.
    pub(super) surprise: f64,
}

impl Fit {
    pub(super) fn sum(all: &[Self]) -> Self {
        all.iter().fold(Self::default(), |sum, it| Self {
            ratio: sum.ratio + it.ratio,
            surprise: sum.surprise + it.surprise,
        })
    }
}

impl TokenNode {
    /// Divides the tokens after a prefix into cells: one for each frequent token, and one for all
    /// others. `None` if there is only one cell.
    pub(super) fn of(prefix: &[u32], next: &[u32], probs: &BTreeMap<u32, f64>) -> Option<Self> {
        let num = next.len() as f64;
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        next.iter().for_each(|id| *counts.entry(*id).or_default() += 1);
        let mut node = Self {
            prefix: prefix.to_vec(),
            counts: Vec::new(),
            probs: Vec::new(),
            log_probs: Vec::new(),
        };
        let mut rest = 1.0;
        for (id, prob) in probs.iter().filter(|(_, prob)| **prob * num >= LEAST_EXPECTED) {
            node.counts.push(counts.remove(id).unwrap_or(0));
            node.probs.push(*prob);
            node.log_probs.push(prob.ln());
            rest -= prob;
        }
        // Rounded probabilities may sum to more than 1, and rounding may allow tokens of
        // probability zero.
        let rest = rest.max(1e-6);
        node.counts.push(counts.into_values().sum());
        node.probs.push(rest);
        node.log_probs.push(rest.ln());
        let total: f64 = node.probs.iter().sum();
        node.probs.iter_mut().for_each(|prob| *prob /= total);
        (node.counts.len() > 1).then_some(node)
    }

    pub(super) fn num(&self) -> usize {
        self.counts.iter().sum()
    }

    pub(super) fn fit(&self, counts: &[usize]) -> Fit {
        let num: usize = counts.iter().sum();
        let mut fit = Fit::default();
        for ((count, prob), log_prob) in counts.iter().zip(&self.probs).zip(&self.log_probs) {
            let (count, expected) = (*count as f64, *prob * num as f64);
            if count > 0.0 {
                fit.ratio += 2.0 * count * (count / expected).ln();
            }
            fit.surprise += (count - expected) * log_prob;
        }
        fit
    }

    /// Redraws the prefix's next tokens from the reference's distribution, and counts them by cell.
    /// First, each log-probability changes at random by up to `rounding`, as a server's does that
    /// rounds otherwise than the reference.
    pub(super) fn simulate(&self, rounding: f64, draws: &mut SeededDraws) -> Vec<usize> {
        let mut change = |prob: &f64| prob * (rounding * (2.0 * draws.uniform() - 1.0)).exp();
        let mut probs: Vec<f64> = self.probs.iter().map(&mut change).collect();
        let total: f64 = probs.iter().sum();
        probs.iter_mut().for_each(|prob| *prob /= total);
        // Cells are drawn one by one, each as a share of the remaining tokens.
        let (mut left, mut mass) = (self.num(), 1.0);
        let mut counts = Vec::with_capacity(probs.len());
        for prob in &probs {
            let share = (prob / mass).clamp(0.0, 1.0);
            let count = draws.binomial(left, share);
            counts.push(count);
            left -= count;
            mass = (mass - prob).max(f64::MIN_POSITIVE);
        }
        // Rounding may leave tokens over for the last cell.
        if let Some(last) = counts.last_mut() {
            *last += left;
        }
        counts
    }

    /// Computes the total variation that is found with probability 0.9, given the numbers of cells
    /// and tokens: by a test at level 1e-5, to which Holm's method lowers 0.01 for 1,000 tests, and
    /// again at level 0.001. What rounding explains cannot be told.
    pub(super) fn detectable(&self, rounding: f64) -> f64 {
        // The non-centrality λ of χ² by degrees of freedom, for these levels and power.
        const LAMBDA: [(f64, f64); 7] = [
            (1.0, 32.9),
            (2.0, 36.3),
            (4.0, 41.0),
            (9.0, 48.9),
            (19.0, 59.7),
            (29.0, 67.8),
            (49.0, 80.6),
        ];
        let freedom = (self.probs.len() - 1) as f64;
        let above = LAMBDA.iter().position(|(df, _)| *df >= freedom).unwrap_or(LAMBDA.len() - 1);
        let ((low, from), (high, to)) = (LAMBDA[above.saturating_sub(1)], LAMBDA[above]);
        let share = if high > low { ((freedom - low) / (high - low)).clamp(0.0, 1.0) } else { 0.0 };
        let lambda = from + share * (to - from);
        // A change of each probability by a share that is uniform up to the rounding.
        let explained = rounding / 4.0;
        (lambda / (4.0 * self.num() as f64)).sqrt() + explained
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detectable_distances_are_those_of_the_table() {
        // With 4,890 answers and 10 cells, a total variation of 0.05 is found.
        let node = TokenNode {
            prefix: vec![],
            counts: vec![489; 10],
            probs: vec![0.1; 10],
            log_probs: vec![0.0; 10],
        };
        assert!((node.detectable(0.0) - 0.05).abs() < 1e-3, "{}", node.detectable(0.0));
        assert!((node.detectable(0.08) - 0.07).abs() < 1e-3);
    }
}
