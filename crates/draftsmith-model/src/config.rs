//! What a checkpoint states about its model: the architecture, its sizes, and the [`DecoderSpec`]
//! that the model is built after.
//!
//! They stand in `config.json`, whose keys are the architecture's: `config/llama.rs` knows Llama's.
//! The tokens that end a response are those of `generation_config.json` where it names some.

mod llama;
mod rope;
mod sizes;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{ModelError, read_json};
use crate::shape::ModelShape;
use crate::spec::DecoderSpec;

/// A family of models: how `config.json` and the weights are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama, and what is published under its name.
    Llama,
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
    pub const ALL: [Self; 1] = [Self::Llama];

    /// As `config.json` names it.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
        }
    }

    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "Llama",
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

/// One id, or a list of them.
#[derive(Deserialize, Serialize, Clone)]
#[serde(untagged, expecting = "is no token id, nor a list of them")]
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

impl ModelConfig {
    /// Reads `config.json` and, for the tokens that end a response, `generation_config.json` of a
    /// checkpoint directory.
    ///
    /// # Errors
    /// If a file is missing or not JSON, the architecture is not known, or a key has a value that
    /// it does not allow.
    pub fn from_model_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let mut config = match read_architecture(&path)? {
            Architecture::Llama => llama::read(&path)?,
        };
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
        match self.architecture {
            Architecture::Llama => llama::to_json(self, dtype),
        }
    }

    /// The number of parameters, a tied LM head counted once.
    pub fn num_parameters(&self) -> usize {
        let ModelShape { vocab_size, hidden_size, num_layers, .. } = self.shape;
        let num_tables = if self.spec.tie_word_embeddings { 1 } else { 2 };
        let layers = num_layers * self.spec.layer().num_parameters(&self.shape);
        num_tables * vocab_size * hidden_size + layers + hidden_size
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
