//! The computations of a decoder as data: norms, attention, rotary embedding, MLP, and the tensor
//! names of checkpoints. Reading, writing, initialising, counting and packing follow this spec;
//! only `config` asks which family a model belongs to.
//!
//! `config/families.rs` holds the families. A family with something new adds a field or variant
//! here, and code where that part is computed or stored. Adapters use the spec of their target.

use std::ops::Range;

use serde::Serialize;

/// A causal language model's sizes and special tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    /// The number of token embeddings.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The number of decoder layers.
    pub num_layers: usize,
    /// The number of query heads.
    pub num_heads: usize,
    /// The number of key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// The width of one head.
    pub head_dim: usize,
    /// The maximum sequence length, in tokens.
    pub context: usize,
    /// The beginning-of-sequence token, if the model has one.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a response; may be empty.
    pub eos_token_ids: Vec<u32>,
}

impl ModelShape {
    /// Returns the id if it has an embedding, or else 0. A draft model may have fewer rows for unused ids
    /// than its target. With the wrong token the draft may be worse, but the output stays the target's.
    pub fn readable(&self, id: u32) -> u32 {
        if (id as usize) < self.vocab_size { id } else { 0 }
    }
}

/// The structure of a decoder without its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// The form of all norms over the residual stream.
    pub norm: NormSpec,
    /// The attention of each layer.
    pub attention: AttentionSpec,
    /// The MLP of each layer.
    pub mlp: MlpSpec,
    /// Whether a layer's MLP reads the same input as its attention, instead of attention's output.
    pub is_parallel: bool,
    /// The rotary embedding of queries and keys.
    pub rope: RopeConfig,
    /// The layers with a sliding window.
    pub window: Option<WindowSpec>,
    /// The factor by which embeddings are multiplied, if any.
    pub embedding_scale: Option<f32>,
    /// The soft cap of logits, if any: they become `cap · tanh(logit / cap)`.
    pub logit_soft_cap: Option<f32>,
    /// Whether the LM head shares the embedding matrix.
    pub tie_word_embeddings: bool,
    /// What sessions do otherwise than trained.
    pub faults: SessionFaults,
    /// The names of the tensors outside the layers.
    pub(crate) names: ModelNames,
}

/// What sessions with a model do otherwise than it was trained, to find out what a server does. Files never
/// say so, and decoding has none of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionFaults {
    /// The bits of each number of cached keys and values, with a scale for every 32; `None` for all bits.
    /// Of models in host memory.
    pub cache_bits: Option<u32>,
    /// The number that is added to the positions of a drafter's own tokens.
    pub position_shift: isize,
    /// Whether an EAGLE-3 drafter reads the token at a position beside the state there, and not the next one.
    pub reads_token_behind: bool,
}

/// A norm over rows: an RMS norm or a LayerNorm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// The function.
    pub form: NormForm,
    /// The number added to the mean square or variance before the root is taken.
    pub epsilon: f64,
}

/// The function of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormForm {
    /// `x / rms(x) ∘ weight`.
    Rms,
    /// `x / rms(x) ∘ (1 + weight)`, as in Gemma. The 1 is added to the weight while loading.
    RmsPlusOne,
    /// One of the two above. The family, which we do not know, decides which.
    Undecided,
    /// `(x − mean(x)) / std(x) ∘ weight + bias`.
    Layer,
}

/// An attention block with its norms.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// The number whose root divides the scores; `None` means the width of a head.
    pub query_scalar: Option<f64>,
    /// The soft cap of scores, if any: they become `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// The number of hidden vectors that the projections to queries, keys and values read,
    /// concatenated: 1, or 2 in an EAGLE-3 drafter.
    pub num_read: usize,
    pub(crate) names: AttentionNames,
}

/// An MLP block with its norms: `down(activation(gate(x)) ∘ up(x))`, or `down(activation(up(x)))`
/// without a gate.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpSpec {
    /// The number of outputs of `up`.
    pub width: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// The activation between the projections.
    pub activation: Activation,
    pub(crate) names: MlpNames,
}

/// The activation of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)`, where Φ is the distribution function of the standard normal distribution.
    Gelu,
    /// The approximation of [`Self::Gelu`] with `½ (1 + tanh(√(2/π) (x + 0.044715 x³)))` for Φ(x).
    GeluTanh,
}

/// A sliding attention window.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowSpec {
    /// The number of tokens that a query attends to, including itself.
    pub size: usize,
    /// A flag for each layer: whether it has the window.
    pub layers: Vec<bool>,
    /// Whether the rows of a bidirectional block see its later rows in these layers too.
    pub sees_ahead: bool,
    /// The rotary embedding of the layers with a window, if it differs from that of the others.
    pub rope: Option<RopeConfig>,
}

/// A rotary position embedding: its base, width and scaling.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base, `rope_theta`.
    pub theta: f64,
    /// The number of rotated channels, the first of each head; `None` for all.
    pub width: Option<usize>,
    /// The scaling of frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// The scaling of rotary frequencies for contexts longer than in pre-training.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// No scaling.
    #[serde(rename = "default")]
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The base grows once a sequence exceeds the model's context. We never read longer sequences,
    /// so this has the same effect as [`RopeScaling::None`].
    Dynamic {
        /// The scaling factor beyond the context.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided and high ones kept, with a linear ramp between them.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length in pre-training, in tokens.
        original_max_position_embeddings: f64,
    },
    /// YaRN (Peng et al. 2023): low frequencies are divided and high ones kept, with a ramp over
    /// channels. Cosines and sines are also scaled.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The number of turns within the pre-training context above which a channel's frequency is
        /// kept.
        beta_fast: f64,
        /// The number of turns within the pre-training context below which a channel's frequency is
        /// divided.
        beta_slow: f64,
        /// Whether the ramp starts and ends at whole channels.
        truncate: bool,
        /// The factor by which cosines and sines are multiplied.
        attention_factor: f64,
        /// The context length in pre-training, in tokens.
        original_max_position_embeddings: f64,
    },
    /// LongRoPE (Ding et al. 2024): each frequency has its own divisor. Sequences of up to
    /// `original_max_position_embeddings` tokens use the short factors. Longer ones are not
    /// supported: switching to the long factors would invalidate cached keys.
    LongRope {
        /// The divisor of each frequency.
        short_factor: Vec<f64>,
        /// The divisors for longer sequences, which are not used here.
        long_factor: Vec<f64>,
        /// The factor by which cosines and sines are multiplied.
        attention_factor: f64,
        /// The context length in pre-training, in tokens.
        original_max_position_embeddings: f64,
    },
}

/// The names of the tensors outside the layers, and the prefix of the layers' names.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelNames {
    pub(crate) embedding: &'static str,
    /// The prefix of layer tensors, which a layer's number follows.
    pub(crate) layers: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) lm_head: &'static str,
    /// The suffixes of tensors that published checkpoints contain but that we compute instead.
    pub(crate) ignored: &'static [&'static str],
}

/// The names of an attention block's tensors, after the layer's prefix. If queries, keys and values
/// are stored in one tensor, they share its name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionNames {
    pub(crate) norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    /// Whether a tensor shared by queries, keys and values is ordered by head: first the query, key
    /// and value of one head, then those of the next.
    pub(crate) is_by_head: bool,
    pub(crate) output: &'static str,
    /// The names of the norms of each head's queries and keys, which are applied before rotation.
    pub(crate) head_norms: Option<[&'static str; 2]>,
    /// The name of the norm of attention's output, which is applied before the residual sum.
    pub(crate) post_norm: Option<&'static str>,
}

/// The names of an MLP's tensors, after the layer's prefix. A gate stored in one tensor with `up`
/// shares its name and comes first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MlpNames {
    pub(crate) norm: &'static str,
    /// The name of the gate; `None` if the MLP has no gate.
    pub(crate) gate: Option<&'static str>,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// The name of the norm of the MLP's output, which is applied before the residual sum.
    pub(crate) post_norm: Option<&'static str>,
}

/// What most layers are expected to have.
pub(crate) const BOTH_PARTS: &str = "the layer has both parts";

/// One decoder layer: attention, then an MLP, each as `x + part(norm(x))`. A model's layers have
/// both parts; an adapter's layers may lack one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LayerSpec {
    pub(crate) norm: NormSpec,
    pub(crate) attention: Option<AttentionSpec>,
    pub(crate) mlp: Option<MlpSpec>,
    pub(crate) is_parallel: bool,
    /// The index into the list of [`Reach`](crate::rope::Reach)es: 0 for a layer that attends to
    /// all tokens, 1 for one with a window.
    pub(crate) reach: usize,
}

/// A layer of a model: what it is, and the prefix of its tensors in checkpoints.
#[derive(Clone, Copy)]
pub(crate) struct NamedLayer<'a> {
    pub(crate) spec: &'a LayerSpec,
    pub(crate) shape: &'a ModelShape,
    pub(crate) name: &'a str,
}

impl<'a> NamedLayer<'a> {
    /// Specifies a norm of the layer over rows of `width` numbers.
    pub(crate) fn norm(&self, name: &'static str, width: usize) -> NamedNorm<'a> {
        NamedNorm { layer: self.name, name, width, spec: &self.spec.norm }
    }
}

/// A norm over rows of `width` numbers.
#[derive(Clone, Copy)]
pub(crate) struct NamedNorm<'a> {
    /// The prefix of the layer; empty for a norm outside layers.
    layer: &'a str,
    name: &'static str,
    pub(crate) width: usize,
    pub(crate) spec: &'a NormSpec,
}

impl<'a> NamedNorm<'a> {
    /// Specifies a norm of hidden states outside layers.
    pub(crate) fn outside(name: &'static str, shape: &ModelShape, spec: &'a NormSpec) -> Self {
        Self { layer: "", name, width: shape.hidden_size, spec }
    }

    /// Returns the same norm of rows of another width.
    pub(crate) fn of_width(self, width: usize) -> Self {
        Self { width, ..self }
    }

    /// Returns whether there is no such norm. Its place then has ones, and no tensor.
    pub(crate) fn is_absent(&self) -> bool {
        self.name.is_empty()
    }

    /// Returns the full name in a checkpoint.
    pub(crate) fn name(&self) -> String {
        let Self { layer, name, .. } = self;
        if layer.is_empty() { (*name).to_owned() } else { format!("{layer}.{name}") }
    }
}

/// A linear layer in a checkpoint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearSpec {
    /// The name after the layer's prefix.
    pub(crate) name: &'static str,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// The rows of the tensor that are this layer's outputs.
    pub(crate) rows: RowStrips,
    pub(crate) has_bias: bool,
    /// Whether the output is added to the residual stream.
    pub(crate) is_residual: bool,
}

/// The rows of a tensor that belong to one linear layer: strips of equal length at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowStrips {
    /// The number of rows of the whole tensor.
    pub(crate) num_all: usize,
    /// The first row of the first strip.
    pub(crate) first: usize,
    /// The number of rows of a strip.
    strip: usize,
    /// The number of rows from the start of one strip to the start of the next.
    step: usize,
}

impl RowStrips {
    fn all(num_all: usize) -> Self {
        Self { num_all, first: 0, strip: num_all, step: num_all }
    }

    /// Lists the tensor's row ranges for the first `outputs` outputs, in order.
    pub(crate) fn strips(self, outputs: usize) -> impl Iterator<Item = Range<usize>> {
        let Self { first, strip, step, .. } = self;
        (0..outputs / strip).map(move |n| first + n * step..first + n * step + strip)
    }
}

impl LinearSpec {
    /// Returns the full name in a checkpoint. `layer` is the layer's prefix; it is empty for
    /// tensors outside the layers.
    pub(crate) fn name_in(&self, layer: &str) -> String {
        if layer.is_empty() { self.name.to_owned() } else { format!("{layer}.{}", self.name) }
    }

    /// Specifies a matrix in a separate tensor, without a bias.
    pub(crate) fn matrix(name: &'static str, inputs: usize, outputs: usize) -> Self {
        let rows = RowStrips::all(outputs);
        Self { name, inputs, outputs, rows, has_bias: false, is_residual: false }
    }

    /// Specifies an LM head, which has no bias.
    pub(crate) fn lm_head(name: &'static str, shape: &ModelShape) -> Self {
        Self::matrix(name, shape.hidden_size, shape.vocab_size)
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

    /// Parses the number of the layer from a tensor's name; `None` for a tensor outside the layers.
    pub(crate) fn layer_of(&self, tensor: &str) -> Option<usize> {
        let behind = tensor.strip_prefix(self.layers)?.strip_prefix('.')?;
        behind.split('.').next()?.parse().ok()
    }

    /// Adds the prefix of the base model, such as `model.`, if a tensor's name lacks it, as in a
    /// checkpoint that was saved without an LM head.
    pub(crate) fn with_base(&self, tensor: &str) -> String {
        let base = self.embedding.split_inclusive('.').next().unwrap_or_default();
        let is_whole = tensor.starts_with(base) || tensor.starts_with(self.lm_head);
        if is_whole { tensor.to_owned() } else { format!("{base}{tensor}") }
    }

    /// Returns whether a tensor is computed here instead of read.
    pub(crate) fn is_buffer(&self, tensor: &str) -> bool {
        self.ignored.iter().any(|end| tensor.ends_with(end))
    }

    /// Returns whether a tensor is outside the layers, embeddings, final norm and LM head, or
    /// computed here. transformers skips it too.
    pub(crate) fn is_foreign(&self, tensor: &str) -> bool {
        let own = [self.embedding, self.layers, self.norm, self.lm_head];
        let is_in =
            |part: &str| tensor.strip_prefix(part).is_some_and(|behind| behind.starts_with('.'));
        self.is_buffer(tensor) || !own.into_iter().any(is_in)
    }

    /// Returns the prefix of a layer's tensor names.
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
    /// Specifies grouped-query attention with Llama's names.
    pub(crate) fn llama(bias: bool) -> Self {
        let names = AttentionNames::LLAMA;
        Self {
            qkv_bias: bias,
            output_bias: bias,
            query_scalar: None,
            soft_cap: None,
            num_read: 1,
            names,
        }
    }

    /// Lists the projections to queries, keys and values, then the output projection.
    pub(crate) fn linears(&self, shape: &ModelShape) -> [LinearSpec; 4] {
        let (hidden, head_dim) = (shape.hidden_size, shape.head_dim);
        let AttentionNames { query, key, value, is_by_head, output, .. } = self.names;
        let outputs =
            [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads].map(|n| n * head_dim);
        let num_all = outputs.iter().sum();
        let linear = |nth: usize, name| {
            let all = RowStrips::all(outputs[nth]);
            let rows = match (query == key, is_by_head) {
                (false, _) => all,
                (true, false) => RowStrips { num_all, first: outputs[..nth].iter().sum(), ..all },
                (true, true) => RowStrips {
                    num_all,
                    first: nth * head_dim,
                    strip: head_dim,
                    step: 3 * head_dim,
                },
            };
            let matrix = LinearSpec::matrix(name, self.num_read * hidden, outputs[nth]);
            LinearSpec { rows, has_bias: self.qkv_bias, ..matrix }
        };
        let output = LinearSpec {
            has_bias: self.output_bias,
            is_residual: true,
            ..LinearSpec::matrix(output, outputs[0], hidden)
        };
        [linear(0, query), linear(1, key), linear(2, value), output]
    }

    /// Computes the factor of the scores: 1/√`query_scalar`, or 1/√`head_dim` if there is no
    /// `query_scalar`.
    pub(crate) fn scale(&self, shape: &ModelShape) -> f32 {
        let scalar = self.query_scalar.map_or(shape.head_dim as f32, |scalar| scalar as f32);
        1.0 / scalar.sqrt()
    }
}

impl MlpSpec {
    /// Specifies a gated MLP with Llama's names.
    pub(crate) fn llama(width: usize, bias: bool) -> Self {
        Self { width, bias, activation: Activation::Silu, names: MlpNames::LLAMA }
    }

    /// Lists the linear layers: the gate, if there is one, then up and down.
    pub(crate) fn linears(&self, shape: &ModelShape) -> (Option<LinearSpec>, [LinearSpec; 2]) {
        let (hidden, width, has_bias) = (shape.hidden_size, self.width, self.bias);
        let MlpNames { gate, up, down, .. } = self.names;
        let into = |name, nth: usize| {
            let mut linear = LinearSpec::matrix(name, hidden, width);
            if gate == Some(up) {
                let (num_all, first) = (2 * width, nth * width);
                linear.rows = RowStrips { num_all, first, ..linear.rows };
            }
            LinearSpec { has_bias, ..linear }
        };
        let down =
            LinearSpec { has_bias, is_residual: true, ..LinearSpec::matrix(down, width, hidden) };
        (gate.map(|gate| into(gate, 0)), [into(up, 1), down])
    }
}

impl NormSpec {
    /// Returns the number that is added to stored weights: 1 for a norm whose checkpoints leave it
    /// out, otherwise 0.
    pub(crate) fn offset(&self) -> f32 {
        if self.form == NormForm::RmsPlusOne { 1.0 } else { 0.0 }
    }
}

impl DecoderSpec {
    /// Specifies the LM head of a model that does not share it with the embedding.
    pub(crate) fn lm_head(&self, shape: &ModelShape) -> LinearSpec {
        LinearSpec::lm_head(self.names.lm_head, shape)
    }

    /// Returns the spec of layer `number`, counted from 0.
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
}
