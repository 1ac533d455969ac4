//! Checks of keys, all with errors of one form.

use anyhow::{Result, bail};

/// Checks a key's value.
///
/// # Errors
/// If it does not hold: the key, and what its problem is.
pub(super) fn require(holds: bool, key: &str, problem: &str) -> Result<()> {
    if holds { Ok(()) } else { bail!("key `{key}` {problem}") }
}
