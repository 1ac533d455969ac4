//! Which sizes of a `config.json` can be those of a model.

use std::path::Path;

use crate::error::ModelError;

/// Checks that sizes are at least 1 and not absurdly large.
pub(super) fn check(path: &Path, sizes: &[(&'static str, usize)]) -> Result<(), ModelError> {
    // The largest models have a million token embeddings or positions. A larger number means a
    // broken file, and would overflow or exhaust memory later.
    const LARGEST: usize = 1 << 28;
    // Layers are counted before their weights are looked up.
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
