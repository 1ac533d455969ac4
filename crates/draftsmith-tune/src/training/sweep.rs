//! The last step of a sweep: selects the best head and writes `sweep.json`.

use anyhow::{Context, Result};
use draftsmith_files::{read_bytes, write_json};
use draftsmith_report::SweptHead;
use draftsmith_theory::{DrafterId, HeadScores, least_by};
use draftsmith_train::HeadTraining;
use serde_json::Value;

use super::TrainingWatch;
use super::export_job::Exported;
use super::outcomes::HeadOutcome;
use crate::heads::{install_head, sweep_path};
use draftsmith_recipe::{Recipe, Tuned, Workspace, head_within};

/// Copies the head with the lowest validation KL to the recipe's head directory, unless a tuned
/// head of the sweep is there. Writes and returns the entries of all heads.
pub(super) fn finish(
    (recipe, id): (&Recipe, DrafterId),
    workspace: &Workspace,
    heads: Vec<(HeadTraining, Exported)>,
    watch: &dyn TrainingWatch,
) -> Result<HeadOutcome> {
    let path = sweep_path(recipe, id);
    // The entries of an earlier run; empty if they have another format.
    let before: Vec<SweptHead> =
        serde_json::from_slice(&read_bytes(&path).unwrap_or_default()).unwrap_or_default();
    let scores = heads.iter().map(|(_, head)| serde_json::from_value(head.scores.clone()));
    let scores: Vec<HeadScores> = scores.collect::<Result<_, _>>()?;
    let best = least_by(0..heads.len(), |nth| scores[*nth].comparable_kl());
    let best = best.context("a sweep has a head")?;
    let row = |(nth, (settings, head)): (usize, &(HeadTraining, Exported))| {
        let name = settings.name();
        // A head that was not trained again keeps its training time.
        let seconds_before = || before.iter().find(|row| row.name == name)?.seconds;
        SweptHead {
            num_layers: settings.num_layers,
            rejection_weight: settings.rejection_weight,
            mixing_ratio: settings.mixing_ratio,
            best: nth == best,
            best_epoch: head.best_epoch,
            scores: scores[nth],
            seconds: head.speed.map(|speed| speed.seconds).or_else(seconds_before),
            dir: head.dir.clone(),
            name,
        }
    };
    let rows: Vec<SweptHead> = heads.iter().enumerate().map(row).collect();
    write_json(&path, &rows)?;
    let dir = head_within(&recipe.export_dir(id));
    // `tune` may since have replaced the copy by another head of the sweep.
    let found = read_bytes(dir.join("config.json")).unwrap_or_default();
    let found: Value = serde_json::from_slice(&found).unwrap_or_default();
    let is_tuned = found.get(Tuned::KEY).is_some();
    let fingerprint = |nth: usize| heads[nth].1.training.get("fingerprint");
    let is_found = |nth: &usize| found.pointer("/training/fingerprint") == fingerprint(*nth);
    let kept = (0..heads.len()).find(is_found).filter(|kept| is_tuned || *kept == best);
    if kept.is_none() {
        install_head(recipe, id, workspace, &heads[best].1.dir)?;
    }
    let (_, mut head) = heads.into_iter().nth(kept.unwrap_or(best)).context("it is one of them")?;
    watch.line(&format!("train-head: the sweep is in `{}`", path.display()));
    head.dir = dir;
    HeadOutcome::of(head, Some(rows))
}
