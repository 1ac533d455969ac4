//! Frozen weights on the CPU, packed in host memory once while loading, and the forward through
//! them: one path for any number of rows.
//!
//! A decoded token is one row, a verification a few. On the CPU each tensor operation on so little
//! costs more in overhead than in arithmetic, and a layer is some sixty of them; general products
//! and caches are laid out for many rows besides. Here a layer is three products and a few passes
//! over slices. Threads that stand by take shares of the products of a few rows (`team`); two share the
//! rows of a longer verification (`sharing`); the many rows of a prompt are cut into blocks, for as
//! many threads as there are (`blocks`). A row's results do not depend on how many are beside it.
//!
//! Other devices and training go through tensors, in `decoder`.
//!
//! Vector instructions are chosen at run time by `pulp`: what is handed to [`vectorized`] is
//! compiled once more for them, provided that everything it calls is inlined into it.

mod attention;
mod blocks;
mod buffers;
mod kernel;
mod lines;
mod norm;
mod read;
mod sharing;
mod steps;
mod storage;
mod team;
mod weights;

use std::ops::Range;

use burn::nn::Linear;
use rayon::prelude::*;

pub(crate) use attention::{AttentionForm, PackedAttention};
pub(crate) use buffers::{PackedLayerCache, Scratch};
pub(crate) use norm::PackedNorm;
pub(crate) use read::Packing;
pub use storage::Storage;
pub(crate) use weights::{PackedWeights, Threads};

use norm::add_normed;

use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::Reach;
use crate::spec::Activation;
pub(crate) use crate::vectors::{reach as runs_on, tensor, values, vectorized};

/// Rows of a block. Fewer share weights that are in the caches less often; more push each other out
/// of them, and score more keys that they may not see.
const MAX_ROWS_A_BLOCK: usize = 64;

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
    /// Whether the MLP reads what attention reads.
    pub(crate) is_parallel: bool,
}

impl PackedLayer {
    /// Weights of its products.
    fn num_weights(&self) -> usize {
        self.products().iter().map(|weights| weights.num_weights()).sum()
    }

    /// Bytes of them.
    fn num_bytes(&self) -> usize {
        self.products().iter().map(|weights| weights.num_bytes()).sum()
    }

    fn products(&self) -> [&PackedWeights; 4] {
        let Self { attention, mlp, .. } = self;
        [&attention.qkv, &attention.output, &mlp.gate_up, &mlp.down]
    }

    /// Adds the layer to rows; `slots` has its memory of each slot.
    pub(crate) fn forward(
        &self,
        x: &mut [f32],
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        reaches: &[Reach],
        scratch: &mut Scratch,
    ) {
        let mut projected = std::mem::take(&mut scratch.projected);
        self.attention.project(x, rows, reaches, scratch, &mut projected);
        self.attention.write(&projected, rows, slots);
        self.finish(x, &projected, rows, slots, reaches, scratch);
        scratch.projected = projected;
    }

    /// Adds to rows what attention and the MLP make of them, once their queries are known and their
    /// keys and values written.
    fn finish(
        &self,
        x: &mut [f32],
        projected: &[f32],
        rows: PlacedRows<'_>,
        slots: &[PackedLayerCache],
        reaches: &[Reach],
        scratch: &mut Scratch,
    ) {
        // Queries were made of the rows already, so that the MLP can read them first.
        if self.is_parallel {
            self.mlp.forward(x, scratch);
        }
        self.attention.attend(x, projected, rows, slots, reaches, scratch);
        if !self.is_parallel {
            self.mlp.forward(x, scratch);
        }
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
    reaches: &[Reach],
) {
    let Some(first) = layers.first() else { return };
    let attention = &first.attention;
    let AttentionForm { num_kv_heads: kv_heads, head_dim, .. } = attention.form;
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
                layer.attention.fill(only_seen, run[..].into(), slots, reaches, scratch);
            }
            let num_rows = x.len() / width;
            let rows_at_once = num_rows.div_ceil(num_rows.div_ceil(MAX_ROWS_A_BLOCK).max(1)).max(1);
            for rows in x.chunks_mut(rows_at_once * width) {
                let run = placed(start, rows.len() / width);
                layer.forward(rows, run[..].into(), slots, reaches, scratch);
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
    reaches: &[Reach],
    scratch: &mut Scratch,
) {
    let num_rows = x.len() / layers[0].attention.norm.width();
    if num_rows > MAX_ROWS_A_BLOCK {
        return scratch.blocks.forward_layers(layers, x, rows, caches, reaches);
    }
    if scratch.sharing.shares(layers, x) {
        return scratch.sharing.forward_layers(layers, x, rows, caches, reaches);
    }
    scratch.in_team(num_rows * layers.len() * layers[0].num_weights(), |scratch| {
        for (layer, slots) in layers.iter().zip(caches) {
            layer.forward(x, rows, slots, reaches, scratch);
        }
    });
}

/// An MLP behind its norm, gated or not.
#[derive(Debug)]
pub(crate) struct PackedMlp {
    pub(crate) norm: PackedNorm,
    /// Gate and up, side by side; up alone where there is no gate.
    pub(crate) gate_up: PackedWeights,
    pub(crate) is_gated: bool,
    pub(crate) activation: Activation,
    pub(crate) down: PackedWeights,
    /// Of what it gives, before that is added.
    pub(crate) post_norm: Option<PackedNorm>,
}

impl PackedMlp {
    /// Adds the MLP of rows to them.
    pub(crate) fn forward(&self, x: &mut [f32], scratch: &mut Scratch) {
        let Scratch { normed, wide, narrow, threads, .. } = scratch;
        self.norm.forward_into(x, normed);
        self.gate_up.multiply(normed, wide, threads);
        let between = if self.is_gated {
            let width = self.down.num_inputs();
            vectorized(
                #[inline(always)]
                || match self.activation {
                    Activation::Silu => steps::gated(wide, width, normed, steps::silu),
                    Activation::Gelu => steps::gated(wide, width, normed, steps::gelu),
                    Activation::GeluTanh => steps::gated(wide, width, normed, steps::gelu_tanh),
                },
            );
            normed
        } else {
            vectorized(
                #[inline(always)]
                || match self.activation {
                    Activation::Silu => steps::activate(wide, steps::silu),
                    Activation::Gelu => steps::activate(wide, steps::gelu),
                    Activation::GeluTanh => steps::activate(wide, steps::gelu_tanh),
                },
            );
            wide
        };
        self.down.multiply(between, narrow, threads);
        add_normed(x, narrow, self.post_norm.as_ref());
    }
}

/// Multiplies rows with a number.
pub(crate) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// `cap · tanh(x / cap)` of all numbers, in place.
pub(crate) fn soft_cap(x: &mut [f32], cap: f32) {
    vectorized(
        #[inline(always)]
        || steps::soft_cap(x, cap),
    );
}

/// Adds `silu(y)` to `x`: the residual step of an acceptance head.
pub(crate) fn add_silu(x: &mut [f32], y: &[f32]) {
    vectorized(
        #[inline(always)]
        || steps::add_silu(x, y),
    );
}

/// Adds to `x` an acceptance head's further inputs: `y`, and the rows of a matrix, each times its
/// scalar.
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
