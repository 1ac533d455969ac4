//! Rotary tables: the cosines and sines of positions, computed when a forward first reads them.
//!
//! What a `config.json` calls the longest sequence is a limit and no allocation: a model that may
//! read millions of tokens and reads a hundred has the table of the first thousand. Tables come in
//! chunks, each as long as all before it. A chunk stays where it is once it is there, so that
//! sessions and threads share a table without waiting for each other.

use std::ops::Range;
use std::sync::OnceLock;

use crate::shape::ModelShape;
use crate::spec::{RopeConfig, RopeScaling};

/// Positions of the first chunk.
const FIRST: usize = 1024;

/// Chunks enough for any position: each doubles the table.
const NUM_CHUNKS: usize = usize::BITS as usize - FIRST.ilog2() as usize + 1;

/// The cosines and sines of every position.
#[derive(Debug)]
pub(crate) struct RopeTable {
    /// Radians a position, one for each pair of channels.
    frequencies: Vec<f32>,
    /// Of each position the cosines, then the sines.
    chunks: [OnceLock<Box<[f32]>>; NUM_CHUNKS],
}

impl RopeTable {
    /// The table of a model, of which nothing is computed yet.
    pub(crate) fn new(config: &RopeConfig, shape: &ModelShape) -> Self {
        let frequencies = inverse_frequencies(config, shape.head_dim);
        let frequencies = frequencies.into_iter().map(|frequency| frequency as f32).collect();
        Self { frequencies, chunks: [const { OnceLock::new() }; NUM_CHUNKS] }
    }

    /// The pairs of channels that are rotated.
    pub(crate) fn num_pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// The cosines and the sines of a position.
    pub(crate) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let number = chunk_of(position);
        let range = positions_of(number);
        let chunk = self.chunks[number].get_or_init(|| self.tabulated(range.clone()));
        let half = self.frequencies.len();
        chunk[(position - range.start) * 2 * half..][..2 * half].split_at(half)
    }

    #[cold]
    fn tabulated(&self, positions: Range<usize>) -> Box<[f32]> {
        let half = self.frequencies.len();
        let mut rows = vec![0.0; positions.len() * 2 * half];
        for (position, row) in positions.zip(rows.chunks_exact_mut((2 * half).max(1))) {
            let (cos, sin) = row.split_at_mut(half);
            for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
                // transformers multiplies in f32; the same product here keeps long contexts equal.
                let angle = f64::from(position as f32 * frequency);
                *cos = angle.cos() as f32;
                *sin = angle.sin() as f32;
            }
        }
        rows.into()
    }

    #[cfg(test)]
    fn num_tabulated(&self) -> usize {
        self.chunks.iter().flat_map(OnceLock::get).map(|chunk| chunk.len()).sum::<usize>()
            / (2 * self.frequencies.len())
    }
}

fn chunk_of(position: usize) -> usize {
    (position / FIRST).checked_ilog2().map_or(0, |doublings| doublings as usize + 1)
}

fn positions_of(chunk: usize) -> Range<usize> {
    match chunk {
        0 => 0..FIRST,
        _ => FIRST << (chunk - 1)..FIRST << chunk,
    }
}
/// Radians a position, one for each pair of channels.
fn inverse_frequencies(config: &RopeConfig, head_dim: usize) -> Vec<f64> {
    let base = (0..head_dim / 2)
        .map(|i| config.theta.powf(-2.0 * i as f64 / head_dim as f64))
        .collect::<Vec<f64>>();
    match config.scaling {
        RopeScaling::None => base,
        RopeScaling::Linear { factor } => base.into_iter().map(|f| f / factor).collect(),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        } => base
            .into_iter()
            .map(|frequency| {
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                if wavelength > original / low_freq_factor {
                    return frequency / factor;
                }
                if wavelength < original / high_freq_factor {
                    return frequency;
                }
                let smooth = (original / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> RopeTable {
        let shape = ModelShape {
            vocab_size: 8,
            hidden_size: 8,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 2,
            head_dim: 4,
            context: usize::MAX,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        };
        RopeTable::new(&RopeConfig { theta: 100.0, scaling: RopeScaling::None }, &shape)
    }

    #[test]
    fn every_position_has_its_own_row() {
        let table = table();
        for position in [0, 1, 1023, 1024, 1025, 2047, 2048, 5000, 70_000] {
            let (cos, sin) = table.at(position);
            for (pair, frequency) in [1.0_f64, 0.1].into_iter().enumerate() {
                let angle = f64::from(position as f32 * frequency as f32);
                assert_eq!(cos[pair], angle.cos() as f32, "{position}");
                assert_eq!(sin[pair], angle.sin() as f32, "{position}");
            }
        }
    }

    #[test]
    fn a_table_is_as_long_as_what_was_read() {
        let table = table();
        assert_eq!(table.num_tabulated(), 0);
        table.at(0);
        assert_eq!(table.num_tabulated(), 1024);
        table.at(1023);
        assert_eq!(table.num_tabulated(), 1024);
        table.at(3000);
        assert_eq!(table.num_tabulated(), 1024 + 2048);
        table.at(1024);
        assert_eq!(table.num_tabulated(), 4096);
        // Any position has a chunk.
        assert!(positions_of(chunk_of(usize::MAX / 4)).contains(&(usize::MAX / 4)));
    }

    #[test]
    fn threads_that_read_it_at_once_read_the_same() {
        let (table, alone) = (table(), table());
        std::thread::scope(|scope| {
            for first in 0..4 {
                let (table, alone) = (&table, &alone);
                scope.spawn(move || {
                    for position in (first * 700..9000).step_by(131) {
                        assert_eq!(table.at(position), alone.at(position));
                    }
                });
            }
        });
    }
}
