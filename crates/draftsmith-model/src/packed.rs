//! Frozen weights on the CPU, packed in host memory once while loading, and the forward through
//! them: one path for any number of rows.
//!
//! A decoded token is one row, a verification a few. On the CPU each tensor operation on so little
//! costs more in overhead than in arithmetic, and a layer is some sixty of them; general products
//! and caches are laid out for many rows besides. Here a layer is three products and a few passes
//! over slices. Two threads share the rows of a verification (`sharing`); the many rows of a prompt
//! are cut into blocks, for as many threads as there are (`blocks`). A row's results do not depend
//! on how many are beside it.
//!
//! Other devices and training go through tensors, in `decoder`.
//!
//! Vector instructions are chosen at run time by `pulp`: what is handed to [`vectorized`] is
//! compiled once more for them, provided that everything it calls is inlined into it.

mod attention;
mod blocks;
mod buffers;
mod kernel;
mod read;
mod sharing;
mod steps;
mod storage;
mod weights;

use std::ops::Range;

use burn::nn::{Linear, RmsNorm};
use rayon::prelude::*;

pub(crate) use attention::PackedAttention;
pub(crate) use buffers::{PackedLayerCache, Scratch};
pub(crate) use read::Packing;
pub use storage::Storage;
pub(crate) use weights::{PackedWeights, Threads};

use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::RopeTable;
pub(crate) use crate::vectors::{reach as runs_on, tensor, values, vectorized};

/// Rows of a block. Fewer share weights that are in the caches less often; more push each other out
/// of them, and score more keys that they may not see.
const MAX_ROWS_A_BLOCK: usize = 64;

/// A norm's scale and its ε.
#[derive(Debug)]
pub(crate) struct PackedNorm {
    pub(crate) gamma: Vec<f32>,
    epsilon: f32,
}

impl PackedNorm {
    pub(crate) fn of(norm: &RmsNorm) -> Self {
        Self { gamma: values(norm.gamma.val()), epsilon: norm.epsilon as f32 }
    }

    /// Numbers of a row.
    pub(crate) fn width(&self) -> usize {
        self.gamma.len()
    }

    /// Norms rows in place.
    pub(crate) fn forward(&self, x: &mut [f32]) {
        vectorized(
            #[inline(always)]
            || steps::rms_norm(x, &self.gamma, self.epsilon),
        );
    }

    /// Writes normed rows to `output`, in place of what it holds.
    fn forward_into(&self, x: &[f32], output: &mut Vec<f32>) {
        output.clear();
        output.extend_from_slice(x);
        self.forward(output);
    }
}

/// Packs layers that read the same input side by side, as one matrix.
pub(crate) fn pack(linears: &[&Linear]) -> PackedWeights {
    let inputs = linears[0].weight.dims()[0];
    let parts: Vec<(Vec<f32>, usize)> = linears
        .iter()
        .map(|linear| (values(linear.weight.val()), linear.weight.dims()[1]))
        .collect();
    let outputs = parts.iter().map(|(_, outputs)| outputs).sum();
    let mut weight = Vec::with_capacity(inputs * outputs);
    for input in 0..inputs {
        for (part, outputs) in &parts {
            weight.extend_from_slice(&part[input * outputs..(input + 1) * outputs]);
        }
    }
    let has_bias = linears.iter().any(|linear| linear.bias.is_some());
    let bias = has_bias.then(|| {
        let bias = |(linear, (_, outputs)): (&&Linear, &(Vec<f32>, usize))| match &linear.bias {
            Some(bias) => values(bias.val()),
            None => vec![0.0; *outputs],
        };
        linears.iter().zip(&parts).flat_map(bias).collect()
    });
    PackedWeights::pack(&weight, inputs, outputs, bias)
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct PackedLayer {
    pub(crate) attention: PackedAttention,
    pub(crate) mlp: PackedMlp,
}

impl PackedLayer {
    fn forward(
        &self,
        x: &mut [f32],
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        rope: &RopeTable,
        scratch: &mut Scratch,
    ) {
        self.attention.forward(x, rows, slots, rope, scratch);
        self.mlp.forward(x, scratch);
    }
}

/// Runs layers on whole sequences of one length, one a thread, in place, and forgets their keys and
/// values.
///
/// `wanted` has the positions of each sequence whose result is read: those behind it stay as they
/// are, and where `are_last`, those before it come out of the last layer as they went in.
///
/// # Shapes
/// - x: `[batch, seq, hidden]`, one after the other
pub(crate) fn forward_sequences(
    layers: &[PackedLayer],
    x: &mut [f32],
    wanted: &[Range<usize>],
    are_last: bool,
    rope: &RopeTable,
) {
    let Some(first) = layers.first() else { return };
    let attention = &first.attention;
    let (kv_heads, head_dim) = (attention.num_kv_heads, attention.head_dim);
    let width = attention.norm.width();
    let sequences = x.par_chunks_mut(x.len() / wanted.len()).zip(wanted).with_max_len(1);
    sequences.for_each(|(x, wanted)| {
        let scratch = &mut Scratch::with_threads(Threads::One);
        // No layer looks at another's keys, so one cache serves all in turn.
        let slots = &mut [PackedLayerCache::new(kv_heads, head_dim, wanted.end)];
        let placed = |start, num_rows| [PlacedRun { slot: 0, start, num_rows }];
        for (number, layer) in layers.iter().enumerate() {
            let is_last = are_last && number + 1 == layers.len();
            let mut start = if is_last { wanted.start } else { 0 };
            let (only_seen, x) = x[..wanted.end * width].split_at_mut(start * width);
            if !only_seen.is_empty() {
                let run = placed(0, start);
                layer.attention.fill(only_seen, run[..].into(), slots, rope, scratch);
            }
            let num_rows = x.len() / width;
            let rows_at_once = num_rows.div_ceil(num_rows.div_ceil(MAX_ROWS_A_BLOCK).max(1)).max(1);
            for rows in x.chunks_mut(rows_at_once * width) {
                let run = placed(start, rows.len() / width);
                layer.forward(rows, run[..].into(), slots, rope, scratch);
                start += run[0].num_rows;
            }
        }
    });
}

/// Runs layers on rows, in place; `caches` gives each layer's memory, by slot.
pub(crate) fn forward_layers<'a>(
    layers: &[PackedLayer],
    x: &mut [f32],
    rows: PlacedRows<'_>,
    caches: impl Iterator<Item = &'a mut [PackedLayerCache]>,
    rope: &RopeTable,
    scratch: &mut Scratch,
) {
    let num_rows = x.len() / layers[0].attention.norm.width();
    if num_rows > MAX_ROWS_A_BLOCK {
        return scratch.blocks.forward_layers(layers, x, rows, caches, rope);
    }
    if scratch.sharing.shares(layers, x) {
        return scratch.sharing.forward_layers(layers, x, rows, caches, rope);
    }
    for (layer, slots) in layers.iter().zip(caches) {
        layer.forward(x, rows, slots, rope, scratch);
    }
}

/// An MLP behind its norm, gated or not.
#[derive(Debug)]
pub(crate) struct PackedMlp {
    pub(crate) norm: PackedNorm,
    /// Gate and up, side by side; up alone where there is no gate.
    pub(crate) gate_up: PackedWeights,
    is_gated: bool,
    pub(crate) down: PackedWeights,
    width: usize,
}

impl PackedMlp {
    /// An MLP of a gate, unless it has none, up and down.
    pub(crate) fn new(norm: &RmsNorm, gate: Option<&Linear>, [up, down]: [&Linear; 2]) -> Self {
        Self {
            norm: PackedNorm::of(norm),
            gate_up: pack(&gate.into_iter().chain([up]).collect::<Vec<_>>()),
            is_gated: gate.is_some(),
            down: pack(&[down]),
            width: down.weight.dims()[0],
        }
    }

    /// Adds the MLP of rows to them.
    pub(crate) fn forward(&self, x: &mut [f32], scratch: &mut Scratch) {
        let Scratch { normed, wide, narrow, threads, .. } = scratch;
        self.norm.forward_into(x, normed);
        self.gate_up.multiply(normed, wide, *threads);
        let between = if self.is_gated {
            vectorized(
                #[inline(always)]
                || steps::gated(wide, self.width, normed),
            );
            normed
        } else {
            vectorized(
                #[inline(always)]
                || steps::silu(wide),
            );
            wide
        };
        self.down.multiply(between, narrow, *threads);
        vectorized(
            #[inline(always)]
            || steps::add(x, narrow),
        );
    }
}

impl PackedAttention {
    /// Attention of `num_heads` heads of queries and `num_kv_heads` of keys.
    pub(crate) fn new(
        norm: &RmsNorm,
        [query, key, value, output]: [&Linear; 4],
        num_heads: usize,
        num_kv_heads: usize,
    ) -> Self {
        Self {
            norm: PackedNorm::of(norm),
            qkv: pack(&[query, key, value]),
            output: pack(&[output]),
            num_heads,
            num_kv_heads,
            head_dim: query.weight.dims()[1] / num_heads,
        }
    }
}

/// Adds `silu(y)` to `x`: the residual step of an acceptance head.
pub(crate) fn add_silu(x: &mut [f32], y: &[f32]) {
    vectorized(
        #[inline(always)]
        || steps::add_silu(x, y),
    );
}

/// Adds to `x` what an acceptance head reads beside a hidden state: `y`, and rows of a matrix, each
/// as often as its scalar says.
pub(crate) fn add_read(x: &mut [f32], y: Option<&[f32]>, scalars: &[f32], matrix: &[f32]) {
    vectorized(
        #[inline(always)]
        || {
            if let Some(y) = y {
                steps::add(x, y);
            }
            for (scalar, row) in scalars.iter().zip(matrix.chunks_exact(x.len())) {
                steps::add_scaled(x, *scalar, row);
            }
        },
    );
}

/// `Σ x y`.
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    vectorized(
        #[inline(always)]
        || steps::dot(x, y),
    )
}
