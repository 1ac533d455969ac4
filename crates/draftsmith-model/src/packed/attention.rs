//! Attention of a few new tokens over the cached tokens, with keys and values stored as panels.
//!
//! Scores are products of queries with keys, and outputs are products of probabilities with values.
//! Both use `kernel`, so keys are panels of 16 positions and values panels of 16 channels.

use std::ops::Range;
use std::sync::Arc;

use pulp::{Arch, Simd, WithSimd};

use super::buffers::{PackedLayerCache, Scratch};
use super::kernel::{Shape, multiply_panels};
use super::norm::{PackedNorm, add_normed};
use super::steps::{self, rotate, softmax};
use super::storage::LINE;
use super::team::Shared;
use super::weights::{PackedWeights, Threads};
use crate::placed::{PlacedRows, PlacedRun};
use crate::rope::{Reach, RopeTable};
use crate::spec::{AttentionSpec, ModelShape, NamedLayer};
use crate::token_tree::TokenTree;
use crate::vectors::vectorized;

/// The number of multiply-adds in a layer's attention from which a team is faster than one thread.
const TEAM_MIXING: usize = 1 << 18;

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

    /// Returns the width of a row's queries that attend to the same head of keys.
    fn group_width(&self) -> usize {
        self.num_heads / self.num_kv_heads * self.head_dim
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
        let Scratch { queries, scores, mixed, heads, narrow, threads, .. } = scratch;
        let mixing = self.mixing(projected, rows, slots, std::mem::take(queries));
        heads.resize(mixing.queries.len(), 0.0);
        let num_groups = mixing.queries.len() / self.form.group_width();
        match threads {
            Threads::Team(team) if num_groups > 1 && mixing.num_products() >= TEAM_MIXING => {
                team.share(mixing, num_groups, |mixing, groups, mixed| {
                    mixing.place(groups, mixed, heads);
                });
            }
            _ => {
                mixing.mix(0..num_groups, scores, mixed);
                mixing.place(0..num_groups, mixed, heads);
                *queries = mixing.queries;
            }
        }
        self.output.multiply(heads, narrow, threads);
        add_normed(x, narrow, self.post_norm.as_ref());
    }

    /// Collects the queries of all rows and what they attend to. Overwrites `queries`.
    fn mixing(
        &self,
        projected: &[f32],
        rows: PlacedRows<'_>,
        slots: &[PackedLayerCache],
        mut queries: Vec<f32>,
    ) -> Mixing {
        let Self { form, ref reach, .. } = *self;
        let ((q_width, kv_width), width) = (form.widths(), form.group_width());
        let (mut rest, mut first_row, mut heads) = (projected, 0, Vec::new());
        queries.clear();
        for PlacedRun { slot, start, num_rows } in rows.runs() {
            let (projected, others) = rest.split_at(num_rows * (q_width + 2 * kv_width));
            rest = others;
            // Whole lines of keys that no row attends to are skipped. This does not change the sums,
            // which would begin with zeros.
            let tree = rows.tree(slot);
            let lowest = tree.map_or(start, |tree| start.min(tree.num_standing));
            let before = reach.first_seen(lowest) / LINE * LINE;
            let end = start + num_rows;
            let last = tree.map_or(end, |tree| tree.end_seen(end - 1)).next_multiple_of(LINE);
            let seen = (start..end).map(|entry| Seen::new(entry, tree, reach, before)).collect();
            let seen: Arc<[Seen]> = seen;
            for number in 0..form.num_kv_heads {
                let first = queries.len() / width;
                for row in projected.chunks_exact(q_width + 2 * kv_width) {
                    queries.extend_from_slice(&row[number * width..][..width]);
                }
                let (cache, seen) = (slots[slot].clone(), seen.clone());
                let (groups, entries) = (first..first + num_rows, before..last);
                heads.push(MixedHead { cache, number, first_row, groups, entries, seen });
            }
            first_row += num_rows;
        }
        Mixing { form, heads, queries }
    }
}

/// The attention of some queries, which averages the values for each of them. A group consists of
/// the queries of a row that attend to the same head.
#[derive(Debug)]
struct Mixing {
    form: AttentionForm,
    heads: Vec<MixedHead>,
    /// The queries, `[groups, group_size, head_dim]`. The groups of a head are consecutive.
    queries: Vec<f32>,
}

/// A head of the keys and values of one slot, and the rows that attend to it.
#[derive(Debug)]
struct MixedHead {
    cache: PackedLayerCache,
    number: usize,
    first_row: usize,
    /// The groups, one per row.
    groups: Range<usize>,
    /// The entries whose keys are multiplied: whole lines.
    entries: Range<usize>,
    /// What each row attends to.
    seen: Arc<[Seen]>,
}

/// What a row attends to: a range of entries without some of them, counted from the first entry
/// whose key is multiplied.
#[derive(Debug)]
struct Seen {
    range: Range<usize>,
    hidden: Vec<usize>,
}

impl Mixing {
    /// Counts the multiply-adds.
    fn num_products(&self) -> usize {
        let products = |head: &MixedHead| head.groups.len() * head.entries.len();
        2 * self.heads.iter().map(products).sum::<usize>() * self.form.group_width()
    }

    /// Splits a range of groups by the heads that they attend to.
    fn parts(&self, groups: Range<usize>) -> impl Iterator<Item = (&MixedHead, Range<usize>)> {
        self.heads.iter().filter_map(move |head| {
            let part = groups.start.max(head.groups.start)..groups.end.min(head.groups.end);
            (!part.is_empty()).then_some((head, part))
        })
    }

    /// Computes the averages for some groups into `mixed`, `[groups, group_size, head_dim]`.
    fn mix(&self, groups: Range<usize>, scores: &mut Vec<f32>, mixed: &mut Vec<f32>) {
        Arch::new().dispatch(MixedPart { mixing: self, groups, scores, mixed });
    }

    /// Copies the averages of some groups to their places in `heads`, `[rows, heads, head_dim]`.
    fn place(&self, groups: Range<usize>, mixed: &[f32], heads: &mut [f32]) {
        let (num_kv_heads, width) = (self.form.num_kv_heads, self.form.group_width());
        let mut mixed = mixed.chunks_exact(width);
        for (head, part) in self.parts(groups) {
            for (group, mixed) in part.zip(&mut mixed) {
                let row = head.first_row + group - head.groups.start;
                heads[(row * num_kv_heads + head.number) * width..][..width].copy_from_slice(mixed);
            }
        }
    }
}

impl Seen {
    #[inline(always)]
    fn new(entry: usize, tree: Option<&TokenTree>, reach: &Reach, before: usize) -> Self {
        let Some(tree) = tree else {
            let range = reach.first_seen(entry) - before..entry + 1 - before;
            return Self { range, hidden: Vec::new() };
        };
        let first = reach.first_seen(tree.position(entry));
        let range = first.min(tree.num_standing) - before..reach.end_seen(tree, entry) - before;
        // Among the nodes of the tree, only the entry's ancestors count.
        let hidden = tree.hidden_from(entry, first).map(|other| other - before).collect();
        Self { range, hidden }
    }
}

impl Shared for Mixing {
    fn compute(&self, groups: Range<usize>) -> Vec<f32> {
        let mut mixed = Vec::new();
        self.mix(groups, &mut Vec::new(), &mut mixed);
        mixed
    }
}

/// Some groups of a mixing.
struct MixedPart<'a> {
    mixing: &'a Mixing,
    groups: Range<usize>,
    scores: &'a mut Vec<f32>,
    mixed: &'a mut Vec<f32>,
}

impl WithSimd for MixedPart<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mixing, groups, scores, mixed } = self;
        let AttentionForm { head_dim, soft_cap, .. } = mixing.form;
        let width = mixing.form.group_width();
        mixed.resize(groups.len() * width, 0.0);
        let mut rest = &mut **mixed;
        for (head, part) in mixing.parts(groups) {
            let MixedHead { cache, number, entries, .. } = head;
            let queries = &mixing.queries[part.start * width..part.end * width];
            scores.resize(queries.len() / head_dim * entries.len(), 0.0);
            let keys = (number * cache.capacity + entries.start) / LINE * head_dim;
            let keys = &cache.keys[keys..][..entries.len() / LINE * head_dim];
            let shape = Shape { inputs: head_dim, stride: head_dim, outputs: entries.len() };
            multiply_panels(simd, queries, keys, shape, scores);
            if let Some(cap) = soft_cap {
                steps::soft_cap(scores, cap);
            }
            let seen = &head.seen[part.start - head.groups.start..];
            for (i, scores) in scores.chunks_exact_mut(entries.len()).enumerate() {
                let Seen { range, hidden } = &seen[i * head_dim / width];
                hidden.iter().for_each(|other| scores[*other] = f32::NEG_INFINITY);
                softmax(scores, range.start, range.end);
                // Hidden nodes must have probability 0 exactly, where softmax may leave a tiny
                // number.
                hidden.iter().for_each(|other| scores[*other] = 0.0);
            }
            let num_panels = head_dim.div_ceil(LINE);
            let values = &cache.values[number * num_panels * cache.capacity..];
            let values = &values[entries.start..num_panels * cache.capacity];
            let shape = Shape { inputs: entries.len(), stride: cache.capacity, outputs: head_dim };
            let (mixed, others) = rest.split_at_mut(part.len() * width);
            rest = others;
            multiply_panels(simd, scores, values, shape, mixed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::team::Team;
    use super::*;

    fn number(seed: usize) -> f32 {
        (seed.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 32768.0 - 1.0
    }

    /// Makes two slots: five tokens of a chain, and three nodes of which one does not see another.
    fn mixing(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Mixing {
        let form = AttentionForm {
            num_heads,
            num_kv_heads,
            head_dim,
            scale: 1.0,
            soft_cap: None,
            reach: 0,
        };
        let seen = |range, hidden: &[usize]| Seen { range, hidden: hidden.to_vec() };
        let chain = (40..45).map(|end| seen(end - 38..end, &[])).collect();
        let tree = [seen(0..20, &[]), seen(0..21, &[]), seen(0..22, &[20])].into();
        let mut heads = Vec::new();
        for (slot, entries, seen) in [(0, 16..64, chain), (1, 0..32, tree)] {
            let seen: Arc<[Seen]> = seen;
            let mut cache = PackedLayerCache::new(num_kv_heads, head_dim, entries.end);
            for position in 0..entries.end {
                for head in 0..num_kv_heads {
                    let at = ((slot * 100 + position) * 16 + head) * 256;
                    let key: Vec<f32> = (0..head_dim).map(|i| number(at + i)).collect();
                    let value: Vec<f32> = (0..head_dim).map(|i| number(at + i + 128)).collect();
                    cache.write(head, position, &key, &value);
                }
            }
            for number in 0..num_kv_heads {
                let first = heads.last().map_or(0, |head: &MixedHead| head.groups.end);
                heads.push(MixedHead {
                    cache: cache.clone(),
                    number,
                    first_row: 5 * slot,
                    groups: first..first + seen.len(),
                    entries: entries.clone(),
                    seen: seen.clone(),
                });
            }
        }
        let queries = (0..8 * num_heads * head_dim).map(|i| number(i + (1 << 20))).collect();
        Mixing { form, heads, queries }
    }

    /// Averages the values for a query by the definition.
    fn average(head: &MixedHead, seen: &Seen, query: &[f32]) -> Vec<f32> {
        let (cache, head_dim) = (&head.cache, query.len());
        let is_seen = |entry: &usize| !seen.hidden.contains(entry);
        let entries: Vec<usize> = seen.range.clone().filter(is_seen).collect();
        let weight = |entry: &usize| {
            let position = head.number * cache.capacity + head.entries.start + entry;
            let keys = &cache.keys[position / LINE * head_dim..][..head_dim];
            let products = keys.iter().zip(query).map(|(key, x)| key.0[position % LINE] * x);
            products.map(f64::from).sum::<f64>().exp()
        };
        let total: f64 = entries.iter().map(weight).sum();
        let channel = |channel: usize| {
            let panel = head.number * head_dim.div_ceil(LINE) + channel / LINE;
            let value = |entry: usize| {
                cache.values[panel * cache.capacity + head.entries.start + entry].0[channel % LINE]
            };
            let parts = entries.iter().map(|entry| weight(entry) * f64::from(value(*entry)));
            (parts.sum::<f64>() / total) as f32
        };
        (0..head_dim).map(channel).collect()
    }

    #[test]
    fn a_team_mixes_as_one_thread_does_and_as_attention_is_defined() {
        for (num_heads, num_kv_heads, head_dim) in [(9, 3, 32), (4, 1, 20), (2, 2, 8)] {
            let mixing = || mixing(num_heads, num_kv_heads, head_dim);
            let (whole, num_groups) = (mixing(), 8 * num_kv_heads);
            let mut alone = vec![f32::NAN; 8 * num_heads * head_dim];
            whole.place(0..num_groups, &whole.compute(0..num_groups), &mut alone);
            let group = num_heads / num_kv_heads;
            let mut queries = whole.queries.chunks_exact(head_dim);
            for head in &whole.heads {
                for (row, seen) in head.seen.iter().enumerate() {
                    for query in 0..group {
                        let x = queries.next().expect("a query");
                        let place =
                            (head.first_row + row) * num_heads + head.number * group + query;
                        let found = &alone[place * head_dim..][..head_dim];
                        for (found, expected) in found.iter().zip(average(head, seen, x)) {
                            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
                        }
                    }
                }
            }
            let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build();
            pool.expect("threads start").install(|| {
                let team = Arc::new(Team::default());
                for _ in 0..50 {
                    team.run(|| {
                        let mut together = vec![f32::NAN; alone.len()];
                        team.share(mixing(), num_groups, |mixing, groups, mixed| {
                            mixing.place(groups, mixed, &mut together);
                        });
                        assert_eq!(together, alone);
                    });
                }
            });
        }
    }
}
