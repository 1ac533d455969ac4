//! The self-draft adapter of Kangaroo (Liu et al. 2024, section 3.1): a small layer that turns a
//! target's own shallow layers into its draft.
//!
//! The paper's is `y = norm(x + attention(input_layernorm(x)))`, where `x` is the target's hidden
//! state after its first `exit_layer` layers; the target's own LM head turns `y` into logits. Its
//! ablation (Table 2) has three others, [`AdapterArchitecture`]: each is a part or the whole of a
//! Llama layer, so that a target's own layer can give the first weights.

mod files;
mod packed_adapter;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::LlamaConfig;
use crate::error::ModelError;
use crate::kv_cache::{KvCache, LayerCache};
use crate::llama::attention::{Attention, Positions};
use crate::llama::rope::Rope;
use crate::llama::{CausalLm, LinearShape, Mlp};
use crate::precision::cast_parameters;
use crate::rows::{Place, Rows};
use packed_adapter::PackedAdapter;

/// What an adapter is made of (Kangaroo, Table 2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterArchitecture {
    /// `norm(x + attention(input_layernorm(x)))`, with the target's LM head: the paper's.
    #[default]
    Attention,
    /// The same with an LM head of its own.
    AttentionWithHead,
    /// A whole Llama layer: the paper's with an MLP behind its own norm, `h + mlp(norm(h))`.
    DecoderLayer,
    /// `norm(x + mlp(post_attention_layernorm(x)))`: a token at a time, without a cache.
    Mlp,
}

impl AdapterArchitecture {
    /// All of them, in the paper's order of parameters.
    pub const ALL: [Self; 4] =
        [Self::Attention, Self::Mlp, Self::AttentionWithHead, Self::DecoderLayer];

    /// Whether a token looks at those before it.
    pub fn has_attention(self) -> bool {
        self != Self::Mlp
    }

    /// Whether there is an MLP.
    pub fn has_mlp(self) -> bool {
        matches!(self, Self::DecoderLayer | Self::Mlp)
    }

    /// Whether it has an LM head of its own.
    pub fn has_head(self) -> bool {
        self == Self::AttentionWithHead
    }
}

impl std::fmt::Display for AdapterArchitecture {
    /// As in recipes and files.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Attention => "attention",
            Self::AttentionWithHead => "attention-with-head",
            Self::DecoderLayer => "decoder-layer",
            Self::Mlp => "mlp",
        })
    }
}

/// An adapter's shape, and where it came from: `config.json` of an adapter directory.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The target's layers that run before the adapter: 1 to one less than all of them.
    pub exit_layer: usize,
    /// What it is made of.
    pub architecture: AdapterArchitecture,
    /// The target's shape with one layer: what the adapter's attention, MLP, norms and rotation
    /// take after.
    pub llama: LlamaConfig,
    /// SHA-256 of the target the adapter was trained for, if known.
    pub target_hash: Option<String>,
    /// Everything else that training recorded.
    pub training: Map<String, Value>,
}

/// A small layer between a target's shallow layers and its LM head.
#[derive(Module, Debug)]
pub struct Adapter {
    attention: Option<NormedAttention>,
    mlp: Option<NormedMlp>,
    norm: RmsNorm,
    /// `[hidden, vocab]`; `None` where the target's serves.
    lm_head: Option<Linear>,
    rope: Rope,
    /// The same once more, for few rows on the CPU.
    #[module(skip)]
    packed: Option<Arc<PackedAdapter>>,
    #[module(skip)]
    config: LlamaConfig,
}

/// Attention behind its norm.
#[derive(Module, Debug)]
struct NormedAttention {
    input_layernorm: RmsNorm,
    self_attn: Attention,
}

/// The gated MLP behind its norm.
#[derive(Module, Debug)]
struct NormedMlp {
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl AdapterConfig {
    /// The paper's adapter for `target` behind its first `exit_layer` layers.
    ///
    /// # Errors
    /// If `exit_layer` is not between 1 and the target's layers less one.
    pub fn new(target: &LlamaConfig, exit_layer: usize) -> Result<Self, ModelError> {
        if exit_layer == 0 || exit_layer >= target.num_hidden_layers {
            return Err(ModelError::ExitLayer { exit_layer, num_layers: target.num_hidden_layers });
        }
        let llama = LlamaConfig {
            num_hidden_layers: 1,
            attention_bias: false,
            mlp_bias: false,
            ..target.clone()
        };
        let architecture = AdapterArchitecture::Attention;
        Ok(Self { exit_layer, architecture, llama, target_hash: None, training: Map::new() })
    }

    /// Initialises an adapter as Kangaroo does: linear layers with a normal distribution of
    /// standard deviation 0.02, norms with ones.
    pub fn init(&self, device: &Device) -> Adapter {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.02 };
        let mut build = |shape: LinearShape| {
            LinearConfig::new(shape.input, shape.output)
                .with_bias(false)
                .with_initializer(initializer.clone())
                .init(device)
        };
        let config = &self.llama;
        let norm = || {
            RmsNormConfig::new(config.hidden_size).with_epsilon(config.rms_norm_eps).init(device)
        };
        let attention = self.architecture.has_attention().then(|| NormedAttention {
            input_layernorm: norm(),
            self_attn: Attention::new(config, &mut build),
        });
        let mlp = self.architecture.has_mlp().then(|| NormedMlp {
            post_attention_layernorm: norm(),
            mlp: Mlp::new(config, &mut build),
        });
        let (input, output) = (config.hidden_size, config.vocab_size);
        let lm_head = LinearShape { name: "lm_head", input, output, bias: false };
        Adapter {
            attention,
            mlp,
            norm: norm(),
            lm_head: self.architecture.has_head().then(|| build(lm_head)),
            rope: Rope::new(config, device),
            packed: None,
            config: config.clone(),
        }
    }

    /// The number of parameters: hidden sizes H, q and kv of all heads, intermediate size I and
    /// vocabulary V make attention 2H(q + kv) + H, an MLP 3HI + H, an LM head HV, and the last norm
    /// H.
    pub fn num_parameters(&self) -> usize {
        let LlamaConfig { hidden_size, intermediate_size, vocab_size, head_dim, .. } = self.llama;
        let (q, kv) =
            (self.llama.num_attention_heads * head_dim, self.llama.num_key_value_heads * head_dim);
        let attention = 2 * hidden_size * (q + kv) + hidden_size;
        let mlp = 3 * hidden_size * intermediate_size + hidden_size;
        let parts = [
            (self.architecture.has_attention(), attention),
            (self.architecture.has_mlp(), mlp),
            (self.architecture.has_head(), hidden_size * vocab_size),
            (true, hidden_size),
        ];
        parts.into_iter().filter(|(has, _)| *has).map(|(_, size)| size).sum()
    }

    /// Checks that the adapter fits a target.
    ///
    /// # Errors
    /// If a width differs, or the exit layer leaves no layer of the target to verify with.
    pub fn check_target(&self, dir: &Path, target: &LlamaConfig) -> Result<(), ModelError> {
        let path = dir.join("config.json");
        let widths: [(&'static str, usize, usize); 2] = [
            ("hidden_size", self.llama.hidden_size, target.hidden_size),
            ("vocab_size", self.llama.vocab_size, target.vocab_size),
        ];
        for (key, found, expected) in widths {
            if found != expected {
                return Err(ModelError::Config {
                    path,
                    key,
                    problem: format!(
                        "is {found}, but the target's is {expected}: the adapter was made for \
                         another target; train one for this target"
                    ),
                });
            }
        }
        let (context, needed) =
            (self.llama.max_position_embeddings, target.max_position_embeddings);
        if context < needed {
            return Err(ModelError::Config {
                path,
                key: "max_position_embeddings",
                problem: format!(
                    "is {context}, but the target reads {needed} tokens: the adapter rotates with \
                     the target's table, so raise it to that"
                ),
            });
        }
        if self.exit_layer == 0 || self.exit_layer >= target.num_hidden_layers {
            return Err(ModelError::Config {
                path,
                key: "exit_layer",
                problem: format!(
                    "is {}, but the target has {} layers: expected 1 to {}",
                    self.exit_layer,
                    target.num_hidden_layers,
                    target.num_hidden_layers - 1
                ),
            });
        }
        Ok(())
    }
}

impl Adapter {
    /// The same adapter, its parts with the weights of the target's layer `number` (its biases are
    /// left out), and its last norm with those of the target's.
    ///
    /// # Panics
    /// If the target has no such layer, or another shape.
    pub fn with_layer_of(self, target: &CausalLm, number: usize) -> Self {
        let device = self.device();
        let (layer, norm) = target.layer_and_norm(number);
        let linear = |from: &Linear| copied_linear(from.weight.val(), &device);
        let norm_of = |from: &RmsNorm| RmsNorm {
            gamma: copied(from.gamma.val(), &device),
            epsilon: from.epsilon,
        };
        let attention = self.attention.map(|_| NormedAttention {
            input_layernorm: norm_of(&layer.input_layernorm),
            self_attn: layer.self_attn.map_projections(linear),
        });
        let mlp = self.mlp.map(|_| NormedMlp {
            post_attention_layernorm: norm_of(&layer.post_attention_layernorm),
            mlp: layer.mlp.map_projections(linear),
        });
        Self { attention, mlp, norm: norm_of(norm), ..self }
    }

    /// The same adapter, its own LM head, if it has one, with the weights of the target's.
    pub fn with_head_of(self, target: &CausalLm) -> Self {
        let device = self.device();
        let lm_head = self.lm_head.map(|_| copied_linear(target.lm_head_weight(), &device));
        Self { lm_head, ..self }
    }

    /// A cache for `num_slots` sequences of up to `capacity` tokens each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        if self.attention.is_none() {
            return KvCache::without_attention(capacity, num_slots);
        }
        KvCache::new(&self.config, capacity, num_slots, &self.device(), self.packed.is_some())
    }

    fn device(&self) -> Device {
        self.norm.gamma.val().device()
    }

    /// A copy that computes in `dtype`, for one forward over whole sequences of a training: on an
    /// autodiff device, gradients reach this adapter's own parameters, in their own type.
    pub fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(Self { packed: None, ..self.clone() }, dtype)
    }

    /// The number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.num_params()
    }

    /// The number of its logits, the target's.
    pub fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    /// The LM head that turns what the adapter says into logits, where it is its own and not the
    /// target's.
    ///
    /// # Shapes
    /// - output: `[hidden, vocab]`
    pub fn own_head(&self) -> Option<Tensor<2>> {
        self.lm_head.as_ref().map(|head| head.weight.val())
    }

    /// Logits of what the adapter says, one row each: by its own LM head or the target's.
    pub fn logits(&self, normed: &Rows, target: &CausalLm) -> Rows {
        let Some(head) = &self.lm_head else { return target.logits(normed) };
        if let (Some(packed), Place::Host(rows)) = (&self.packed, &normed.place)
            && let Some(logits) = packed.logits(rows)
        {
            return normed.with_place(logits);
        }
        let rows = normed.clone().into_tensor(&self.device());
        let [batch, seq, width] = rows.dims();
        let logits = rows.reshape([batch * seq, width]).matmul(head.weight.val());
        normed.with_place(logits.reshape([batch, seq, self.config.vocab_size]))
    }

    /// What the LM head reads, over whole sequences, without a cache. Causal, so padding on the
    /// right changes nothing to its left.
    ///
    /// # Shapes
    /// - features: `[batch, seq, hidden]`, the target's hidden states at the exit layer
    /// - output: the same, after the adapter's norm
    pub fn forward(&self, features: Tensor<3>) -> Tensor<3> {
        let positions = Positions::whole(&self.rope, &features);
        self.run(features, &positions, None)
    }

    /// The same for new tokens, which follow those that the cache holds of their sequences.
    ///
    /// # Panics
    /// If a slot is full, or its rows come in several runs.
    pub fn forward_cached(&self, features: Rows, cache: &mut KvCache) -> Rows {
        let num_rows = features.num_rows();
        let (place, slots) = features.into_parts();
        let runs = slots.runs(num_rows);
        match (&self.packed, place) {
            (Some(packed), Place::Host(rows)) => {
                let normed = packed.forward(rows, runs, cache);
                slots.rows(normed)
            }
            (_, place) => {
                let features = place.into_tensor(&self.device());
                let runs = cache.extend(0..1, runs);
                let positions = Positions::following(&self.rope, runs, &features);
                let normed = self.run(features, &positions, Some(cache.layer_mut(0)));
                slots.rows(normed)
            }
        }
    }

    /// Reads new tokens into the cache, for their keys and values alone.
    ///
    /// # Panics
    /// As [`Adapter::forward_cached`].
    pub fn fill_cache(&self, features: Rows, cache: &mut KvCache) {
        let num_rows = features.num_rows();
        let (place, slots) = features.into_parts();
        let runs = slots.runs(num_rows);
        match (&self.packed, place) {
            (Some(packed), Place::Host(rows)) => packed.fill(&rows, runs, cache),
            (_, place) => {
                let runs = cache.extend(0..1, runs);
                let Some(attention) = &self.attention else { return };
                let features = place.into_tensor(&self.device());
                let positions = Positions::following(&self.rope, runs, &features);
                let normed = attention.input_layernorm.forward(features);
                attention.self_attn.fill(normed, &positions, cache.layer_mut(0));
            }
        }
    }

    fn run(
        &self,
        features: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let mut hidden = features;
        if let Some(NormedAttention { input_layernorm, self_attn }) = &self.attention {
            let normed = input_layernorm.forward(hidden.clone());
            hidden = hidden + self_attn.forward(normed, positions, cache);
        }
        if let Some(NormedMlp { post_attention_layernorm, mlp }) = &self.mlp {
            hidden = hidden.clone() + mlp.forward(post_attention_layernorm.forward(hidden));
        }
        self.norm.forward(hidden)
    }
}

/// A linear layer with a copy of `[in, out]` weights, on `device`.
fn copied_linear(weight: Tensor<2>, device: &Device) -> Linear {
    Linear { weight: copied(weight, device), bias: None }
}

/// A copy in f32, as what is trained is.
fn copied<const D: usize>(values: Tensor<D>, device: &Device) -> Param<Tensor<D>> {
    Param::from_data(values.cast(FloatDType::F32).into_data(), device)
}
