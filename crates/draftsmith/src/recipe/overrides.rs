//! `--set KEY=VALUE`: keys of a recipe that the command line sets.

use anyhow::{Context, Result, bail};

/// More parts than any key of a recipe has. What is nested deeply overflows the stack of what writes
/// it.
const MOST_PARTS: usize = 16;

/// Sets `a.b=value` in a table. The value is TOML; what is not, is a string.
pub(super) fn set(table: &mut toml::Table, given: &str) -> Result<()> {
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
