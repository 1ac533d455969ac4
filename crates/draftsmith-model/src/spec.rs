//! What a decoder computes, as data: its norms, attention, rotation and MLP, and the names under
//! which a checkpoint keeps their weights. Reading, writing, initialising, counting and packing all
//! follow it, and nothing else asks which family a model is of.
//!
//! `config/families.rs` has the families, each an entry. One that differs in something new adds a
//! field or a variant to the part that differs, and an arm where that part is computed or stored.

use std::ops::Range;

use crate::shape::ModelShape;

/// Everything about a decoder but its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// Every norm of rows of the residual stream.
    pub norm: NormSpec,
    /// Each layer's attention.
    pub attention: AttentionSpec,
    /// Each layer's MLP.
    pub mlp: MlpSpec,
    /// Whether a layer's MLP reads what its attention reads, and not what it leaves behind.
    pub is_parallel: bool,
    /// How queries and keys are rotated.
    pub rope: RopeConfig,
    /// Layers whose queries look at the last tokens alone.
    pub window: Option<WindowSpec>,
    /// What embeddings are multiplied with, where they are.
    pub embedding_scale: Option<f32>,
    /// Logits are `cap · tanh(logit / cap)`, where they have one.
    pub logit_soft_cap: Option<f32>,
    /// Whether the LM head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// What the tensors outside the layers are called.
    pub(crate) names: ModelNames,
}

/// A norm of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// What it computes.
    pub form: NormForm,
    /// Added to what the root is taken of.
    pub epsilon: f64,
}

/// What a norm computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormForm {
    /// `x / rms(x) ∘ weight`
    Rms,
    /// `x / rms(x) ∘ (1 + weight)`: Gemma's. The 1 is added while loading.
    RmsPlusOne,
    /// `(x − mean(x)) / std(x) ∘ weight + bias`
    Layer,
}

/// Attention behind its norm, in the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of what they mix has one.
    pub output_bias: bool,
    /// Scores are divided by the root of this; `None` for the width of a head.
    pub query_scalar: Option<f64>,
    /// Scores are `cap · tanh(score / cap)`, where they have one.
    pub soft_cap: Option<f32>,
    pub(crate) names: AttentionNames,
}

/// An MLP behind its norm, in the residual stream: `down(activation(gate(x)) ∘ up(x))`, or
/// `down(activation(up(x)))` where there is no gate.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpSpec {
    /// The number of outputs of `up`.
    pub width: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Between the projections.
    pub activation: Activation,
    pub(crate) names: MlpNames,
}

/// What an MLP applies to each number of its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`
    Silu,
    /// `x · Φ(x)`, with the normal distribution's Φ
    Gelu,
    /// The same with `½ (1 + tanh(√(2/π) (x + 0.044715 x³)))` for Φ
    GeluTanh,
}

/// Layers whose queries look at the last tokens alone.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowSpec {
    /// How many tokens a query looks at, its own among them.
    pub size: usize,
    /// Whether each layer is one of them.
    pub layers: Vec<bool>,
    /// How they rotate, where it is not as the others do.
    pub rope: Option<RopeConfig>,
}

/// Rotary position embedding: base frequency and how long contexts stretch it.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base, `rope_theta`.
    pub theta: f64,
    /// How many channels of a head are rotated: the first. `None` for all.
    pub width: Option<usize>,
    /// The stretch.
    pub scaling: RopeScaling,
}

/// How the rotary frequencies are stretched for contexts longer than the pre-training's.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// A base that grows with a sequence once it is longer than the model's context. No longer
    /// sequence is read here, so that it computes what [`RopeScaling::None`] does.
    Dynamic {
        /// The stretch behind the context.
        factor: f64,
    },
    /// Llama 3.1's: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of pre-training.
        original_max_position_embeddings: f64,
    },
    /// YaRN (Peng et al. 2023): the same with a ramp over channels, and larger cosines and sines.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// Channels that turn more often than this in the pre-training's context are kept.
        beta_fast: f64,
        /// Channels that turn less often are divided.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole channels.
        truncate: bool,
        /// What cosines and sines are multiplied with.
        attention_factor: f64,
        /// The context length of pre-training.
        original_max_position_embeddings: f64,
    },
    /// LongRoPE (Ding et al. 2024): each frequency divided by its own factor. Sequences of up to
    /// `original_max_position_embeddings` tokens have the short factors, and no longer one is read
    /// here: the others would change what a cache holds already.
    LongRope {
        /// The divisors of each frequency.
        short_factor: Vec<f64>,
        /// Those of sequences that are not read here.
        long_factor: Vec<f64>,
        /// What cosines and sines are multiplied with.
        attention_factor: f64,
        /// The context length of pre-training.
        original_max_position_embeddings: f64,
    },
}

/// Names of the tensors outside the layers, and what the layers' names begin with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelNames {
    pub(crate) embedding: &'static str,
    /// Before a layer's number.
    pub(crate) layers: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) lm_head: &'static str,
    /// Tensors of published checkpoints that hold what is computed here: ends of their names.
    pub(crate) ignored: &'static [&'static str],
}

/// Names of an attention's tensors, behind its layer's. Queries, keys and values that lie in one
/// tensor have one name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionNames {
    pub(crate) norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    /// Whether one tensor has them head by head: a head's query, key and value, then the next's.
    pub(crate) is_by_head: bool,
    pub(crate) output: &'static str,
    /// Of queries and of keys, head by head, before they are rotated.
    pub(crate) head_norms: Option<[&'static str; 2]>,
    /// Before what attention gives is added to the residual stream.
    pub(crate) post_norm: Option<&'static str>,
}

/// Names of an MLP's tensors, behind its layer's. A gate in one tensor with `up` has its name, and
/// lies before it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MlpNames {
    pub(crate) norm: &'static str,
    /// `None` in an MLP without a gate.
    pub(crate) gate: Option<&'static str>,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// Before what the MLP gives is added to the residual stream.
    pub(crate) post_norm: Option<&'static str>,
}

/// One layer: its parts in their order, each `x + part(norm(x))`. A model's layers have both; an
/// adapter's may leave one out.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LayerSpec {
    pub(crate) norm: NormSpec,
    pub(crate) attention: Option<AttentionSpec>,
    pub(crate) mlp: Option<MlpSpec>,
    pub(crate) is_parallel: bool,
    /// Which of a model's reaches it has: 0 for all tokens, 1 for a window.
    pub(crate) reach: usize,
}

/// A linear layer as a checkpoint keeps it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearSpec {
    /// Behind the layer's name.
    pub(crate) name: &'static str,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Which of the tensor's rows are its outputs.
    pub(crate) rows: StoredRows,
    pub(crate) has_bias: bool,
    /// Whether its output is added to the residual stream.
    pub(crate) is_residual: bool,
}

/// Rows of a tensor: strips of one length at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredRows {
    /// All rows of the tensor.
    pub(crate) num_all: usize,
    /// The first that is meant.
    pub(crate) first: usize,
    /// Rows of a strip.
    strip: usize,
    /// Rows from one strip's beginning to the next's.
    step: usize,
}

impl StoredRows {
    fn all(num_all: usize) -> Self {
        Self { num_all, first: 0, strip: num_all, step: num_all }
    }

    /// The ranges of the tensor's rows that so many outputs are, in their order.
    pub(crate) fn strips(self, outputs: usize) -> impl Iterator<Item = Range<usize>> {
        let Self { first, strip, step, .. } = self;
        (0..outputs / strip).map(move |n| first + n * step..first + n * step + strip)
    }
}

impl LinearSpec {
    /// The name in a checkpoint, of a layer's or outside of them.
    pub(crate) fn name_in(&self, layer: &str) -> String {
        if layer.is_empty() { self.name.to_owned() } else { format!("{layer}.{}", self.name) }
    }

    /// A matrix that is a tensor of its own, without a bias.
    pub(crate) fn matrix(name: &'static str, inputs: usize, outputs: usize) -> Self {
        let rows = StoredRows::all(outputs);
        Self { name, inputs, outputs, rows, has_bias: false, is_residual: false }
    }

    /// An LM head, which has no bias.
    pub(crate) fn lm_head(name: &'static str, shape: &ModelShape) -> Self {
        Self::matrix(name, shape.hidden_size, shape.vocab_size)
    }

    pub(crate) fn num_parameters(&self) -> usize {
        self.inputs * self.outputs + if self.has_bias { self.outputs } else { 0 }
    }
}

impl ModelNames {
    /// Llama's names, which most families share.
    pub(crate) const LLAMA: Self = Self {
        embedding: "model.embed_tokens",
        layers: "model.layers",
        norm: "model.norm",
        lm_head: "lm_head",
        ignored: &["rotary_emb.inv_freq"],
    };

    /// The layer that a tensor is of, by its name; None of those outside the layers.
    pub(crate) fn layer_of(&self, tensor: &str) -> Option<usize> {
        let behind = tensor.strip_prefix(self.layers)?.strip_prefix('.')?;
        behind.split('.').next()?.parse().ok()
    }

    /// What the names of a layer's tensors begin with.
    pub(crate) fn layer(&self, number: usize) -> String {
        format!("{}.{number}", self.layers)
    }
}

impl AttentionNames {
    pub(crate) const LLAMA: Self = Self {
        norm: "input_layernorm",
        query: "self_attn.q_proj",
        key: "self_attn.k_proj",
        value: "self_attn.v_proj",
        is_by_head: false,
        output: "self_attn.o_proj",
        head_norms: None,
        post_norm: None,
    };
}

impl MlpNames {
    pub(crate) const LLAMA: Self = Self {
        norm: "post_attention_layernorm",
        gate: Some("mlp.gate_proj"),
        up: "mlp.up_proj",
        down: "mlp.down_proj",
        post_norm: None,
    };
}

impl AttentionSpec {
    /// Grouped-query attention under Llama's names.
    pub(crate) fn llama(bias: bool) -> Self {
        let names = AttentionNames::LLAMA;
        Self { qkv_bias: bias, output_bias: bias, query_scalar: None, soft_cap: None, names }
    }

    /// The projections to queries, keys and values, and of what they mix.
    pub(crate) fn linears(&self, shape: &ModelShape) -> [LinearSpec; 4] {
        let (hidden, head_dim) = (shape.hidden_size, shape.head_dim);
        let outputs =
            [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads].map(|n| n * head_dim);
        let names = [self.names.query, self.names.key, self.names.value];
        let num_all = outputs.iter().sum();
        let mut first = 0;
        let mut nth = 0;
        let [query, key, value] = names.map(|name| {
            let mut linear = LinearSpec::matrix(name, hidden, outputs[nth]);
            if names[0] == names[1] {
                linear.rows = if self.names.is_by_head {
                    StoredRows {
                        num_all,
                        first: nth * head_dim,
                        strip: head_dim,
                        step: 3 * head_dim,
                    }
                } else {
                    StoredRows { num_all, first, ..StoredRows::all(outputs[nth]) }
                };
            }
            first += outputs[nth];
            nth += 1;
            LinearSpec { has_bias: self.qkv_bias, ..linear }
        });
        let output = LinearSpec {
            has_bias: self.output_bias,
            is_residual: true,
            ..LinearSpec::matrix(self.names.output, outputs[0], hidden)
        };
        [query, key, value, output]
    }

    /// What scores are multiplied with.
    pub(crate) fn scale(&self, shape: &ModelShape) -> f32 {
        let scalar = self.query_scalar.map_or(shape.head_dim as f32, |scalar| scalar as f32);
        1.0 / scalar.sqrt()
    }
}

impl MlpSpec {
    /// A gated MLP under Llama's names.
    pub(crate) fn llama(width: usize, bias: bool) -> Self {
        Self { width, bias, activation: Activation::Silu, names: MlpNames::LLAMA }
    }

    /// The projections: the gate, if there is one, then up and down.
    pub(crate) fn linears(&self, shape: &ModelShape) -> (Option<LinearSpec>, [LinearSpec; 2]) {
        let (hidden, width, has_bias) = (shape.hidden_size, self.width, self.bias);
        let MlpNames { gate, up, down, .. } = self.names;
        let into = |name, nth: usize| {
            let mut linear = LinearSpec::matrix(name, hidden, width);
            if gate == Some(up) {
                let (num_all, first) = (2 * width, nth * width);
                linear.rows = StoredRows { num_all, first, ..linear.rows };
            }
            LinearSpec { has_bias, ..linear }
        };
        let down =
            LinearSpec { has_bias, is_residual: true, ..LinearSpec::matrix(down, width, hidden) };
        (gate.map(|gate| into(gate, 0)), [into(up, 1), down])
    }
}

impl NormSpec {
    /// What is added to the weights that a checkpoint keeps.
    pub(crate) fn offset(&self) -> f32 {
        if self.form == NormForm::RmsPlusOne { 1.0 } else { 0.0 }
    }

    pub(crate) fn num_parameters(self, width: usize) -> usize {
        if self.form == NormForm::Layer { 2 * width } else { width }
    }
}

impl DecoderSpec {
    /// The LM head, where it has weights of its own.
    pub(crate) fn lm_head(&self, shape: &ModelShape) -> LinearSpec {
        LinearSpec::lm_head(self.names.lm_head, shape)
    }

    /// A model's layer.
    pub(crate) fn layer(&self, number: usize) -> LayerSpec {
        let in_window = |window: &WindowSpec| window.layers.get(number) == Some(&true);
        LayerSpec {
            norm: self.norm,
            attention: Some(self.attention.clone()),
            mlp: Some(self.mlp.clone()),
            is_parallel: self.is_parallel,
            reach: usize::from(self.window.as_ref().is_some_and(in_window)),
        }
    }

    /// Parameters outside the layers, a tied LM head counted once.
    pub(crate) fn num_parameters_outside(&self, shape: &ModelShape) -> usize {
        let num_tables = if self.tie_word_embeddings { 1 } else { 2 };
        let norm = self.norm.num_parameters(shape.hidden_size);
        num_tables * shape.vocab_size * shape.hidden_size + norm
    }
}

impl LayerSpec {
    /// The number of parameters.
    pub(crate) fn num_parameters(&self, shape: &ModelShape) -> usize {
        let sum = |linears: &[LinearSpec]| linears.iter().map(LinearSpec::num_parameters).sum();
        // Each part has its norm.
        let norms = |post_norm: Option<&str>| {
            self.norm.num_parameters(shape.hidden_size) * (1 + usize::from(post_norm.is_some()))
        };
        let of_attention = |attention: &AttentionSpec| -> usize {
            let linears: usize = sum(&attention.linears(shape));
            let of_heads = attention
                .names
                .head_norms
                .map_or(0, |both| both.len() * self.norm.num_parameters(shape.head_dim));
            linears + of_heads + norms(attention.names.post_norm)
        };
        let of_mlp = |mlp: &MlpSpec| -> usize {
            let (gate, up_and_down) = mlp.linears(shape);
            let linears: usize = sum(&up_and_down);
            let gate = gate.as_ref().map_or(0, LinearSpec::num_parameters);
            gate + linears + norms(mlp.names.post_norm)
        };
        let parts = [self.attention.as_ref().map(of_attention), self.mlp.as_ref().map(of_mlp)];
        parts.into_iter().flatten().sum()
    }
}
