//! Reads and writes a model's `config.json`: its family, its sizes, and the [`DecoderSpec`] to
//! build.
//!
//! `config/keys.rs` lists the keys, `config/families.rs` turns them into each family's spec,
//! `config/json.rs` writes them, and `config/gguf.rs` translates those of a GGUF file. If `generation_config.json` names end tokens, they replace those
//! of `config.json`.
//!
//! Only this module asks which family a model belongs to: a family is an entry in its table. All
//! other code follows the spec. A value that we cannot compute causes an error that names its key.

mod ends;
mod families;
mod gguf;
mod json;
mod keys;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value};

pub(crate) use self::families::draft_window;
use self::keys::TokenIds;
#[cfg(test)]
pub(crate) use self::keys::{Keys, RopeKeys};
use crate::error::{ModelError, Result, json_key, read_json, read_json_key};
use crate::gguf::{Gguf, is_gguf};
use crate::spec::{
    AttentionSpec, DecoderSpec, MlpSpec, ModelNames, ModelShape, NormForm, NormSpec, RopeConfig,
    RopeScaling, SessionFaults,
};

/// A model family, which decides how to read `config.json` and the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama and models published under its name: Vicuna, Llama 2 and 3.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3.
    Qwen3,
    /// Phi-3, Phi-3.5 and Phi-4.
    Phi3,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, text only.
    Gemma3,
    /// GPT-NeoX and Pythia.
    GptNeox,
}

/// A model's architecture without its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// The sizes and special tokens.
    pub shape: ModelShape,
    /// The computations of the model.
    pub spec: DecoderSpec,
}

impl Architecture {
    /// All supported families.
    pub const ALL: [Self; 8] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Phi3,
        Self::Gemma2,
        Self::Gemma3,
        Self::GptNeox,
    ];

    /// Returns the family's `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        self.names().0
    }

    /// Returns the family's usual name.
    pub fn name(self) -> &'static str {
        self.names().1
    }

    /// Returns whether the family's class in transformers can rotate a part of each head.
    pub(crate) fn rotates_in_part(self) -> bool {
        matches!(self, Self::Phi3 | Self::GptNeox)
    }

    /// Returns the family's class name in transformers.
    fn class(self) -> &'static str {
        self.names().2
    }

    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Llama => ("llama", "Llama", "LlamaForCausalLM"),
            Self::Mistral => ("mistral", "Mistral", "MistralForCausalLM"),
            Self::Qwen2 => ("qwen2", "Qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "Qwen3", "Qwen3ForCausalLM"),
            Self::Phi3 => ("phi3", "Phi-3", "Phi3ForCausalLM"),
            Self::Gemma2 => ("gemma2", "Gemma 2", "Gemma2ForCausalLM"),
            Self::Gemma3 => ("gemma3_text", "Gemma 3", "Gemma3ForCausalLM"),
            Self::GptNeox => ("gpt_neox", "GPT-NeoX", "GPTNeoXForCausalLM"),
        }
    }
}

impl ModelConfig {
    /// Configures a Llama with an MLP of width `mlp_width`, and common settings for the rest: an
    /// untied LM head, no biases, ε = 1e-5, and rotary base 10,000.
    pub fn llama(shape: ModelShape, mlp_width: usize) -> Self {
        let spec = DecoderSpec {
            norm: NormSpec { form: NormForm::Rms, epsilon: 1e-5 },
            attention: AttentionSpec::llama(false),
            mlp: MlpSpec::llama(mlp_width, false),
            is_parallel: false,
            rope: RopeConfig { theta: 10_000.0, width: None, scaling: RopeScaling::None },
            window: None,
            embedding_scale: None,
            logit_soft_cap: None,
            tie_word_embeddings: false,
            faults: SessionFaults::default(),
            names: ModelNames::LLAMA,
        };
        Self { architecture: Architecture::Llama, shape, spec }
    }

    /// Configures a Qwen 3 as [`Self::llama`] configures a Llama.
    pub fn qwen3(shape: ModelShape, mlp_width: usize) -> Self {
        let mut config = Self::llama(shape, mlp_width);
        config.architecture = Architecture::Qwen3;
        config.spec.attention.names.head_norms = families::HEAD_NORMS;
        config
    }

    /// Sets whether the LM head and the embedding share one matrix.
    #[must_use]
    pub fn with_tied_embeddings(mut self, tied: bool) -> Self {
        self.spec.tie_word_embeddings = tied;
        self
    }

    /// Reads `config.json` of a checkpoint directory, and end tokens from `generation_config.json`
    /// if it has any. Instead of a directory, `dir` may be a GGUF file.
    ///
    /// # Errors
    /// If a file is missing or malformed, the family is not supported, or a key has a bad value.
    pub fn from_model_dir(dir: &Path) -> Result<Self> {
        if is_gguf(dir) {
            return Self::from_gguf(&Gguf::read(dir)?);
        }
        let path = dir.join("config.json");
        let mut config = Self::from_keys(&path, &read_json(&path)?)?;
        config.read_end_tokens(dir)?;
        Ok(config)
    }

    /// Reads the end tokens of `generation_config.json` in a directory, if it has any.
    ///
    /// # Errors
    /// If the file is malformed.
    pub fn read_end_tokens(&mut self, dir: &Path) -> Result<()> {
        let path = dir.join("generation_config.json");
        if path.exists()
            && let Some(ids) = read_json_key::<TokenIds>(&path, "eos_token_id")?
        {
            self.shape.eos_token_ids = ids.into_vec();
        }
        Ok(())
    }

    /// Reads the keys of the `config.json` at `path`.
    ///
    /// # Errors
    /// If the family is not supported, or a key has a bad value.
    pub(crate) fn from_keys(path: &Path, keys: &Map<String, Value>) -> Result<Self> {
        families::read(read_architecture(path, keys)?, path, keys)
    }
}

/// Reads the family from a `config.json`; Llama if the file names no family.
fn read_architecture(path: &Path, keys: &Map<String, Value>) -> Result<Architecture> {
    let model_type: Option<String> = json_key(path, keys, "model_type")?;
    let Some(model_type) = model_type else { return Ok(Architecture::Llama) };
    let known = |architecture: &Architecture| architecture.model_type() == model_type;
    Architecture::ALL.into_iter().find(known).ok_or_else(|| {
        let known = Architecture::ALL.map(|known| format!("`{}`", known.model_type())).join(", ");
        let problem = format!("is `{model_type}`, which is not supported; expected one of {known}");
        ModelError::config(path, "model_type", problem)
    })
}
