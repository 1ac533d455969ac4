//! Readers of files that others may have written, opened to the bench `fuzz` and the test `corpus`,
//! which hold them to this: no file does more to them than to be refused. No part of the interface.

use std::path::Path;

use anyhow::Result;

use crate::commands::inspect;
use crate::console::Console;
use crate::recipe::{Overrides, Recipe};
use crate::served;

/// Reads a recipe with the `KEY=VALUE` overrides of a command line.
///
/// # Errors
/// As the commands tell them.
pub fn recipe(path: &Path, overrides: &[String]) -> Result<()> {
    Recipe::read(path, &Overrides { keys: overrides, ..Overrides::default() }).map(drop)
}

/// Reads the journal of what servers gave.
///
/// # Errors
/// If it cannot be read, or has nothing.
pub fn journal(path: &Path) -> Result<()> {
    served::readers::journal(path)
}

/// Reads a server's answer.
///
/// # Errors
/// What is wrong with it.
pub fn answer(bytes: &[u8]) -> Result<()> {
    served::readers::answer(bytes)
}

/// Reads whatever `draftsmith inspect` explains, and makes of it what that shows.
///
/// # Errors
/// As the command tells them.
pub fn inspect(path: &Path) -> Result<()> {
    inspect::run(path, None, &Console::silent())
}
