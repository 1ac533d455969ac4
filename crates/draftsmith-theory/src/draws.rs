//! The source of all randomness: a trait with two kinds of draw, and its seeded generator.
//!
//! With `SeededDraws`, code that takes `Draws` gives one random output. With the `Enumerator` of
//! `enumerate` it gives the exact distribution of its outputs. The trait therefore offers discrete
//! decisions and no uniform numbers, because an enumerator cannot visit a continuum.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Binomial, Distribution};
use sha2::{Digest, Sha256};

/// A source of random decisions.
pub trait Draws {
    /// Returns true with probability `prob`: if r < `prob` for r uniform in [0, 1).
    ///
    /// The result is never true for `prob` <= 0 and always true for `prob` >= 1. The inequality is
    /// strict because the published r <= p/q accepts a token of probability 0 at r = 0.
    fn bernoulli(&mut self, prob: f64) -> bool;

    /// Draws an index in proportion to `weights`, which are non-negative and need not sum to one.
    ///
    /// An index of weight 0 is never returned.
    ///
    /// # Panics
    /// If the weights do not have a positive finite sum.
    fn categorical(&mut self, weights: &[f64]) -> usize;
}

/// A reproducible source of draws: a ChaCha8 generator keyed by a seed and a named stream.
///
/// Each (seed, stream) has a separate generator, so the draws of a row do not depend on the rows
/// before it, on their order or on the thread.
///
/// ```
/// use draftsmith_theory::{Draws, SeededDraws};
/// let mut draws = SeededDraws::new(42, &["alpaca#17", "draft-tokens"]);
/// assert!(draws.categorical(&[0.0, 0.3, 0.7]) > 0);
/// ```
#[derive(Debug, Clone)]
pub struct SeededDraws {
    rng: ChaCha8Rng,
}

impl SeededDraws {
    /// Creates the generator of one stream, which is named by parts such as a row id and a purpose.
    ///
    /// The key is the SHA-256 of the seed, the number of parts, and each part's length and bytes,
    /// so that `["ab", "c"]` and `["a", "bc"]` are different streams.
    pub fn new(seed: u64, stream: &[&str]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(seed.to_le_bytes());
        hasher.update((stream.len() as u64).to_le_bytes());
        for part in stream {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self { rng: ChaCha8Rng::from_seed(hasher.finalize().into()) }
    }

    /// Draws a uniform number in [0, 1), a multiple of 2^-53.
    ///
    /// It is implemented here and not by a library, so that a seed gives the same numbers for ever.
    pub fn uniform(&mut self) -> f64 {
        const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
        (self.rng.next_u64() >> 11) as f64 * UNIT
    }

    /// Shuffles items by Fisher–Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            // At most `last`, since the uniform number is below 1.
            items.swap(last, (self.uniform() * (last + 1) as f64) as usize);
        }
    }

    /// Draws the number of successes in `num` trials, each with success probability `prob`.
    ///
    /// # Panics
    /// If `prob` is not in [0, 1].
    pub fn binomial(&mut self, num: usize, prob: f64) -> usize {
        let binomial = Binomial::new(num as u64, prob).expect("a probability");
        binomial.sample(&mut self.rng) as usize
    }
}

impl Draws for SeededDraws {
    fn bernoulli(&mut self, prob: f64) -> bool {
        debug_assert!(!prob.is_nan(), "a probability is a number");
        // A certain outcome consumes a number too, so that later draws do not depend on `prob`.
        self.uniform() < prob
    }

    fn categorical(&mut self, weights: &[f64]) -> usize {
        let total = weights.chunks(CHUNK).map(chunk_sum).sum::<f64>();
        assert!(
            total > 0.0 && total.is_finite(),
            "weights must have a positive finite sum, not {total}"
        );
        find_cumulative(weights, self.uniform() * total)
    }
}

/// The number of weights per partial sum: enough for vector additions, few enough to search.
const CHUNK: usize = 1024;

/// Returns the first index whose cumulative weight exceeds `threshold`. If rounding leaves none,
/// returns the last index of positive weight.
fn find_cumulative(weights: &[f64], threshold: f64) -> usize {
    let mut before = 0.0;
    for (chunk_index, chunk) in weights.chunks(CHUNK).enumerate() {
        let through = before + chunk_sum(chunk);
        if through > threshold {
            let mut cumulative = before;
            for (index, &weight) in chunk.iter().enumerate() {
                cumulative += weight;
                if weight > 0.0 && cumulative > threshold {
                    return chunk_index * CHUNK + index;
                }
            }
            // Added one by one, the chunk's weights are a rounding error below their wide sum.
            return chunk_index * CHUNK + last_positive(chunk);
        }
        before = through;
    }
    last_positive(weights)
}

fn last_positive(weights: &[f64]) -> usize {
    weights.iter().rposition(|&weight| weight > 0.0).expect("a positive sum has a positive term")
}

/// Sums a chunk in eight lanes, which the compiler turns into vector additions.
fn chunk_sum(chunk: &[f64]) -> f64 {
    let (eights, rest) = chunk.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for eight in eights {
        for (lane, weight) in lanes.iter_mut().zip(eight) {
            *lane += weight;
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().sum::<f64>()
}

/// Draws a random distribution with some zeros.
#[cfg(test)]
pub(crate) fn random_probs(rng: &mut SeededDraws, len: usize) -> Vec<f64> {
    loop {
        let weights: Vec<f64> = (0..len)
            .map(|_| if rng.bernoulli(0.3) { 0.0 } else { rng.uniform().powi(3) })
            .collect();
        let total: f64 = weights.iter().sum();
        if total > 0.0 {
            return weights.iter().map(|weight| weight / total).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_uniforms(seed: u64, stream: &[&str]) -> Vec<f64> {
        let mut draws = SeededDraws::new(seed, stream);
        (0..8).map(|_| draws.uniform()).collect()
    }

    #[test]
    fn binomials_have_their_mean_and_variance() {
        let mut draws = SeededDraws::new(2, &["binomial"]);
        for (num, prob) in [(50, 0.1), (7, 0.5), (400, 0.02), (900, 0.4)] {
            let drawn: Vec<f64> = (0..20_000).map(|_| draws.binomial(num, prob) as f64).collect();
            let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
            let variance =
                drawn.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / drawn.len() as f64;
            let expected = num as f64 * prob;
            assert!((mean / expected - 1.0).abs() < 0.03, "{mean} {expected}");
            assert!((variance / (expected * (1.0 - prob)) - 1.0).abs() < 0.06, "{variance}");
        }
        assert_eq!([draws.binomial(5, 0.0), draws.binomial(5, 1.0)], [0, 5]);
    }

    #[test]
    fn a_stream_depends_only_on_seed_and_name() {
        let reference = first_uniforms(7, &["row#1", "draft"]);
        assert_eq!(reference, first_uniforms(7, &["row#1", "draft"]));
        for (seed, stream) in [
            (8, &["row#1", "draft"][..]),
            (7, &["row#2", "draft"]),
            (7, &["row#1", "target"]),
            (7, &["row#1draft"]),
            (7, &["row#1", "draft", ""]),
            (7, &["row#1d", "raft"]),
            (7, &[]),
        ] {
            assert_ne!(reference, first_uniforms(seed, stream), "seed {seed}, stream {stream:?}");
        }
    }

    #[test]
    fn streams_are_uncorrelated() {
        let mut products = 0.0;
        for row in 0..2000 {
            let id = format!("row#{row}");
            let first = SeededDraws::new(1, &[&id, "a"]).uniform() - 0.5;
            let second = SeededDraws::new(1, &[&id, "b"]).uniform() - 0.5;
            products += first * second * 12.0;
        }
        // The mean of 2000 products of unit variance has a standard error of 0.022.
        assert!((products / 2000.0).abs() < 0.09);
    }

    #[test]
    fn certain_draws_are_certain_and_consume_one_uniform() {
        let mut certain = SeededDraws::new(3, &[]);
        let mut plain = SeededDraws::new(3, &[]);
        for _ in 0..1000 {
            assert!(!certain.bernoulli(0.0));
            assert!(certain.bernoulli(1.0));
            assert!(certain.bernoulli(f64::INFINITY));
            for _ in 0..3 {
                plain.uniform();
            }
        }
        assert_eq!(certain.uniform(), plain.uniform());
    }

    #[test]
    fn categorical_follows_its_weights_and_avoids_zero() {
        let weights = [0.0, 2.0, 0.0, 1.0, 5.0, 0.0];
        let mut counts = [0usize; 6];
        let mut draws = SeededDraws::new(11, &["frequencies"]);
        for _ in 0..80_000 {
            counts[draws.categorical(&weights)] += 1;
        }
        for (count, weight) in counts.iter().zip(weights) {
            let prob = weight / 8.0;
            // Five standard deviations of a binomial count.
            let slack = 5.0 * (80_000.0 * prob * (1.0 - prob)).sqrt();
            assert!((*count as f64 - 80_000.0 * prob).abs() <= slack, "{counts:?}");
        }
    }

    #[test]
    fn find_cumulative_is_the_plain_walk() {
        let mut draws = SeededDraws::new(5, &["walk"]);
        for len in [1, 7, 8, 1023, 1024, 1025, 5000] {
            // Multiples of 2^-10 below 1: their sums are exact in any order, so both walks must
            // agree exactly.
            let weights: Vec<f64> =
                (0..len).map(|_| (draws.uniform() * 4.0).floor() / 1024.0).collect();
            let total: f64 = weights.iter().sum();
            if total == 0.0 {
                continue;
            }
            for _ in 0..200 {
                let threshold = draws.uniform() * total;
                let mut cumulative = 0.0;
                let plain = weights.iter().position(|weight| {
                    cumulative += weight;
                    cumulative > threshold
                });
                assert_eq!(Some(find_cumulative(&weights, threshold)), plain);
            }
        }
    }

    #[test]
    fn a_threshold_beyond_the_sum_falls_on_the_last_positive_weight() {
        assert_eq!(find_cumulative(&[0.5, 0.5, 0.0], 1.0), 1);
        assert_eq!(find_cumulative(&[0.0, 0.5], 0.0), 1);
    }

    #[test]
    #[should_panic(expected = "positive finite sum")]
    fn weights_without_mass_are_a_bug() {
        SeededDraws::new(0, &[]).categorical(&[0.0, 0.0]);
    }
}
