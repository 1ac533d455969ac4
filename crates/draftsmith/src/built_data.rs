//! The data that `build-data` left.

use anyhow::{Result, bail};
use draftsmith_data::{Provenance, ResponseRow, read_dir};

use crate::recipe::Recipe;

/// The rows of the recipe's built data, and where they came from.
///
/// # Errors
/// If nothing was built, or a shard cannot be read.
pub(crate) fn built_rows(recipe: &Recipe) -> Result<(Vec<ResponseRow>, Provenance)> {
    let data_dir = recipe.data_dir();
    if !data_dir.is_dir() {
        bail!(
            "there is no data in `{}`; hint: run `draftsmith build-data` with this recipe first",
            data_dir.display()
        );
    }
    Ok(read_dir(&data_dir)?)
}
