//! Frozen weights on the CPU, packed in host memory while loading, and the forward through them for
//! any number of rows.
//!
//! A frozen model on the CPU exists once in memory, packed in the number format of its files. (An
//! adapter that decodes has its tensors too; training next to a packed model unpacks the tensors
//! that it needs.) A decoded token is one row, and a verification a few rows. For so few rows,
//! tensor operations spend more time on overhead than on arithmetic. A general matrix product also
//! takes three times as long for two rows as for one, so that speculation gains nothing. Here a
//! layer is three products and a few passes over slices.
//!
//! Threads share this work in three ways. A team takes shares of each product and of the attention of
//! a few rows (`team`), two threads share the rows of a longer verification (`sharing`), and a
//! prompt's rows are divided into blocks for all threads (`blocks`). A row's result does not depend
//! on the rows beside it. Nor does it depend on the format, if the format represents the numbers
//! exactly and is not quantised: products with quantised weights round their inputs (`quantised`).
//!
//! Other devices and training use tensors, in `decoder`.
//!
//! `pulp` chooses vector instructions at run time. [`vectorized`] compiles its argument again for
//! them, provided that all calls inside are inlined. The only `unsafe` code is a prefetch in
//! `kernel`, and instructions that `pulp` lacks in `quantised/lanes/x86`.

mod attention;
mod blocks;
mod buffers;
mod kernel;
mod lines;
mod norm;
mod quantised;
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
pub(crate) use storage::Storage;
pub(crate) use weights::{PackedWeights, Threads};

use norm::add_normed;

use crate::placed::{PlacedRows, PlacedRun};
use crate::spec::{Activation, BOTH_PARTS};
pub(crate) use crate::vectors::{reach as runs_on, tensor, values, vectorized};

/// The maximum number of rows in a block. Smaller blocks reuse cached weights less. Larger blocks
/// evict their own rows from the cache and compute more scores that are masked.
const MAX_ROWS_A_BLOCK: usize = 64;

/// Packs a linear layer.
pub(crate) fn pack(linear: &Linear) -> PackedWeights {
    let [inputs, outputs] = linear.weight.dims();
    let bias = linear.bias.as_ref().map(|bias| values(bias.val()));
    PackedWeights::pack(&values(linear.weight.val()), inputs, outputs, bias)
}

/// One decoder layer with packed weights. The layers of some adapters lack a part.
#[derive(Debug)]
pub(crate) struct PackedLayer {
    pub(crate) attention: Option<PackedAttention>,
    pub(crate) mlp: Option<PackedMlp>,
    /// Whether the MLP reads the same input as the attention, instead of the attention's output.
    pub(crate) is_parallel: bool,
}

impl PackedLayer {
    /// Counts the weights of the layer's products.
    fn num_weights(&self) -> usize {
        self.products().map(PackedWeights::num_weights).sum()
    }

    /// Lists the weights of the layer's products.
    fn products(&self) -> impl Iterator<Item = &PackedWeights> {
        let attention = self.attention.iter().flat_map(|it| [&it.qkv, &it.output]);
        attention.chain(self.mlp.iter().flat_map(|it| [&it.gate_up, &it.down]))
    }

    /// Returns the width of the residual stream.
    fn width(&self) -> usize {
        let norm = self.attention.as_ref().map(|it| &it.norm);
        norm.or(self.mlp.as_ref().map(|it| &it.norm)).expect("a layer has a part").width()
    }

    /// Returns the attention.
    ///
    /// # Panics
    /// If the layer lacks it.
    pub(crate) fn whole_attention(&self) -> &PackedAttention {
        self.attention.as_ref().expect(BOTH_PARTS)
    }

    /// Adds the layer's output to the rows `x`. Its queries, keys and values read the rows `read`
    /// instead if given, which are after the norm. `slots` contains the layer's cache, one entry
    /// per slot.
    pub(crate) fn forward(
        &self,
        (x, read): (&mut [f32], Option<&[f32]>),
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        scratch: &mut Scratch,
    ) {
        if let Some(attention) = &self.attention {
            let read = read.map_or((&*x, false), |read| (read, true));
            attention.fill(read, rows, slots, scratch);
        }
        let projected = std::mem::take(&mut scratch.projected);
        self.finish(x, &projected, rows, slots, scratch);
        scratch.projected = projected;
    }

    /// Adds attention and MLP to the rows. The queries are in `projected`; the keys and values are
    /// already cached.
    fn finish(
        &self,
        x: &mut [f32],
        projected: &[f32],
        rows: PlacedRows<'_>,
        slots: &[PackedLayerCache],
        scratch: &mut Scratch,
    ) {
        // The queries are already computed, so the MLP may change the rows first.
        if let Some(mlp) = self.mlp.as_ref().filter(|_| self.is_parallel) {
            mlp.forward(x, scratch);
        }
        if let Some(attention) = &self.attention {
            attention.attend(x, projected, rows, slots, scratch);
        }
        if let Some(mlp) = self.mlp.as_ref().filter(|_| !self.is_parallel) {
            mlp.forward(x, scratch);
        }
    }
}

/// Runs layers in place over whole sequences of one length, one sequence per thread. The keys and
/// values are dropped afterwards.
///
/// `wanted` lists, for each sequence, the positions whose results are needed. Later positions are
/// left unchanged. If `are_last` is true, the last layer leaves earlier positions unchanged too.
///
/// # Shapes
/// - x: `[batch, seq, hidden]`, contiguous
pub(crate) fn forward_sequences(
    layers: &[PackedLayer],
    x: &mut [f32],
    wanted: &[Range<usize>],
    are_last: bool,
) {
    let Some(first) = layers.first() else { return };
    let AttentionForm { num_kv_heads: kv_heads, head_dim, .. } = first.whole_attention().form;
    let width = first.width();
    let sequences = x.par_chunks_mut(x.len() / wanted.len()).zip(wanted).with_max_len(1);
    sequences.for_each(|(x, wanted)| {
        let scratch = &mut Scratch::with_threads(Threads::One);
        // Layers do not read each other's keys, so one cache is reused by all layers.
        let slots = &mut [PackedLayerCache::new(kv_heads, head_dim, wanted.end)];
        let placed = |start, num_rows| [PlacedRun { slot: 0, start, num_rows }];
        for (number, layer) in layers.iter().enumerate() {
            let is_last = are_last && number + 1 == layers.len();
            let mut start = if is_last { wanted.start } else { 0 };
            let (only_seen, x) = x[..wanted.end * width].split_at_mut(start * width);
            if !only_seen.is_empty() {
                let run = placed(0, start);
                let rows = PlacedRows::new(&run, &[]);
                layer.whole_attention().fill((only_seen, false), rows, slots, scratch);
            }
            let num_rows = x.len() / width;
            let rows_at_once = num_rows.div_ceil(num_rows.div_ceil(MAX_ROWS_A_BLOCK).max(1)).max(1);
            for rows in x.chunks_mut(rows_at_once * width) {
                let run = placed(start, rows.len() / width);
                layer.forward((rows, None), PlacedRows::new(&run, &[]), slots, scratch);
                start += run[0].num_rows;
            }
        }
    });
}

/// Runs layers in place on rows. `caches` yields each layer's cache, one entry per slot.
pub(crate) fn forward_layers<'a>(
    layers: &[PackedLayer],
    x: &mut [f32],
    rows: PlacedRows<'_>,
    caches: impl Iterator<Item = &'a mut [PackedLayerCache]>,
    scratch: &mut Scratch,
) {
    let num_rows = x.len() / layers[0].width();
    if num_rows > MAX_ROWS_A_BLOCK {
        return scratch.blocks.forward_layers(layers, x, rows, caches);
    }
    // The first of two threads does not wait for the keys of later rows.
    if !rows.attend_ahead() && scratch.sharing.shares(layers, x) {
        return scratch.sharing.forward_layers(layers, x, rows, caches);
    }
    scratch.in_team(num_rows * layers.len() * layers[0].num_weights(), |scratch| {
        for (layer, slots) in layers.iter().zip(caches) {
            layer.forward((x, None), rows, slots, scratch);
        }
    });
}

/// Runs a layer in place on rows `x`. Its queries, keys and values read the rows `read` instead,
/// which are after the norm.
pub(crate) fn forward_reading(
    layer: &PackedLayer,
    (read, x): (&[f32], &mut [f32]),
    rows: PlacedRows<'_>,
    slots: &mut [PackedLayerCache],
    scratch: &mut Scratch,
) {
    let (width, read_width) = (layer.width(), layer.whole_attention().qkv.inputs);
    let mut rest = rows;
    let parts = read.chunks(MAX_ROWS_A_BLOCK * read_width);
    for (read, x) in parts.zip(x.chunks_mut(MAX_ROWS_A_BLOCK * width)) {
        let num_rows = x.len() / width;
        let (rows, others) = rest.split_at(num_rows);
        rest = others;
        scratch.in_team(num_rows * layer.num_weights(), |scratch| {
            layer.forward((x, Some(read)), rows, slots, scratch);
        });
    }
}

/// An MLP block with its norms, gated or not.
#[derive(Debug)]
pub(crate) struct PackedMlp {
    pub(crate) norm: PackedNorm,
    /// The projections gate and up side by side, or only up.
    pub(crate) gate_up: PackedWeights,
    pub(crate) is_gated: bool,
    pub(crate) activation: Activation,
    pub(crate) down: PackedWeights,
    /// The norm of the output, which is applied before the residual sum.
    pub(crate) post_norm: Option<PackedNorm>,
}

impl PackedMlp {
    /// Adds the MLP's output to the rows.
    pub(crate) fn forward(&self, x: &mut [f32], scratch: &mut Scratch) {
        let Scratch { normed, wide, narrow, threads, .. } = scratch;
        self.norm.forward_into(x, normed);
        self.gate_up.multiply(normed, wide, threads);
        let between = if self.is_gated {
            let width = self.down.inputs;
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

/// Computes an LM head's logits for rows `[rows, inputs]`, with a soft cap if given.
pub(crate) fn logits(lm_head: &PackedWeights, rows: &[f32], cap: Option<f32>) -> Vec<f32> {
    let mut logits = Vec::new();
    lm_head.multiply(rows, &mut logits, &Threads::All);
    if let Some(cap) = cap {
        soft_cap(&mut logits, cap);
    }
    logits
}

/// Multiplies all numbers by `factor`.
pub(crate) fn scale(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// Computes `cap · tanh(x / cap)`, in place.
fn soft_cap(x: &mut [f32], cap: f32) {
    vectorized(
        #[inline(always)]
        || steps::soft_cap(x, cap),
    );
}

/// Adds `silu(y)` to `x`, the residual step of an acceptance head.
pub(crate) fn add_silu(x: &mut [f32], y: &[f32]) {
    vectorized(
        #[inline(always)]
        || steps::add_silu(x, y),
    );
}

/// Adds an acceptance head's further inputs to `x`: `y`, and each row of `matrix` times its scalar.
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

/// Computes `Σ x y`.
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    vectorized(
        #[inline(always)]
        || steps::dot(x, y),
    )
}
