//! Which sizes of a `config.json` can be those of a model.

use std::path::Path;

use crate::error::ModelError;

/// Checks sizes that a `config.json` gives.
pub(super) fn check(path: &Path, sizes: &[(&'static str, usize)]) -> Result<(), ModelError> {
    // The largest models have a million token embeddings or positions; a number past this is a
    // broken file, and would only overflow or exhaust memory further on.
    const LARGEST: usize = 1 << 28;
    // Layers are counted before their weights are looked for.
    const MOST_LAYERS: usize = 1 << 16;
    let largest = |key: &str| if key == "num_hidden_layers" { MOST_LAYERS } else { LARGEST };
    match sizes.iter().find(|(key, size)| *size == 0 || *size > largest(key)) {
        None => Ok(()),
        Some((key, size)) => Err(ModelError::Config {
            path: path.to_path_buf(),
            key,
            problem: format!("is {size}, expected 1 to {}", largest(key)),
        }),
    }
}
