//! The heads of a sweep beside each other: the best of them, `sweep.json` and the table.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_files::write_whole;
use draftsmith_theory::HeadScores;
use serde::{Deserialize, Serialize};

use super::{Done, SCORES, Trained, finished};
use crate::console::Console;
use crate::recipe::Recipe;
use crate::workspace::Workspace;

/// A head of a sweep: a row of `sweep.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SweptHead {
    /// `d3-w6-r0.15`.
    pub(crate) name: String,
    pub(crate) num_layers: usize,
    pub(crate) rejection_weight: f64,
    pub(crate) mixing_ratio: f64,
    /// Whether it is the one in `head/`: that with the lowest `unshifted_kl`.
    pub(crate) best: bool,
    /// The epoch that its weights are from.
    pub(crate) best_epoch: usize,
    /// Its scores on the validation rows.
    pub(crate) scores: HeadScores,
    /// Time of the pass that trained it, beside others; null where nobody knows any more.
    pub(crate) seconds: Option<f64>,
    /// Its directory.
    pub(crate) dir: PathBuf,
}

impl SweptHead {
    /// What heads of several rejection weights are compared by.
    pub(crate) fn comparable(&self) -> f64 {
        comparable(&self.scores)
    }
}

fn comparable(scores: &HeadScores) -> f64 {
    scores.unshifted_kl.unwrap_or(scores.kl)
}

/// The rows' file, in the sweep's directory.
const ROWS: &str = "sweep.json";

/// Copies the best of the heads to where one is looked for, and writes and returns what there is to
/// tell of all.
pub(super) fn finish(
    recipe: &Recipe,
    workspace: &Workspace,
    heads: Vec<Done>,
    console: &Console,
) -> Result<Trained> {
    let path = recipe.sweep_dir().join(ROWS);
    let before = read_rows(&path);
    let scores: Vec<f64> = heads.iter().map(|head| comparable(&head.scores)).collect();
    let best = lowest(&scores).context("a sweep has a head")?;
    let rows: Vec<SweptHead> =
        heads.iter().enumerate().map(|(nth, head)| row(head, nth == best, &before)).collect();
    write_whole(&path, format!("{}\n", serde_json::to_string_pretty(&rows)?))?;
    let mut head = heads.into_iter().nth(best).context("the best is one of them")?;
    let head_dir = recipe.head_dir();
    // One that is there may have been tuned since.
    if finished(&head_dir, &head.planned.fingerprint).is_none() {
        workspace.forget(&head_dir);
        copy(&head.planned.dir, &head_dir)?;
        recipe.write_beside(&head_dir)?;
    }
    console.note(format!("train-head: the sweep is in `{}`", path.display()));
    head.planned.dir = head_dir;
    Ok(head.trained(Some(rows)))
}

fn row(head: &Done, best: bool, before: &[SweptHead]) -> SweptHead {
    let settings = &head.planned.settings;
    let name = settings.name();
    let seconds = match head.speed {
        Some(speed) => Some(speed.seconds),
        // Kept, as it was.
        None => before.iter().find(|row| row.name == name).and_then(|row| row.seconds),
    };
    SweptHead {
        name,
        num_layers: settings.num_layers,
        rejection_weight: settings.rejection_weight,
        mixing_ratio: settings.mixing_ratio,
        best,
        best_epoch: head.best_epoch,
        scores: head.scores,
        seconds,
        dir: head.planned.dir.clone(),
    }
}

/// The rows that an earlier run wrote; none if there are none, or of another version.
fn read_rows(path: &Path) -> Vec<SweptHead> {
    let bytes = std::fs::read(path).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// The place of the lowest, the first of several.
fn lowest(values: &[f64]) -> Option<usize> {
    (0..values.len()).min_by(|a, b| values[*a].total_cmp(&values[*b]))
}

/// Copies a head, its config last: what has one is whole.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("cannot create `{}`", to.display()))?;
    for name in [SCORES, "model.safetensors", "config.json"] {
        let (from, to) = (from.join(name), to.join(name));
        let bytes =
            std::fs::read(&from).with_context(|| format!("cannot read `{}`", from.display()))?;
        write_whole(&to, bytes)?;
    }
    Ok(())
}
