//! `report`: compares two evaluations side by side.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_report::{ResultRow, pair_rows, read_results, render_pairs};

use crate::console::Console;

/// Compares two evaluations. Each path is a `results.json`, or a directory that contains one.
pub(crate) fn run([first, second]: [&Path; 2], console: &Console) -> Result<()> {
    let (first, second) = (rows_of(first)?, rows_of(second)?);
    console.text(render_pairs(&first, &second, console.width(), console.colour()))?;
    console.document(&pair_rows(&first, &second))
}

/// Reads the rows of a results file. A directory may be that of an evaluation, or a recipe's
/// checkpoint directory.
fn rows_of(path: &Path) -> Result<Vec<ResultRow>> {
    let places = ["results.json", "evaluation/results.json"];
    let found = match path.is_dir() {
        true => places.map(|place| path.join(place)).into_iter().find(|place| place.is_file()),
        false => Some(PathBuf::from(path)),
    };
    let found = found.with_context(|| {
        format!(
            "`{}` holds no `results.json`; hint: name a directory that `draftsmith evaluate` wrote, such as \
             `checkpoints/NAME/evaluation`",
            path.display()
        )
    })?;
    Ok(read_results(&found)?)
}
