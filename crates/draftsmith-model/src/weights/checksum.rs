//! The checksum of an export's weights. It is in the `config.json` beside them, so that the weight
//! file has the standard format; weights that changed since are refused.

use std::path::Path;

use draftsmith_files::hash_file;
use serde::Deserialize;
use serde_json::Value;

use super::write::write_json;
use crate::error::{ModelError, read_json};

/// The key of `config.json`.
#[derive(Deserialize)]
struct Checksum {
    weights_hash: Option<String>,
}

/// Writes an export's `config.json` with the SHA-256 of its weight file.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn write_config(
    dir: &Path,
    mut config: Value,
    weights_hash: String,
) -> Result<(), ModelError> {
    config["weights_hash"] = weights_hash.into();
    write_json(&dir.join("config.json"), &config)
}

/// Checks an export's weights. Exports from other programs have no checksum and pass.
///
/// # Errors
/// If they are not what was exported, or a file cannot be read.
pub(crate) fn check_weights(dir: &Path) -> Result<(), ModelError> {
    let Checksum { weights_hash: Some(expected) } = read_json(&dir.join("config.json"))? else {
        return Ok(());
    };
    let path = dir.join("model.safetensors");
    if hash_file(&path)? == expected { Ok(()) } else { Err(ModelError::Changed { path }) }
}
