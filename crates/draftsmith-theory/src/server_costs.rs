//! What a round takes on a server, by the number of requests in it and of candidates, and the throughput that
//! follows.
//!
//! A round of B requests with K candidates each takes T(B, K) and yields B·m tokens, where m is the mean number of
//! tokens per round and request. So the throughput is B·m / T(B, K); the order of accepted and rejected candidates
//! does not matter. T is measured where no candidate is accepted, so that a round is the time between two tokens.

use std::collections::BTreeMap;

use crate::TheoryError;

/// The share of block medians below the estimate of a cell: noise on a shared machine only adds time.
const QUANTILE: f64 = 0.25;

/// Measured rounds of one batch size and number of candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerCell {
    /// B: requests side by side.
    pub batch_size: usize,
    /// K: candidates per round and request; 0 for a server without speculation.
    pub num_candidates: usize,
    /// The median round of each block of rounds, in seconds.
    pub block_seconds: Vec<f64>,
}

/// The rounds of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerCosts {
    cells: Vec<ServerCell>,
}

impl ServerCosts {
    /// Costs from cells. At least one is without speculation.
    ///
    /// # Errors
    /// If a time or batch size is not positive, a cell is there twice or has no block, or none is without speculation.
    pub fn new(cells: Vec<ServerCell>) -> Result<Self, TheoryError> {
        let key = |cell: &ServerCell| (cell.num_candidates, cell.batch_size);
        for (nth, cell) in cells.iter().enumerate() {
            let is_time = |seconds: &f64| *seconds > 0.0 && seconds.is_finite();
            let is_valid = cell.batch_size > 0
                && !cell.block_seconds.is_empty()
                && cell.block_seconds.iter().all(is_time)
                && cells[..nth].iter().all(|other| key(other) != key(cell));
            if !is_valid {
                let (num_candidates, batch_size) = key(cell);
                return Err(TheoryError::ServerCell { batch_size, num_candidates });
            }
        }
        match cells.iter().any(|cell| cell.num_candidates == 0) {
            true => Ok(Self { cells }),
            false => Err(TheoryError::NoPlainServer),
        }
    }

    /// The batch sizes that were measured without speculation, ascending.
    pub fn batch_sizes(&self) -> Vec<usize> {
        let plain = self.cells.iter().filter(|cell| cell.num_candidates == 0);
        let mut sizes: Vec<usize> = plain.map(|cell| cell.batch_size).collect();
        sizes.sort_unstable();
        sizes
    }

    /// The numbers of candidates that were measured, ascending, without 0.
    pub fn lengths(&self) -> Vec<usize> {
        let mut lengths: Vec<usize> = self.cells.iter().map(|cell| cell.num_candidates).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.retain(|length| *length > 0);
        lengths
    }

    /// The table of rounds, from all blocks.
    pub fn table(&self) -> RoundTable {
        self.table_of(|_, num| (0..num).collect())
    }

    /// The table from some blocks of each cell: `pick` gets the cell's index and its number of blocks, and returns
    /// indices of blocks; an index may occur twice.
    pub fn table_of(&self, mut pick: impl FnMut(usize, usize) -> Vec<usize>) -> RoundTable {
        let mut seconds: BTreeMap<usize, BTreeMap<usize, f64>> = BTreeMap::new();
        for (nth, cell) in self.cells.iter().enumerate() {
            let blocks = pick(nth, cell.block_seconds.len());
            let mut blocks: Vec<f64> =
                blocks.into_iter().map(|at| cell.block_seconds[at]).collect();
            blocks.sort_by(f64::total_cmp);
            let at = (QUANTILE * (blocks.len() - 1) as f64).round() as usize;
            seconds.entry(cell.num_candidates).or_default().insert(cell.batch_size, blocks[at]);
        }
        // More requests and more candidates never take less: each pass keeps the order of the other.
        for _ in 0..2 {
            for by_batch in seconds.values_mut() {
                rise(by_batch.values_mut().collect());
            }
            let sizes: Vec<usize> = seconds.values().flat_map(|it| it.keys().copied()).collect();
            for size in sizes {
                rise(seconds.values_mut().filter_map(|it| it.get_mut(&size)).collect());
            }
        }
        RoundTable { seconds }
    }
}

/// Replaces values by the nearest ones that never fall: their means over stretches that fall.
fn rise(values: Vec<&mut f64>) {
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for value in &values {
        pools.push((**value, 1));
        while let [.., (before, num_before), (last, num)] = pools[..]
            && before > last
        {
            let total = num_before + num;
            let mean = (before * num_before as f64 + last * num as f64) / total as f64;
            pools.truncate(pools.len() - 2);
            pools.push((mean, total));
        }
    }
    let fitted = pools.into_iter().flat_map(|(mean, num)| std::iter::repeat_n(mean, num));
    values.into_iter().zip(fitted).for_each(|(value, fitted)| *value = fitted);
}

/// Seconds per round, monotone in both numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundTable {
    /// By number of candidates and batch size.
    seconds: BTreeMap<usize, BTreeMap<usize, f64>>,
}

impl RoundTable {
    /// Seconds of a round: measured, or on the line between the batch sizes beside it. `None` outside of what was
    /// measured.
    pub fn seconds(&self, batch_size: f64, num_candidates: usize) -> Option<f64> {
        let by_batch = self.seconds.get(&num_candidates)?;
        let below = by_batch.iter().rfind(|(size, _)| **size as f64 <= batch_size)?;
        let above = by_batch.iter().find(|(size, _)| **size as f64 >= batch_size)?;
        let [(from, low), (to, high)] =
            [below, above].map(|(size, seconds)| (*size as f64, *seconds));
        let share = if to > from { (batch_size - from) / (to - from) } else { 0.0 };
        Some(low + share * (high - low))
    }

    /// Tokens per second of all requests together, if a round yields this many tokens per request.
    pub fn throughput(
        &self,
        batch_size: f64,
        num_candidates: usize,
        tokens_per_round: f64,
    ) -> Option<f64> {
        Some(batch_size * tokens_per_round / self.seconds(batch_size, num_candidates)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(batch_size: usize, num_candidates: usize, seconds: &[f64]) -> ServerCell {
        ServerCell { batch_size, num_candidates, block_seconds: seconds.to_vec() }
    }

    fn close(found: Option<f64>, expected: f64) {
        let found = found.expect("measured");
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    }

    #[test]
    fn a_table_takes_low_quantiles_rises_and_interpolates() {
        let costs = ServerCosts::new(vec![
            // Sorted 1, 2, 3, 4, 9: the quarter is 2.
            cell(1, 0, &[9.0, 2.0, 1.0, 4.0, 3.0]),
            cell(4, 0, &[3.0]),
            // Falls from 5 to 4, which makes 4.5 for both.
            cell(1, 3, &[5.0]),
            cell(4, 3, &[4.0]),
        ]);
        let costs = costs.expect("valid");
        let table = costs.table();
        close(table.seconds(1.0, 0), 2.0);
        close(table.seconds(2.5, 0), 2.5);
        close(table.seconds(1.0, 3), 4.5);
        close(table.seconds(4.0, 3), 4.5);
        close(table.throughput(4.0, 3, 2.25), 2.0);
        assert_eq!(table.seconds(5.0, 0), None, "not measured");
        assert_eq!(table.seconds(1.0, 2), None);
        assert_eq!((costs.batch_sizes(), costs.lengths()), (vec![1, 4], vec![3]));
        // The slowest block of the first cell.
        let slow =
            costs.table_of(|nth, num| if nth == 0 { vec![0; num] } else { (0..num).collect() });
        // 9 and 3 make 6, and 6 and 4.5 make 5.25.
        close(slow.seconds(1.0, 0), 5.25);
    }

    #[test]
    fn speculation_never_costs_less_than_none() {
        let costs =
            ServerCosts::new(vec![cell(1, 0, &[2.0]), cell(1, 2, &[1.0]), cell(1, 5, &[6.0])]);
        let table = costs.expect("valid").table();
        close(table.seconds(1.0, 0), 1.5);
        close(table.seconds(1.0, 2), 1.5);
        close(table.seconds(1.0, 5), 6.0);
    }

    #[test]
    fn wrong_cells_are_named() {
        for cells in [
            vec![cell(1, 0, &[])],
            vec![cell(1, 0, &[0.0])],
            vec![cell(0, 0, &[1.0])],
            vec![cell(1, 0, &[1.0]), cell(1, 0, &[1.0])],
            vec![cell(1, 0, &[f64::NAN])],
        ] {
            assert!(matches!(ServerCosts::new(cells), Err(TheoryError::ServerCell { .. })));
        }
        assert_eq!(ServerCosts::new(vec![cell(1, 2, &[1.0])]), Err(TheoryError::NoPlainServer));
    }
}
