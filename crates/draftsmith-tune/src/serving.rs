//! The last sentence of a run: which setting to serve, where, what to expect there, and what to do
//! next. `run`, the report, `check` and `export` all take it from here.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_recipe::{Recipe, quoted, served_path};
use draftsmith_report::{
    Conclusion, DRAFTSMITH, DecodingName, DeployAdvice, DrafterName, GroupVerdict, ResultRow,
    ServingWay, fastest_ways,
};
use draftsmith_theory::{DrafterId, Estimate, StopRuleName};
use serde::Deserialize;

use crate::tuning::TuningFile;

/// What this module reads of a [`Tuning`](crate::tuner::Tuning).
#[derive(Deserialize)]
struct TunedWays {
    drafter: DrafterName,
    decoding: DecodingName,
    #[serde(default)]
    ways: Vec<ServingWay>,
    /// The directory whose `config.json` has the chosen rule.
    #[serde(default)]
    export: Option<PathBuf>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TunedFile {
    tunings: Vec<TunedWays>,
}

/// Reads the ways that `tune` found, for one drafter or for all of them. llama.cpp may have two: with
/// the drafter, and with its lookup. Empty before `tune`.
///
/// # Errors
/// If the file exists but cannot be read.
pub fn tuned_ways(
    recipe: &Recipe,
    decoding: DecodingName,
    drafter: Option<DrafterId>,
) -> Result<Vec<ServingWay>> {
    let tunings = tunings(recipe, decoding, drafter)?;
    Ok(tunings.into_iter().flat_map(|tuned| tuned.ways).collect())
}

fn tunings(
    recipe: &Recipe,
    decoding: DecodingName,
    drafter: Option<DrafterId>,
) -> Result<Vec<TunedWays>> {
    let TunedFile { mut tunings } = TuningFile::TUNED.read(recipe)?;
    tunings.retain(|tuned| {
        tuned.decoding == decoding && drafter.is_none_or(|id| tuned.drafter.id() == Some(id))
    });
    Ok(tunings)
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
    // A setting that tuning chose has a name that can be typed.
    let tuned = tunings(recipe, row.decoding, Some(id))?.into_iter().find_map(|it| it.export);
    let tuned = tuned.filter(|_| verdict.tuned.is_some());
    let rule = tuned.map(|dir| format!("--rule tuned={}", quoted(&dir.to_string_lossy())));
    let typed = rule.as_ref().map_or_else(String::new, |rule| format!("; `{rule}`"));
    let name = format!("{} ({}{typed})", row.drafter.text(), row.rule_label());
    let Some(found) = verdict.found(&name) else { return Ok(conclusion) };
    let next = next(verdict, recipe, (id, row.stop_rule));
    if verdict.advice == DeployAdvice::Deploy
        && let Some(own) = own_way(row, id, recipe, rule)
    {
        let measured = own.speedup;
        conclusion.serving.push(own);
        let ways = fastest_ways(&tuned_ways(recipe, row.decoding, None)?);
        conclusion.serving.extend(ways.into_iter().map(|way| way.as_unsure_as(measured)));
    }
    conclusion.last = Some(format!("{found} {next}"));
    Ok(conclusion)
}

/// Returns the measured way to decode with draftsmith.
fn own_way(
    row: &ResultRow,
    id: DrafterId,
    recipe: &Recipe,
    rule: Option<String>,
) -> Option<ServingWay> {
    let [low, high] = row.speedup_interval?;
    Some(ServingWay {
        runtime: DRAFTSMITH.to_owned(),
        drafter: row.drafter,
        setting: row.rule_label(),
        drafting: None,
        speedup: Estimate { value: row.speedup?, low, high },
        costs: None,
        lost: Vec::new(),
        start: vec![format!(
            "draftsmith generate --recipe {} --drafter {id} {}--prompt TEXT",
            served_path(&recipe.evaluation_dir().join("recipe.toml"), true),
            rule.map_or_else(String::new, |rule| rule + " ")
        )],
    })
}

/// Recommends the next step for a setting. A head that the rule does not read needs no check.
fn next(verdict: &GroupVerdict, recipe: &Recipe, (id, rule): (DrafterId, StopRuleName)) -> String {
    let is_trained = recipe.drafters.get(id).is_some_and(|it| it.kind.training().is_some());
    let reads_head = rule.entry().is_some_and(|entry| !entry.heads.is_empty());
    let head = || recipe.head_dir(id).filter(|_| reads_head);
    let own = is_trained.then(|| recipe.export_dir(id)).or_else(head);
    match (verdict.advice, own) {
        (DeployAdvice::Deploy, Some(dir)) => format!(
            "Next, run `draftsmith check {}`, and if it passes, serve with a command under \"where to serve it\".",
            quoted(&served_path(&dir, true))
        ),
        (DeployAdvice::NotTuned, _) if recipe.tune.is_some() => {
            "Next, measure this setting on other prompts, because these chose it.".to_owned()
        }
        _ => verdict.next().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_report::MeasuredSetting;

    use super::*;

    fn last(advice: DeployAdvice, recipe: &str) -> String {
        last_of(advice, recipe, StopRuleName::RejectionThreshold)
    }

    fn last_of(advice: DeployAdvice, recipe: &str, rule: StopRuleName) -> String {
        let recipe: Recipe = toml::from_str(recipe).expect("a recipe");
        let (group, interval) = ("test, greedy".to_owned(), Some([1.21, 1.31]));
        let setting = MeasuredSetting { label: "head 0.8".to_owned(), speedup: 1.26, interval };
        let verdict = GroupVerdict { group, advice, tuned: None, fastest: Some(setting) };
        let draft = recipe.draft().expect("a draft").0;
        let text = next(&verdict, &recipe, (draft, rule));
        let here = std::env::current_dir().expect("a directory");
        text.replace(&format!("{}/", here.display()), "")
    }

    #[test]
    fn a_run_ends_with_the_next_step() {
        let recipe =
            "name = 'a'\n[models]\ntarget = 't'\n[drafters.draft]\nkind = 'model'\nmodel = 'd'\n";
        let trained = format!("{recipe}[drafters.draft.head]\n");
        insta::assert_snapshot!(last(DeployAdvice::Deploy, &trained), @"Next, run `draftsmith check checkpoints/a/draft/head`, and if it passes, serve with a command under \"where to serve it\".");
        let unread = last_of(DeployAdvice::Deploy, &trained, StopRuleName::CostEntropy);
        insta::assert_snapshot!(unread, @r#"Next, serve with a command under "where to serve it"."#);
        insta::assert_snapshot!(last(DeployAdvice::Deploy, recipe), @r#"Next, serve with a command under "where to serve it"."#);
        insta::assert_snapshot!(last(DeployAdvice::DoNotSpeculate, recipe), @"Next, try another drafter, or serve the target alone.");
        insta::assert_snapshot!(last(DeployAdvice::TooUncertain, recipe), @"Next, measure more prompts on a quiet machine: raise `evaluate.num_prompts`.");
        insta::assert_snapshot!(last(DeployAdvice::NotTuned, recipe), @"Next, add `tune = {}` to the recipe and run it again, which chooses a setting on other prompts.");
        insta::assert_snapshot!(last(DeployAdvice::NotTuned, &format!("tune = {{}}\n{recipe}")), @"Next, measure this setting on other prompts, because these chose it.");
    }
}
