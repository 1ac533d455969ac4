//! Llama's `config.json`, in the layout of transformers 4 (`torch_dtype`, `rope_theta`,
//! `rope_scaling`) and of transformers 5 (`dtype`, `rope_parameters`): either is read, and the newer
//! one written, with what transformers 4 needs beside it.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::rope::{self, RopeKeys};
use super::{Architecture, ModelConfig, TokenIds, sizes};
use crate::error::{ModelError, read_json};
use crate::shape::ModelShape;
use crate::spec::{AttentionSpec, DecoderSpec, MlpSpec, ModelNames, RopeConfig, RopeScaling};

/// The keys, before defaults and checks.
#[derive(Deserialize)]
struct Keys {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_max_position_embeddings")]
    max_position_embeddings: usize,
    #[serde(default = "default_rms_norm_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_hidden_act")]
    hidden_act: String,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeKeys>,
    rope_parameters: Option<RopeKeys>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    bos_token_id: Option<u32>,
    eos_token_id: Option<TokenIds>,
}

fn default_max_position_embeddings() -> usize {
    2048
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_hidden_act() -> String {
    "silu".to_owned()
}

impl ModelConfig {
    /// A Llama with an MLP of width `mlp_width`. All else is as most have it: an LM head of its own,
    /// no biases, ε = 1e-5, and a rotation of base 10,000.
    pub fn llama(shape: ModelShape, mlp_width: usize) -> Self {
        let spec = DecoderSpec {
            norm_epsilon: 1e-5,
            attention: AttentionSpec::llama(false),
            mlp: MlpSpec::llama(mlp_width, false),
            rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::None },
            tie_word_embeddings: false,
            names: ModelNames::LLAMA,
        };
        Self { architecture: Architecture::Llama, shape, spec }
    }

    /// The same, with the embedding matrix as its LM head or not.
    #[must_use]
    pub fn with_tied_embeddings(mut self, tied: bool) -> Self {
        self.spec.tie_word_embeddings = tied;
        self
    }
}

/// Reads a Llama's `config.json`.
pub(super) fn read(path: &Path) -> Result<ModelConfig, ModelError> {
    let keys: Keys = read_json(path)?;
    let fail = |key, problem: String| ModelError::Config { path: path.to_path_buf(), key, problem };
    if keys.hidden_act != "silu" {
        return Err(fail("hidden_act", format!("is `{}`, expected `silu`", keys.hidden_act)));
    }
    sizes::check(
        path,
        &[
            ("vocab_size", keys.vocab_size),
            ("hidden_size", keys.hidden_size),
            ("intermediate_size", keys.intermediate_size),
            ("num_hidden_layers", keys.num_hidden_layers),
            ("num_attention_heads", keys.num_attention_heads),
            ("num_key_value_heads", keys.num_key_value_heads.unwrap_or(1)),
            ("head_dim", keys.head_dim.unwrap_or(2)),
            ("max_position_embeddings", keys.max_position_embeddings),
        ],
    )?;
    let num_heads = keys.num_attention_heads;
    let num_kv_heads = keys.num_key_value_heads.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(fail(
            "num_key_value_heads",
            format!("is {num_kv_heads}, which does not divide `num_attention_heads` = {num_heads}"),
        ));
    }
    let head_dim = match keys.head_dim {
        Some(dim) => dim,
        None if keys.hidden_size.is_multiple_of(num_heads) => keys.hidden_size / num_heads,
        None => {
            return Err(fail(
                "hidden_size",
                format!(
                    "is {}, which `num_attention_heads` = {num_heads} does not divide; give \
                     `head_dim`",
                    keys.hidden_size
                ),
            ));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(fail("head_dim", format!("is {head_dim}; rotary embedding needs it even")));
    }
    if keys.rms_norm_eps.is_nan() || keys.rms_norm_eps <= 0.0 {
        return Err(fail(
            "rms_norm_eps",
            format!("is {}, expected more than 0", keys.rms_norm_eps),
        ));
    }
    let spec = DecoderSpec {
        norm_epsilon: keys.rms_norm_eps,
        attention: AttentionSpec::llama(keys.attention_bias),
        mlp: MlpSpec::llama(keys.intermediate_size, keys.mlp_bias),
        rope: rope::read(keys.rope_theta, keys.rope_parameters.or(keys.rope_scaling), path)?,
        tie_word_embeddings: keys.tie_word_embeddings,
        names: ModelNames::LLAMA,
    };
    let shape = ModelShape {
        vocab_size: keys.vocab_size,
        hidden_size: keys.hidden_size,
        num_layers: keys.num_hidden_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        context: keys.max_position_embeddings,
        bos_token_id: keys.bos_token_id,
        eos_token_ids: keys.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
    };
    Ok(ModelConfig { architecture: Architecture::Llama, shape, spec })
}

/// `config.json` in the layout of transformers 5, with `rope_theta` beside it for transformers 4.
pub(super) fn to_json(config: &ModelConfig, dtype: &str) -> Value {
    let ModelConfig { shape, spec, .. } = config;
    let rope = rope::to_json(&spec.rope);
    let scaling = if spec.rope.scaling == RopeScaling::None { Value::Null } else { rope.clone() };
    let eos = match shape.eos_token_ids.as_slice() {
        [] => Value::Null,
        [id] => json!(id),
        ids => json!(ids),
    };
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": Architecture::Llama.model_type(),
        "attention_bias": spec.attention.bias,
        "attention_dropout": 0.0,
        "bos_token_id": shape.bos_token_id,
        "dtype": dtype,
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.mlp.width,
        "max_position_embeddings": shape.context,
        "mlp_bias": spec.mlp.bias,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_parameters": rope,
        "rope_scaling": scaling,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": true,
        "vocab_size": shape.vocab_size,
    })
}
