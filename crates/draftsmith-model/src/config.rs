//! `config.json` of a Llama-architecture checkpoint, in the layout of transformers 4
//! (`torch_dtype`, `rope_theta`, `rope_scaling`) and of transformers 5 (`dtype`,
//! `rope_parameters`): read into one [`LlamaConfig`], written in the newer layout that both read.
//!
//! The stop tokens come from here too: `generation_config.json` first, then `config.json`.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{ModelError, read_json};

/// The shape of a Llama-architecture model.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Number of token embeddings.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// The RMSNorm epsilon.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the LM head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Whether the attention projections have biases.
    pub attention_bias: bool,
    /// Whether the MLP projections have biases.
    pub mlp_bias: bool,
    /// The token that begins a sequence, if the model has one.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a response; may be empty.
    pub eos_token_ids: Vec<u32>,
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

/// The file as it stands, before defaults and checks.
#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
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
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    bos_token_id: Option<u32>,
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
struct RawRope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// One id, or a list of them.
#[derive(Deserialize, Serialize, Clone)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Deserialize)]
struct RawGenerationConfig {
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

impl LlamaConfig {
    /// Reads `config.json` and, for the stop tokens, `generation_config.json` of a checkpoint
    /// directory.
    ///
    /// # Errors
    /// If a file is missing or not JSON, or a key has a value outside the Llama architecture.
    pub fn from_model_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let raw: RawConfig = read_json(&path)?;
        let mut config = raw.check(&path)?;
        let generation_path = dir.join("generation_config.json");
        if generation_path.exists() {
            let generation: RawGenerationConfig = read_json(&generation_path)?;
            if let Some(ids) = generation.eos_token_id {
                config.eos_token_ids = ids.into_vec();
            }
        }
        Ok(config)
    }

    /// The number of query heads that share one key/value head.
    pub fn num_query_groups(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// The number of parameters, a tied LM head counted once.
    pub fn num_parameters(&self) -> usize {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let q = self.num_attention_heads * self.head_dim;
        let kv = self.num_key_value_heads * self.head_dim;
        let attention = 2 * h * q + 2 * h * kv;
        let attention_bias = if self.attention_bias { q + 2 * kv + h } else { 0 };
        let mlp = 3 * h * i + if self.mlp_bias { 2 * i + h } else { 0 };
        let layer = attention + attention_bias + mlp + 2 * h;
        let embeddings = self.vocab_size * h * if self.tie_word_embeddings { 1 } else { 2 };
        embeddings + self.num_hidden_layers * layer + h
    }

    /// `config.json` in the layout of transformers 5, with `rope_theta` beside it for
    /// transformers 4.
    pub fn to_json(&self, dtype: &str) -> Value {
        let rope = match &self.rope.scaling {
            RopeScaling::None => json!({"rope_type": "default", "rope_theta": self.rope.theta}),
            RopeScaling::Linear { factor } => {
                json!({"rope_type": "linear", "rope_theta": self.rope.theta, "factor": factor})
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3", "rope_theta": self.rope.theta, "factor": factor,
                "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        };
        let scaling =
            if self.rope.scaling == RopeScaling::None { Value::Null } else { rope.clone() };
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "dtype": dtype,
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": self.mlp_bias,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_scaling": scaling,
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype,
            "use_cache": true,
            "vocab_size": self.vocab_size,
        })
    }
}

impl RawConfig {
    fn check(self, path: &Path) -> Result<LlamaConfig, ModelError> {
        let fail =
            |key, problem: String| ModelError::Config { path: path.to_path_buf(), key, problem };
        if self.model_type.as_deref().is_some_and(|t| t != "llama") {
            return Err(fail(
                "model_type",
                format!(
                    "is `{}`: only Llama-architecture models (`llama`) can be read",
                    self.model_type.unwrap_or_default()
                ),
            ));
        }
        if self.hidden_act != "silu" {
            return Err(fail("hidden_act", format!("is `{}`, expected `silu`", self.hidden_act)));
        }
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads.unwrap_or(1)),
            ("head_dim", self.head_dim.unwrap_or(2)),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        // The largest models have a million token embeddings or positions; a number past
        // this is a broken file, and would only overflow or exhaust memory further on.
        const LARGEST: usize = 1 << 28;
        for (key, value) in positive {
            if value == 0 || value > LARGEST {
                return Err(fail(key, format!("is {value}, expected 1 to {LARGEST}")));
            }
        }
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        if !self.num_attention_heads.is_multiple_of(kv_heads) {
            return Err(fail(
                "num_key_value_heads",
                format!(
                    "is {kv_heads}, which does not divide `num_attention_heads` = {}",
                    self.num_attention_heads
                ),
            ));
        }
        let head_dim = match self.head_dim {
            Some(dim) => dim,
            None if self.hidden_size.is_multiple_of(self.num_attention_heads) => {
                self.hidden_size / self.num_attention_heads
            }
            None => {
                return Err(fail(
                    "hidden_size",
                    format!(
                        "is {}, which `num_attention_heads` = {} does not divide; give `head_dim`",
                        self.hidden_size, self.num_attention_heads
                    ),
                ));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(fail("head_dim", format!("is {head_dim}; rotary embedding needs it even")));
        }
        if self.rms_norm_eps.is_nan() || self.rms_norm_eps <= 0.0 {
            return Err(fail(
                "rms_norm_eps",
                format!("is {}, expected more than 0", self.rms_norm_eps),
            ));
        }
        let rope = read_rope(self.rope_theta, self.rope_parameters.or(self.rope_scaling), path)?;
        Ok(LlamaConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: kv_heads,
            head_dim,
            max_position_embeddings: self.max_position_embeddings,
            rms_norm_eps: self.rms_norm_eps,
            rope,
            tie_word_embeddings: self.tie_word_embeddings,
            attention_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            bos_token_id: self.bos_token_id,
            eos_token_ids: self.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
        })
    }
}

/// Joins the two layouts' rope keys.
fn read_rope(
    top_level_theta: Option<f64>,
    raw: Option<RawRope>,
    path: &Path,
) -> Result<RopeConfig, ModelError> {
    let fail = |key, problem: String| ModelError::Config { path: path.to_path_buf(), key, problem };
    let theta = raw.as_ref().and_then(|r| r.rope_theta).or(top_level_theta).unwrap_or(10_000.0);
    if theta.is_nan() || theta <= 0.0 || theta.is_infinite() {
        return Err(fail("rope_theta", format!("is {theta}, expected a positive number")));
    }
    let Some(raw) = raw else { return Ok(RopeConfig { theta, scaling: RopeScaling::None }) };
    let need = |key: &'static str, value: Option<f64>| match value {
        Some(value) if value > 0.0 && value.is_finite() => Ok(value),
        other => Err(fail(key, format!("is {other:?}, expected a positive number"))),
    };
    let scaling = match raw.rope_type.as_deref() {
        None | Some("default") => RopeScaling::None,
        Some("linear") => {
            RopeScaling::Linear { factor: need("rope_parameters.factor", raw.factor)? }
        }
        Some("llama3") => RopeScaling::Llama3 {
            factor: need("rope_parameters.factor", raw.factor)?,
            low_freq_factor: need("rope_parameters.low_freq_factor", raw.low_freq_factor)?,
            high_freq_factor: need("rope_parameters.high_freq_factor", raw.high_freq_factor)?,
            original_max_position_embeddings: need(
                "rope_parameters.original_max_position_embeddings",
                raw.original_max_position_embeddings,
            )?,
        },
        Some(other) => {
            return Err(fail(
                "rope_parameters.rope_type",
                format!("is `{other}`: `default`, `linear` and `llama3` are known"),
            ));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#""model_type":"llama","vocab_size":64,"hidden_size":32,
        "intermediate_size":48,"num_hidden_layers":2,"num_attention_heads":4"#;

    fn read(extra: &str) -> Result<LlamaConfig, ModelError> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), format!("{{{BASE}{extra}}}"))
            .expect("written");
        LlamaConfig::from_model_dir(dir.path())
    }

    #[test]
    fn both_layouts_of_rope_read_alike() {
        let four = read(r#","rope_theta":500000.0,"torch_dtype":"float16""#).expect("reads");
        let five = read(
            r#","rope_parameters":{"rope_theta":500000.0,"rope_type":"default"},"dtype":"float16""#,
        )
        .expect("reads");
        assert_eq!(four, five);
        assert_eq!(four.rope.theta, 500_000.0);
        assert_eq!(four.head_dim, 8);
        assert_eq!(four.num_key_value_heads, 4);
    }

    #[test]
    fn what_is_written_reads_back() {
        for extra in [
            r#","rope_parameters":{"rope_theta":1e4,"rope_type":"llama3","factor":8.0,
                "low_freq_factor":1.0,"high_freq_factor":4.0,
                "original_max_position_embeddings":8192},"eos_token_id":[2,3]"#,
            r#","rope_scaling":{"type":"linear","factor":2.0},"eos_token_id":2,"bos_token_id":1"#,
            "",
        ] {
            let config = read(extra).expect("reads");
            let dir = tempfile::tempdir().expect("a temporary directory");
            std::fs::write(dir.path().join("config.json"), config.to_json("float32").to_string())
                .expect("written");
            assert_eq!(LlamaConfig::from_model_dir(dir.path()).expect("reads back"), config);
        }
    }

    #[test]
    fn bad_values_name_file_and_key() {
        for (extra, key) in [
            (r#","num_key_value_heads":3"#, "num_key_value_heads"),
            (r#","num_key_value_heads":0"#, "num_key_value_heads"),
            (r#","head_dim":7"#, "head_dim"),
            (r#","hidden_act":"gelu""#, "hidden_act"),
            (r#","rope_scaling":{"type":"yarn","factor":2.0}"#, "rope_type"),
            (r#","rope_scaling":{"type":"linear"}"#, "factor"),
            (r#","max_position_embeddings":99999999999999"#, "max_position_embeddings"),
        ] {
            let message = read(extra).expect_err("refused").to_string();
            assert!(message.contains("config.json") && message.contains(key), "{message}");
        }
        let message = read(r#","vocab_size":"#).expect_err("refused").to_string();
        assert!(message.contains("config.json"), "{message}");
    }
}
