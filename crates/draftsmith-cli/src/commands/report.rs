//! `report`: compares two evaluations or two trainings side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_report::{EvaluationSummary, pair_rows, plain_table, read_results, render_pairs};

use super::inspect::Training;
use crate::console::Console;

/// Compares two evaluations or trainings. Each path is a `results.json`, or a directory that contains one.
pub(crate) fn run([first, second]: [&Path; 2], console: &Console) -> Result<()> {
    if let Some((one, other)) = Training::find(first)?.zip(Training::find(second)?) {
        return trainings(&one.figures(), &other.figures(), console);
    }
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

/// Compares two trainings by their scores.
fn trainings(
    first: &BTreeMap<String, f64>,
    second: &BTreeMap<String, f64>,
    console: &Console,
) -> Result<()> {
    let names: BTreeSet<&String> = first.keys().chain(second.keys()).collect();
    let shown = |score: Option<f64>| score.map_or("-".to_owned(), |score| format!("{score:.4}"));
    let rows = names.iter().map(|name| {
        let both = [first.get(*name).copied(), second.get(*name).copied()];
        let change = both[0].zip(both[1]).map(|(one, other)| other - one);
        [(*name).clone(), shown(both[0]), shown(both[1]), shown(change)]
    });
    console
        .text(plain_table(["", "A", "B", "B - A"], rows, 1..4, (1, 1), console.width()) + "\n")?;
    console.document(&[first, second])
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
             `checkpoints/NAME/evaluation`, or two of trainings, such as `checkpoints/NAME/eagle-training`",
            path.display()
        )
    })
}
