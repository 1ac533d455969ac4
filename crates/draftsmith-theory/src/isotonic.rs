//! Isotonic regression: the monotone function that fits weighted observations best.
//!
//! It first gathers observations into blocks of about equal weight, so that each mean covers enough
//! of them. Then it pools adjacent blocks in the wrong order (pool adjacent violators), which
//! minimises the weighted sum of squares among monotone functions. Stop rules' step functions and
//! calibrations are made of these blocks.

/// Tolerance for rounding in a block's weight, so that it does not take in another observation.
const SLACK: f64 = 1e-9;

/// An observation of the function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Observed {
    /// The argument: a signal or a prediction.
    pub(crate) at: f64,
    /// The observed value.
    pub(crate) outcome: f64,
    /// Above 0.
    pub(crate) weight: f64,
}

/// Adjacent observations that share one mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Block {
    /// The smallest argument.
    pub(crate) from: f64,
    /// Σ weight.
    pub(crate) weight: f64,
    sum_at: f64,
    sum_outcome: f64,
}

impl Block {
    fn of(observed: &Observed) -> Self {
        let Observed { at, outcome, weight } = *observed;
        Self { from: at, weight, sum_at: weight * at, sum_outcome: weight * outcome }
    }

    /// The mean outcome.
    pub(crate) fn mean(&self) -> f64 {
        self.sum_outcome / self.weight
    }

    /// The mean argument.
    pub(crate) fn centre(&self) -> f64 {
        self.sum_at / self.weight
    }

    /// Merges the next block into this one.
    fn merge(&mut self, next: &Self) {
        self.weight += next.weight;
        self.sum_at += next.sum_at;
        self.sum_outcome += next.sum_outcome;
    }
}

/// Blocks with ascending arguments and monotone means, rising if `rises`, else falling: at most
/// `max_blocks`, each of at least `min_weight` unless the total is less. Equal arguments share a
/// block. Observations without weight or with an argument that is not finite are ignored.
pub(crate) fn isotonic_blocks(
    mut observed: Vec<Observed>,
    max_blocks: usize,
    min_weight: f64,
    rises: bool,
) -> Vec<Block> {
    observed.retain(|observed| observed.at.is_finite() && observed.weight > 0.0);
    observed.sort_by(|one, other| one.at.total_cmp(&other.at));
    let weight: f64 = observed.iter().map(|observed| observed.weight).sum();
    let num_blocks = ((weight / min_weight) as usize).clamp(1, max_blocks);
    let per_block = (weight / num_blocks as f64).max(min_weight);
    let mut blocks: Vec<Block> = Vec::with_capacity(num_blocks);
    for equals in observed.chunk_by(|one, other| one.at == other.at) {
        let mut tied = Block::of(&equals[0]);
        for observed in &equals[1..] {
            tied.merge(&Block::of(observed));
        }
        match blocks.last_mut() {
            Some(last) if last.weight < per_block * (1.0 - SLACK) => last.merge(&tied),
            _ => blocks.push(tied),
        }
    }
    if let [.., before, last] = &mut blocks[..]
        && last.weight < min_weight * (1.0 - SLACK)
    {
        before.merge(last);
        blocks.pop();
    }
    pooled(blocks, rises)
}

/// Pools adjacent blocks whose means do not rise, or do not fall.
fn pooled(blocks: Vec<Block>, rises: bool) -> Vec<Block> {
    let mut pooled: Vec<Block> = Vec::with_capacity(blocks.len());
    for mut block in blocks {
        while let Some(last) = pooled.last_mut()
            && (if rises { last.mean() >= block.mean() } else { last.mean() <= block.mean() })
        {
            last.merge(&block);
            block = *last;
            pooled.pop();
        }
        pooled.push(block);
    }
    pooled
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeededDraws;

    /// Outcomes on a grid, so that some are equal, with unequal weights.
    fn random(seed: u64, len: usize) -> Vec<Observed> {
        let mut draws = SeededDraws::new(seed, &["isotonic"]);
        let mut observed = |at: usize| Observed {
            at: at as f64,
            outcome: (draws.uniform() * 5.0).floor(),
            weight: 0.25 + draws.uniform(),
        };
        (0..len).map(&mut observed).collect()
    }

    /// The fitted value at every observation, starting from one block per observation.
    fn fitted(observed: &[Observed], rises: bool) -> Vec<f64> {
        let blocks = pooled(observed.iter().map(Block::of).collect(), rises);
        let block_of = |at: f64| &blocks[blocks.partition_point(|block| block.from <= at) - 1];
        observed.iter().map(|observed| block_of(observed.at).mean()).collect()
    }

    /// The least-squares fit among all partitions into blocks whose means rise.
    fn by_brute_force(observed: &[Observed]) -> Vec<f64> {
        let mut best: Option<(f64, Vec<f64>)> = None;
        for cuts in 0..1u32 << (observed.len() - 1) {
            let mut values: Vec<f64> = Vec::new();
            let mut start = 0;
            for end in 1..=observed.len() {
                if end < observed.len() && cuts >> (end - 1) & 1 == 0 {
                    continue;
                }
                let block = &observed[start..end];
                let weight: f64 = block.iter().map(|one| one.weight).sum();
                let mean = block.iter().map(|one| one.weight * one.outcome).sum::<f64>() / weight;
                values.extend(block.iter().map(|_| mean));
                start = end;
            }
            let squares: f64 = observed
                .iter()
                .zip(&values)
                .map(|(one, value)| one.weight * (one.outcome - value).powi(2))
                .sum();
            if values.is_sorted() && best.as_ref().is_none_or(|(least, _)| squares < *least) {
                best = Some((squares, values));
            }
        }
        best.expect("one block is always in order").1
    }

    #[test]
    fn pooling_gives_the_least_squares_of_all_monotone_fits() {
        for seed in 0..40 {
            let observed = random(seed, 8);
            let expected = by_brute_force(&observed);
            for (found, expected) in fitted(&observed, true).iter().zip(&expected) {
                // A mean of up to eight numbers below 5, summed in a different order.
                assert!((found - expected).abs() < 1e-12, "{found} for {expected}, seed {seed}");
            }
            let mirrored: Vec<Observed> =
                observed.iter().map(|one| Observed { outcome: -one.outcome, ..*one }).collect();
            let falling = fitted(&mirrored, false);
            let rising = fitted(&observed, true);
            assert!(falling.iter().zip(&rising).all(|(one, other)| *one == -other));
        }
    }

    #[test]
    fn a_weight_counts_as_that_many_observations() {
        let weighted: Vec<Observed> = random(7, 200)
            .into_iter()
            .map(|one| Observed { weight: (1.0 + 4.0 * one.weight).floor(), ..one })
            .collect();
        let repeated: Vec<Observed> = weighted
            .iter()
            .flat_map(|one| vec![Observed { weight: 1.0, ..*one }; one.weight as usize])
            .collect();
        let blocks = |observed| isotonic_blocks(observed, 16, 25.0, true);
        let (one, other) = (blocks(weighted), blocks(repeated));
        assert_eq!(one.len(), other.len());
        assert!(one.len() > 1);
        for (one, other) in one.iter().zip(&other) {
            assert_eq!((one.from, one.weight), (other.from, other.weight));
            assert!((one.mean() - other.mean()).abs() < 1e-12);
            assert!((one.centre() - other.centre()).abs() < 1e-12);
        }
    }

    #[test]
    fn equal_arguments_share_a_block_and_blocks_have_the_minimum_weight() {
        let observed: Vec<Observed> = random(3, 300)
            .into_iter()
            .map(|one| Observed { at: (one.at / 7.0).floor(), outcome: one.at, weight: 1.0 })
            .collect();
        let blocks = isotonic_blocks(observed, 20, 30.0, true);
        assert!(blocks.len() > 5);
        assert!(blocks.windows(2).all(|two| two[0].from < two[1].from));
        assert!(blocks.iter().all(|block| block.weight >= 30.0));
        assert_eq!(isotonic_blocks(random(3, 5), 20, 30.0, true).len(), 1);
        assert_eq!(isotonic_blocks(Vec::new(), 20, 30.0, true), []);
        let nothing = Observed { at: 1.0, outcome: 1.0, weight: 0.0 };
        assert_eq!(isotonic_blocks(vec![nothing], 20, 30.0, true), []);
    }
}
