//! Llama-architecture models: embedding, decoder layers that can be run in ranges, final norm and
//! LM head.
//!
//! The pieces are public on purpose: a self-draft runs the layers `0..exit_layer`, verification
//! goes on with `exit_layer..num_layers` on the same features. [`CausalLm::hidden_states`] runs
//! whole sequences without a cache, for training and for features.
//!
//! Weights are kept as contiguous `[in, out]` matrices and inputs are flattened to two dimensions
//! before each product: other layouts decode several times slower on CPU.

pub(crate) mod attention;
mod load;
mod packed_model;
pub(crate) mod rope;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{
    Device, FloatDType, Int, Tensor, TensorData, activation::silu, module::embedding,
};

use crate::config::LlamaConfig;
use crate::kv_cache::KvCache;
use crate::packed;
use crate::precision::cast_parameters;
use crate::rows::{Place, Rows, Run, Slots};
use crate::weights::WeightDtype;
use attention::{Attention, Positions};
pub(crate) use load::{build_from, linear, pretty, read_norm, transposed};
use packed_model::PackedModel;
use rope::Rope;

/// A causal language model of the Llama architecture.
#[derive(Module, Debug)]
pub struct CausalLm {
    /// `[vocab, hidden]`
    embed_tokens: Param<Tensor<2>>,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    /// To `[vocab]`. `None` while a tied model is trained: the embedding is both then. A
    /// loaded model has its own contiguous copy, tied or not.
    lm_head: Option<Linear>,
    rope: Rope,
    /// The same once more, for few rows on the CPU.
    #[module(skip)]
    packed: Option<Arc<PackedModel>>,
    #[module(skip)]
    config: LlamaConfig,
}

/// One decoder layer: attention and MLP, each after a norm and around a residual.
#[derive(Module, Debug)]
pub(crate) struct DecoderLayer {
    pub(crate) input_layernorm: RmsNorm,
    pub(crate) self_attn: Attention,
    pub(crate) post_attention_layernorm: RmsNorm,
    pub(crate) mlp: Mlp,
}

/// The gated MLP: `down(silu(gate(x)) ∘ up(x))`.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

/// A linear layer that a builder must supply.
pub(crate) struct LinearShape {
    /// Name within its layer, as in the checkpoint.
    pub(crate) name: &'static str,
    pub(crate) input: usize,
    pub(crate) output: usize,
    pub(crate) bias: bool,
}

/// Applies a linear layer to `[batch, seq, in]`, as one product over all rows.
pub(crate) fn project(linear: &Linear, x: Tensor<3>) -> Tensor<2> {
    let [batch, seq, width] = x.dims();
    linear.forward(x.reshape([batch * seq, width]))
}

impl LlamaConfig {
    /// Initialises a model with random weights (normal, standard deviation 0.02, as transformers
    /// does; the two projections into the residual stream scaled by 1/√(2·layers), as GPT-2 does),
    /// for training from scratch.
    pub fn init(&self, device: &Device) -> CausalLm {
        let residual_std = 0.02 / (2.0 * self.num_hidden_layers as f64).sqrt();
        let init = |mean_std: f64| Initializer::Normal { mean: 0.0, std: mean_std };
        let mut linear = |shape: LinearShape| {
            let into_residual = matches!(shape.name, "self_attn.o_proj" | "mlp.down_proj");
            let std = if into_residual { residual_std } else { 0.02 };
            let mut layer = LinearConfig::new(shape.input, shape.output)
                .with_bias(shape.bias)
                .with_initializer(init(std))
                .init(device);
            layer.bias = layer.bias.map(|_| Initializer::Zeros.init([shape.output], device));
            layer
        };
        let norm =
            || RmsNormConfig::new(self.hidden_size).with_epsilon(self.rms_norm_eps).init(device);
        let layers = (0..self.num_hidden_layers)
            .map(|_| DecoderLayer {
                input_layernorm: norm(),
                self_attn: Attention::new(self, &mut linear),
                post_attention_layernorm: norm(),
                mlp: Mlp::new(self, &mut linear),
            })
            .collect();
        let lm_head = (!self.tie_word_embeddings)
            .then(|| LinearConfig::new(self.hidden_size, self.vocab_size).with_bias(false))
            .map(|head| head.with_initializer(init(0.02)).init(device));
        CausalLm {
            embed_tokens: init(0.02).init([self.vocab_size, self.hidden_size], device),
            layers,
            norm: norm(),
            lm_head,
            rope: Rope::new(self, device),
            packed: None,
            config: self.clone(),
        }
    }
}

impl Mlp {
    pub(crate) fn new(
        config: &LlamaConfig,
        linear: &mut impl FnMut(LinearShape) -> Linear,
    ) -> Self {
        let (hidden, wide, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let mut named = |name, input, output| linear(LinearShape { name, input, output, bias });
        Self {
            gate_proj: named("mlp.gate_proj", hidden, wide),
            up_proj: named("mlp.up_proj", hidden, wide),
            down_proj: named("mlp.down_proj", wide, hidden),
        }
    }

    /// The projections of gate, up and down.
    pub(crate) fn projections(&self) -> [&Linear; 3] {
        [&self.gate_proj, &self.up_proj, &self.down_proj]
    }

    /// The same MLP of other projections, each made of the one here.
    pub(crate) fn map_projections(&self, map: impl Fn(&Linear) -> Linear) -> Self {
        let [gate_proj, up_proj, down_proj] = self.projections().map(map);
        Self { gate_proj, up_proj, down_proj }
    }

    /// # Shapes
    /// - x, output: `[batch, seq, hidden]`
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let x = x.reshape([batch * seq, hidden]);
        let gated = silu(self.gate_proj.forward(x.clone())) * self.up_proj.forward(x);
        self.down_proj.forward(gated).reshape([batch, seq, hidden])
    }
}

impl CausalLm {
    /// The model's shape.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        self.embed_tokens.val().device()
    }

    /// The model with its weights in `dtype`, in which it then computes; see `precision.rs`. Where
    /// weights are drawn lazily, as [`LlamaConfig::init`] does, each is drawn, cast and let go in
    /// turn.
    pub fn to_dtype(self, dtype: WeightDtype) -> Self {
        if self.embed_tokens.val().dtype() == dtype.float_dtype().into() {
            return self;
        }
        // Packed weights are f32.
        cast_parameters(Self { packed: None, ..self }, dtype.float_dtype())
    }

    /// One layer, and the final norm: what an adapter can begin with.
    pub(crate) fn layer_and_norm(&self, number: usize) -> (&DecoderLayer, &RmsNorm) {
        (&self.layers[number], &self.norm)
    }

    /// A cache for `num_slots` sequences of up to `capacity` tokens each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        KvCache::new(&self.config, capacity, num_slots, &self.device(), self.packed.is_some())
    }

    /// Looks up token embeddings.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        embedding(self.embed_tokens.val(), ids)
    }

    /// The root of the mean square of all numbers of the embeddings.
    pub fn embedding_size(&self) -> f32 {
        let table = self.embed_tokens.val().cast(FloatDType::F32);
        table.square().mean().sqrt().into_scalar::<f32>()
    }

    /// Looks up the embeddings of tokens of the sequence in slot 0, for the layers over a cache: in
    /// host memory where the model has packed weights. There a token's results do not depend on
    /// the tokens beside it.
    pub fn embed_ids(&self, ids: &[u32]) -> Rows {
        if let Some(packed) = &self.packed {
            return packed.embed(ids).into();
        }
        let values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let ids = Tensor::from_data(TensorData::new(values, [1, ids.len()]), &self.device());
        self.embed(ids).into()
    }

    /// [`CausalLm::embed_ids`] of tokens of several sequences, for one forward: each run is a slot
    /// and its sequence's next tokens.
    pub fn embed_runs(&self, runs: &[(usize, &[u32])]) -> Rows {
        let ids: Vec<u32> = runs.iter().flat_map(|(_, ids)| *ids).copied().collect();
        let slots: Slots =
            runs.iter().map(|(slot, ids)| Run { slot: *slot, num_rows: ids.len() }).collect();
        slots.rows(self.embed_ids(&ids).place)
    }

    /// Runs a range of layers on new tokens, which follow those that each layer's cache holds of
    /// their sequences. A row depends on its own sequence alone.
    ///
    /// # Panics
    /// If the layers of the range hold different numbers of a sequence's tokens, its slot is full,
    /// or its rows come in several runs.
    pub fn forward_layers(&self, layers: Range<usize>, hidden: Rows, cache: &mut KvCache) -> Rows {
        if layers.is_empty() {
            return hidden;
        }
        let num_rows = hidden.num_rows();
        let (place, slots) = hidden.into_parts();
        let hidden = match (&self.packed, place) {
            (Some(packed), Place::Host(mut rows)) => {
                packed.forward_layers(layers, &mut rows, slots.runs(num_rows), cache);
                return slots.rows(rows);
            }
            (_, place) => place.into_tensor(&self.device()),
        };
        let runs = cache.extend(layers.clone(), slots.runs(num_rows));
        let positions = Positions::following(&self.rope, runs, &hidden);
        let run = |hidden, number: usize| {
            self.layers[number].forward(hidden, &positions, Some(cache.layer_mut(number)))
        };
        slots.rows(layers.fold(hidden, run))
    }

    /// Reads new tokens into the caches of layer `first` and all behind it, for their keys and
    /// values alone: of the last layer nothing else is computed. `hidden` is the stream after
    /// `first` layers; embeddings where that is 0.
    ///
    /// # Panics
    /// As [`CausalLm::forward_layers`].
    pub fn fill_cache(&self, first: usize, hidden: Rows, cache: &mut KvCache) {
        let last = self.config.num_hidden_layers - 1;
        let num_rows = hidden.num_rows();
        let (place, slots) = self.forward_layers(first..last, hidden, cache).into_parts();
        let runs = slots.runs(num_rows);
        let hidden = match (&self.packed, place) {
            (Some(packed), Place::Host(rows)) => return packed.fill_last(&rows, runs, cache),
            (_, place) => place.into_tensor(&self.device()),
        };
        let runs = cache.extend(last..last + 1, runs);
        let positions = Positions::following(&self.rope, runs, &hidden);
        let layer = &self.layers[last];
        let normed = layer.input_layernorm.forward(hidden);
        layer.self_attn.fill(normed, &positions, cache.layer_mut(last));
    }

    /// [`CausalLm::final_norm`] of rows.
    pub fn normed(&self, hidden: Rows) -> Rows {
        let (place, slots) = hidden.into_parts();
        match (&self.packed, place) {
            (Some(packed), Place::Host(rows)) => slots.rows(packed.normed(rows)),
            (_, place) => slots.rows(self.final_norm(place.into_tensor(&self.device()))),
        }
    }

    /// [`CausalLm::lm_head`] of normed rows, one row of logits each.
    pub fn logits(&self, normed: &Rows) -> Rows {
        match (&self.packed, &normed.place) {
            (Some(packed), Place::Host(rows)) => normed.with_place(packed.logits(rows)),
            (_, place) => {
                normed.with_place(self.lm_head(place.clone().into_tensor(&self.device())))
            }
        }
    }

    /// Applies the final RMSNorm. Its output is what heads and Hugging Face's
    /// `hidden_states[-1]` mean by the final hidden state.
    pub fn final_norm(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.norm.forward(hidden)
    }

    /// Applies the LM head to normed hidden states.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`
    /// - output: `[batch, seq, vocab]`
    pub fn lm_head(&self, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, seq, width] = hidden.dims();
        let rows = hidden.reshape([batch * seq, width]);
        rows.matmul(self.lm_head_weight()).reshape([batch, seq, self.config.vocab_size])
    }

    /// The LM head as a matrix, for losses that take it in chunks; it has no bias.
    ///
    /// # Shapes
    /// - output: `[hidden, vocab]`
    pub fn lm_head_weight(&self) -> Tensor<2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.embed_tokens.val().transpose(),
        }
    }

    /// Every layer's hidden states over whole sequences, without a cache: entry `ℓ` is the stream
    /// after `ℓ` layers, entry 0 the embeddings. The last is *not* normed.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `num_layers + 1` of `[batch, seq, hidden]`
    pub fn all_hidden_states(&self, ids: Tensor<2, Int>) -> Vec<Tensor<3>> {
        let embedded = self.embed(ids);
        let positions = Positions::whole(&self.rope, &embedded);
        let mut states = vec![embedded];
        for layer in &self.layers {
            let last = states[states.len() - 1].clone();
            states.push(layer.forward(last, &positions, None));
        }
        states
    }

    /// The hidden states after each number of layers in `exit_layers`, and the final ones (after
    /// the final norm), over whole sequences in one pass, without a cache. No other layer's states
    /// are kept.
    ///
    /// `wanted` names, for each sequence, the positions whose final states somebody reads. What
    /// lies behind them is padding, and what lies before them is only ever looked at: where that
    /// saves time, neither is computed to its end. So the exits' states hold before the end of
    /// `wanted`, the final ones within it; elsewhere they are finite and mean nothing.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - wanted: `batch` of them, within `seq`
    /// - output: `[batch, seq, hidden]` for each of `exit_layers`, in their order, and once more
    ///
    /// # Panics
    /// If there are fewer layers than one of `exit_layers`, or not one of `wanted` a sequence.
    pub fn hidden_states_at(
        &self,
        ids: Tensor<2, Int>,
        exit_layers: &[usize],
        wanted: &[Range<usize>],
    ) -> (Vec<Tensor<3>>, Tensor<3>) {
        assert_eq!(ids.dims()[0], wanted.len(), "positions are wanted of every sequence");
        let mut rising: Vec<usize> = (0..exit_layers.len()).collect();
        rising.sort_by_key(|place| exit_layers[*place]);
        let mut hidden = self.embed(ids);
        let mut num_run = 0;
        let mut exits = vec![hidden.clone(); exit_layers.len()];
        for place in rising {
            hidden = self.run_layers(num_run..exit_layers[place], hidden, wanted);
            num_run = exit_layers[place];
            exits[place] = hidden.clone();
        }
        let last = self.run_layers(num_run..self.layers.len(), hidden, wanted);
        (exits, self.final_norm(last))
    }

    /// The final hidden states (after the final norm) over whole sequences, without a cache.
    /// Causal, so padding on the right changes nothing to its left.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub fn hidden_states(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [batch, seq] = ids.dims();
        let hidden = self.run_layers(0..self.layers.len(), self.embed(ids), &vec![0..seq; batch]);
        self.final_norm(hidden)
    }

    /// The hidden states after the first `exit_layer` layers over whole sequences, without a cache;
    /// no other layer is run.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    ///
    /// # Panics
    /// If there are fewer layers.
    pub fn exit_states(&self, ids: Tensor<2, Int>, exit_layer: usize) -> Tensor<3> {
        let [batch, seq] = ids.dims();
        self.run_layers(0..exit_layer, self.embed(ids), &vec![0..seq; batch])
    }

    /// Runs layers over whole sequences, without a cache. `wanted`: see
    /// [`CausalLm::hidden_states_at`].
    fn run_layers(
        &self,
        layers: Range<usize>,
        hidden: Tensor<3>,
        wanted: &[Range<usize>],
    ) -> Tensor<3> {
        if let Some(packed) = &self.packed {
            let (shape, device) = (hidden.dims(), hidden.device());
            let mut x = packed::values(hidden);
            packed.run_sequences(layers, &mut x, wanted);
            return packed::tensor(x, shape, &device);
        }
        let positions = Positions::whole(&self.rope, &hidden);
        let layers = self.layers[layers].iter();
        layers.fold(hidden, |hidden, layer| layer.forward(hidden, &positions, None))
    }
}

impl DecoderLayer {
    fn forward(
        &self,
        hidden: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut crate::kv_cache::LayerCache>,
    ) -> Tensor<3> {
        let attended =
            self.self_attn.forward(self.input_layernorm.forward(hidden.clone()), positions, cache);
        let hidden = hidden + attended;
        let mlp = self.mlp.forward(self.post_attention_layernorm.forward(hidden.clone()));
        hidden + mlp
    }
}
