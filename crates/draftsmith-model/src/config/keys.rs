//! The keys of a `config.json`, before defaults and checks. Families share most keys; each reads
//! only its own, as transformers does.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use draftsmith_files::parse_json_value;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error::{ModelError, Result};
use crate::spec::Activation;

#[derive(Deserialize)]
pub(crate) struct Keys {
    #[serde(skip)]
    path: PathBuf,
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) num_key_value_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) max_position_embeddings: Option<usize>,
    pub(super) rms_norm_eps: Option<f64>,
    pub(super) layer_norm_eps: Option<f64>,
    pub(super) hidden_act: Option<String>,
    pub(super) hidden_activation: Option<String>,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_scaling: Option<RopeKeys>,
    pub(super) rope_parameters: Option<RopeKeys>,
    pub(super) rope_local_base_freq: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) rotary_pct: Option<f64>,
    pub(super) rotary_emb_base: Option<f64>,
    pub(super) original_max_position_embeddings: Option<f64>,
    pub(super) tie_word_embeddings: Option<bool>,
    pub(super) attention_bias: Option<bool>,
    pub(super) mlp_bias: Option<bool>,
    #[serde(default, deserialize_with = "given")]
    pub(super) sliding_window: Given<usize>,
    pub(super) use_sliding_window: Option<bool>,
    pub(super) max_window_layers: Option<usize>,
    pub(super) use_swa: Option<bool>,
    pub(super) swa_window_size: Option<usize>,
    pub(super) sliding_window_pattern: Option<usize>,
    pub(super) layer_types: Option<Vec<String>>,
    pub(super) query_pre_attn_scalar: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    pub(super) attn_logit_softcapping: Given<f32>,
    #[serde(default, deserialize_with = "given")]
    pub(super) final_logit_softcapping: Given<f32>,
    pub(super) use_parallel_residual: Option<bool>,
    use_bidirectional_attention: Option<Value>,
    quantization_config: Option<Value>,
    pub(super) bos_token_id: Option<u32>,
    pub(super) eos_token_id: Option<TokenIds>,
}

/// The value of the key `rope_parameters` or `rope_scaling`.
#[derive(Deserialize, Default)]
pub(crate) struct RopeKeys {
    pub(super) rope_theta: Option<f64>,
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) rope_type: Option<String>,
    /// The older name of `rope_type`; some files have both.
    pub(super) r#type: Option<String>,
    pub(super) factor: Option<f64>,
    pub(super) low_freq_factor: Option<f64>,
    pub(super) high_freq_factor: Option<f64>,
    pub(super) original_max_position_embeddings: Option<f64>,
    pub(super) beta_fast: Option<f64>,
    pub(super) beta_slow: Option<f64>,
    pub(super) mscale: Option<f64>,
    pub(super) mscale_all_dim: Option<f64>,
    pub(super) truncate: Option<bool>,
    pub(super) attention_factor: Option<f64>,
    pub(super) short_factor: Option<Vec<f64>>,
    pub(super) long_factor: Option<Vec<f64>>,
    /// The parameters for layers that attend to all tokens, if layers differ. serde's `flatten`
    /// would avoid repeating the fields, but its errors do not name the key.
    pub(super) full_attention: Option<Box<RopeKeys>>,
    pub(super) sliding_attention: Option<Box<RopeKeys>>,
}

/// A key for which `null` and absence differ. The outer `None` means absent, the inner one `null`.
pub(super) type Given<T> = Option<Option<T>>;

fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Given<T>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// One token id or a list of them.
#[derive(Deserialize, Serialize, Clone)]
#[serde(untagged, expecting = "is neither a token id nor a list of them")]
pub(super) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(super) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl Keys {
    /// Reads the keys of the file at `path`. Keys of models that no family here can compute cause
    /// an error.
    pub(super) fn read(path: &Path, keys: &Map<String, Value>) -> Result<Self> {
        let keys = parse_json_value(path, "", Value::Object(keys.clone()))?;
        let keys = Self { path: path.to_path_buf(), ..keys };
        if keys.quantization_config.is_some() {
            let problem = "is set, but quantised weights cannot be read; hint: use the original \
                           checkpoint in f32, bf16 or f16";
            return Err(keys.fail("quantization_config", problem));
        }
        match &keys.use_bidirectional_attention {
            None | Some(Value::Bool(false)) => Ok(keys),
            Some(other) => {
                let problem = format!("is {other}, but only causal models generate text");
                Err(keys.fail("use_bidirectional_attention", problem))
            }
        }
    }

    /// Builds the error for a bad key.
    pub(super) fn fail(&self, key: &str, problem: impl Display) -> ModelError {
        ModelError::config(&self.path, key, problem)
    }

    /// Checks that a value is present, finite and above 0.
    pub(super) fn positive(&self, key: &'static str, value: Option<f64>) -> Result<f64> {
        match value {
            Some(value) if value > 0.0 && value.is_finite() => Ok(value),
            Some(value) => Err(self.fail(key, format!("is {value}, expected a positive number"))),
            None => Err(self.fail(key, "is missing, expected a positive number")),
        }
    }

    /// Checks that sizes are at least 1 and below a plausible maximum.
    pub(super) fn check_sizes(&self, sizes: &[(&'static str, usize)]) -> Result<()> {
        // The largest models have a million token embeddings or positions. A larger number means a
        // broken file, and would overflow or exhaust memory later.
        const LARGEST: usize = 1 << 28;
        // The number of layers is used before weights are looked up, so it has a limit of its own. The
        // deepest models have some 200.
        const MOST_LAYERS: usize = 1 << 12;
        let largest = |key: &str| if key == "num_hidden_layers" { MOST_LAYERS } else { LARGEST };
        match sizes.iter().find(|(key, size)| *size == 0 || *size > largest(key)) {
            None => Ok(()),
            Some((key, size)) => {
                Err(self.fail(key, format!("is {size}, expected 1 to {}", largest(key))))
            }
        }
    }

    /// Parses the activation function that a key names.
    pub(super) fn activation(&self, key: &'static str, name: &str) -> Result<Activation> {
        match name {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::Gelu),
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
            other => {
                let known = "expected `silu`, `gelu` or `gelu_pytorch_tanh`";
                Err(self.fail(key, format!("is `{other}`, {known}")))
            }
        }
    }
}

/// Returns the activation's name in `config.json`.
pub(super) fn activation_name(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
    }
}
