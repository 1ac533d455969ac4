//! What a decoder computes, as data: its norms, attention, rotation and MLP, and the names under
//! which a checkpoint keeps their weights. Reading, writing, initialising, counting and packing all
//! follow it, and nothing else asks which family a model is of.
//!
//! It holds what is computed today. A family that differs adds a field or a variant to the part that
//! differs (biases, norms and names of each part are there already), and an arm where that part is
//! computed or stored.

use crate::shape::ModelShape;

/// Everything about a decoder but its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// ε of the norms, which are RMSNorms.
    pub norm_epsilon: f64,
    /// Each layer's attention.
    pub attention: AttentionSpec,
    /// Each layer's MLP, behind its attention.
    pub mlp: MlpSpec,
    /// How queries and keys are rotated.
    pub rope: RopeConfig,
    /// Whether the LM head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// What the tensors outside the layers are called.
    pub(crate) names: ModelNames,
}

/// Attention behind its norm, in the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Whether the projections have biases.
    pub bias: bool,
    pub(crate) names: AttentionNames,
}

/// An MLP behind its norm, in the residual stream: `down(silu(gate(x)) ∘ up(x))`, or
/// `down(silu(up(x)))` where there is no gate.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpSpec {
    /// The number of outputs of `up`.
    pub width: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    pub(crate) names: MlpNames,
}

/// Rotary position embedding: base frequency and how long contexts stretch it.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base, `rope_theta`.
    pub theta: f64,
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
}

/// Names of the tensors outside the layers, and what the layers' names begin with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelNames {
    pub(crate) embedding: &'static str,
    /// Before a layer's number.
    pub(crate) layers: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) lm_head: &'static str,
}

/// Names of an attention's tensors, behind its layer's.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionNames {
    pub(crate) norm: &'static str,
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    pub(crate) output: &'static str,
}

/// Names of an MLP's tensors, behind its layer's.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MlpNames {
    pub(crate) norm: &'static str,
    /// `None` in an MLP without a gate.
    pub(crate) gate: Option<&'static str>,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

/// One layer: its parts in their order, each `x + part(norm(x))`. A model's layers have both; an
/// adapter's may leave one out.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LayerSpec {
    pub(crate) norm_epsilon: f64,
    pub(crate) attention: Option<AttentionSpec>,
    pub(crate) mlp: Option<MlpSpec>,
}

/// A linear layer as a checkpoint keeps it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearSpec {
    /// Behind the layer's name.
    pub(crate) name: &'static str,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) has_bias: bool,
    /// Whether its output is added to the residual stream.
    pub(crate) is_residual: bool,
}

impl LinearSpec {
    /// The name in a checkpoint, of a layer's or outside of them.
    pub(crate) fn name_in(&self, layer: &str) -> String {
        if layer.is_empty() { self.name.to_owned() } else { format!("{layer}.{}", self.name) }
    }

    /// An LM head, which has no bias.
    pub(crate) fn lm_head(name: &'static str, shape: &ModelShape) -> Self {
        let (inputs, outputs) = (shape.hidden_size, shape.vocab_size);
        Self { name, inputs, outputs, has_bias: false, is_residual: false }
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
    };

    /// What the names of a layer's tensors begin with.
    pub(crate) fn layer(&self, number: usize) -> String {
        format!("{}.{number}", self.layers)
    }
}

impl AttentionSpec {
    /// Grouped-query attention under Llama's names.
    pub(crate) fn llama(bias: bool) -> Self {
        let names = AttentionNames {
            norm: "input_layernorm",
            query: "self_attn.q_proj",
            key: "self_attn.k_proj",
            value: "self_attn.v_proj",
            output: "self_attn.o_proj",
        };
        Self { bias, names }
    }

    /// The projections to queries, keys and values, and of what they mix.
    pub(crate) fn linears(&self, shape: &ModelShape) -> [LinearSpec; 4] {
        let hidden = shape.hidden_size;
        let (q, kv) = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let linear = |name, inputs, outputs, is_residual| LinearSpec {
            name,
            inputs,
            outputs,
            has_bias: self.bias,
            is_residual,
        };
        [
            linear(self.names.query, hidden, q, false),
            linear(self.names.key, hidden, kv, false),
            linear(self.names.value, hidden, kv, false),
            linear(self.names.output, q, hidden, true),
        ]
    }
}

impl MlpSpec {
    /// A gated MLP under Llama's names.
    pub(crate) fn llama(width: usize, bias: bool) -> Self {
        let names = MlpNames {
            norm: "post_attention_layernorm",
            gate: Some("mlp.gate_proj"),
            up: "mlp.up_proj",
            down: "mlp.down_proj",
        };
        Self { width, bias, names }
    }

    /// The projections: the gate, if there is one, then up and down.
    pub(crate) fn linears(&self, shape: &ModelShape) -> (Option<LinearSpec>, [LinearSpec; 2]) {
        let (hidden, width, has_bias) = (shape.hidden_size, self.width, self.bias);
        let into = |name| LinearSpec {
            name,
            inputs: hidden,
            outputs: width,
            has_bias,
            is_residual: false,
        };
        let down = LinearSpec {
            name: self.names.down,
            inputs: width,
            outputs: hidden,
            has_bias,
            is_residual: true,
        };
        (self.names.gate.map(into), [into(self.names.up), down])
    }
}

impl DecoderSpec {
    /// The LM head, where it has weights of its own.
    pub(crate) fn lm_head(&self, shape: &ModelShape) -> LinearSpec {
        LinearSpec::lm_head(self.names.lm_head, shape)
    }

    /// A model's layer.
    pub(crate) fn layer(&self) -> LayerSpec {
        LayerSpec {
            norm_epsilon: self.norm_epsilon,
            attention: Some(self.attention.clone()),
            mlp: Some(self.mlp.clone()),
        }
    }
}

impl LayerSpec {
    /// The number of parameters.
    pub(crate) fn num_parameters(&self, shape: &ModelShape) -> usize {
        let sum = |linears: &[LinearSpec]| linears.iter().map(LinearSpec::num_parameters).sum();
        let of_attention = |attention: &AttentionSpec| -> usize { sum(&attention.linears(shape)) };
        let of_mlp = |mlp: &MlpSpec| -> usize {
            let (gate, up_and_down) = mlp.linears(shape);
            gate.as_ref().map_or(0, LinearSpec::num_parameters) + sum(&up_and_down)
        };
        let parts = [self.attention.as_ref().map(of_attention), self.mlp.as_ref().map(of_mlp)];
        // Each part has its norm.
        parts.into_iter().flatten().map(|linears| linears + shape.hidden_size).sum()
    }
}
