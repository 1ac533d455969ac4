//! `run`: checks the recipe, then runs all stages in order. Stages whose output exists are skipped.
//! At the end, it says in plain words which setting was fastest.

pub(crate) mod dry;
mod preflight;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use draftsmith_report::{Conclusion, serving_text, wrapped};
use serde_json::{Value, json};

use crate::commands::{
    StageJob, build_data, build_datastore, evaluate, record, replay, train_drafter, train_head,
    tune,
};
use draftsmith_recipe::on_pool;
use draftsmith_tune::build_data::DamagedShards;
use draftsmith_tune::tuner::finished_tuning;

/// The least time of earlier stages by which tuning is limited, so that a resumed run measures enough.
const LEAST_BEFORE_TUNING: Duration = Duration::from_secs(60);

/// Runs all stages with one workspace. Prints the table of results, the report's path, the ways to
/// serve, and the last sentences.
pub(crate) fn run(job: StageJob<'_>) -> Result<()> {
    let StageJob { recipe, console, .. } = job;
    let (head, self_drafts) = (recipe.trained_head(), recipe.trained_self_drafts());
    let trains = head.is_some() || !self_drafts.is_empty();
    ensure!(
        recipe.data.is_some() || trains || recipe.evaluate.is_some(),
        "the recipe has no stage; hint: give it a section `[data]` or `[evaluate]`, or drafters that are \
         trained"
    );
    let begun = Instant::now();
    on_pool(|| preflight::check(job))?;
    // Stages must not write to stdout, because `run` writes one document for all of them.
    let quiet = console.without_output();
    let stage = StageJob { console: &quiet, ..job };
    let built = recipe.data.as_ref().map(|_| build_data::run(stage, DamagedShards::Refused));
    let built = built.transpose()?;
    if built.is_some() {
        build_datastore::run_once(stage)?;
    }
    let head = head.map(|_| train_head::run(stage, None)).transpose()?;
    let adapters =
        (!self_drafts.is_empty()).then(|| train_drafter::run(stage, None)).transpose()?;
    let is_tuned = recipe.tune.is_some();
    let recorded = is_tuned.then(|| on_pool(|| record::run(stage))).transpose()?;
    let (tuned, replayed) = match is_tuned {
        true => {
            // The limit is half of the time so far, so tuning takes at most a third of the total up to
            // then, unless the earlier stages were finished before.
            let time_limit = begun.elapsed().max(LEAST_BEFORE_TUNING) / 2;
            let tuned = tune_once(stage, time_limit)?;
            (Some(tuned), Some(replay::run(stage)?))
        }
        false => (None, None),
    };
    let evaluation = match recipe.evaluate {
        Some(_) if recipe.target_elsewhere().is_some() => {
            console.note("evaluate: skipped, because servers run the target");
            None
        }
        Some(_) => Some(on_pool(|| evaluate::run_once(stage))?),
        None => None,
    };
    for one in replayed.iter().flat_map(|replay| &replay.predictions) {
        console.note(format!(
            "run: {}, {}: {}",
            one.drafter.text(),
            one.decoding.text(),
            one.over_online.verdict()
        ));
    }
    if let Some(evaluation) = &evaluation {
        console.text(evaluate::text(evaluation, console))?;
        let Conclusion { serving, last, .. } = &evaluation.conclusion;
        if !serving.is_empty() {
            let ways = serving_text(serving, console.width());
            console.text(format!("\nwhere to serve it:\n{ways}"))?;
        }
        if let Some(last) = last {
            console.text(format!("\n{}\n", wrapped(last, console.width()).join("\n")))?;
        }
    }
    console.document(&json!({
        "build_data": built,
        "train_head": head,
        "train_drafter": adapters,
        "record": recorded,
        "tune": tuned,
        "replay": replayed,
        "evaluate": evaluation,
    }))
}

/// Tunes within a time limit, or returns a finished tuning of the same inputs.
fn tune_once(job: StageJob<'_>, time_limit: Duration) -> Result<Value> {
    let StageJob { recipe, workspace, console } = job;
    if let Some(tuned) = finished_tuning(recipe, workspace)? {
        let file = recipe.tuning_dir().join("tuned.json");
        console.note(format!("tune: kept `{}`; `draftsmith tune` tunes again", file.display()));
        return Ok(tuned);
    }
    let tune = || tune::run_within(job, Some(time_limit));
    Ok(serde_json::to_value(on_pool(tune)?)?)
}
