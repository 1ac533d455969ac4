//! Attention of a few new tokens over the tokens read so far, with keys and values kept as panels.
//!
//! Scores are products of queries with keys, mixtures products of probabilities with values: both
//! are what `kernel` multiplies. So keys stand as panels of 16 positions and values as panels of 16
//! channels, and one kernel serves weights and cache alike.

use pulp::{Arch, Simd, WithSimd};

use super::buffers::{PackedLayerCache, Scratch};
use super::kernel::{Shape, multiply_panels};
use super::norm::{PackedNorm, add_normed};
use super::steps::{self, rotate, softmax};
use super::storage::LINE;
use super::weights::PackedWeights;
use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::{Reach, RopeTable};
use crate::shape::ModelShape;
use crate::spec::{AttentionSpec, LayerSpec};
use crate::token_tree::TokenTree;
use crate::vectors::vectorized;

/// One layer's attention behind its norm, as the CPU reads it.
#[derive(Debug)]
pub(crate) struct PackedAttention {
    pub(crate) norm: PackedNorm,
    /// Queries, keys and values of a token, side by side.
    pub(crate) qkv: PackedWeights,
    /// Of each head's query and key, before they are rotated.
    pub(crate) head_norms: Option<[PackedNorm; 2]>,
    pub(crate) output: PackedWeights,
    /// Of what it gives, before that is added.
    pub(crate) post_norm: Option<PackedNorm>,
    pub(crate) form: AttentionForm,
}

/// What an attention computes besides its products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttentionForm {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    pub(crate) soft_cap: Option<f32>,
    /// Which of the model's reaches it has.
    pub(crate) reach: usize,
}

impl AttentionForm {
    /// The form of a layer's attention.
    pub(crate) fn new(spec: &AttentionSpec, layer: &LayerSpec, shape: &ModelShape) -> Self {
        let ModelShape { num_heads, num_kv_heads, head_dim, .. } = *shape;
        let (scale, soft_cap, reach) = (spec.scale(shape), spec.soft_cap, layer.reach);
        Self { num_heads, num_kv_heads, head_dim, scale, soft_cap, reach }
    }

    /// Numbers of a row's queries, and of its keys or its values.
    fn widths(&self) -> (usize, usize) {
        (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
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
        reaches: &[Reach],
        scratch: &mut Scratch,
    ) {
        let mut projected = std::mem::take(&mut scratch.projected);
        self.project(x, rows, reaches, scratch, &mut projected);
        self.write(&projected, rows, slots);
        scratch.projected = projected;
    }

    /// Adds the attention of new tokens to their hidden states; `slots` has this layer's memory of
    /// each slot.
    pub(crate) fn forward(
        &self,
        x: &mut [f32],
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        reaches: &[Reach],
        scratch: &mut Scratch,
    ) {
        let mut projected = std::mem::take(&mut scratch.projected);
        self.project(x, rows, reaches, scratch, &mut projected);
        self.write(&projected, rows, slots);
        self.attend(x, &projected, rows, slots, reaches, scratch);
        scratch.projected = projected;
    }

    /// Queries, keys and values of rows, each normed before and rotated to its position, queries
    /// scaled as scores are, into `projected`.
    pub(super) fn project(
        &self,
        x: &[f32],
        rows: PlacedRows<'_>,
        reaches: &[Reach],
        scratch: &mut Scratch,
        projected: &mut Vec<f32>,
    ) {
        self.norm.forward_into(x, &mut scratch.normed);
        self.qkv.multiply(&scratch.normed, projected, &scratch.threads);
        vectorized(
            #[inline(always)]
            || self.rotate(projected, rows, &reaches[self.form.reach].rope),
        );
    }

    #[inline(always)]
    fn rotate(&self, projected: &mut [f32], rows: PlacedRows<'_>, rope: &RopeTable) {
        let AttentionForm { head_dim, scale, .. } = self.form;
        let (q_width, kv_width) = self.form.widths();
        let mut projected = projected.chunks_exact_mut(q_width + 2 * kv_width);
        for PlacedRun { slot, start, num_rows } in rows.runs() {
            for entry in start..start + num_rows {
                let Some(row) = projected.next() else { return };
                let (cos, sin) = rope.at(rows.position(slot, entry));
                let (q, kv) = row.split_at_mut(q_width);
                let k = &mut kv[..kv_width];
                if let Some([query_norm, key_norm]) = &self.head_norms {
                    query_norm.apply(q);
                    key_norm.apply(k);
                }
                // The scores' scale is the queries' as well, and fewer numbers.
                for query in q.chunks_exact_mut(head_dim) {
                    rotate(query, cos, sin, scale);
                }
                for key in k.chunks_exact_mut(head_dim) {
                    rotate(key, cos, sin, 1.0);
                }
            }
        }
    }

    /// Writes the keys and values of rows, which [`PackedAttention::project`] gave, into the slots.
    pub(super) fn write(
        &self,
        projected: &[f32],
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
    ) {
        vectorized(
            #[inline(always)]
            || {
                let AttentionForm { num_kv_heads, head_dim, .. } = self.form;
                let (q_width, kv_width) = self.form.widths();
                let mut projected = projected.chunks_exact(q_width + 2 * kv_width);
                for PlacedRun { slot, start, num_rows } in rows.runs() {
                    for entry in start..start + num_rows {
                        let Some(row) = projected.next() else { return };
                        let (keys, values) = row[q_width..].split_at(kv_width);
                        for head in 0..num_kv_heads {
                            let channels = head * head_dim..(head + 1) * head_dim;
                            let (key, value) = (&keys[channels.clone()], &values[channels]);
                            slots[slot].write(head, entry, key, value);
                        }
                    }
                }
            },
        );
    }

    /// Adds the attention of rows to them, whose queries are in `projected` and whose keys and
    /// values are in the slots.
    pub(super) fn attend(
        &self,
        x: &mut [f32],
        projected: &[f32],
        rows: PlacedRows<'_>,
        slots: &[PackedLayerCache],
        reaches: &[Reach],
        scratch: &mut Scratch,
    ) {
        let reach = &reaches[self.form.reach];
        Arch::new().dispatch(Mix { form: self.form, reach, projected, rows, slots, scratch });
        self.output.multiply(&scratch.heads, &mut scratch.narrow, &scratch.threads);
        add_normed(x, &mut scratch.narrow, self.post_norm.as_ref());
    }
}

/// From queries to the mixtures of values that they see, in `scratch.heads`.
struct Mix<'a> {
    form: AttentionForm,
    reach: &'a Reach,
    projected: &'a [f32],
    rows: PlacedRows<'a>,
    slots: &'a [PackedLayerCache],
    scratch: &'a mut Scratch,
}

impl WithSimd for Mix<'_> {
    type Output = ();

    /// Slot by slot: a token looks at its own sequence alone.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { form, reach, projected, rows, slots, scratch } = self;
        let Scratch { queries, scores, mixed, heads, .. } = scratch;
        let AttentionForm { num_heads, num_kv_heads: kv_heads, head_dim, soft_cap, .. } = form;
        let (q_width, kv_width) = form.widths();
        let row_width = q_width + 2 * kv_width;
        heads.resize(projected.len() / row_width * q_width, 0.0);
        let mut first = 0;
        for PlacedRun { slot, start, num_rows } in rows.runs() {
            let cache = &slots[slot];
            let projected = &projected[first * row_width..(first + num_rows) * row_width];
            let heads = &mut heads[first * q_width..(first + num_rows) * q_width];
            first += num_rows;
            // What no row sees is not scored, in whole lines: where a row's sums begin changes
            // nothing, since they begin with zeros.
            let tree = rows.tree(slot);
            let lowest = tree.map_or(start, |tree| start.min(tree.num_standing()));
            let before = reach.first_seen(lowest) / LINE * LINE;
            let all = (start + num_rows).next_multiple_of(LINE) - before;
            let group = num_heads / kv_heads;
            for kv_head in 0..kv_heads {
                // The queries that share this head's keys, row by row.
                queries.clear();
                for row in projected.chunks_exact(row_width) {
                    let of_group = &row[kv_head * group * head_dim..][..group * head_dim];
                    queries.extend_from_slice(of_group);
                }
                scores.resize(num_rows * group * all, 0.0);
                let keys = (kv_head * cache.capacity + before) / LINE * head_dim;
                let keys = &cache.keys[keys..][..all / LINE * head_dim];
                let shape = Shape { inputs: head_dim, stride: head_dim, outputs: all };
                multiply_panels(simd, queries, keys, shape, scores);
                if let Some(cap) = soft_cap {
                    steps::soft_cap(scores, cap);
                }
                for (i, scores) in scores.chunks_exact_mut(all).enumerate() {
                    let entry = start + i / group;
                    match tree {
                        None => {
                            let first = reach.first_seen(entry) - before;
                            softmax(scores, first, entry + 1 - before);
                        }
                        Some(tree) => softmax_in_tree(scores, tree, entry, before, reach),
                    }
                }
                mixed.resize(num_rows * group * head_dim, 0.0);
                let num_panels = head_dim.div_ceil(LINE);
                let values = &cache.values[kv_head * num_panels * cache.capacity..];
                let values = &values[before..num_panels * cache.capacity];
                let shape = Shape { inputs: all, stride: cache.capacity, outputs: head_dim };
                multiply_panels(simd, scores, values, shape, mixed);
                for (row, mixed) in
                    heads.chunks_exact_mut(q_width).zip(mixed.chunks_exact(group * head_dim))
                {
                    row[kv_head * group * head_dim..][..group * head_dim].copy_from_slice(mixed);
                }
            }
        }
    }
}

/// The softmax of what a token scores at the entries from `before` on, which sees no nodes but those
/// that it follows.
#[inline(always)]
fn softmax_in_tree(
    scores: &mut [f32],
    tree: &TokenTree,
    entry: usize,
    before: usize,
    reach: &Reach,
) {
    let first_seen = reach.first_seen(tree.position(entry));
    let hidden = || tree.hidden_from(entry, first_seen).map(|other| other - before);
    hidden().for_each(|other| scores[other] = f32::NEG_INFINITY);
    softmax(scores, first_seen.min(tree.num_standing()) - before, entry + 1 - before);
    // Next to nothing, and here nothing.
    hidden().for_each(|other| scores[other] = 0.0);
}
