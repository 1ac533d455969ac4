//! What a checkpoint states about its model: the architecture, its sizes, and the [`DecoderSpec`]
//! that the model is built after.
//!
//! They stand in `config.json`: `config/keys.rs` has its keys, `config/families.rs` what each family
//! makes of them, `config/json.rs` writes them. The tokens that end a response are those of
//! `generation_config.json` where it names some.

mod families;
mod json;
mod keys;
mod rope;
mod sizes;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use self::keys::TokenIds;
use crate::error::{ModelError, read_json};
use crate::shape::ModelShape;
use crate::spec::{
    AttentionSpec, DecoderSpec, MlpSpec, ModelNames, NormForm, NormSpec, RopeConfig, RopeScaling,
};

/// A family of models: how `config.json` and the weights are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama, and what is published under its name: Vicuna, Llama 2 and 3.
    Llama,
    /// Mistral, with a window over the last tokens or without.
    Mistral,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3.
    Qwen3,
    /// Phi-3, Phi-3.5 and Phi-4.
    Phi3,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, as far as it reads text.
    Gemma3,
    /// GPT-NeoX and Pythia.
    GptNeox,
}

/// A model without its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family, whose `config.json` it is.
    pub architecture: Architecture,
    /// Its sizes.
    pub shape: ModelShape,
    /// What it computes.
    pub spec: DecoderSpec,
}

impl Architecture {
    /// All that can be read.
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

    /// As `config.json` names it.
    pub fn model_type(self) -> &'static str {
        self.names().0
    }

    /// As people call it.
    pub fn name(self) -> &'static str {
        self.names().1
    }

    /// As transformers calls its class.
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

/// The key that names whose keys the others are.
#[derive(Deserialize)]
struct ModelType {
    model_type: Option<String>,
}

#[derive(Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<TokenIds>,
}

impl ModelConfig {
    /// A Llama with an MLP of width `mlp_width`. All else is as most have it: an LM head of its own,
    /// no biases, ε = 1e-5, and a rotation of base 10,000.
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

    /// Reads `config.json` and, for the tokens that end a response, `generation_config.json` of a
    /// checkpoint directory.
    ///
    /// # Errors
    /// If a file is missing or not JSON, the architecture is not known, or a key has a value that
    /// it does not allow.
    pub fn from_model_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let mut config = families::read(read_architecture(&path)?, &path)?;
        let generation_path = dir.join("generation_config.json");
        if generation_path.exists() {
            let generation: GenerationConfig = read_json(&generation_path)?;
            if let Some(ids) = generation.eos_token_id {
                config.shape.eos_token_ids = ids.into_vec();
            }
        }
        Ok(config)
    }

    /// `config.json`, for weights stored as `dtype`.
    pub fn to_json(&self, dtype: &str) -> Value {
        json::to_json(self, dtype)
    }

    /// The number of parameters, a tied LM head counted once.
    pub fn num_parameters(&self) -> usize {
        // Layers differ in what they look at, not in their weights.
        let layer = self.spec.layer(0).num_parameters(&self.shape);
        self.spec.num_parameters_outside(&self.shape) + self.shape.num_layers * layer
    }
}

/// The architecture that a `config.json` names; Llama where it names none.
fn read_architecture(path: &Path) -> Result<Architecture, ModelError> {
    let ModelType { model_type } = read_json(path)?;
    let Some(model_type) = model_type else { return Ok(Architecture::Llama) };
    let known = |architecture: &Architecture| architecture.model_type() == model_type;
    Architecture::ALL.into_iter().find(known).ok_or_else(|| {
        let known = Architecture::ALL.map(|known| format!("`{}`", known.model_type())).join(", ");
        ModelError::Config {
            path: path.to_path_buf(),
            key: "model_type",
            problem: format!("is `{model_type}`: models of these types can be read: {known}"),
        }
    })
}
