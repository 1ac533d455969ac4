//! `completions`: prints the script with which a shell completes commands, flags and values.

use anyhow::Result;
use clap_complete::Shell;
use serde_json::json;

use crate::console::Console;

/// Prints the completion script for the commands of `parser`.
pub(crate) fn run(shell: Shell, parser: &mut clap::Command, console: &Console) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, parser, "draftsmith", &mut script);
    let script = String::from_utf8(script)?;
    console.document(&json!({ "shell": shell.to_string(), "script": script }))?;
    console.text(script)
}
