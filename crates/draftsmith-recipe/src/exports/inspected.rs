//! Describes models, drafters and heads as JSON documents.

use std::path::Path;

use crate::exports::config_keys::read_keys;
use crate::exports::found_adapter_head;
use crate::exports::tuned::Tuned;
use crate::workspace::{hash_dir, text_files};
use anyhow::Result;
use draftsmith_data::{ChatTemplate, TextFiles, TextTokenizer};
use draftsmith_files::merged;
use draftsmith_model::{AcceptanceHeadConfig, AdapterConfig, ModelConfig, WeightReader};
use serde_json::{Value, json};

use crate::watch::Silent;

/// Describes a model in a directory or GGUF file.
///
/// # Errors
/// If a file is missing or broken.
pub fn model(dir: &Path) -> Result<Value> {
    let config = ModelConfig::from_model_dir(dir)?;
    let shape = &config.shape;
    let weights = WeightReader::open_dir(dir)?;
    let text = text_files(dir).ok();
    let with_tokenizer = text.clone().filter(TextFiles::has_tokenizer);
    let tokenizer = with_tokenizer.map(TextTokenizer::from_model_dir).transpose()?;
    let template = text.map(ChatTemplate::from_model_dir).transpose()?.flatten();
    Ok(json!({
        "kind": "model",
        "architecture": config.architecture.model_type(),
        "num_parameters": config.num_parameters(),
        "stored_dtype": weights.dtype(),
        "num_tensors": weights.names().count(),
        "hidden_size": shape.hidden_size,
        "intermediate_size": config.spec.mlp.width,
        "num_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tokenizer_size": tokenizer.as_ref().map(TextTokenizer::vocab_size),
        "context": shape.context,
        "rope_theta": config.spec.rope.theta,
        "tied_embeddings": config.spec.tie_word_embeddings,
        "eos_token_ids": shape.eos_token_ids,
        "chat_template": template.is_some(),
        "tokenizer_hash": tokenizer.map(|tokenizer| tokenizer.hash()).transpose()?,
        "hash": hash_dir(dir, &Silent)?,
    }))
}

/// Counts the parameters in the weight files.
fn num_stored_parameters(weights: &WeightReader) -> usize {
    let names = weights.names().filter(|name| weights.is_weights(name));
    let shapes = names.filter_map(|name| weights.shape(name));
    shapes.map(|shape| shape.iter().product::<usize>()).sum()
}

pub(crate) fn adapter(dir: &Path) -> Result<Value> {
    let config = AdapterConfig::from_dir(dir)?;
    let own = json!({
        "exit_layer": config.exit_layer(),
        "architecture": config.architecture,
        "num_layers": config.model.shape.num_layers,
        "draft_vocabulary": config.vocabulary_size(),
        "target_hash": config.target_hash,
        "training": config.training,
        "head": found_adapter_head(dir).as_deref().map(head).transpose()?,
    });
    state_network("self-draft adapter", dir, &config.model, own)
}

pub(crate) fn eagle3(dir: &Path) -> Result<Value> {
    let config = read_keys(&dir.join("config.json"))?;
    let given = |key: &str| config.get(key).cloned();
    let own = json!({
        // The value is null for the default layers, which depend on the target.
        "layers": given("eagle_aux_hidden_state_layer_ids"),
        "draft_vocabulary": given("draft_vocab_size"),
        "norm_before_residual": given("norm_before_residual").unwrap_or(false.into()),
        "target_hidden_size": given("target_hidden_size"),
        "target_hash": given("target_hash"),
        "training": given("training"),
    });
    state_network("EAGLE-3 drafter", dir, &ModelConfig::from_model_dir(dir)?, own)
}

/// Describes a drafter that reads the target's hidden states, with the keys of its kind in `own`.
pub(crate) fn state_network(
    kind: &str,
    dir: &Path,
    model: &ModelConfig,
    own: Value,
) -> Result<Value> {
    let ModelConfig { shape, spec, .. } = model;
    let weights = WeightReader::open_dir(dir)?;
    let described = json!({
        "kind": kind,
        "hidden_size": shape.hidden_size,
        "intermediate_size": spec.mlp.width,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "num_parameters": num_stored_parameters(&weights),
        "stored_dtype": weights.dtype(),
        "tuned": Tuned::read(dir)?,
        "hash": hash_dir(dir, &Silent)?,
    });
    Ok(merged(described, own))
}

pub(crate) fn head(dir: &Path) -> Result<Value> {
    let config = AcceptanceHeadConfig::from_dir(dir)?;
    let weights = WeightReader::open_file(&dir.join("model.safetensors"))?;
    Ok(json!({
        "kind": "acceptance head",
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "blocks": if config.tied { "tied" } else { "untied" },
        "form": config.reads.form(),
        "inputs": config.reads.inputs(),
        "labels": config.training.get("labels"),
        "num_parameters": num_stored_parameters(&weights),
        "stored_dtype": weights.dtype(),
        "draft_hash": config.draft_hash,
        "target_hash": config.target_hash,
        "training": config.training,
        "tuned": Tuned::read(dir)?,
        "hash": hash_dir(dir, &Silent)?,
    }))
}
