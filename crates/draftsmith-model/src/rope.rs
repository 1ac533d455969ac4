//! Rotary tables: cosines and sines of positions, computed when a forward first needs them.
//!
//! The context limit allocates nothing: a model that may read millions of tokens but reads a
//! hundred has a table of the first thousand positions. A table grows in chunks, each as long as
//! all earlier ones together. Chunks never move, so sessions and threads share a table without
//! waiting for each other.

mod frequencies;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::spec::{DecoderSpec, ModelShape, RopeConfig};
use crate::token_tree::TokenTree;
use frequencies::inverse_frequencies;

/// The number of positions in the first chunk.
const FIRST: usize = 1024;

/// The number of chunks that is enough for any position, because each chunk doubles the table.
const NUM_CHUNKS: usize = usize::BITS as usize - FIRST.ilog2() as usize + 1;

/// The tokens that a layer's queries attend to, and the rotary table of queries and keys. Clones
/// share the table.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    pub(crate) rope: Arc<RopeTable>,
    /// The size of the sliding window in tokens; `None` if queries attend to all earlier tokens.
    pub(crate) window: Option<usize>,
    /// Whether the rows of a bidirectional block see its later rows.
    pub(crate) sees_ahead: bool,
    /// Whether scores have a soft cap, which fused attention does not support.
    pub(crate) is_capped: bool,
}

/// The cosines and sines of every position.
#[derive(Debug)]
pub(crate) struct RopeTable {
    /// The angle in radians per position, for each pair of channels.
    frequencies: Vec<f32>,
    /// The factor by which cosines and sines are multiplied.
    factor: f32,
    /// The cosines and then the sines of each position, in chunks of positions.
    chunks: [OnceLock<Box<[f32]>>; NUM_CHUNKS],
}

impl Reach {
    /// Lists the reaches of a model's layers: first all tokens, then the window if any layer has
    /// one. [`LayerSpec::reach`](crate::spec::LayerSpec::reach) is an index into this list.
    pub(crate) fn all_of(spec: &DecoderSpec, shape: &ModelShape) -> Vec<Self> {
        let rope = Arc::new(RopeTable::new(&spec.rope, shape));
        let is_capped = spec.attention.soft_cap.is_some();
        let in_window = spec.window.as_ref().map(|window| {
            let own = window.rope.as_ref().map(|own| Arc::new(RopeTable::new(own, shape)));
            let rope = own.unwrap_or_else(|| rope.clone());
            let (size, sees_ahead) = (Some(window.size), window.sees_ahead);
            Self { rope, window: size, sees_ahead, is_capped }
        });
        [Self { rope: rope.clone(), window: None, sees_ahead: true, is_capped }]
            .into_iter()
            .chain(in_window)
            .collect()
    }

    /// Returns the end of the cache entries that `entry`, of a tree, may attend to.
    #[inline(always)]
    pub(crate) fn end_seen(&self, tree: &TokenTree, entry: usize) -> usize {
        let end = entry.saturating_add(self.window.unwrap_or(usize::MAX));
        if self.sees_ahead { tree.end_seen(entry).min(end) } else { entry + 1 }
    }

    /// Returns the first position that a token at `position` attends to.
    #[inline(always)]
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

impl RopeTable {
    /// Creates a table without positions; [`Self::at`] fills it.
    fn new(config: &RopeConfig, shape: &ModelShape) -> Self {
        let width = config.width.unwrap_or(shape.head_dim);
        let (frequencies, factor) = inverse_frequencies(config, width);
        let frequencies = frequencies.into_iter().map(|frequency| frequency as f32).collect();
        let chunks = [const { OnceLock::new() }; NUM_CHUNKS];
        Self { frequencies, factor: factor as f32, chunks }
    }

    /// Looks up the cosines and the sines of a position. Computes their chunk if no forward has
    /// needed it before.
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
                // transformers multiplies in f32. We do the same, so that results agree for long
                // contexts.
                let angle = f64::from(position as f32 * frequency);
                *cos = angle.cos() as f32 * self.factor;
                *sin = angle.sin() as f32 * self.factor;
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
#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::RopeScaling;

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
        let plain = RopeConfig { theta: 100.0, width: None, scaling: RopeScaling::None };
        RopeTable::new(&plain, &shape)
    }

    #[test]
    fn every_position_has_its_cosines_and_sines() {
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
    fn a_table_grows_with_the_positions_read() {
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
    fn threads_that_read_a_table_at_once_read_the_same() {
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
