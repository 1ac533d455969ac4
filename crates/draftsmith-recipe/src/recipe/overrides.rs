//! Overrides of a recipe by the command line: keys set by `--set KEY=VALUE`, the seed, and the
//! models' dtype. The dtype also applies to trainings that do not set `dtype` themselves.

use anyhow::{Context, Result, ensure};
use draftsmith_model::WeightDtype;

use crate::kinds::{Kinds, default_dtype};

/// The command line's overrides of a recipe.
#[derive(Debug, Clone, Default)]
pub struct Overrides<'a> {
    /// The texts `KEY=VALUE` from the command line.
    pub keys: &'a [String],
    /// The seed that replaces the recipe's; `None` keeps it.
    pub seed: Option<u64>,
    /// The dtype of trainings that do not set `dtype`.
    pub dtype: WeightDtype,
    /// Whether a malformed record in a prompt file is an error.
    pub is_strict: bool,
    /// The kinds that drafters may have.
    pub kinds: Kinds,
}

impl Overrides<'_> {
    /// Applies the overrides to a recipe's table. Returns whether anything could have changed.
    pub(super) fn apply(&self, table: &mut toml::Table) -> Result<bool> {
        for given in self.keys {
            set(table, given)?;
        }
        if !self.dtype.is_f32()
            && let Some(drafters) = table.get_mut("drafters").and_then(toml::Value::as_table_mut)
        {
            default_dtype(drafters, self.dtype.name(), &self.kinds);
        }
        Ok(!self.keys.is_empty() || !self.dtype.is_f32())
    }
}

/// The maximum number of parts in a key, more than any valid key has. Deeper nesting would overflow
/// the stack of the TOML writer.
const MOST_PARTS: usize = 16;

/// Sets `a.b=value` in a table. The value is parsed as TOML; if that fails, it is a string.
fn set(table: &mut toml::Table, given: &str) -> Result<()> {
    let (key, value) = given.split_once('=').with_context(|| {
        format!("`--set {given}`: expected KEY=VALUE, as in `drafters.draft.head.num_layers=2`")
    })?;
    let value = toml::from_str::<toml::Table>(&format!("value = {value}"))
        .ok()
        .and_then(|mut parsed| parsed.remove("value"))
        .unwrap_or_else(|| toml::Value::String(value.to_owned()));
    let mut parts: Vec<&str> = key.trim().split('.').collect();
    ensure!(
        parts.len() <= MOST_PARTS,
        "`--set`: the key has {} parts, expected at most {MOST_PARTS}",
        parts.len()
    );
    let last = parts.pop().unwrap_or_default();
    let mut place = table;
    for part in parts {
        place = place
            .entry(part)
            .or_insert_with(|| toml::Value::Table(toml::Table::new()))
            .as_table_mut()
            .with_context(|| format!("`--set {given}`: `{part}` is not a section"))?;
    }
    place.insert(last.to_owned(), value);
    Ok(())
}
