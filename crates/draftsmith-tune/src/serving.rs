//! The last sentence of a run: which setting to serve, where, what to expect there, and what to do
//! next. `run`, the report, `check` and `export` all take it from here.

use anyhow::Result;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::exports::servers::served_path;
use draftsmith_report::{
    Conclusion, DRAFTSMITH, DecodingName, DeployAdvice, DrafterName, GroupVerdict, ResultRow,
    ServingWay, fastest_ways,
};
use draftsmith_theory::{DrafterId, Estimate};
use serde::Deserialize;

use crate::tuning::TuningFile;

/// What this module reads of a [`Tuning`](crate::tuner::Tuning).
#[derive(Deserialize)]
struct TunedWays {
    drafter: DrafterName,
    decoding: DecodingName,
    #[serde(default)]
    ways: Vec<ServingWay>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TunedFile {
    tunings: Vec<TunedWays>,
}

/// Reads the fastest way of each runtime that `tune` found, for one drafter or for all of them.
/// Empty before `tune`.
///
/// # Errors
/// If the file exists but cannot be read.
pub fn tuned_ways(
    recipe: &Recipe,
    decoding: DecodingName,
    drafter: Option<DrafterId>,
) -> Result<Vec<ServingWay>> {
    let file: TunedFile = TuningFile::TUNED.read(recipe)?;
    let is_meant = |tuned: &&TunedWays| {
        tuned.decoding == decoding && drafter.is_none_or(|id| tuned.drafter.id() == Some(id))
    };
    Ok(fastest_ways(file.tunings.iter().filter(is_meant).flat_map(|tuned| &tuned.ways)))
}

/// Adds the ways to serve and the last sentences to a conclusion. They cover its first dataset and
/// way of decoding.
///
/// # Errors
/// If the results of `tune` cannot be read.
pub fn concluded(
    mut conclusion: Conclusion,
    rows: &[ResultRow],
    recipe: &Recipe,
) -> Result<Conclusion> {
    let Some(verdict) = conclusion.verdicts.first() else { return Ok(conclusion) };
    let setting = verdict.tuned.as_ref().or(verdict.fastest.as_ref());
    let row = rows.iter().find(|row| setting.is_some_and(|it| row.label() == it.label));
    let Some((row, id)) = row.and_then(|row| Some((row, row.drafter.id()?))) else {
        return Ok(conclusion);
    };
    let name = format!("{} ({})", row.drafter.text(), row.rule_label());
    let Some(found) = verdict.found(&name) else { return Ok(conclusion) };
    let next = next(verdict, &conclusion, recipe, id);
    if verdict.advice == DeployAdvice::Deploy {
        conclusion.serving.extend(own_way(row, id, recipe));
        conclusion.serving.extend(tuned_ways(recipe, row.decoding, None)?);
    }
    conclusion.last = Some(format!("{found} {next}"));
    Ok(conclusion)
}

/// Returns the measured way to decode with draftsmith.
fn own_way(row: &ResultRow, id: DrafterId, recipe: &Recipe) -> Option<ServingWay> {
    let [low, high] = row.speedup_interval?;
    Some(ServingWay {
        runtime: DRAFTSMITH.to_owned(),
        drafter: row.drafter,
        setting: row.rule_label(),
        drafting: None,
        speedup: Estimate { value: row.speedup?, low, high },
        is_measured: true,
        lost: Vec::new(),
        start: vec![format!(
            "draftsmith generate --recipe {} --drafter {id} --prompt TEXT",
            served_path(&recipe.evaluation_dir().join("recipe.toml"), true)
        )],
    })
}

/// Recommends the next step in one sentence, or two with doubts.
fn next(verdict: &GroupVerdict, conclusion: &Conclusion, recipe: &Recipe, id: DrafterId) -> String {
    if let Some(doubt) = conclusion.doubts.first() {
        return format!("First settle what makes this doubtful. {doubt}");
    }
    let is_trained = recipe.drafters.get(id).is_some_and(|it| it.kind.training().is_some());
    let own = is_trained.then(|| recipe.export_dir(id)).or_else(|| recipe.head_dir(id));
    match (verdict.advice, own) {
        (DeployAdvice::Deploy, Some(dir)) => format!(
            "Next, run `draftsmith check {}`. If it passes, serve with a command above.",
            served_path(&dir, true)
        ),
        (DeployAdvice::NotTuned, _) if recipe.tune.is_some() => {
            "Next, measure this setting on other prompts, because these chose it.".to_owned()
        }
        _ => verdict.next().to_owned(),
    }
}
