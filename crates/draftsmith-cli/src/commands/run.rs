//! `run`: checks the recipe, then runs all stages in order. Stages whose output exists are skipped.
//! At the end, it says in plain words which setting was fastest.

mod end;
mod preflight;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use draftsmith_report::wrapped;
use serde_json::{Value, json};

use crate::commands::{build_data, evaluate, record, replay, train_drafter, train_head, tune};
use crate::console::Console;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::device::on_pool;
use draftsmith_recipe::exports::head_within;
use draftsmith_recipe::workspace::Workspace;
use draftsmith_tune::build_data::DamagedShards;
use draftsmith_tune::tuner::finished_tuning;

/// Runs all stages with one workspace. Prints the table of results, the report's path, the commands
/// to run next, and the final sentences.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<()> {
    let (head, self_drafts) = (recipe.trained_head(), recipe.trained_self_drafts());
    let trains = head.is_some() || !self_drafts.is_empty();
    if recipe.data.is_none() && !trains && recipe.evaluate.is_none() {
        bail!(
            "the recipe has no stage; hint: give it a section `[data]` or `[evaluate]`, or drafters that are \
             trained"
        );
    }
    let begun = Instant::now();
    on_pool(|| preflight::check(recipe, workspace, console))?;
    // Stages must not write to stdout, because `run` writes one document for all of them.
    let quiet_stages = console.without_output();
    let built = match recipe.data {
        Some(_) => Some(build_data::run(recipe, DamagedShards::Refused, workspace, &quiet_stages)?),
        None => None,
    };
    let head = match head {
        Some(_) => Some(train_head::run(recipe, None, workspace, &quiet_stages)?),
        None => None,
    };
    let adapters = match self_drafts.is_empty() {
        false => Some(train_drafter::run(recipe, None, workspace, &quiet_stages)?),
        true => None,
    };
    let is_tuned = recipe.tune.is_some();
    let recorded = match is_tuned {
        true => Some(on_pool(|| record::run(recipe, workspace, &quiet_stages))?),
        false => None,
    };
    let (tuned, replayed) = match is_tuned {
        true => {
            // The limit is half of the time so far, so measuring costs takes at most a third of the
            // total up to then.
            let time_limit = begun.elapsed() / 2;
            let tuned = tune_once(recipe, workspace, time_limit, &quiet_stages)?;
            (Some(tuned), Some(replay::run(recipe, workspace, &quiet_stages)?))
        }
        false => (None, None),
    };
    let evaluation = match recipe.evaluate {
        Some(_) if recipe.target_elsewhere().is_some() => {
            console.note("evaluate: skipped, because servers run the target");
            None
        }
        Some(_) => Some(on_pool(|| evaluate::run_once(recipe, workspace, &quiet_stages))?),
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
        console.text(next_commands(recipe))?;
        if let Some(sentences) = end::sentences(evaluation, recipe) {
            console.text(format!("\n{}\n", wrapped(&sentences, console.width()).join("\n")))?;
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
fn tune_once(
    recipe: &Recipe,
    workspace: &Workspace,
    time_limit: Duration,
    console: &Console,
) -> Result<Value> {
    if let Some(tuned) = finished_tuning(recipe, workspace)? {
        let file = recipe.tuning_dir().join("tuned.json");
        console.note(format!("tune: kept `{}`; `draftsmith tune` tunes again", file.display()));
        return Ok(tuned);
    }
    let tune = || tune::run_within(recipe, workspace, Some(time_limit), console);
    Ok(serde_json::to_value(on_pool(tune)?)?)
}

/// Lists commands to run next, ready to paste, for the trained head and each trained self-draft:
/// check it, try it, export it. Empty if the recipe trains neither.
fn next_commands(recipe: &Recipe) -> String {
    let models = &recipe.models;
    let generate = |rest: String| {
        let target = quoted(&models.target);
        format!("draftsmith generate --target {target} {rest} --prompt TEXT")
    };
    let mut lines = Vec::new();
    if let (Some((id, _)), Some((_, draft))) = (recipe.trained_head(), recipe.draft()) {
        let head = quoted(&head_within(&recipe.export_dir(id)));
        lines.push(format!("draftsmith check {head}"));
        lines.push(generate(format!("--draft {} --head {head}", quoted(draft))));
        lines.push(format!("draftsmith export --for transformers {head} exported/{id}"));
    }
    for (id, _) in recipe.trained_self_drafts() {
        let dir = quoted(&recipe.export_dir(id));
        lines.push(format!("draftsmith check {dir}"));
        lines.push(generate(format!("--drafter {dir}")));
        let kind = recipe.drafters.get(id).and_then(|it| it.kind.entry().directory.as_ref());
        if let Some(form) = kind.and_then(|directory| directory.export.forms.first()) {
            lines.push(format!("draftsmith export --for {} {dir} exported/{id}", form.name));
        }
    }
    match lines.is_empty() {
        true => String::new(),
        false => format!("\nnext:\n  {}\n", lines.join("\n  ")),
    }
}

/// Quotes a path as a single word for a POSIX shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./@+:".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_words_of_a_shell() {
        let quoted = |text: &str| quoted(Path::new(text));
        assert_eq!(quoted("checkpoints/tiny/head"), "checkpoints/tiny/head");
        assert_eq!(quoted("my models/it's"), "'my models/it'\\''s'");
    }

    #[test]
    fn a_recipe_that_trains_nothing_has_no_next_command() {
        let read = |text: &str| -> Recipe { toml::from_str(text).expect("a recipe") };
        let models =
            "name = 'a'\n[models]\ntarget = 't'\n[drafters.draft]\nkind = 'model'\nmodel = 'd'\n";
        assert_eq!(next_commands(&read(models)), "");
        let adapter = |nth| format!("[drafters.exit{nth}]\nkind = 'adapter'\nexit_layer = {nth}\n");
        let trained = format!("{models}[drafters.draft.head]\n{}{}", adapter(1), adapter(2));
        let text = next_commands(&read(&trained));
        insta::assert_snapshot!(text, @r#"
        next:
          draftsmith check checkpoints/a/draft/head
          draftsmith generate --target t --draft d --head checkpoints/a/draft/head --prompt TEXT
          draftsmith export --for transformers checkpoints/a/draft/head exported/draft
          draftsmith check checkpoints/a/exit1
          draftsmith generate --target t --drafter checkpoints/a/exit1 --prompt TEXT
          draftsmith export --for draft-model checkpoints/a/exit1 exported/exit1
          draftsmith check checkpoints/a/exit2
          draftsmith generate --target t --drafter checkpoints/a/exit2 --prompt TEXT
          draftsmith export --for draft-model checkpoints/a/exit2 exported/exit2
        "#);
    }
}
