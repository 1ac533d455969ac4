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
use burn::nn::Linear;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{
    Device, FloatDType, Tensor, TensorData, activation::softmax, module::attention,
};

use super::norm::Norm;
use super::rope::RopeWindow;
use super::soft_cap::soft_capped;
use super::source::WeightSource;
use crate::kv_cache::LayerCache;
use crate::packed::AttentionForm;
use crate::placed::PlacedRun;
use crate::rope::Reach;
use crate::shape::ModelShape;
use crate::spec::{AttentionSpec, LayerSpec};

/// One layer's attention behind its norm.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    norm: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Of each head's query and key, before they are rotated.
    head_norms: Option<[Norm; 2]>,
    post_norm: Option<Norm>,
    #[module(skip)]
    form: AttentionForm,
}

/// What the layers of one forward share: for each reach of the model what its layers' queries look
/// at.
#[derive(Debug, Clone)]
pub(crate) struct Positions(Vec<View>);

/// What the queries of some layers look at, and how they are rotated.
#[derive(Debug, Clone)]
struct View {
    rope: RopeWindow,
    seen: Seen,
}

/// What queries look at.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "there is one a forward and reach")]
enum Seen {
    /// Whole sequences.
    Whole(Mask),
    /// Whole sequences, by the backend's fused attention.
    Fused,
    /// The tokens of their own sequence, which a cache holds: runs of rows, each one slot's.
    Cached(Vec<(PlacedRun, Mask)>),
}

/// How a query is kept from what follows it, and from what lies before its window: added to the
/// scores, `[1, 1, seq, all]`, 0 where a query may look, a large negative number where it may not.
/// `None` where it may look everywhere.
type Mask = Option<Tensor<4>>;

/// Added to scores that must not be seen: softmax turns it into exactly 0.
const MASKED: f32 = -1e30;

/// The mask of `seq` tokens that follow `start` others.
fn mask_of(reach: &Reach, start: usize, seq: usize, dtype: FloatDType, device: &Device) -> Mask {
    let all = start + seq;
    if seq == 1 && reach.first_seen(start) == 0 {
        return None;
    }
    let mut mask = vec![0.0; seq * all];
    for (query, row) in mask.chunks_exact_mut(all).enumerate() {
        row[..reach.first_seen(start + query)].fill(MASKED);
        row[start + query + 1..].fill(MASKED);
    }
    let mask = TensorData::new(mask, [1, 1, seq, all]);
    Some(Tensor::<4>::from_data(mask, device).cast(dtype))
}

impl Positions {
    /// The rotary tables and masks of whole sequences, on the layers' device: what they read may be a
    /// constant to what is trained.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`, in the type that the layers compute in
    pub(crate) fn whole(reaches: &[Reach], hidden: &Tensor<3>, device: &Device) -> Self {
        let dtype = FloatDType::from(hidden.dtype());
        let [_, seq, _] = hidden.dims();
        let all = PlacedRun { slot: 0, start: 0, num_rows: seq };
        let view = |reach: &Reach| {
            let rope = RopeWindow::new(&reach.rope, &[all], dtype, device);
            let is_causal = reach.first_seen(seq.saturating_sub(1)) == 0;
            let may_fuse = dtype == FloatDType::BF16 && !device.is_autodiff();
            let seen = if may_fuse && is_causal && !reach.is_capped {
                Seen::Fused
            } else {
                Seen::Whole(mask_of(reach, 0, seq, dtype, device))
            };
            View { rope, seen }
        };
        Self(reaches.iter().map(view).collect())
    }

    /// The rotary tables and masks of new tokens behind those that a cache holds, on the layers'
    /// device.
    ///
    /// # Shapes
    /// - hidden: `[1, rows, hidden]`, in the type that the layers compute in
    pub(crate) fn following(
        reaches: &[Reach],
        runs: &[PlacedRun],
        hidden: &Tensor<3>,
        device: &Device,
    ) -> Self {
        let dtype = FloatDType::from(hidden.dtype());
        let view = |reach: &Reach| {
            let rope = RopeWindow::new(&reach.rope, runs, dtype, device);
            let mask = |run: &PlacedRun| mask_of(reach, run.start, run.num_rows, dtype, device);
            View { rope, seen: Seen::Cached(runs.iter().map(|run| (*run, mask(run))).collect()) }
        };
        Self(reaches.iter().map(view).collect())
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
        let mut norm = |part, width| source.norm(name, part, width, &layer.norm);
        let mut head_norms = None;
        if let Some([query, key]) = spec.names.head_norms {
            head_norms = Some([norm(query, shape.head_dim)?, norm(key, shape.head_dim)?]);
        }
        let post_norm =
            spec.names.post_norm.map(|part| norm(part, shape.hidden_size)).transpose()?;
        Ok(Self {
            norm: norm(spec.names.norm, shape.hidden_size)?,
            head_norms,
            post_norm,
            query: source.linear(name, &query)?,
            key: source.linear(name, &key)?,
            value: source.linear(name, &value)?,
            output: source.linear(name, &output)?,
            form: AttentionForm::new(spec, layer, shape),
        })
    }

    /// The norm before it, those of queries and keys, and that of what it gives: as far as there are
    /// any.
    pub(crate) fn norms(&self) -> (&Norm, Option<&[Norm; 2]>, Option<&Norm>) {
        (&self.norm, self.head_norms.as_ref(), self.post_norm.as_ref())
    }

    /// The projections of queries, keys, values and the output.
    pub(crate) fn projections(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    /// What it computes besides.
    pub(crate) fn form(&self) -> AttentionForm {
        self.form
    }

    /// The same attention of other weights, each made of the one here.
    pub(super) fn with_weights_of(
        self,
        other: &Self,
        norm: impl Fn(&Norm) -> Norm,
        linear: impl Fn(&Linear) -> Linear,
    ) -> Self {
        let [query, key, value, output] = other.projections().map(linear);
        Self {
            norm: norm(&other.norm),
            head_norms: other.head_norms.as_ref().map(|both| both.each_ref().map(&norm)),
            post_norm: other.post_norm.as_ref().map(&norm),
            query,
            key,
            value,
            output,
            // An adapter's reach is its own.
            form: self.form,
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
        let AttentionForm { num_heads, head_dim, scale, reach, .. } = self.form;
        let View { rope, seen } = &positions.0[reach];
        let x = self.norm.forward(x);
        let q = self.normed(0, self.heads(&self.query, num_heads, x.clone()));
        let (k, v) = self.keys_and_values(x, rope);
        // The scores' scale is the queries' as well, and fewer numbers.
        let mixed = match seen {
            Seen::Fused => {
                // The backend scales by 1 / √head_dim.
                let rest = scale * (head_dim as f32).sqrt();
                let rest = if (rest - 1.0).abs() < 1e-6 { 1.0 } else { rest };
                self.mix_fused(rope.rotate(q, rest), k, v)
            }
            Seen::Whole(mask) => self.mix(rope.rotate(q, scale), k, v, mask),
            Seen::Cached(runs) => {
                let cache = cache.expect("positions behind a cache's come with it");
                let q = rope.rotate(q, scale);
                let mut mixed = Vec::with_capacity(runs.len());
                for ((run, mask), rows) in runs.iter().zip(rows_of(runs)) {
                    let (k, v) = cache.append(*run, cut(&k, 2, &rows), cut(&v, 2, &rows));
                    mixed.push(self.mix(cut(&q, 1, &rows), k, v, mask));
                }
                if mixed.len() == 1 { mixed.swap_remove(0) } else { Tensor::cat(mixed, 2) }
            }
        };
        let mixed = mixed.swap_dims(1, 2).reshape([batch, seq, num_heads * head_dim]);
        let output = project(&self.output, mixed).reshape([batch, seq, hidden]);
        match &self.post_norm {
            Some(norm) => norm.forward(output),
            None => output,
        }
    }

    /// The values that each query mixes from those it may look at.
    ///
    /// # Shapes
    /// - q: `[batch, seq, heads, head_dim]`, rotated and scaled
    /// - k, v: `[batch, kv_heads, all, head_dim]`
    /// - output: `[batch, heads, seq, head_dim]`
    fn mix(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: &Mask) -> Tensor<4> {
        let ([batch, seq, heads, head_dim], all) = (q.dims(), k.dims()[2]);
        let AttentionForm { num_kv_heads, soft_cap, .. } = self.form;
        let rows = heads / num_kv_heads * seq;
        let dtype = q.dtype();
        let q = q.swap_dims(1, 2).reshape([batch, num_kv_heads, rows, head_dim]);
        let mut scores = soft_capped(q.matmul(k.swap_dims(2, 3)), soft_cap);
        if let Some(mask) = mask {
            scores = (scores.reshape([batch, heads, seq, all]) + Tensor::clone(mask)).reshape([
                batch,
                num_kv_heads,
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
        let num_kv_heads = self.form.num_kv_heads;
        let groups = heads / num_kv_heads;
        let repeated = |x: Tensor<4>| {
            if groups == 1 {
                return x;
            }
            x.reshape([batch, num_kv_heads, 1, seq, head_dim])
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
        let View { rope, seen } = &positions.0[self.form.reach];
        let (k, v) = self.keys_and_values(self.norm.forward(x), rope);
        let Seen::Cached(runs) = seen else { panic!("positions behind a cache's") };
        for ((run, _), rows) in runs.iter().zip(rows_of(runs)) {
            cache.append(*run, cut(&k, 2, &rows), cut(&v, 2, &rows));
        }
    }

    /// Of normed x, `[batch, kv_heads, seq, head_dim]` each, the keys rotated.
    fn keys_and_values(&self, x: Tensor<3>, rope: &RopeWindow) -> (Tensor<4>, Tensor<4>) {
        let num_kv_heads = self.form.num_kv_heads;
        let k = self.normed(1, self.heads(&self.key, num_kv_heads, x.clone()));
        let v = self.heads(&self.value, num_kv_heads, x);
        (rope.rotate(k, 1.0).swap_dims(1, 2), v.swap_dims(1, 2))
    }

    /// A projection cut into heads, `[batch, seq, heads, head_dim]`.
    fn heads(&self, linear: &Linear, num_heads: usize, x: Tensor<3>) -> Tensor<4> {
        let [batch, seq, _] = x.dims();
        project(linear, x).reshape([batch, seq, num_heads, self.form.head_dim])
    }

    /// Heads by their norm, if they have one: that of queries or of keys.
    fn normed(&self, nth: usize, heads: Tensor<4>) -> Tensor<4> {
        match &self.head_norms {
            Some(norms) => norms[nth].forward(heads),
            None => heads,
        }
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
