//! The checksum of an export's weights. It is in `config.json`, so the weight file stays as other
//! programs write and read it. Weights that were changed since are refused.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::read::hex;
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
/// If the weights were changed, or a file cannot be read.
pub(crate) fn check_weights(dir: &Path) -> Result<(), ModelError> {
    let Checksum { weights_hash: Some(expected) } = read_json(&dir.join("config.json"))? else {
        return Ok(());
    };
    let path = dir.join("model.safetensors");
    if hash_file(&path)? == expected { Ok(()) } else { Err(ModelError::Changed { path }) }
}

fn hash_file(path: &Path) -> Result<String, ModelError> {
    let io = |error| ModelError::io("read", path, error);
    let mut file = File::open(path).map_err(io)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(io)? {
            0 => return Ok(hex(&hasher.finalize())),
            length => hasher.update(&buffer[..length]),
        }
    }
}
