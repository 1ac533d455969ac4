//! A forward over many rows, such as a prompt, divided into blocks that all threads work on.
//!
//! A block is small enough that its rows stay in a core's cache while the layer's weights are read.
//! It is large enough that each weight read serves many products. Blocks synchronise twice per
//! layer: when all keys and values are computed, so that they can be written, and at the end of the
//! layer.

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::buffers::{Blocks, PackedLayerCache, Scratch};
use super::{MAX_ROWS_A_BLOCK, PackedLayer, Threads};
use crate::placed::PlacedRows;

/// The minimum number of rows in a block, even if some threads then have no block.
const MIN_ROWS_A_BLOCK: usize = 16;

/// Consecutive rows of a forward.
struct Block<'a> {
    x: &'a mut [f32],
    rows: PlacedRows<'a>,
    projected: &'a mut Vec<f32>,
}

impl Blocks {
    /// Runs layers in place on rows. `caches` yields each layer's cache, one entry per slot.
    pub(super) fn forward_layers<'a>(
        &mut self,
        layers: &[PackedLayer],
        x: &mut [f32],
        rows: PlacedRows<'_>,
        caches: impl Iterator<Item = &'a mut [PackedLayerCache]>,
    ) {
        let Some(first) = layers.first() else { return };
        let width = first.width();
        let num_threads = rayon::current_num_threads();
        let rows_a_block = rows_a_block(x.len() / width, num_threads);
        let num_blocks = (x.len() / width).div_ceil(rows_a_block);
        self.scratches.resize_with(num_threads, || Scratch::with_threads(Threads::One));
        self.projected.resize_with(num_blocks, Vec::new);
        let mut rest = rows;
        let mut blocks: Vec<Block<'_>> = x
            .chunks_mut(rows_a_block * width)
            .zip(&mut self.projected)
            .map(|(x, projected)| {
                let (rows, others) = rest.split_at(x.len() / width);
                rest = others;
                Block { x, rows, projected }
            })
            .collect();
        for (layer, slots) in layers.iter().zip(caches) {
            if let Some(attention) = &layer.attention {
                for_each(
                    &mut blocks,
                    &mut self.scratches,
                    |Block { x, rows, projected }, scratch| {
                        attention.project((x, false), *rows, scratch, projected);
                    },
                );
                for block in &blocks {
                    attention.write(block.projected, block.rows, slots);
                }
            }
            let slots = &*slots;
            for_each(&mut blocks, &mut self.scratches, |block, scratch| {
                layer.finish(block.x, block.projected, block.rows, slots, scratch);
            });
        }
    }
}

/// Returns the number of rows per block. Blocks are about equal, none exceeds the maximum, and each
/// thread gets the same number of blocks.
fn rows_a_block(num_rows: usize, num_threads: usize) -> usize {
    let num_blocks = num_rows.div_ceil(MAX_ROWS_A_BLOCK).next_multiple_of(num_threads);
    num_rows.div_ceil(num_blocks).max(MIN_ROWS_A_BLOCK)
}

/// Runs `work` on all blocks, each thread with its own buffers. The last blocks come first, because
/// they attend to the most keys.
fn for_each<'a>(
    blocks: &mut [Block<'a>],
    scratches: &mut [Scratch],
    work: impl Fn(&mut Block<'a>, &mut Scratch) + Sync,
) {
    let queue = Mutex::new(blocks.iter_mut().rev());
    scratches.par_iter_mut().with_max_len(1).for_each(|scratch| {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(block) = next else { break };
            work(block, scratch);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_even_and_never_too_large() {
        for (num_rows, num_threads, expected) in
            [(512, 2, 64), (513, 2, 52), (257, 2, 43), (2048, 16, 64), (100, 16, 16), (65, 1, 33)]
        {
            assert_eq!(rows_a_block(num_rows, num_threads), expected);
        }
    }
}
