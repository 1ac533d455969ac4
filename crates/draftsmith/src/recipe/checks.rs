//! Checks of keys, and what is told of those that do not hold or cannot be read.

use anyhow::{Result, bail};
use draftsmith_files::{Notation, plain_problem};

/// Checks a key's value.
///
/// # Errors
/// If it does not hold: the key, and what its problem is.
pub(super) fn require(holds: bool, key: &str, problem: &str) -> Result<()> {
    if holds { Ok(()) } else { bail!("key `{key}` {problem}") }
}

/// toml's own message, which shows the place, without its trailing newline and the names of Rust's
/// types.
pub(super) fn toml_error(error: &toml::de::Error) -> anyhow::Error {
    let told = error.message();
    let text = error.to_string().replace(told, &plain_problem(told, Notation::Toml));
    anyhow::anyhow!("{}", text.trim_end().to_owned())
}
