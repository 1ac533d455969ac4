//! What an evaluation writes, each file whole or not at all: the report, answers, summary and,
//! last, results.json.

use std::path::Path;

use anyhow::Result;
use draftsmith_files::write_whole;
use draftsmith_model::ModelConfig;

use super::group::Evaluated;
use super::{Evaluation, Models, machine};
use crate::agreement::rounding;
use crate::console::Console;
use crate::device::DeviceChoice;
use crate::exports::Exports;
use crate::exports::cascades::{numbered, numbered_merged};
use crate::prompts::Dataset;
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::report::render_html;
use crate::results::{
    DatasetSummary, DecodingName, Estimate, EvaluationSummary, GroupSummary, ModelSummary,
    PromiseSummary, results_to_json, sort_rows, summary_to_json,
};
use crate::table::render_table;
use crate::tuning::read_replay;
use crate::workspace::hash_dir;

pub(super) fn write(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    all: Models<'_>,
    datasets: &[Dataset],
    mut evaluated: Evaluated,
    console: &Console,
) -> Result<Evaluation> {
    sort_rows(&mut evaluated.rows);
    // What an interrupted evaluation has measured is kept apart from whole ones.
    let dir = if console.is_interrupted() {
        recipe.evaluation_dir().with_file_name("evaluation-partial")
    } else {
        recipe.evaluation_dir()
    };
    let Models { workspace, pair, exports } = all;
    let Exports { head, draft_tokens, adapters, .. } = exports;
    let mut models = vec![describe(
        "target",
        &recipe.models.target,
        pair.target.config(),
        workspace.target_hash()?,
    )];
    if let (Some(draft), Some(path), Some(hash)) =
        (&pair.draft, &recipe.models.draft, workspace.draft_hash()?)
    {
        let mut draft = describe("draft", path, draft.config(), hash);
        if let Some(tokens) = draft_tokens {
            draft.description += &draws(tokens.len(), tokens.coverage);
        }
        models.push(draft);
    }
    if let Some(head) = head {
        let kind = if head.config.tied { "tied" } else { "untied" };
        let form = if head.config.reads.looks_ahead() { " that looks ahead" } else { "" };
        let inputs = head.config.reads.inputs().iter();
        let more: String = inputs.map(|input| format!(", + {}", input.name())).collect();
        models.push(ModelSummary {
            role: "head".to_owned(),
            name: head.dir.display().to_string(),
            description: format!(
                "acceptance head{form}, {} {kind} blocks of width {}{more}",
                head.config.num_layers, head.config.hidden_size
            ),
            hash: hash_dir(&head.dir, console)?,
        });
    }
    for adapter in adapters {
        models.push(ModelSummary {
            role: "adapter".to_owned(),
            name: adapter.dir.display().to_string(),
            description: format!(
                "self-draft adapter behind layer {}, {} x {}, {:.2} M parameters{}",
                adapter.config.exit_layer,
                adapter.config.model.shape.num_layers,
                adapter.config.architecture,
                adapter.adapter.num_parameters() as f64 / 1e6,
                adapter
                    .config
                    .draft_vocabulary
                    .as_ref()
                    .map(|all| draws(all.ids().len(), adapter.config.vocabulary_coverage()))
                    .unwrap_or_default()
            ),
            hash: hash_dir(&adapter.dir, console)?,
        });
    }
    if let (Some(small), Some(path)) = (exports.small_draft.as_ref(), &recipe.models.small_draft) {
        let hash = hash_dir(path, console)?;
        models.push(describe("small draft", path, small.config(), &hash));
    }
    let cascades = numbered(&evaluate.cascades).map(|(id, it)| (id, it.to_string()));
    let merged = numbered_merged(&evaluate.merged).map(|(id, it)| (id, it.to_string()));
    models.extend(cascades.chain(merged).map(|(id, description)| ModelSummary {
        role: id.text(),
        name: id.to_string(),
        description,
        hash: String::new(),
    }));
    let summary = EvaluationSummary {
        recipe: recipe.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        device: DeviceChoice::name(workspace.device()),
        dtype: workspace.dtype,
        machine: machine::describe(),
        versions: machine::versions(),
        models,
        max_new_tokens: evaluate.max_new_tokens,
        batch_size: evaluate.batch_size,
        seeds: vec![recipe.seed],
        datasets: datasets
            .iter()
            .map(|d| DatasetSummary { name: d.name.clone(), num_prompts: d.prompts.len() })
            .collect(),
        groups: evaluated.groups,
    };
    for (name, text) in &evaluated.answers {
        write_whole(&dir.join(name), text)?;
    }
    let report = dir.join("report.html");
    let replay = read_replay(recipe, workspace.dtype)?;
    write_whole(&report, render_html(&evaluated.rows, &summary, &replay)?)?;
    write_whole(&dir.join("summary.json"), summary_to_json(&summary)?)?;
    write_whole(&dir.join("results.json"), results_to_json(&evaluated.rows)?)?;
    recipe.write_beside(&dir)?;
    let num_forgiven: usize = summary.groups.iter().map(|g| g.num_forgiven_ties).sum();
    if num_forgiven > 0 {
        console.note(format!(
            "evaluate: {num_forgiven} greedy mismatches forgiven: both tokens' logits are within \
             {} of the greatest there",
            rounding(workspace.dtype).tie_text()
        ));
    }
    for group in &summary.groups {
        for promise in &group.promises {
            console.note(told(group, promise));
        }
    }
    let evaluation = Evaluation { rows: evaluated.rows, report };
    console.text(render_table(&evaluation.rows, console.width(), console.colour()))?;
    console.text(format!("report: {}\n", evaluation.report.display()))?;
    console.document(&evaluation.rows)?;
    Ok(evaluation)
}

/// How many tokens a drafter draws, and how many of the held-out responses' those are.
fn draws(num_tokens: usize, coverage: Option<f64>) -> String {
    let coverage = coverage
        .map(|coverage| format!(" ({:.1} % of those in held-out responses)", coverage * 100.0));
    format!(", draws {num_tokens} tokens{}", coverage.unwrap_or_default())
}

/// A promise and what came of it, in a line.
fn told(group: &GroupSummary, promise: &PromiseSummary) -> String {
    let Estimate { value, low, high } = promise.measured_gain;
    let percent = |share: f64| format!("{:+.1} %", share * 100.0);
    format!(
        "evaluate: {}, {}: {}{} against K = {}: tuning promised {}, measured {} (95 %: {} to {}): {}",
        group.dataset,
        DecodingName::of(&group.decoding).text(),
        promise.drafter.prefix().map(|prefix| prefix + ", ").unwrap_or_default(),
        promise.stop_rule.symbol().unwrap_or_default(),
        promise.best_fixed_length,
        percent(promise.expected_gain.value),
        percent(value),
        percent(low),
        percent(high),
        if promise.holds { "held" } else { "not held" },
    )
}

fn describe(role: &str, dir: &Path, config: &ModelConfig, hash: &str) -> ModelSummary {
    let shape = &config.shape;
    ModelSummary {
        role: role.to_owned(),
        name: dir.display().to_string(),
        description: format!(
            "{} architecture, {} layers, hidden {}, {} heads ({} key/value), vocabulary {}, \
             {:.1} M parameters",
            config.architecture.name(),
            shape.num_layers,
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.vocab_size,
            config.num_parameters() as f64 / 1e6
        ),
        hash: hash.to_owned(),
    }
}
