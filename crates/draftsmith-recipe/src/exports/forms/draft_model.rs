//! Exports an adapter as a draft model: a checkpoint of the target's architecture family, for any
//! runtime that supports draft models.

use std::path::Path;

use anyhow::Result;
use draftsmith_files::write_whole;
use draftsmith_model::{AdapterConfig, CausalLm};
use serde_json::json;

use super::{Exporting, Written};
use crate::exports::config_keys::write_keys;
use crate::exports::{AdapterExport, found_adapter_head};
use crate::out_dir::{OutDir, copy_if_there};
use crate::workspace::Workspace;

/// The key of `config.json` that records what the draft model was made from.
const MADE_OF: &str = "draftsmith";

/// Exports the adapter in the source directory as a draft model.
pub(crate) fn export(export: &Exporting<'_>) -> Result<Written> {
    let (Exporting { source, out, .. }, workspace) = (export, (export.open)()?);
    let adapter = AdapterExport::read(source, &workspace)?;
    let dir = OutDir::begin_again(out)?;
    let model = write_draft_model(&adapter, &workspace, dir.path())?;
    let config = &adapter.config;
    dir.finish()?;
    let num_layers = model.shape().num_layers;
    let origin = match config.exit_layer() {
        0 => "all from the adapter".to_owned(),
        first => format!("{first} from the target and {} from the adapter", num_layers - first),
    };
    let num_parameters = model.config().num_parameters();
    Ok(Written {
        what: format!(
            "a draft model of {num_layers} layers, {origin}, with {num_parameters} parameters"
        ),
        ignored: ignored(source, config),
        commands: Vec::new(),
    })
}

/// Writes an adapter's draft model with the target's tokenizer and chat template.
pub(crate) fn write_draft_model(
    AdapterExport { adapter, config, dir: source }: &AdapterExport,
    workspace: &Workspace,
    out: &Path,
) -> Result<CausalLm> {
    let target = &workspace.target_alone()?.target;
    let model = adapter.draft_model(config, target)?;
    let files = workspace.text.files(&workspace.models)?;
    model.write_model_dir(out, target.stored_dtype())?;
    let made_of = json!({
        "draft_model_of": {
            "adapter": workspace.artifacts.adapter_hash(source, config)?,
            "target_hash": workspace.models.target_hash()?,
            "exit_layer": config.exit_layer(),
            "architecture": config.architecture.to_string(),
        }
    });
    write_keys(&out.join("config.json"), [(MADE_OF, made_of)])?;
    match files.made() {
        Some(made) => {
            for (name, contents) in made {
                write_whole(&out.join(name), contents)?;
            }
        }
        None => {
            for name in TEXT_FILES.iter().chain(&["generation_config.json"]) {
                copy_if_there(files.place(), out, name)?;
            }
        }
    }
    Ok(model)
}

/// The files that may hold a tokenizer and a chat template.
pub(crate) const TEXT_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
];

/// Lists the properties that runtimes cannot use, one sentence each.
fn ignored(source: &Path, config: &AdapterConfig) -> Vec<String> {
    let mut ignored = Vec::from_iter(vocabulary_ignored(config));
    if let Some(head) = found_adapter_head(source) {
        ignored.push(format!(
            "the acceptance head in `{}`: use `--for transformers` to include it",
            head.display()
        ));
    }
    ignored
}

/// Explains that runtimes gain no speed from an exported draft vocabulary. `None` if the adapter
/// drafts from the full vocabulary.
pub(crate) fn vocabulary_ignored(config: &AdapterConfig) -> Option<String> {
    let vocabulary = config.draft_vocabulary.as_ref()?;
    Some(format!(
        "the draft vocabulary: {} tokens keep their rows of the LM head, the other rows are zeros, and \
         a draft forward reads all {}; train an adapter for this use without \
         `adapter.draft_vocabulary`",
        vocabulary.ids().len(),
        config.model.shape.vocab_size
    ))
}
