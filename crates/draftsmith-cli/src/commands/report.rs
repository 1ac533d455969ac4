//! `report`: compares two evaluations side by side.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_report::{EvaluationSummary, pair_rows, read_results, render_pairs};

use crate::console::Console;

/// Compares two evaluations. Each path is a `results.json`, or a directory that contains one.
pub(crate) fn run([first, second]: [&Path; 2], console: &Console) -> Result<()> {
    let (first, second) = (file_of(first)?, file_of(second)?);
    let summaries = EvaluationSummary::beside(&first).zip(EvaluationSummary::beside(&second));
    let differences = summaries.map(|(one, other)| one.differences(&other)).unwrap_or_default();
    if !differences.is_empty() {
        console.note("report: the two evaluations differ in more than what is compared:");
        differences.iter().for_each(|difference| console.note(format!("  {difference}")));
    }
    let (first, second) = (read_results(&first)?, read_results(&second)?);
    console.text(render_pairs(&first, &second, console.width(), console.colour()))?;
    console.document(&pair_rows(&first, &second))
}

/// Finds a results file. A directory may be that of an evaluation, or a recipe's checkpoint
/// directory.
fn file_of(path: &Path) -> Result<PathBuf> {
    let places = ["results.json", "evaluation/results.json"];
    let found = match path.is_dir() {
        true => places.map(|place| path.join(place)).into_iter().find(|place| place.is_file()),
        false => Some(PathBuf::from(path)),
    };
    found.with_context(|| {
        format!(
            "`{}` holds no `results.json`; hint: name a directory that `draftsmith evaluate` wrote, such as \
             `checkpoints/NAME/evaluation`",
            path.display()
        )
    })
}
