//! `inspect`: shows the properties and provenance of a model, head, adapter, data set or result.

mod acceptance;
mod lines;
mod page;
mod training;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use draftsmith_data::{
    DraftColumns, Incomplete, Provenance, ResponseRow, RolloutProvenance, has_shards,
    is_rollouts_path, read_dir, read_rollout_provenance, read_rollouts, read_shard, rollouts_paths,
};
use draftsmith_model::is_gguf;
use draftsmith_report::{read_results, render_table};
use serde_json::{Map, Value, json};

use self::acceptance::{acceptance_probs, agreements, mean, overlaps};
use self::lines::lines;
use crate::console::Console;
use draftsmith_recipe::exports::inspect_model;
use draftsmith_recipe::kinds::Kinds;
use draftsmith_tune::rollouts::RecordedSet;

pub(crate) use page::PageArguments;
pub(crate) use training::Training;

/// Runs the command.
pub(crate) fn run(path: &Path, page: Option<&PageArguments>, console: &Console) -> Result<()> {
    let page = page.filter(|page| page.html.is_some());
    let is_parquet = path.is_file() && path.extension().is_some_and(|e| e == "parquet");
    let is_rollouts =
        is_parquet && (is_rollouts_path(path) || read_rollout_provenance(path).is_ok());
    if let Some(training) = Training::find(path)?.filter(|_| !path.join("config.json").exists()) {
        page.and_then(|page| page.html.as_ref())
            .map_or(Ok(()), |html| training.write_page(path, html))?;
        console.document(&training)?;
        return console.text(training.text(console.width()));
    }
    ensure!(
        page.is_none() || !is_rollouts && (is_parquet || has_shards(path)),
        "`--html` needs a training's directory, or responses: a data directory or one of its responses-*.parquet"
    );
    let is_json = || path.is_file() && path.extension().is_some_and(|e| e == "json");
    if path.join("results.json").is_file() || is_json() {
        let file = if path.is_dir() { path.join("results.json") } else { path.to_path_buf() };
        let rows = read_results(&file)?;
        console.document(&rows)?;
        return console.text(render_table(&rows, console.width(), console.colour()));
    }
    let shown = if is_rollouts {
        rollouts(path)?
    } else if is_parquet {
        let (rows, provenance) = read_shard(path, None)?;
        dataset(path, &rows, &provenance, page, console)?
    } else if has_shards(path) {
        let data = read_dir(path, Incomplete::Allowed)?;
        let mut shown = dataset(path, &data.rows, &data.provenance, page, console)?;
        shown["num_shards"] = json!(data.num_shards());
        shown["num_shards_planned"] = json!(data.num_shards_planned);
        shown["hash"] = json!(data.hash);
        let recorded = rollouts_paths(path)?;
        if !recorded.is_empty() {
            shown["rollouts"] = all_rollouts(&recorded)?;
        }
        shown
    } else if path.is_dir() && rollouts_paths(path).is_ok_and(|paths| !paths.is_empty()) {
        json!({ "kind": "rollouts", "rollouts": all_rollouts(&rollouts_paths(path)?)? })
    } else if is_gguf(path) && path.is_file() {
        inspect_model(path)?
    } else if path.join("config.json").is_file() {
        (Kinds::default().found_in(path)?.export.inspect)(path)?
    } else if !path.exists() {
        bail!("there is no such file or directory");
    } else {
        bail!(
            "expected a checkpoint, head or adapter directory (with config.json), a model in a GGUF file, a training's \
             directory (with metrics.jsonl), a data directory \
             (with responses-*.parquet or rollouts-*.parquet), a Parquet file of responses or \
             rollouts, or results.json"
        );
    };
    console.document(&shown)?;
    console.text(lines(&shown))
}

/// Describes rows, and writes their page if one was requested.
fn dataset(
    path: &Path,
    rows: &[ResponseRow],
    provenance: &Provenance,
    page: Option<&PageArguments>,
    console: &Console,
) -> Result<Value> {
    page.map_or(Ok(()), |page| page.write(path, rows, provenance, console))?;
    let num_tokens: usize = rows.iter().map(|row| row.response_ids.len()).sum();
    let sources: BTreeSet<&str> = rows.iter().map(|row| row.source.as_str()).collect();
    let num_eos =
        rows.iter().filter(|row| row.finish_reason == draftsmith_data::FinishReason::Eos).count();
    let drafted: Vec<_> = rows.iter().filter_map(|row| row.draft.as_ref()).collect();
    let mean_of = |column: fn(&DraftColumns) -> Vec<f64>| {
        mean(drafted.iter().flat_map(|columns| column(columns)))
    };
    let mean_overlap = mean_of(overlaps);
    let mut shown = json!({
        "kind": "responses",
        "num_rows": rows.len(),
        "sources": sources,
        "num_prompt_tokens": rows.iter().map(|row| row.prompt_ids.len()).sum::<usize>(),
        "num_response_tokens": num_tokens,
        "share_ended_by_eos": num_eos as f64 / rows.len().max(1) as f64,
        "has_draft": !drafted.is_empty(),
        "mean_overlap": mean_overlap,
        "mean_acceptance_prob": mean_of(acceptance_probs),
        "greedy_agreement": mean_of(agreements),
        "mean_draft_entropy": mean_of(|c| c.draft_entropy.iter().map(|v| f64::from(*v)).collect()),
        "entropy_ratio": acceptance::entropy_ratio(&drafted),
        "by_entropy": acceptance::by_entropy(&drafted, provenance.is_raw()),
        "expected_tokens": mean_overlap.map(acceptance::expected_tokens),
        "provenance": provenance,
    });
    // Only rows labelled from a server's log-probabilities have this.
    let masses = rows.iter().filter_map(|row| row.target_outside_mass.as_ref()).flatten();
    if let Some(mass) = mean(masses.map(|mass| f64::from(*mass))) {
        shown["mean_outside_mass"] = json!(mass);
    }
    Ok(shown)
}

/// Describes rollout files by name, without their provenance.
fn all_rollouts(paths: &[PathBuf]) -> Result<Value> {
    let mut all = Map::new();
    for path in paths {
        let mut shown = Map::new();
        add_rollouts(path, &mut shown)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        all.insert(name.into_owned(), shown.into());
    }
    Ok(all.into())
}

fn rollouts(path: &Path) -> Result<Value> {
    let mut shown = Map::from_iter([("kind".to_owned(), json!("rollouts"))]);
    let provenance = add_rollouts(path, &mut shown)?;
    shown.insert("provenance".to_owned(), provenance.fields().into());
    Ok(shown.into())
}

/// Adds the description of a file of rollouts, and returns its provenance.
fn add_rollouts(path: &Path, shown: &mut Map<String, Value>) -> Result<RolloutProvenance> {
    let (rows, provenance) = read_rollouts(path, None)?;
    let RolloutProvenance { drafter, set, .. } = &provenance;
    let decoding = provenance.decoding().to_string();
    let own = json!({ "drafter": drafter, "set": set, "decoding": decoding });
    let summary = json!(RecordedSet::new(&rows, &provenance)?.summary());
    for part in [own, summary] {
        shown.extend(part.as_object().cloned().into_iter().flatten());
    }
    Ok(provenance)
}
