//! Checks that the data that `build-data` wrote matches what the recipe would build now, and
//! describes that data in the provenance of exports.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, ensure};
use draftsmith_data::{DataSet, FieldDifference, Provenance, SourceWeight, hash_bytes};
use draftsmith_files::merged;
use serde_json::{Value, json};

use crate::prompt_files::files_of;
use crate::recipe::{DataRecipe, PromptSource, Recipe, Responses};
use crate::workspace::Workspace;

/// Describes everything that the recipe's data depends on: models, prompt files and settings.
///
/// # Errors
/// If a model file or a prompt file cannot be read.
pub fn data_provenance(
    recipe: &Recipe,
    data: &DataRecipe,
    workspace: &Workspace,
) -> Result<Provenance> {
    let paths: Vec<PathBuf> = data.prompts.iter().map(|source| source.path.clone()).collect();
    let log_probs = data
        .served_by()
        .and_then(|server| Some((server.log_probs(&data.decoding())?, server.max_outside_mass)));
    Ok(Provenance {
        prompts: workspace.artifacts.prompt_files(&paths)?,
        limit: data.num_prompts.map(|n| n as u64),
        weights: source_weights(data)?,
        split: data.split.map(|split| recipe.splits.range(split)),
        lengths: data.lengths(),
        keep_duplicates: data.keep_duplicates,
        existing_responses: data.responses == Responses::Existing,
        served_model: data.served_by().map(|server| server.model.clone()),
        served_log_probs: log_probs.map(|(num, _)| num as u32),
        max_outside_mass: log_probs.map(|(_, most)| most),
        temperature: data.temperature,
        top_p: data.top_p,
        top_k: data.top_k.map(|k| k as u32),
        min_p: data.min_p,
        repetition_penalty: data.repetition_penalty,
        ..workspace.provenance(recipe.seed, data.max_new_tokens)?
    })
}

/// Lists each source's weight and number of files. The list is empty if no source has a weight.
fn source_weights(data: &DataRecipe) -> Result<Vec<SourceWeight>> {
    if data.prompts.iter().all(|source| source.weight.is_none()) {
        return Ok(Vec::new());
    }
    let weight = |PromptSource { path, weight }: &PromptSource| {
        let num_files = files_of([path])?.len();
        Ok(SourceWeight { num_files, weight: weight.unwrap_or(1.0) })
    };
    data.prompts.iter().map(weight).collect()
}

/// Reads the recipe's built data. Checks that the data was built with the recipe's models, prompts
/// and settings, and that every token id is below `vocab_size`. The seed may differ, because
/// several trainings may share data.
///
/// # Errors
/// If the data is missing, incomplete or unreadable, was built with other models, prompts or
/// settings, or contains a token id of `vocab_size` or above.
pub fn built_data(
    recipe: &Recipe,
    workspace: &Workspace,
    vocab_size: usize,
) -> Result<Arc<DataSet>> {
    let dir = recipe.data_dir();
    ensure!(
        dir.is_dir(),
        "there is no data in `{}`; hint: run `draftsmith build-data` with this recipe first",
        dir.display()
    );
    let built = workspace.artifacts.data(&dir)?;
    let found = &built.provenance;
    let expected = match &recipe.data {
        Some(data) => data_provenance(recipe, data, workspace)?,
        // Without a section `[data]`, only the models can be compared.
        None => {
            let now = workspace.provenance(recipe.seed, 0)?;
            Provenance {
                target: now.target,
                draft: now.draft,
                tokenizer: now.tokenizer,
                chat_template: now.chat_template,
                special_tokens: now.special_tokens,
                eos_token_ids: now.eos_token_ids,
                stop_strings: now.stop_strings,
                dtype: now.dtype,
                ..found.clone()
            }
        }
    };
    let expected = Provenance { version: found.version.clone(), seed: found.seed, ..expected };
    let differences = found.differences(&expected);
    ensure!(
        differences.is_empty(),
        "the data in `{}` was built with {}; hint: undo the change, or delete the Parquet \
         files there and run `draftsmith build-data` with this recipe again",
        dir.display(),
        changes_text(&differences)
    );
    built.check_tokens(vocab_size)?;
    Ok(built)
}

/// Lists the fields that differ, each with its old and its new value: "`seed` = 0, which is 7 now".
pub fn changes_text(differences: &[FieldDifference]) -> String {
    let one = |FieldDifference { key, left, right }: &FieldDifference| {
        format!("`{key}` = {left}, which is {right} now")
    };
    differences.iter().map(one).collect::<Vec<_>>().join("; and with ")
}

/// Computes an export's fingerprint: a hash of its training settings and of the data with its provenance.
///
/// # Errors
/// If the settings cannot be written as JSON.
pub fn fingerprint(settings: Value, data: &DataSet, provenance: &Provenance) -> Result<String> {
    let all = json!({ "settings": settings, "rows": data.hash, "data": provenance });
    Ok(hash_bytes(serde_json::to_string(&all)?.as_bytes()))
}

/// Describes the training data for an export, without the models' hashes, which are separate keys there.
pub fn trained_on(data: &DataSet) -> Value {
    let mut fields = data.provenance.fields();
    fields.retain(|key, _| !["target", "draft"].contains(&key.as_str()));
    let rows = json!({
        "rows": data.hash,
        "num_rows": data.rows.len(),
        "num_shards": data.num_shards(),
        "num_shards_planned": data.num_shards_planned,
    });
    merged(fields.into(), rows)
}
