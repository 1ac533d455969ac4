//! The table `[training]`: training settings shared by all drafters that read the target's hidden
//! states. A drafter's own keys take precedence. The keys are copied to the drafters while a recipe
//! is read; no other code knows the table.

use anyhow::{Result, bail, ensure};
use toml::{Table, Value};

use crate::kinds::Kinds;

/// The keys that all these trainings have in common.
pub(super) const KEYS: [&str; 11] = [
    "draft_vocabulary",
    "initial",
    "teacher",
    "max_len",
    "loss",
    "loss_chunk",
    "cache_mib",
    "features",
    "features_format",
    "dtype",
    "optimizer",
];

/// Removes `[training]` from a recipe, and copies its keys to the trained drafters that do not set
/// them. Returns whether the table existed.
///
/// # Errors
/// If a key is not in [`KEYS`], or the recipe trains no such drafter.
pub(super) fn share(recipe: &mut Table, kinds: &Kinds) -> Result<bool> {
    let Some(shared) = recipe.remove("training") else { return Ok(false) };
    let Value::Table(shared) = shared else { bail!("`training` is not a table of keys") };
    if let Some(key) = shared.keys().find(|key| !KEYS.contains(&key.as_str())) {
        bail!("key `training.{key}` is unknown, expected one of `{}`", KEYS.join("`, `"));
    }
    let is_trained = |drafter: &Table| {
        let entry = drafter.get("kind").and_then(Value::as_str).and_then(|name| kinds.get(name));
        let export = entry.filter(|it| it.is_trained()).and_then(|it| it.export.as_ref());
        export.is_some_and(|export| !drafter.contains_key(export.key))
    };
    let drafters = recipe.get_mut("drafters").and_then(Value::as_table_mut);
    let drafters = drafters.into_iter().flat_map(|all| all.iter_mut().map(|(_, drafter)| drafter));
    let trained = drafters.filter_map(Value::as_table_mut).filter(|drafter| is_trained(drafter));
    ensure!(
        trained.map(|drafter| add_missing(drafter, &shared)).count() > 0,
        "`[training]` has keys, but no adapter, EAGLE-3 or block drafter is trained"
    );
    Ok(true)
}

/// Copies the keys of `more` that a table lacks, recursively.
fn add_missing(table: &mut Table, more: &Table) {
    for (key, value) in more {
        match (table.get_mut(key), value) {
            (Some(Value::Table(own)), Value::Table(more)) => add_missing(own, more),
            (Some(_), _) => {}
            (None, _) => drop(table.insert(key.clone(), value.clone())),
        }
    }
}
