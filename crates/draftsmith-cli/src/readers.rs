//! Readers of untrusted files, public only for the bench `fuzz` and the test `corpus`: a malformed
//! file must cause an error and nothing worse. They are not part of the public interface.

use std::path::Path;

use anyhow::{Error, Result};

use crate::commands::inspect;
use crate::console::Console;
use draftsmith_recipe::{Overrides, Recipe};

/// Reads all valid responses of a journal.
///
/// # Errors
/// If the journal cannot be read, or has no valid response.
pub fn journal(path: &Path) -> Result<()> {
    draftsmith_served::readers::journal(path).map_err(Error::msg)
}

/// Parses a server's response as one to a greedy and as one to a sampled request.
///
/// # Errors
/// If the response is invalid for both.
pub fn answer(bytes: &[u8]) -> Result<()> {
    draftsmith_served::readers::answer(bytes).map_err(Error::msg)
}

/// Reads a server's file of hidden states and deletes it.
///
/// # Errors
/// If the file is not the one of the assumed request.
pub fn states(path: &Path) -> Result<()> {
    draftsmith_served::readers::states(path).map_err(Error::msg)
}

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
