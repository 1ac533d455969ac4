//! Readers of untrusted files, public only for the bench `fuzz` and the test `corpus`: a malformed
//! file must cause an error and nothing worse. They are not part of the public interface.

use std::path::Path;

use anyhow::Result;

use crate::commands::inspect;
use crate::console::Console;
use draftsmith_recipe::{Overrides, Recipe};

/// Reads a recipe, with `KEY=VALUE` overrides from the command line.
///
/// # Errors
/// If the recipe or an override is invalid.
pub fn recipe(path: &Path, overrides: &[String]) -> Result<()> {
    Recipe::read(path, &Overrides { keys: overrides, ..Overrides::default() }).map(drop)
}

/// Reads a file as `draftsmith inspect` does, without printing.
///
/// # Errors
/// If the file is not one that `inspect` shows.
pub fn inspect(path: &Path) -> Result<()> {
    inspect::run(path, None, &Console::silent())
}
