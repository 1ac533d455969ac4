//! The trainings of a recipe, for benches that repeat them.

use anyhow::{Context, Result};
use draftsmith_train::{AdapterTraining, HeadTraining};

/// The training of the head of the first draft model.
///
/// # Errors
/// If there is none, or it is invalid.
pub(crate) fn head_training(recipe: &toml::Table) -> Result<HeadTraining> {
    let mut draft = drafter(recipe, "model")?;
    let head = draft.remove("head").context("the recipe's draft model has no table `head`")?;
    Ok(head.try_into()?)
}

/// The training of the first adapter.
///
/// # Errors
/// If there is none, or it is invalid.
pub(crate) fn adapter_training(recipe: &toml::Table) -> Result<AdapterTraining> {
    let mut adapter = drafter(recipe, "adapter")?;
    for key in ["kind", "head", "rules", "max_candidate_length"] {
        adapter.remove(key);
    }
    Ok(adapter.try_into()?)
}

/// The first drafter of a kind.
fn drafter(recipe: &toml::Table, kind: &str) -> Result<toml::Table> {
    let drafters = recipe.get("drafters").and_then(toml::Value::as_table);
    let mut tables = drafters.into_iter().flat_map(|all| all.values());
    let found = tables.find_map(|drafter| {
        let is_kind = drafter.get("kind").and_then(toml::Value::as_str) == Some(kind);
        drafter.as_table().filter(|_| is_kind)
    });
    found.cloned().with_context(|| format!("the recipe has no drafter of the kind `{kind}`"))
}
