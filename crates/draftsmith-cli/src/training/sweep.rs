//! Finishes a sweep: selects the best head and writes `sweep.json`.

use anyhow::{Context, Result};
use draftsmith_files::write_whole;
use draftsmith_model::AcceptanceHeadConfig;
use draftsmith_report::SweptHead;
use draftsmith_theory::{DrafterId, HeadScores};
use draftsmith_train::HeadTraining;
use serde_json::Value;

use super::export_job::{Planned, SCORES};
use super::head_outcome::{ExportedHead, HeadOutcome};
use crate::console::Console;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::kinds::head_within;
use draftsmith_recipe::workspace::Workspace;

/// The file of the rows in the sweep's directory.
const ROWS: &str = "sweep.json";

/// Copies the best head to the recipe's head directory, and writes and returns the rows of all heads.
pub(crate) fn finish(
    (recipe, id): (&Recipe, DrafterId),
    workspace: &Workspace,
    heads: Vec<(HeadTraining, ExportedHead)>,
    console: &Console,
) -> Result<HeadOutcome> {
    let path = recipe.sweep_dir(id).join(ROWS);
    // The rows of an earlier run; none if they have another format.
    let before: Vec<SweptHead> =
        serde_json::from_slice(&std::fs::read(&path).unwrap_or_default()).unwrap_or_default();
    let kl = |nth: usize| heads[nth].1.scores.comparable_kl();
    let best = (0..heads.len()).min_by(|one, other| kl(*one).total_cmp(&kl(*other)));
    let best = best.context("a sweep has a head")?;
    let row = |(nth, (settings, head)): (usize, &(HeadTraining, ExportedHead))| {
        let name = settings.name();
        // A kept head keeps its time.
        let seconds_before = || before.iter().find(|row| row.name == name)?.seconds;
        SweptHead {
            num_layers: settings.num_layers,
            rejection_weight: settings.rejection_weight,
            mixing_ratio: settings.mixing_ratio,
            best: nth == best,
            best_epoch: head.best_epoch,
            scores: head.scores,
            seconds: head.speed.map(|speed| speed.seconds).or_else(seconds_before),
            dir: head.dir.clone(),
            name,
        }
    };
    let rows: Vec<SweptHead> = heads.iter().enumerate().map(row).collect();
    write_whole(&path, format!("{}\n", serde_json::to_string_pretty(&rows)?))?;
    let (_, mut head) = heads.into_iter().nth(best).context("the best is one of them")?;
    let fingerprint = head.config.training.get("fingerprint").and_then(Value::as_str);
    let fingerprint = fingerprint.context("a head of a sweep has a fingerprint")?.to_owned();
    let planned = Planned { id, dir: head_within(&recipe.export_dir(id)), fingerprint };
    // An existing copy may have been tuned since, so we keep it.
    if planned.found::<_, HeadScores>(AcceptanceHeadConfig::from_dir).is_none() {
        workspace.artifacts.forget(&planned.dir);
        std::fs::create_dir_all(&planned.dir)
            .with_context(|| format!("cannot create `{}`", planned.dir.display()))?;
        // `config.json` comes last, because it marks a complete head.
        for name in [SCORES, "model.safetensors", "config.json"] {
            let from = head.dir.join(name);
            let bytes = std::fs::read(&from);
            let bytes = bytes.with_context(|| format!("cannot read `{}`", from.display()))?;
            write_whole(&planned.dir.join(name), bytes)?;
        }
        recipe.write_of(id, &planned.dir)?;
    }
    console.note(format!("train-head: the sweep is in `{}`", path.display()));
    head.dir = planned.dir;
    Ok(HeadOutcome::of(head, Some(rows)))
}
