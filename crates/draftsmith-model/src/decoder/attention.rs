//! Grouped-query attention with rotary positions: over a cache while decoding, causal over whole
//! sequences while training.
//!
//! Queries that share a key/value head are stacked as rows of one product, so keys and values are
//! never expanded to the number of query heads. The exception are whole sequences in bf16 that
//! record no gradients, those of a frozen model on a GPU: they go through the backend's fused
//! attention, which never holds the scores of a whole sequence. It multiplies in 16 bits
//! whatever it is given, so f32 stays away from it.

use std::ops::Range;

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{
    Device, FloatDType, Tensor, TensorData, activation::softmax, module::attention,
};

use super::rope::{Rope, RopeWindow};
use super::source::WeightSource;
use crate::kv_cache::LayerCache;
use crate::placed::PlacedRun;
use crate::shape::ModelShape;
use crate::spec::{AttentionSpec, LayerSpec};

/// One layer's attention behind its norm.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

/// What the layers of one forward share.
#[derive(Debug, Clone)]
pub(crate) struct Positions {
    rope: RopeWindow,
    seen: Seen,
}

/// What queries look at.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "there is one a forward")]
enum Seen {
    /// Whole sequences.
    Whole(Mask),
    /// Whole sequences, by the backend's fused attention.
    Fused,
    /// The tokens of their own sequence, which a cache holds: runs of rows, each one slot's.
    Cached(Vec<(PlacedRun, Mask)>),
}

/// How a query is kept from what follows it: added to the scores, `[1, 1, seq, all]`, 0 where a
/// query may look, a large negative number where it may not. `None` where it may look everywhere.
type Mask = Option<Tensor<4>>;

/// Added to scores that must not be seen: softmax turns it into exactly 0.
const MASKED: f32 = -1e30;

/// The mask of `seq` tokens that follow `start` others.
fn causal_mask(start: usize, seq: usize, dtype: FloatDType, device: &Device) -> Mask {
    if seq == 1 {
        return None;
    }
    let all = start + seq;
    let mut mask = vec![0.0; seq * all];
    for (query, row) in mask.chunks_exact_mut(all).enumerate() {
        row[start + query + 1..].fill(MASKED);
    }
    let mask = TensorData::new(mask, [1, 1, seq, all]);
    Some(Tensor::<4>::from_data(mask, device).cast(dtype))
}

impl Positions {
    /// The rotary tables and mask of whole sequences, on the layers' device: what they read may be a
    /// constant to what is trained.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`, in the type that the layers compute in
    pub(crate) fn whole(rope: &Rope, hidden: &Tensor<3>, device: &Device) -> Self {
        let dtype = FloatDType::from(hidden.dtype());
        let [_, seq, _] = hidden.dims();
        let all = PlacedRun { slot: 0, start: 0, num_rows: seq };
        let rope = rope.window(&[all], dtype, device);
        let seen = if dtype == FloatDType::BF16 && !device.is_autodiff() {
            Seen::Fused
        } else {
            Seen::Whole(causal_mask(0, seq, dtype, device))
        };
        Self { rope, seen }
    }

    /// The rotary tables and masks of new tokens behind those that a cache holds, on the layers'
    /// device.
    ///
    /// # Shapes
    /// - hidden: `[1, rows, hidden]`, in the type that the layers compute in
    pub(crate) fn following(
        rope: &Rope,
        runs: &[PlacedRun],
        hidden: &Tensor<3>,
        device: &Device,
    ) -> Self {
        let dtype = FloatDType::from(hidden.dtype());
        let rope = rope.window(runs, dtype, device);
        let mask = |run: &PlacedRun| causal_mask(run.start, run.num_rows, dtype, device);
        let seen = Seen::Cached(runs.iter().map(|run| (*run, mask(run))).collect());
        Self { rope, seen }
    }
}

impl Attention {
    /// The attention of the layer `name`, with the weights that `source` has.
    pub(super) fn build<S: WeightSource>(
        spec: &AttentionSpec,
        layer: &LayerSpec,
        shape: &ModelShape,
        name: &str,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let [query, key, value, output] = spec.linears(shape);
        let norm = format!("{name}.{}", spec.names.norm);
        Ok(Self {
            norm: source.norm(&norm, shape.hidden_size, layer.norm_epsilon)?,
            query: source.linear(name, &query)?,
            key: source.linear(name, &key)?,
            value: source.linear(name, &value)?,
            output: source.linear(name, &output)?,
            num_heads: shape.num_heads,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
        })
    }

    pub(crate) fn norm(&self) -> &RmsNorm {
        &self.norm
    }

    /// The projections of queries, keys, values and the output.
    pub(crate) fn projections(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    /// The numbers of heads of queries and of keys.
    pub(crate) fn num_heads(&self) -> (usize, usize) {
        (self.num_heads, self.num_kv_heads)
    }

    /// The same attention of other weights, each made of the one here.
    pub(super) fn map(
        &self,
        norm: impl Fn(&RmsNorm) -> RmsNorm,
        linear: impl Fn(&Linear) -> Linear,
    ) -> Self {
        let [query, key, value, output] = self.projections().map(linear);
        let Self { num_heads, num_kv_heads, head_dim, .. } = *self;
        Self {
            norm: norm(&self.norm),
            query,
            key,
            value,
            output,
            num_heads,
            num_kv_heads,
            head_dim,
        }
    }

    /// Attends from tokens to those before them in their sequence and themselves.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Panics
    /// If the positions are behind those of a cache, and it is not given.
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let x = self.norm.forward(x);
        let q = self.heads(&self.query, self.num_heads, x.clone());
        let (k, v) = self.keys_and_values(x, positions);
        // The scores' scale is the queries' as well, and fewer numbers.
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let mixed = match &positions.seen {
            Seen::Fused => self.mix_fused(positions.rope.rotate(q, 1.0), k, v),
            Seen::Whole(mask) => self.mix(positions.rope.rotate(q, scale), k, v, mask),
            Seen::Cached(runs) => {
                let cache = cache.expect("positions behind a cache's come with it");
                let q = positions.rope.rotate(q, scale);
                let mut mixed = Vec::with_capacity(runs.len());
                for ((run, mask), rows) in runs.iter().zip(rows_of(runs)) {
                    let (k, v) = cache.append(*run, cut(&k, 2, &rows), cut(&v, 2, &rows));
                    mixed.push(self.mix(cut(&q, 1, &rows), k, v, mask));
                }
                if mixed.len() == 1 { mixed.swap_remove(0) } else { Tensor::cat(mixed, 2) }
            }
        };
        let mixed = mixed.swap_dims(1, 2).reshape([batch, seq, self.num_heads * self.head_dim]);
        project(&self.output, mixed).reshape([batch, seq, hidden])
    }

    /// The values that each query mixes from those it may look at.
    ///
    /// # Shapes
    /// - q: `[batch, seq, heads, head_dim]`, rotated and scaled
    /// - k, v: `[batch, kv_heads, all, head_dim]`
    /// - output: `[batch, heads, seq, head_dim]`
    fn mix(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &Mask) -> Tensor<4> {
        let ([batch, seq, heads, head_dim], all) = (q.dims(), k.dims()[2]);
        let rows = heads / self.num_kv_heads * seq;
        let dtype = q.dtype();
        let q = q.swap_dims(1, 2).reshape([batch, self.num_kv_heads, rows, head_dim]);
        let mut scores = q.matmul(k.swap_dims(2, 3));
        if let Some(mask) = mask {
            scores = (scores.reshape([batch, heads, seq, all]) + Tensor::clone(mask)).reshape([
                batch,
                self.num_kv_heads,
                rows,
                all,
            ]);
        }
        let weights = softmax(scores.cast(FloatDType::F32), 3).cast(dtype);
        weights.matmul(v).reshape([batch, heads, seq, head_dim])
    }

    /// The same of whole sequences, by the backend, which scales.
    fn mix_fused(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let [batch, seq, heads, head_dim] = q.dims();
        let groups = heads / self.num_kv_heads;
        let repeated = |x: Tensor<4>| {
            if groups == 1 {
                return x;
            }
            x.reshape([batch, self.num_kv_heads, 1, seq, head_dim])
                .repeat_dim(2, groups)
                .reshape([batch, heads, seq, head_dim])
        };
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        attention(q.swap_dims(1, 2), repeated(k), repeated(v), None, None, options)
    }

    /// Writes the keys and values of new tokens, whose attention nobody reads.
    ///
    /// # Shapes
    /// - x: `[1, rows, hidden]`
    pub(crate) fn fill(&self, x: Tensor<3>, positions: &Positions, cache: &mut LayerCache) {
        let (k, v) = self.keys_and_values(self.norm.forward(x), positions);
        let Seen::Cached(runs) = &positions.seen else { panic!("positions behind a cache's") };
        for ((run, _), rows) in runs.iter().zip(rows_of(runs)) {
            cache.append(*run, cut(&k, 2, &rows), cut(&v, 2, &rows));
        }
    }

    /// Of normed x, `[batch, kv_heads, seq, head_dim]` each, the keys rotated.
    fn keys_and_values(&self, x: Tensor<3>, positions: &Positions) -> (Tensor<4>, Tensor<4>) {
        let k = self.heads(&self.key, self.num_kv_heads, x.clone());
        let v = self.heads(&self.value, self.num_kv_heads, x);
        (positions.rope.rotate(k, 1.0).swap_dims(1, 2), v.swap_dims(1, 2))
    }

    /// A projection cut into heads, `[batch, seq, heads, head_dim]`.
    fn heads(&self, linear: &Linear, num_heads: usize, x: Tensor<3>) -> Tensor<4> {
        let [batch, seq, _] = x.dims();
        project(linear, x).reshape([batch, seq, num_heads, self.head_dim])
    }
}

/// Which rows of a forward each run has.
fn rows_of(runs: &[(PlacedRun, Mask)]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    runs.iter().map(move |(run, _)| {
        end += run.num_rows;
        end - run.num_rows..end
    })
}

/// Some rows of a tensor, whose dimension `dim` they are.
fn cut(x: &Tensor<4>, dim: usize, rows: &Range<usize>) -> Tensor<4> {
    match x.dims()[dim] == rows.len() {
        true => x.clone(),
        false => x.clone().narrow(dim, rows.start, rows.len()),
    }
}

/// Applies a linear layer to `[batch, seq, in]`, as one product over all rows.
fn project(linear: &Linear, x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    linear.forward(x.reshape([batch * seq, width]))
}
