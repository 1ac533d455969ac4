//! Attention of a few new tokens over the cached tokens, with keys and values stored as panels.
//!
//! Scores are products of queries with keys, and outputs are products of probabilities with values.
//! Both use `kernel`, so keys are panels of 16 positions and values panels of 16 channels.

use pulp::{Arch, Simd, WithSimd};

use super::buffers::{PackedLayerCache, Scratch};
use super::kernel::{Shape, multiply_panels};
use super::norm::{PackedNorm, add_normed};
use super::steps::{self, rotate, softmax};
use super::storage::LINE;
use super::weights::PackedWeights;
use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::{Reach, RopeTable};
use crate::spec::{AttentionSpec, ModelShape, NamedLayer};
use crate::token_tree::TokenTree;
use crate::vectors::vectorized;

/// The attention block of one layer, with its norms.
#[derive(Debug)]
pub(crate) struct PackedAttention {
    pub(crate) norm: PackedNorm,
    /// The projections to queries, keys and values, side by side.
    pub(crate) qkv: PackedWeights,
    /// The norms of each head's query and key, which are applied before rotation.
    pub(crate) head_norms: Option<[PackedNorm; 2]>,
    pub(crate) output: PackedWeights,
    /// The norm of the output, which is applied before the residual sum.
    pub(crate) post_norm: Option<PackedNorm>,
    pub(crate) form: AttentionForm,
    /// What queries attend to, and the rotary table.
    pub(crate) reach: Reach,
}

/// The parameters of an attention besides its weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttentionForm {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    /// The factor of the scores.
    pub(crate) scale: f32,
    pub(crate) soft_cap: Option<f32>,
    /// The index into the model's list of [`Reach`](crate::rope::Reach)es.
    pub(crate) reach: usize,
}

impl AttentionForm {
    pub(crate) fn new(spec: &AttentionSpec, layer: NamedLayer<'_>) -> Self {
        let ModelShape { num_heads, num_kv_heads, head_dim, .. } = *layer.shape;
        let (scale, soft_cap, reach) = (spec.scale(layer.shape), spec.soft_cap, layer.spec.reach);
        Self { num_heads, num_kv_heads, head_dim, scale, soft_cap, reach }
    }

    /// Returns the width of a row's queries, and of its keys or values.
    fn widths(&self) -> (usize, usize) {
        (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
    }
}

impl PackedAttention {
    /// Writes the keys and values of new tokens without computing their attention. Applies the norm
    /// to x first, unless `is_normed` is true. `slots` contains the layer's cache, one entry per
    /// slot.
    pub(crate) fn fill(
        &self,
        x: (&[f32], bool),
        rows: PlacedRows<'_>,
        slots: &mut [PackedLayerCache],
        scratch: &mut Scratch,
    ) {
        let mut projected = std::mem::take(&mut scratch.projected);
        self.project(x, rows, scratch, &mut projected);
        self.write(&projected, rows, slots);
        scratch.projected = projected;
    }

    /// Computes queries, keys and values of rows into `projected`. Applies the norm to x first,
    /// unless `is_normed` is true; then x may be several rows, concatenated. Norms and rotation are
    /// applied to queries and keys. Queries are also multiplied by the scale of the scores.
    pub(super) fn project(
        &self,
        (x, is_normed): (&[f32], bool),
        rows: PlacedRows<'_>,
        scratch: &mut Scratch,
        projected: &mut Vec<f32>,
    ) {
        let Scratch { normed, threads, .. } = scratch;
        if is_normed {
            self.qkv.multiply(x, projected, threads);
        } else {
            self.norm.forward_into(x, normed);
            self.qkv.multiply(normed, projected, threads);
        }
        vectorized(
            #[inline(always)]
            || self.rotate(projected, rows, &self.reach.rope),
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
                // The scale of the scores is applied to the queries, which are fewer numbers.
                for query in q.chunks_exact_mut(head_dim) {
                    rotate(query, cos, sin, scale);
                }
                for key in k.chunks_exact_mut(head_dim) {
                    rotate(key, cos, sin, 1.0);
                }
            }
        }
    }

    /// Caches the keys and values that [`PackedAttention::project`] computed.
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

    /// Adds attention to the rows. The queries are in `projected`; the keys and values are already
    /// cached.
    pub(super) fn attend(
        &self,
        x: &mut [f32],
        projected: &[f32],
        rows: PlacedRows<'_>,
        slots: &[PackedLayerCache],
        scratch: &mut Scratch,
    ) {
        let Self { form, ref reach, .. } = *self;
        Arch::new().dispatch(Mix { form, reach, projected, rows, slots, scratch });
        self.output.multiply(&scratch.heads, &mut scratch.narrow, &scratch.threads);
        add_normed(x, &mut scratch.narrow, self.post_norm.as_ref());
    }
}

/// Averages the values for each query by attention, into `scratch.heads`.
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

    /// Processes one slot after another, because a token attends only to its own sequence.
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
            // Whole lines of keys that no row attends to are skipped. This does not change the
            // sums, which would begin with zeros.
            let tree = rows.tree(slot);
            let lowest = tree.map_or(start, |tree| start.min(tree.num_standing));
            let before = reach.first_seen(lowest) / LINE * LINE;
            let end = start + num_rows;
            let end = tree.map_or(end, |tree| tree.end_seen(end - 1));
            let all = end.next_multiple_of(LINE) - before;
            let group = num_heads / kv_heads;
            for kv_head in 0..kv_heads {
                // These are the queries that share this head's keys, row by row.
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

/// Computes the softmax of the scores of cache entry `entry`. The first score is for entry
/// `before`. Among the nodes of the tree, only the entry's ancestors count.
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
    softmax(
        scores,
        first_seen.min(tree.num_standing) - before,
        reach.end_seen(tree, entry) - before,
    );
    // Hidden nodes must have probability 0 exactly, where softmax may leave a tiny number.
    hidden().for_each(|other| scores[other] = 0.0);
}
