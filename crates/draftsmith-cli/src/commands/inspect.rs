//! `inspect`: shows the properties and provenance of a model, head, adapter, data set or result.

mod acceptance;
mod page;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use draftsmith_data::{
    ChatTemplate, DraftColumns, Incomplete, Provenance, ResponseRow, TextTokenizer, has_shards,
    is_rollouts_path, read_dir, read_rollout_provenance, read_rollouts, read_shard, rollouts_paths,
};
use draftsmith_model::{AcceptanceHeadConfig, AdapterConfig, ModelConfig, WeightReader};
use draftsmith_report::{read_results, render_table};
use serde_json::{Map, Number, Value, json};

use self::acceptance::{acceptance_probs, agreements, mean, overlaps};
use crate::console::Console;
use draftsmith_recipe::exports::calibration::HeadCalibration;
use draftsmith_recipe::exports::found_adapter_head;
use draftsmith_recipe::exports::tuned::Tuned;
use draftsmith_recipe::workspace::hash_dir;
use draftsmith_tune::rollouts::RecordedSet;

pub(crate) use page::PageArguments;

/// Runs the command.
pub(crate) fn run(path: &Path, page: Option<&PageArguments>, console: &Console) -> Result<()> {
    let page = page.filter(|page| page.html.is_some());
    let is_parquet = path.is_file() && path.extension().is_some_and(|e| e == "parquet");
    let is_rollouts =
        is_parquet && (is_rollouts_path(path) || read_rollout_provenance(path).is_ok());
    if page.is_some() && (is_rollouts || !(is_parquet || has_shards(path))) {
        bail!("`--html` needs responses: a data directory or one of its responses-*.parquet");
    }
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
    } else if path.join("config.json").is_file() {
        let bytes = std::fs::read(path.join("config.json"))?;
        let config: Map<String, Value> = serde_json::from_slice(&bytes).unwrap_or_default();
        let has = |key: &str| config.contains_key(key);
        if has("num_layers") && !has("vocab_size") {
            head(path)?
        } else if has("exit_layer") {
            adapter(path)?
        } else {
            model(path)?
        }
    } else if !path.exists() {
        bail!("there is no such file or directory");
    } else {
        bail!(
            "expected a checkpoint, head or adapter directory (with config.json), a data directory \
             (with responses-*.parquet or rollouts-*.parquet), a Parquet file of responses or \
             rollouts, or results.json"
        );
    };
    console.document(&shown)?;
    console.text(lines(&shown))
}

fn model(dir: &Path) -> Result<Value> {
    let config = ModelConfig::from_model_dir(dir)?;
    let shape = &config.shape;
    let weights = WeightReader::open_dir(dir)?;
    let has_tokenizer = dir.join("tokenizer.json").is_file();
    let tokenizer = has_tokenizer.then(|| TextTokenizer::from_model_dir(dir)).transpose()?;
    let template = ChatTemplate::from_model_dir(dir)?;
    Ok(json!({
        "kind": "model",
        "architecture": config.architecture.model_type(),
        "num_parameters": config.num_parameters(),
        "stored_dtype": weights.dtype(),
        "num_tensors": weights.names().count(),
        "hidden_size": shape.hidden_size,
        "intermediate_size": config.spec.mlp.width,
        "num_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tokenizer_size": tokenizer.as_ref().map(TextTokenizer::vocab_size),
        "context": shape.context,
        "rope_theta": config.spec.rope.theta,
        "tied_embeddings": config.spec.tie_word_embeddings,
        "eos_token_ids": shape.eos_token_ids,
        "chat_template": template.is_some(),
        "tokenizer_hash": tokenizer.map(|tokenizer| tokenizer.hash()).transpose()?,
        "hash": hash_dir(dir, &Console::silent())?,
    }))
}

/// The number of parameters in the weight files.
fn num_stored_parameters(weights: &WeightReader) -> usize {
    let names = weights.names().filter(|name| weights.is_weights(name));
    let shapes = names.filter_map(|name| weights.shape(name));
    shapes.map(|shape| shape.iter().product::<usize>()).sum()
}

fn adapter(dir: &Path) -> Result<Value> {
    let config = AdapterConfig::from_dir(dir)?;
    let shape = &config.model.shape;
    let weights = WeightReader::open_dir(dir)?;
    Ok(json!({
        "kind": "self-draft adapter",
        "exit_layer": config.exit_layer,
        "architecture": config.architecture,
        "num_layers": shape.num_layers,
        "draft_vocabulary": config.draft_vocabulary.as_ref().map(|all| all.ids().len()),
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "num_parameters": num_stored_parameters(&weights),
        "stored_dtype": weights.dtype(),
        "target_hash": config.target_hash,
        "training": config.training,
        "tuned": Tuned::read(dir)?,
        "head": found_adapter_head(dir).as_deref().map(head).transpose()?,
        "hash": hash_dir(dir, &Console::silent())?,
    }))
}

fn head(dir: &Path) -> Result<Value> {
    let config = AcceptanceHeadConfig::from_dir(dir)?;
    let weights = WeightReader::open_file(&dir.join("model.safetensors"))?;
    Ok(json!({
        "kind": "acceptance head",
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "blocks": if config.tied { "tied" } else { "untied" },
        "form": config.reads.form(),
        "inputs": config.reads.inputs(),
        "labels": config.training.get("labels"),
        "num_parameters": num_stored_parameters(&weights),
        "stored_dtype": weights.dtype(),
        "draft_hash": config.draft_hash,
        "target_hash": config.target_hash,
        "training": config.training,
        "calibration": HeadCalibration::read(dir)?,
        "tuned": Tuned::read(dir)?,
        "hash": hash_dir(dir, &Console::silent())?,
    }))
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
    let mut sources: Vec<&str> = rows.iter().map(|row| row.source.as_str()).collect();
    sources.sort_unstable();
    sources.dedup();
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

/// Rollout files by name, without provenance.
fn all_rollouts(paths: &[PathBuf]) -> Result<Value> {
    let mut all = Map::new();
    for path in paths {
        let mut shown = rollouts(path)?;
        if let Some(shown) = shown.as_object_mut() {
            shown.retain(|key, _| !["kind", "provenance"].contains(&key.as_str()));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        all.insert(name.into_owned(), shown);
    }
    Ok(Value::Object(all))
}

fn rollouts(path: &Path) -> Result<Value> {
    let (rows, provenance) = read_rollouts(path, None)?;
    let mut shown = json!({
        "kind": "rollouts",
        "drafter": provenance.drafter,
        "set": provenance.set,
        "decoding": provenance.decoding().to_string(),
    });
    let summary = serde_json::to_value(RecordedSet::new(&rows, &provenance)?.summary())?;
    if let (Some(shown), Value::Object(summary)) = (shown.as_object_mut(), summary) {
        shown.extend(summary);
        shown.insert("provenance".to_owned(), Value::Object(provenance.fields()));
    }
    Ok(shown)
}

/// Longest width that we align to. Formatting panics at widths beyond `u16`.
const WIDEST: usize = 200;

/// A JSON object as aligned `key  value` lines, with nested objects indented.
fn lines(value: &Value) -> String {
    fn write(object: &Map<String, Value>, indent: usize, out: &mut String) {
        let width = object.keys().map(String::len).max().unwrap_or(0).min(WIDEST);
        for (key, value) in object {
            match value {
                Value::Object(inner) if !inner.is_empty() => {
                    *out += &format!("{:indent$}{key}\n", "");
                    write(inner, indent + 2, out);
                }
                Value::Array(list) if let Some(table) = table(list) => {
                    *out += &format!("{:indent$}{key}\n", "");
                    for line in table {
                        *out += &format!("{:indent$}  {line}\n", "");
                    }
                }
                value => {
                    let text = match value {
                        Value::Null => "-".to_owned(),
                        Value::String(text) => text.clone(),
                        Value::Number(n) => number(n),
                        Value::Array(list)
                            if list.len() > 1 && list.iter().all(Value::is_object) =>
                        {
                            format!("{} (see `--json`)", list.len())
                        }
                        other => other.to_string(),
                    };
                    *out += &format!("{:indent$}{key:<width$}  {text}\n", "");
                }
            }
        }
    }
    let mut out = String::new();
    if let Value::Object(object) = value {
        write(object, 0, &mut out);
    }
    out
}

fn number(number: &Number) -> String {
    match number.as_f64() {
        Some(n) if number.is_f64() && (n == 0.0 || (1e-3..1e6).contains(&n.abs())) => {
            format!("{n:.4}")
        }
        Some(n) if number.is_f64() => format!("{n:.3e}"),
        _ => number.to_string(),
    }
}

/// The lines of a table for a list of objects with the same keys and only numbers; `None` for other lists.
fn table(list: &[Value]) -> Option<Vec<String>> {
    let text = |value: &Value| match value {
        Value::Number(n) => Some(number(n)),
        Value::Null => Some("-".to_owned()),
        _ => None,
    };
    let heading: Vec<String> = list.first()?.as_object()?.keys().cloned().collect();
    let mut rows = vec![heading];
    for value in list {
        let object = value.as_object().filter(|object| object.keys().eq(&rows[0]))?;
        rows.push(object.values().map(text).collect::<Option<_>>()?);
    }
    let width =
        |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0).min(WIDEST);
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(at, cell)| format!("{cell:>0$}", width(at)));
        cells.collect::<Vec<_>>().join("  ")
    };
    Some(rows.iter().map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_number_objects_become_tables() {
        let shown = json!({
            "bands": [{ "from": 0.0, "count": 12, "bound": null }, { "from": 0.25, "count": 3, "bound": 0.5 }],
            "files": [{ "name": "a" }, { "name": "b" }],
            "ids": [1, 2],
        });
        assert_eq!(
            lines(&shown),
            "bands\n    from  count   bound\n  0.0000     12       -\n  0.2500      3  0.5000\n\
             files  2 (see `--json`)\nids    [1,2]\n"
        );
        let long = "k".repeat(70_000);
        let shown = json!({ "a": [{ long.clone(): 1 }], long.clone(): 2 });
        assert!(lines(&shown).contains(&format!("{long}  2\n")));
    }
}
