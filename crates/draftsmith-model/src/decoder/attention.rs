//! Grouped-query attention with rotary positions: over a cache while decoding, causal over whole
//! sequences while training.
//!
//! Over a cache, the sequences of a forward form one batch ([`Following`]).
//!
//! Queries that share a key/value head are stacked as rows of one product, so keys and values are
//! never repeated for each query head. The exception is a frozen bf16 model on a GPU that reads
//! whole sequences: it uses the backend's fused attention, which never materialises the scores.
//! Fused attention multiplies in 16 bits, so f32 does not use it.

mod unrolled;

use std::ops::Range;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{
    Device, FloatDType, Tensor, TensorData, activation::softmax, module::attention,
};

use super::block::BlockTensors;
use super::few_rows::{FewRows, Joined, finished};
use super::kernels::{Kernels, Then};
use super::norm::Norm;
use super::rope::RopeWindow;
use super::soft_capped;
use super::source::{WeightSource, named_linears};
use crate::following::{Following, MASKED};
use crate::kv_cache::{KvCache, LayerCache};
use crate::packed::AttentionForm;
use crate::placed::{PlacedRows, PlacedRun};
use crate::precision::copied;
use crate::rope::Reach;
use crate::rows::{DeviceRows, Run};
use crate::spec::{AttentionNames, AttentionSpec, NamedLayer};
use crate::weights::NamedTensor;

pub(crate) use unrolled::{DraftAttention, DraftPlan, Drafts, UnrolledAttention, delayed};

const CACHE: &str = "positions that continue a cache come with it";

/// The attention block of one layer, with its norms.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    pub(crate) norm: Norm,
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    pub(super) output: Linear,
    /// The norms of each head's query and key, which are applied before rotation.
    pub(super) head_norms: Option<[Norm; 2]>,
    pub(super) post_norm: Option<Norm>,
    #[module(skip)]
    pub(super) form: AttentionForm,
    /// The projections to queries, keys and values joined to one product; `None` if they are
    /// separate.
    #[module(skip)]
    pub(super) joined: Option<Joined>,
}

/// Data that the layers of one forward share: rotary tables and masks for each reach of the model.
#[derive(Debug, Clone)]
pub(crate) struct Positions {
    views: Vec<View>,
    /// The places of new tokens in the cache. `None` for whole sequences, or if the layers keep no
    /// keys.
    following: Option<Following>,
    /// The rows of new tokens in the form that our own kernels read; `None` if there are too many
    /// rows.
    few: Option<FewRows>,
    /// Our own kernels, if the layers are frozen on a GPU and have joined products.
    kernels: Option<Kernels>,
}

/// The rotation and the mask of layers with the same reach.
#[derive(Debug, Clone)]
struct View {
    rope: RopeWindow,
    mask: Mask,
    /// Whether the backend's fused attention replaces the mask.
    is_fused: bool,
}

/// The numbers added to the scores, `[batch or 1, 1, seq, all]`: 0 where a query may attend, a
/// large negative number for later positions and for those before its window. `None` if a query may
/// attend to all.
type Mask = Option<Tensor<4>>;

/// Builds the causal mask of whole sequences, `[1, 1, seq, seq]`; `None` for a single token.
fn mask_of(reach: &Reach, seq: usize, dtype: FloatDType, device: &Device) -> Mask {
    if seq == 1 {
        return None;
    }
    let mut mask = vec![MASKED; seq * seq];
    for (query, row) in mask.chunks_exact_mut(seq).enumerate() {
        row[reach.first_seen(query)..=query].fill(0.0);
    }
    let mask = TensorData::new(mask, [1, 1, seq, seq]);
    Some(Tensor::<4>::from_data(mask, device).cast(dtype))
}

impl Positions {
    /// Builds rotary tables and masks of whole sequences, on the layers' device. `hidden` may be on
    /// another device, since features can be constants on a device without autodiff.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`, in the type in which the layers compute
    pub(crate) fn whole(
        reaches: &[Reach],
        is_joined: bool,
        hidden: &Tensor<3>,
        device: &Device,
    ) -> Self {
        let dtype = FloatDType::from(hidden.dtype());
        let [_, seq, _] = hidden.dims();
        let all = [PlacedRun { slot: 0, start: 0, num_rows: seq }];
        let view = |reach: &Reach| {
            let rope = RopeWindow::new(&reach.rope, PlacedRows::new(&all, &[]), dtype, device);
            let is_causal = reach.first_seen(seq.saturating_sub(1)) == 0;
            let may_fuse = dtype == FloatDType::BF16 && !device.is_autodiff();
            let is_fused = may_fuse && is_causal && !reach.is_capped;
            let mask = if is_fused { None } else { mask_of(reach, seq, dtype, device) };
            View { rope, mask, is_fused }
        };
        let kernels = is_joined.then(|| Kernels::on(device)).flatten();
        Self { views: reaches.iter().map(view).collect(), following: None, few: None, kernels }
    }

    /// Registers new tokens in the caches of `layers`, and returns their rotary tables and masks,
    /// on the device and in the type of `hidden`. `num_kv_heads` is `None` if the layers have no
    /// attention. Our own kernels may be used if the products of the layers are joined.
    pub(crate) fn following(
        reaches: &[Reach],
        (is_joined, num_kv_heads): (bool, Option<usize>),
        hidden: &DeviceRows,
        layers: Range<usize>,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> Self {
        let (device, num_padding) = (hidden.tensor.device(), hidden.num_padding());
        let dtype = FloatDType::from(hidden.tensor.dtype());
        let num_slots = cache.num_slots();
        let rows = cache.extend(layers, runs, num_padding);
        let kernels = is_joined.then(|| Kernels::on(&device)).flatten();
        if let Some(few) = kernels
            .and_then(|kernels| FewRows::new(kernels, reaches, rows, (dtype.into(), &device)))
        {
            return Self { views: Vec::new(), following: None, few: Some(few), kernels };
        }
        let following = num_kv_heads.map(|num_kv_heads| {
            Following::new(rows, num_padding, num_slots, num_kv_heads, &device)
        });
        let views = following.iter().flat_map(|following| {
            reaches.iter().map(|reach| View {
                rope: RopeWindow::new(&reach.rope, rows, dtype, &device),
                mask: Some(following.mask(rows, reach, dtype, &device)),
                is_fused: false,
            })
        });
        Self { views: views.collect(), following, few: None, kernels }
    }

    /// Returns the kernels of the layers, if these are frozen on a GPU.
    pub(crate) fn kernels(&self) -> Option<Kernels> {
        self.kernels
    }
}

impl Attention {
    /// Returns the index into the model's list of [`Reach`]es.
    pub(crate) fn reach(&self) -> usize {
        self.form.reach
    }

    /// Builds the attention of a layer with weights from `source`.
    pub(super) fn build<S: WeightSource>(
        spec: &AttentionSpec,
        layer: NamedLayer<'_>,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let NamedLayer { shape, name, .. } = layer;
        let [query, key, value, output] = spec.linears(shape);
        let mut norm = |part, width| source.norm(layer.norm(part, width));
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
            form: AttentionForm::new(spec, layer),
            joined: None,
        })
    }

    /// Lists the tensors in a checkpoint's layout.
    pub(super) fn named(&self, spec: &AttentionSpec, layer: NamedLayer<'_>) -> Vec<NamedTensor> {
        let AttentionNames { norm, head_norms, post_norm, .. } = spec.names;
        let named = |(own, part): (&Norm, &'static str)| own.named(layer.norm(part, own.width()));
        let mut tensors = named((&self.norm, norm));
        let linears = spec.linears(layer.shape).into_iter().zip(self.projections());
        tensors.extend(named_linears(layer.name, linears));
        let of_heads = self.head_norms.iter().flatten().zip(head_norms.into_iter().flatten());
        tensors.extend(of_heads.chain(self.post_norm.iter().zip(post_norm)).flat_map(named));
        tensors
    }

    /// Returns the projections to queries, keys, values and output.
    pub(crate) fn projections(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    /// Returns a trainable copy of `other` on `device`, with the reach of this attention.
    pub(super) fn with_weights_of(self, other: Self, device: &Device) -> Self {
        Self { form: self.form, ..copied(other, device) }
    }

    /// Initialises the weights with trainable copies of `other`'s, where they fit. If a projection
    /// has the same number of outputs as `other`'s but more inputs, the copies become its last
    /// rows.
    pub(super) fn begun_from(self, other: Self, device: &Device) -> Self {
        let begun = |own: Linear, theirs: Linear| {
            let (own_weight, weight) = (own.weight.val(), theirs.weight.val());
            let ([inputs, outputs], [their_inputs, their_outputs]) =
                (own_weight.dims(), weight.dims());
            if outputs != their_outputs || inputs < their_inputs {
                return own;
            }
            let weight = weight.cast(FloatDType::F32).to_device(&own_weight.device());
            let weight = match inputs - their_inputs {
                0 => weight,
                num => Tensor::cat(vec![own_weight.narrow(0, 0, num), weight], 0),
            };
            Linear { weight: Param::from_data(weight.into_data(), device), bias: own.bias }
        };
        let norm = match other.norm.beta() {
            None => copied(other.norm, device),
            Some(_) => self.norm,
        };
        Self {
            norm,
            query: begun(self.query, other.query),
            key: begun(self.key, other.key),
            value: begun(self.value, other.value),
            output: begun(self.output, other.output),
            ..self
        }
    }

    /// Applies the norm to the rows that the attention reads.
    pub(crate) fn normed_input<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.norm.forward(x)
    }

    /// Joins the projections to queries, keys and values, if the layer decodes on a GPU.
    pub(super) fn join(&mut self) {
        let has_shift = |norm: &Norm| norm.beta().is_some();
        let is_suited = !self.head_norms.iter().flatten().any(has_shift);
        if is_suited && !self.is_joined() && Kernels::on(&self.query.weight.device()).is_some() {
            Joined::new(&mut [&mut self.output]);
            self.joined = Joined::new(&mut [&mut self.query, &mut self.key, &mut self.value]);
        }
    }

    pub(super) fn is_joined(&self) -> bool {
        self.joined.as_ref().is_some_and(|joined| joined.is_of(&self.query))
    }

    /// Adds [`Self::forward`] of x to a residual. Applies the norm to x first, unless `is_normed`
    /// is true.
    pub(crate) fn added_to(
        &self,
        residual: Tensor<3>,
        (x, is_normed): (Tensor<3>, bool),
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let joined = positions.kernels.zip(self.joined.as_ref());
        if let (Some(few), Some((_, joined))) = (&positions.few, joined) {
            return self.added_few((residual, x), is_normed, (few, joined), cache.expect(CACHE));
        }
        let x = if is_normed { x } else { self.norm.forward(x) };
        let Some((kernels, _)) = joined else {
            return residual + self.forward(x, positions, cache);
        };
        let shape = residual.dims();
        let mixed = self.mixed(x, positions, cache).flatten(0, 1);
        let residual = residual.reshape([shape[0] * shape[1], shape[2]]);
        finished(kernels, &self.output, &self.post_norm, mixed, residual).reshape(shape)
    }

    /// Adds the attention of few rows over a cache to a residual.
    fn added_few(
        &self,
        both: (Tensor<3>, Tensor<3>),
        is_normed: bool,
        (few, joined): (&FewRows, &Joined),
        cache: &mut LayerCache,
    ) -> Tensor<3> {
        let norm = (!is_normed).then_some(&self.norm);
        let block = BlockTensors::new(norm, joined, &self.output, self.post_norm.as_ref());
        let norms = self.head_norms.as_ref();
        let epsilon = norms.map_or(0.0, |[query, _]| query.epsilon());
        let norms = norms.map(|both| both.each_ref().map(Norm::gamma));
        few.attention(both, block, cache, (norms, epsilon), self.form)
    }

    /// Attends from each token to itself and earlier tokens of its sequence.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden · num_read]`, after the norm
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Panics
    /// If `positions` continue a cache and `cache` is `None`.
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let [batch, seq, _] = x.dims();
        let output = project(&self.output, self.mixed(x, positions, cache));
        let [_, hidden] = output.dims();
        let output = output.reshape([batch, seq, hidden]);
        match &self.post_norm {
            Some(norm) => norm.forward(output),
            None => output,
        }
    }

    /// Projects rows to queries, keys and values, and averages the values for each query by
    /// attention.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden · num_read]`, after the norm
    /// - output: `[batch, seq, heads · head_dim]`
    fn mixed(
        &self,
        x: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let AttentionForm { head_dim, scale, reach, .. } = self.form;
        let View { rope, mask, is_fused } = &positions.views[reach];
        let [q, k, v] = self.queries_keys_and_values(x, positions);
        let (q, k) = (self.normed(0, q), rope.rotate(self.normed(1, k), 1.0));
        let is_frozen = positions.kernels.is_some();
        // The scale of the scores is applied to the queries, which are fewer numbers.
        match &positions.following {
            None if *is_fused => {
                // The backend scales scores by 1 / √head_dim.
                let rest = scale * (head_dim as f32).sqrt();
                let rest = if (rest - 1.0).abs() < 1e-6 { 1.0 } else { rest };
                let [k, v] = [k, v].map(|x| x.swap_dims(1, 2));
                joined(self.mix_fused(rope.rotate(q, rest), k, v))
            }
            None => {
                let [k, v] = [k, v].map(|x| x.swap_dims(1, 2));
                joined(self.mix(rope.rotate(q, scale), [k, v], mask, is_frozen))
            }
            Some(following) => {
                let cache = cache.expect(CACHE);
                let [k, v] = cache.append(following, [k, v]);
                let q = following.batch(rope.rotate(q, scale));
                following.unbatch(joined(self.mix(q, [k, v], mask, is_frozen)))
            }
        }
    }

    /// Projects x, after the norm, to queries, keys and values, `[batch, seq, heads, head_dim]`
    /// each. Norms of heads and rotation are not applied yet.
    fn queries_keys_and_values(&self, x: Tensor<3>, positions: &Positions) -> [Tensor<4>; 3] {
        let AttentionForm { num_heads, num_kv_heads, head_dim, .. } = self.form;
        let Some((kernels, joined)) = positions.kernels.zip(self.joined.as_ref()) else {
            return [
                self.heads(&self.query, num_heads, x.clone()),
                self.heads(&self.key, num_kv_heads, x.clone()),
                self.heads(&self.value, num_kv_heads, x),
            ];
        };
        let [batch, seq, width] = x.dims();
        let all = joined.project(kernels, x.reshape([batch * seq, width]), None, Then::Nothing);
        let all = all.reshape([batch, seq, num_heads + 2 * num_kv_heads, head_dim]);
        let part = |start, num| all.clone().narrow(2, start, num);
        [
            part(0, num_heads),
            part(num_heads, num_kv_heads),
            part(num_heads + num_kv_heads, num_kv_heads),
        ]
    }

    /// Averages the values that each query attends to, weighted by the softmax of the scores.
    ///
    /// # Shapes
    /// - q: `[batch, seq, heads, head_dim]`, rotated and scaled
    /// - k, v: `[batch, kv_heads, all, head_dim]`
    /// - output: `[batch, heads, seq, head_dim]`
    fn mix(&self, q: Tensor<4>, [k, v]: [Tensor<4>; 2], mask: &Mask, is_frozen: bool) -> Tensor<4> {
        let multiply = if is_frozen { Kernels::product } else { Tensor::matmul };
        let ([batch, seq, heads, head_dim], all) = (q.dims(), k.dims()[2]);
        let AttentionForm { num_kv_heads, soft_cap, .. } = self.form;
        let rows = heads / num_kv_heads * seq;
        let dtype = q.dtype();
        let q = q.swap_dims(1, 2).reshape([batch, num_kv_heads, rows, head_dim]);
        let mut scores = soft_capped(multiply(q, k.swap_dims(2, 3)), soft_cap);
        if let Some(mask) = mask {
            scores = (scores.reshape([batch, heads, seq, all]) + Tensor::clone(mask)).reshape([
                batch,
                num_kv_heads,
                rows,
                all,
            ]);
        }
        let weights = weights_of(scores).cast(dtype);
        multiply(weights, v).reshape([batch, heads, seq, head_dim])
    }

    /// Computes [`Self::mix`] for whole sequences with the backend's fused attention, which applies
    /// its own scale and causal mask.
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

    /// Writes the keys and values of new tokens without computing their attention. Applies the norm
    /// to x first, unless `is_normed` is true.
    ///
    /// # Shapes
    /// - x: `[1, rows, hidden]`
    pub(crate) fn fill(
        &self,
        (x, is_normed): (Tensor<3>, bool),
        positions: &Positions,
        cache: &mut LayerCache,
    ) {
        if let Some(few) = positions.few.as_ref().zip(self.joined.as_ref()) {
            self.added_few((x.clone(), x), is_normed, few, cache);
            return;
        }
        let View { rope, .. } = &positions.views[self.form.reach];
        let x = if is_normed { x } else { self.norm.forward(x) };
        let new = self.keys_and_values(x, rope);
        let following = positions.following.as_ref().expect("positions that continue a cache");
        cache.append(following, new);
    }

    pub(crate) fn num_kv_heads(&self) -> usize {
        self.form.num_kv_heads
    }

    /// Projects x, after the norm, to rotated keys and to values, `[batch, seq, kv_heads,
    /// head_dim]` each.
    fn keys_and_values(&self, x: Tensor<3>, rope: &RopeWindow) -> [Tensor<4>; 2] {
        let num_kv_heads = self.form.num_kv_heads;
        let k = self.normed(1, self.heads(&self.key, num_kv_heads, x.clone()));
        let v = self.heads(&self.value, num_kv_heads, x);
        [rope.rotate(k, 1.0), v]
    }

    /// Applies a projection and splits its outputs into heads, `[batch, seq, heads, head_dim]`.
    fn heads(&self, linear: &Linear, num_heads: usize, x: Tensor<3>) -> Tensor<4> {
        let [batch, seq, _] = x.dims();
        project(linear, x).reshape([batch, seq, num_heads, self.form.head_dim])
    }

    /// Applies the norm of queries (`nth` = 0) or of keys (`nth` = 1), if there is one.
    fn normed(&self, nth: usize, heads: Tensor<4>) -> Tensor<4> {
        match &self.head_norms {
            Some(norms) => norms[nth].forward(heads),
            None => heads,
        }
    }
}

/// Concatenates heads: `[batch, heads, seq, head_dim]` to `[batch, seq, heads · head_dim]`.
fn joined(mixed: Tensor<4>) -> Tensor<3> {
    let [batch, heads, seq, head_dim] = mixed.dims();
    mixed.swap_dims(1, 2).reshape([batch, seq, heads * head_dim])
}

/// Applies a linear layer to `[batch, seq, in]`, as one product over all rows.
fn project(linear: &Linear, x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    linear.forward(x.reshape([batch * seq, width]))
}

/// Computes the softmax of scores over the last dimension, in f32. The scores are reshaped to a
/// matrix, because burn compiles kernels for every number of dimensions.
fn weights_of(scores: Tensor<4>) -> Tensor<4> {
    let shape = scores.dims();
    softmax(scores.cast(FloatDType::F32).flatten::<2>(0, 2), 1).reshape(shape)
}
