//! What the command line says beside a recipe: keys that it sets by `--set KEY=VALUE`, the seed, and
//! the type that models compute in, which is a training's too unless the recipe names another.

use anyhow::{Context, Result, bail};
use draftsmith_model::WeightDtype;

/// Sections of trainings, which have a key `dtype`.
const TRAININGS: [&str; 3] = ["head", "adapter", "adapter_head"];

/// All that is said.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Overrides<'a> {
    /// `KEY=VALUE` each.
    pub(crate) keys: &'a [String],
    /// Instead of the recipe's.
    pub(crate) seed: Option<u64>,
    /// Of trainings that do not say so themselves.
    pub(crate) dtype: WeightDtype,
    /// Whether a malformed record of a prompt file is an error.
    pub(crate) is_strict: bool,
}

impl Overrides<'_> {
    /// Sets what is said of a table's keys, and returns whether anything was.
    pub(super) fn apply(&self, table: &mut toml::Table) -> Result<bool> {
        for given in self.keys {
            set(table, given)?;
        }
        if !self.dtype.is_f32() {
            for section in TRAININGS {
                if let Some(keys) = table.get_mut(section).and_then(toml::Value::as_table_mut) {
                    keys.entry("dtype").or_insert_with(|| self.dtype.name().into());
                }
            }
        }
        Ok(!self.keys.is_empty() || !self.dtype.is_f32())
    }
}

/// More parts than any key of a recipe has. What is nested deeply overflows the stack of what writes
/// it.
const MOST_PARTS: usize = 16;

/// Sets `a.b=value` in a table. The value is TOML; what is not, is a string.
fn set(table: &mut toml::Table, given: &str) -> Result<()> {
    let (key, value) = given.split_once('=').with_context(|| {
        format!("`--set {given}`: expected KEY=VALUE, as in `head.num_layers=2`")
    })?;
    let value = toml::from_str::<toml::Table>(&format!("value = {value}"))
        .ok()
        .and_then(|mut parsed| parsed.remove("value"))
        .unwrap_or_else(|| toml::Value::String(value.to_owned()));
    let mut parts: Vec<&str> = key.trim().split('.').collect();
    if parts.len() > MOST_PARTS {
        bail!(
            "`--set`: a key of {} parts, no recipe has one of more than {MOST_PARTS}",
            parts.len()
        );
    }
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
