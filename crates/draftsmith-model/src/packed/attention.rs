//! Attention of a few new tokens over the tokens read so far, with keys and values kept as panels.
//!
//! Scores are products of queries with keys, mixtures products of probabilities with values: both
//! are what `weights` multiplies. So keys stand as panels of 16 positions and values as panels of 16
//! channels, and one kernel serves weights and cache alike.

use pulp::{Arch, Simd, WithSimd};

use super::kernel::{Shape, multiply_panels};
use super::sharing::Sharing;
use super::steps::{add, rotate, softmax};
use super::storage::{LINE, Line};
use super::weights::{PackedWeights, Threads};
use super::{PackedNorm, RopeTable, vectorized};
use crate::kv_cache::{PlacedRows, PlacedRun};

/// One layer's attention behind its norm, as the CPU reads it.
#[derive(Debug)]
pub(crate) struct PackedAttention {
    pub(super) norm: PackedNorm,
    /// Queries, keys and values of a token, side by side.
    pub(super) qkv: PackedWeights,
    pub(super) output: PackedWeights,
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
}

/// Keys and values of one layer for the sequence in one slot.
#[derive(Debug)]
pub(crate) struct PackedLayerCache {
    /// For each head panels of 16 positions, each `[head_dim, 16]`.
    keys: Vec<Line>,
    /// For each head panels of 16 channels, each `[capacity, 16]`.
    values: Vec<Line>,
    num_kv_heads: usize,
    head_dim: usize,
    /// A whole number of lines.
    capacity: usize,
}

/// Buffers that the layers of a forward share.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(super) normed: Vec<f32>,
    pub(super) wide: Vec<f32>,
    pub(super) narrow: Vec<f32>,
    /// Who may work on the products.
    pub(super) threads: Threads,
    /// Whether two threads may share rows.
    pub(super) sharing: Sharing,
    queries: Vec<f32>,
    scores: Vec<f32>,
    mixed: Vec<f32>,
    heads: Vec<f32>,
}

impl Scratch {
    /// Buffers for a forward that so many threads work on.
    pub(crate) fn with_threads(threads: Threads) -> Self {
        Self { threads, ..Self::default() }
    }
}

impl PackedLayerCache {
    pub(crate) fn new(num_kv_heads: usize, head_dim: usize, capacity: usize) -> Self {
        let capacity = capacity.next_multiple_of(LINE);
        let empty = Line([0.0; LINE]);
        Self {
            keys: vec![empty; num_kv_heads * capacity / LINE * head_dim],
            values: vec![empty; num_kv_heads * head_dim.div_ceil(LINE) * capacity],
            num_kv_heads,
            head_dim,
            capacity,
        }
    }

    /// Writes one head's key and value at a position.
    #[inline(always)]
    fn write(&mut self, head: usize, position: usize, key: &[f32], value: &[f32]) {
        let panel = head * self.capacity / LINE + position / LINE;
        let (lines, key) = (&mut self.keys[panel * self.head_dim..][..key.len()], key);
        for channel in 0..key.len() {
            lines[channel].0[position % LINE] = key[channel];
        }
        let first = head * self.head_dim.div_ceil(LINE);
        let (whole, rest) = value.as_chunks::<LINE>();
        let mut at = first * self.capacity + position;
        for value in whole {
            self.values[at].0 = *value;
            at += self.capacity;
        }
        if !rest.is_empty() {
            self.values[at].0[..rest.len()].copy_from_slice(rest);
        }
    }

    /// Writes tokens from position `start` on, given as `[heads, tokens, head_dim]` each.
    pub(crate) fn write_all(&mut self, start: usize, keys: &[f32], values: &[f32]) {
        let num_tokens = keys.len() / (self.num_kv_heads * self.head_dim);
        let rows = keys.chunks_exact(self.head_dim).zip(values.chunks_exact(self.head_dim));
        for (row, (key, value)) in rows.enumerate() {
            self.write(row / num_tokens, start + row % num_tokens, key, value);
        }
    }

    /// Keys and values of the first `len` tokens, `[heads, len, head_dim]` each.
    pub(crate) fn read_all(&self, len: usize) -> (Vec<f32>, Vec<f32>) {
        let size = self.num_kv_heads * len * self.head_dim;
        let (mut keys, mut values) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for head in 0..self.num_kv_heads {
            for position in 0..len {
                let panel = head * self.capacity / LINE + position / LINE;
                let lines = &self.keys[panel * self.head_dim..][..self.head_dim];
                keys.extend(lines.iter().map(|line| line.0[position % LINE]));
                for channel in 0..self.head_dim {
                    let panel = head * self.head_dim.div_ceil(LINE) + channel / LINE;
                    values.push(self.values[panel * self.capacity + position].0[channel % LINE]);
                }
            }
        }
        (keys, values)
    }
}

impl PackedAttention {
    /// Writes the keys and values of new tokens, whose attention nobody reads; `slots` has this
    /// layer's memory of each slot.
    pub(crate) fn fill(
        &self,
        x: &[f32],
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        rope: &RopeTable,
        scratch: &mut Scratch,
    ) {
        self.project(x, scratch);
        Arch::new().dispatch(Attend { attention: self, rows, slots, rope, scratch, mixes: false });
    }

    /// Adds the attention of new tokens to their hidden states; `slots` has this layer's memory of
    /// each slot.
    pub(crate) fn forward(
        &self,
        x: &mut [f32],
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        rope: &RopeTable,
        scratch: &mut Scratch,
    ) {
        self.project(x, scratch);
        Arch::new().dispatch(Attend { attention: self, rows, slots, rope, scratch, mixes: true });
        self.output.multiply(&scratch.heads, &mut scratch.narrow, scratch.threads);
        vectorized(
            #[inline(always)]
            || add(x, &scratch.narrow),
        );
    }

    /// Queries, keys and values of normed rows, into `scratch.wide`.
    fn project(&self, x: &[f32], scratch: &mut Scratch) {
        self.norm.forward_into(x, &mut scratch.normed);
        self.qkv.multiply(&scratch.normed, &mut scratch.wide, scratch.threads);
    }
}

/// From queries, keys and values in `scratch.wide` to mixtures in `scratch.heads`.
struct Attend<'a> {
    attention: &'a PackedAttention,
    rows: PlacedRows<'a>,
    slots: &'a mut [PackedLayerCache],
    rope: &'a RopeTable,
    scratch: &'a mut Scratch,
    /// False where only keys and values are wanted.
    mixes: bool,
}

impl WithSimd for Attend<'_> {
    type Output = ();

    /// Slot by slot: a token looks at its own sequence alone.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { attention, rows, slots, rope, scratch, mixes } = self;
        let Scratch { wide, queries, scores, mixed, heads, .. } = scratch;
        let (head_dim, kv_heads) = (attention.head_dim, attention.num_kv_heads);
        let (q_width, kv_width) = (attention.num_heads * head_dim, kv_heads * head_dim);
        let row_width = q_width + 2 * kv_width;
        if mixes {
            heads.resize(wide.len() / row_width * q_width, 0.0);
        }
        // The scores' scale is the queries' as well, and fewer numbers.
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut first = 0;
        for PlacedRun { slot, start, num_rows } in rows.runs() {
            let cache = &mut slots[slot];
            let wide = &mut wide[first * row_width..(first + num_rows) * row_width];
            for (r, row) in wide.chunks_exact_mut(row_width).enumerate() {
                let (cos, sin) = rope.at(start + r);
                let (q, kv) = row.split_at_mut(q_width);
                for query in q.chunks_exact_mut(head_dim) {
                    rotate(query, cos, sin, scale);
                }
                let (k, v) = kv.split_at_mut(kv_width);
                for head in 0..kv_heads {
                    let channels = head * head_dim..(head + 1) * head_dim;
                    rotate(&mut k[channels.clone()], cos, sin, 1.0);
                    cache.write(head, start + r, &k[channels.clone()], &v[channels]);
                }
            }
            let first_of_run = first;
            first += num_rows;
            if !mixes {
                continue;
            }
            let heads = &mut heads[first_of_run * q_width..first * q_width];
            let all = (start + num_rows).next_multiple_of(LINE);
            let group = attention.num_heads / kv_heads;
            for kv_head in 0..kv_heads {
                // The queries that share this head's keys, row by row.
                queries.clear();
                for row in wide.chunks_exact(row_width) {
                    let of_group = &row[kv_head * group * head_dim..][..group * head_dim];
                    queries.extend_from_slice(of_group);
                }
                scores.resize(num_rows * group * all, 0.0);
                let keys = &cache.keys[kv_head * cache.capacity / LINE * head_dim..];
                let keys = &keys[..all / LINE * head_dim];
                let shape = Shape { inputs: head_dim, stride: head_dim, outputs: all };
                multiply_panels(simd, queries, keys, shape, scores);
                for (i, scores) in scores.chunks_exact_mut(all).enumerate() {
                    softmax(scores, start + i / group + 1);
                }
                mixed.resize(num_rows * group * head_dim, 0.0);
                let num_panels = head_dim.div_ceil(LINE);
                let values = &cache.values[kv_head * num_panels * cache.capacity..];
                let shape = Shape { inputs: all, stride: cache.capacity, outputs: head_dim };
                multiply_panels(simd, scores, &values[..num_panels * cache.capacity], shape, mixed);
                for (row, mixed) in
                    heads.chunks_exact_mut(q_width).zip(mixed.chunks_exact(group * head_dim))
                {
                    row[kv_head * group * head_dim..][..group * head_dim].copy_from_slice(mixed);
                }
            }
        }
    }
}
