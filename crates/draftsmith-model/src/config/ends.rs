//! The ends of models of any family: embeddings, final norm and LM head, for a target whose layers
//! run on a server.
//!
//! Multimodal models keep the keys of their language model in `text_config`. A family that we do not
//! know counts as a Llama, whose layers are never built: keys that say how layers compute are ignored.
//! Keys that change the ends in a way that we do not know are refused.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Architecture, ModelConfig, families, read_architecture};
use crate::error::{ModelError, Result, read_json};
use crate::gguf::is_gguf;
use crate::spec::NormForm;

/// The key of a multimodal model's language model.
const TEXT: &str = "text_config";
/// Keys by which some families scale embeddings, and by which they scale logits.
const EMBEDDING_SCALES: [&str; 2] = ["embedding_multiplier", "scale_emb"];
const LOGIT_SCALES: [&str; 4] =
    ["logits_scaling", "logit_scale", "dim_model_base", "lm_head_multiplier"];
/// The keys that we read of an unknown family: the sizes, which a drafter takes over, and what the
/// ends need.
const READ: [&str; 13] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
];

impl ModelConfig {
    /// Reads the `config.json` of a target whose layers run elsewhere. The target may be of any family,
    /// and quantised. Unless the family is one of [`Architecture::ALL`], only the sizes, the special
    /// tokens and the ends have a meaning. A GGUF file must have a model of one of these families.
    ///
    /// # Errors
    /// If a file is missing or not JSON, a key has a bad value, or a key changes the ends in a way
    /// that is not known.
    pub fn ends_from_model_dir(dir: &Path) -> Result<Self> {
        if is_gguf(dir) {
            return Self::from_model_dir(dir);
        }
        let path = &dir.join("config.json");
        let keys = language_keys(read_json(path)?);
        let mut config = match read_architecture(path, &keys) {
            Ok(architecture) => families::read(architecture, path, &keys)?,
            Err(_) => unknown(path, keys)?,
        };
        config.read_end_tokens(dir)?;
        Ok(config)
    }
}

/// Returns the keys of the language model, without those of a quantisation of its layers.
fn language_keys(mut keys: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(text)) = keys.remove(TEXT) {
        keys.extend(text);
    }
    keys.remove("quantization_config");
    keys
}

/// Reads the keys of a family that we do not know.
fn unknown(path: &Path, mut keys: Map<String, Value>) -> Result<ModelConfig> {
    let scale = |key: &&str| keys.get(*key).and_then(Value::as_f64).filter(|scale| *scale != 1.0);
    if let Some(key) = LOGIT_SCALES.into_iter().find(|key| scale(key).is_some()) {
        let problem = "is set, and how it changes the logits is not known here";
        return Err(ModelError::config(path, key, problem));
    }
    let embedding_scale = EMBEDDING_SCALES.iter().find_map(scale);
    let soft_cap = keys.get("final_logit_softcapping").and_then(Value::as_f64);
    if let Some(theta) = keys.get("rope_parameters").and_then(|rope| rope.get("rope_theta")) {
        keys.insert("rope_theta".to_owned(), theta.clone());
    }
    keys.retain(|key, _| READ.contains(&&**key));
    if let Some(width) = keys.get("hidden_size").and_then(Value::as_u64) {
        // Mixtures of experts may name only the width of an expert. This one is a drafter's.
        keys.entry("intermediate_size").or_insert_with(|| (4 * width).into());
    }
    let mut config = families::read(Architecture::Llama, path, &keys)?;
    config.spec.embedding_scale = embedding_scale.map(|scale| scale as f32);
    config.spec.logit_soft_cap = soft_cap.map(|cap| cap as f32);
    config.spec.norm.form = NormForm::Undecided;
    Ok(config)
}
