//! The time of a server's round, by batch size and candidates, and the throughput that follows.
//!
//! A round of B requests with K candidates each takes T(B, K) seconds. T is measured on text where
//! no candidate is accepted, so that a round lasts from one token to the next. If B clients keep a
//! server busy, an answer of R rounds takes R·T(B, K), plus the time B·P of reading B prompts,
//! because reading a prompt of P seconds stops all requests. For answers of n tokens the throughput
//! is thus B·n / (R·T(B, K) + B·P). The order of accepted and rejected candidates does not matter.
//!
//! If the requests of a round draft different numbers kᵢ of candidates, T is split in two. V(rows)
//! is the target's time, which equals T without speculation at that many requests. D(B, k) = T(B,
//! k) − V(B·(1 + k)) is the time of k steps of the drafter. With independent kᵢ, a round takes E
//! V(B + Σkᵢ) + E D(B, max kᵢ) on average. Look-ups have D = 0.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Result, TheoryError};

/// The quantile of a cell's block medians that serves as its time. It is below the median because
/// noise on a shared machine only adds time.
const QUANTILE: f64 = 0.25;

/// The measured rounds of one batch size and number of candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerCell {
    /// B: the number of concurrent requests.
    pub batch_size: usize,
    /// K: the number of candidates per round and request; 0 for a server without speculation.
    pub num_candidates: usize,
    /// The median seconds of a round in each block of measured rounds.
    pub block_seconds: Vec<f64>,
    /// The seconds of prefill per prompt token; 0 if they are unknown.
    pub prompt_token_seconds: f64,
}

/// The measured costs of a server's rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerCosts {
    cells: Vec<ServerCell>,
}

impl ServerCosts {
    /// Creates costs from cells, of which at least one must be without speculation.
    ///
    /// # Errors
    /// If a time or batch size is not positive, a cell occurs twice or has no block, or no cell is
    /// without speculation.
    pub fn new(cells: Vec<ServerCell>) -> Result<Self> {
        let key = |cell: &ServerCell| (cell.num_candidates, cell.batch_size);
        for (nth, cell) in cells.iter().enumerate() {
            let is_time = |seconds: &f64| *seconds > 0.0 && seconds.is_finite();
            let is_valid = cell.batch_size > 0
                && !cell.block_seconds.is_empty()
                && cell.prompt_token_seconds >= 0.0
                && cell.prompt_token_seconds.is_finite()
                && cell.block_seconds.iter().all(is_time)
                && cells[..nth].iter().all(|other| key(other) != key(cell));
            let (num_candidates, batch_size) = key(cell);
            TheoryError::ensure(is_valid, || {
                format!(
                    "the cell of batch size {batch_size} and {num_candidates} candidates is there twice, has no block, \
                     or has a time or batch size that is not above 0"
                )
            })?;
        }
        TheoryError::ensure(cells.iter().any(|cell| cell.num_candidates == 0), || {
            "no cell is of a server without speculation, which every speed-up is over; hint: start the server without \
             it and run `draftsmith server costs` with `--candidates 0`"
                .into()
        })?;
        Ok(Self { cells })
    }

    /// Returns the batch sizes that were measured without speculation, ascending.
    pub fn batch_sizes(&self) -> Vec<usize> {
        let plain = self.cells.iter().filter(|cell| cell.num_candidates == 0);
        let mut sizes: Vec<usize> = plain.map(|cell| cell.batch_size).collect();
        sizes.sort_unstable();
        sizes
    }

    /// Returns the measured numbers of candidates above 0, ascending.
    pub fn lengths(&self) -> Vec<usize> {
        let lengths = self.cells.iter().map(|cell| cell.num_candidates).filter(|it| *it > 0);
        lengths.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Builds the table of round times from all blocks.
    pub fn table(&self) -> RoundTable {
        self.table_of(|_, num| (0..num).collect())
    }

    /// Builds the table of round times from selected blocks of each cell. `pick` gets the cell's
    /// index and its number of blocks, and returns the indices of the blocks to use, in which an
    /// index may occur twice.
    pub fn table_of(&self, mut pick: impl FnMut(usize, usize) -> Vec<usize>) -> RoundTable {
        let mut seconds: BTreeMap<usize, BTreeMap<usize, f64>> = BTreeMap::new();
        let mut smallest: BTreeMap<usize, (usize, f64)> = BTreeMap::new();
        for (nth, cell) in self.cells.iter().enumerate() {
            // Requests that begin together have their prompts read together. The smallest batch
            // shows the time of one prompt alone, which is the longest.
            let of_cell = (cell.batch_size, cell.prompt_token_seconds);
            let of_smallest = smallest.entry(cell.num_candidates).or_insert(of_cell);
            if cell.batch_size < of_smallest.0 {
                *of_smallest = of_cell;
            }
            let blocks = pick(nth, cell.block_seconds.len());
            let mut blocks: Vec<f64> =
                blocks.into_iter().map(|at| cell.block_seconds[at]).collect();
            blocks.sort_by(f64::total_cmp);
            let at = (QUANTILE * (blocks.len() - 1) as f64).round() as usize;
            seconds.entry(cell.num_candidates).or_default().insert(cell.batch_size, blocks[at]);
        }
        // More requests or more candidates never take less time. Each pass over one of the two
        // keeps the order of the other.
        for _ in 0..2 {
            for by_batch in seconds.values_mut() {
                rise(by_batch.values_mut().collect());
            }
            let sizes: Vec<usize> = seconds.values().flat_map(|it| it.keys().copied()).collect();
            for size in sizes {
                rise(seconds.values_mut().filter_map(|it| it.get_mut(&size)).collect());
            }
        }
        let prompt_token_seconds =
            smallest.into_iter().map(|(length, (_, seconds))| (length, seconds)).collect();
        RoundTable { seconds, prompt_token_seconds }
    }
}

/// Replaces values by the nearest non-decreasing ones: falling stretches become their mean.
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

/// The seconds per round, which rise with the batch size and with the number of candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundTable {
    /// The seconds per round by number of candidates, then by batch size.
    seconds: BTreeMap<usize, BTreeMap<usize, f64>>,
    /// The seconds of prefill per prompt token, by number of candidates.
    prompt_token_seconds: BTreeMap<usize, f64>,
}

/// The work of a set of requests, summed over them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// The number of prompt tokens.
    pub prompt_tokens: f64,
    /// The number of answer tokens. The first token of each answer comes from reading the prompt.
    pub tokens: f64,
    /// The number of rounds after the first tokens.
    pub rounds: f64,
}

impl Work {
    /// Computes the mean tokens per round of a request, without the first token of each of the
    /// `num_requests` answers.
    pub fn tokens_per_round(&self, num_requests: f64) -> f64 {
        (self.tokens - num_requests) / self.rounds
    }
}

impl RoundTable {
    /// Returns the seconds of a round, measured or linearly interpolated between the two nearest
    /// batch sizes. None outside the measured range.
    pub fn seconds(&self, batch_size: f64, num_candidates: usize) -> Option<f64> {
        let by_batch = self.seconds.get(&num_candidates)?;
        let below = by_batch.iter().rfind(|(size, _)| **size as f64 <= batch_size)?;
        let above = by_batch.iter().find(|(size, _)| **size as f64 >= batch_size)?;
        let [(from, low), (to, high)] =
            [below, above].map(|(size, seconds)| (*size as f64, *seconds));
        let share = if to > from { (batch_size - from) / (to - from) } else { 0.0 };
        Some(low + share * (high - low))
    }

    /// Computes the expected seconds of a round in which each request independently drafts `k`
    /// candidates with probability `shares[k]`. A fractional batch size is interpolated linearly.
    /// None outside the measured range.
    ///
    /// # Panics
    /// If `shares` is empty.
    pub fn mixed_seconds(&self, batch_size: f64, shares: &[f64], source: DraftedBy) -> Option<f64> {
        let at = |size: f64| self.seconds_of_batch(size as usize, shares, source);
        let (from, share) = (batch_size.floor(), batch_size.fract());
        let low = at(from)?;
        if share == 0.0 { Some(low) } else { Some(low + share * (at(from + 1.0)? - low)) }
    }

    fn seconds_of_batch(
        &self,
        batch_size: usize,
        shares: &[f64],
        source: DraftedBy,
    ) -> Option<f64> {
        // The probability of each total number of candidates over all requests.
        let mut sums = vec![1.0];
        for _ in 0..batch_size {
            let mut next = vec![0.0; sums.len() + shares.len() - 1];
            for (before, chance) in sums.iter().enumerate() {
                for (more, share) in shares.iter().enumerate() {
                    next[before + more] += chance * share;
                }
            }
            sums = next;
        }
        let mut seconds = 0.0;
        for (num_candidates, chance) in sums.iter().enumerate().filter(|(_, it)| **it > 1e-12) {
            seconds += chance * self.seconds((batch_size + num_candidates) as f64, 0)?;
        }
        let DraftedBy::Drafter { most } = source else { return Some(seconds) };
        let (mut up_to, mut before) = (0.0, 0.0);
        for (longest, share) in shares.iter().enumerate() {
            up_to += share;
            let at_most = f64::min(up_to, 1.0).powi(batch_size as i32);
            if at_most - before > 1e-12 {
                let num_steps = (longest + 1).min(most);
                seconds += (at_most - before) * self.draft_seconds(batch_size, num_steps)?;
            }
            before = at_most;
        }
        Some(seconds)
    }

    /// Computes D(B, k), the seconds of k steps of the drafter, at least 0, with linear
    /// interpolation between measured numbers of steps. None outside the measured range.
    fn draft_seconds(&self, batch_size: usize, num_steps: usize) -> Option<f64> {
        let at = |length: usize| -> Option<f64> {
            if length == 0 {
                return Some(0.0);
            }
            let whole = self.seconds(batch_size as f64, length)?;
            let target = self.seconds((batch_size * (1 + length)) as f64, 0)?;
            Some((whole - target).max(0.0))
        };
        let measured = || self.seconds.keys().copied();
        let (from, to) =
            (measured().rfind(|it| *it <= num_steps)?, measured().find(|it| *it >= num_steps)?);
        let share = if to > from { (num_steps - from) as f64 / (to - from) as f64 } else { 0.0 };
        let low = at(from)?;
        Some(low + share * (at(to)? - low))
    }

    /// Computes the tokens per second of all requests together, if a round takes `round_seconds`.
    ///
    /// `num_candidates` selects the measured time of reading a prompt, because the server's drafter
    /// may read prompts too. If none was measured for it, the time without speculation is used.
    pub fn throughput(
        &self,
        batch_size: f64,
        num_candidates: usize,
        round_seconds: f64,
        work: &Work,
    ) -> f64 {
        let known = |length: &usize| self.prompt_token_seconds.get(length);
        let prompt = known(&num_candidates).or_else(|| known(&0)).copied().unwrap_or(0.0);
        let seconds = work.rounds * round_seconds + batch_size * prompt * work.prompt_tokens;
        batch_size * work.tokens / seconds
    }
}

/// The kind of drafter that proposes the candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftedBy {
    /// A drafter that proposes up to `most` candidates step by step. To stop earlier, it takes one
    /// more step without a candidate.
    Drafter {
        /// The maximum number of candidates, at least 1.
        most: usize,
    },
    /// A look-up in the text, which takes no time.
    LookUp,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(batch_size: usize, num_candidates: usize, seconds: &[f64]) -> ServerCell {
        let block_seconds = seconds.to_vec();
        ServerCell { batch_size, num_candidates, block_seconds, prompt_token_seconds: 0.0 }
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
        let work = Work { prompt_tokens: 0.0, tokens: 9.0, rounds: 4.0 };
        close(Some(table.throughput(4.0, 3, 4.5, &work)), 2.0);
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
    fn reading_a_prompt_stops_all_requests() {
        let plain = ServerCell { prompt_token_seconds: 0.25, ..cell(1, 0, &[1.0]) };
        let together = ServerCell { prompt_token_seconds: 0.125, ..cell(4, 0, &[1.0]) };
        let table = ServerCosts::new(vec![together, plain]).expect("valid").table();
        // Two requests at a time: 10 rounds of a second, and two prompts of 8 tokens at a quarter
        // of a second.
        let work = Work { prompt_tokens: 8.0, tokens: 21.0, rounds: 10.0 };
        close(Some(table.throughput(2.0, 0, 1.0, &work)), 2.0 * 21.0 / 14.0);
        close(Some(table.throughput(2.0, 5, 1.0, &work)), 2.0 * 21.0 / 14.0);
        close(Some(work.tokens_per_round(1.0)), 2.0);
    }

    #[test]
    fn rounds_of_different_lengths_are_averaged_over_every_batch() {
        // V(rows) = rows², D(B, k) = 10·k·B: neither a mean number of rows nor of steps would do.
        let target = |rows: usize| (rows * rows) as f64;
        let cells = (1..=8).map(|rows| cell(rows, 0, &[target(rows)])).chain(
            [1, 2].iter().flat_map(|size| {
                [1, 2, 3]
                    .map(|k| cell(*size, k, &[target(size * (1 + k)) + (10 * k * size) as f64]))
            }),
        );
        let all: Vec<ServerCell> = cells.collect();
        let table = ServerCosts::new(all.clone()).expect("valid").table();
        let shares = [0.5, 0.0, 0.3, 0.2];
        let mut expected = [0.0, 0.0];
        for (one, first) in shares.iter().enumerate() {
            for (other, second) in shares.iter().enumerate() {
                let rows = target(2 + one + other);
                expected[0] += first * second * rows;
                expected[1] += first * second * (rows + (20 * (one.max(other) + 1).min(3)) as f64);
            }
        }
        let drafter = DraftedBy::Drafter { most: 3 };
        close(table.mixed_seconds(2.0, &shares, DraftedBy::LookUp), expected[0]);
        close(table.mixed_seconds(2.0, &shares, drafter), expected[1]);
        let always = [0.0, 0.0, 0.0, 1.0];
        let whole = table.seconds(2.0, 3).expect("measured");
        close(table.mixed_seconds(2.0, &always, drafter), whole);
        // Two steps are measured; without them they are between one and three.
        let fewer: Vec<ServerCell> =
            all.iter().filter(|it| it.num_candidates != 2).cloned().collect();
        let fewer = ServerCosts::new(fewer).expect("valid").table();
        close(fewer.mixed_seconds(2.0, &shares, drafter), expected[1]);
        let one = table.seconds(1.0, 3).expect("measured");
        close(table.mixed_seconds(1.5, &always, drafter), (one + whole) / 2.0);
        let wider = table.mixed_seconds(3.0, &shares, DraftedBy::LookUp);
        assert_eq!(wider, None, "twelve rows were not measured");
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
            assert!(ServerCosts::new(cells).unwrap_err().to_string().contains("is there twice"));
        }
        let refused = ServerCosts::new(vec![cell(1, 2, &[1.0])]).unwrap_err().to_string();
        assert!(refused.starts_with("no cell is of a server without speculation"));
    }
}
