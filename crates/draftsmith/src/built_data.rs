//! The data that `build-data` left.

use anyhow::{Result, bail};
use draftsmith_data::{Provenance, ResponseRow, read_dir};

use crate::recipe::Recipe;

/// The rows of the recipe's built data, for models that know `vocab_size` tokens, and where they came
/// from.
///
/// # Errors
/// If nothing was built, a shard cannot be read, or a row has a token that the models do not know.
pub(crate) fn built_rows(
    recipe: &Recipe,
    vocab_size: usize,
) -> Result<(Vec<ResponseRow>, Provenance)> {
    let data_dir = recipe.data_dir();
    if !data_dir.is_dir() {
        bail!(
            "there is no data in `{}`; hint: run `draftsmith build-data` with this recipe first",
            data_dir.display()
        );
    }
    Ok(read_dir(&data_dir, Some(vocab_size))?)
}
