//! `check`: tests whether an exported head or adapter is fit to be served.

mod show;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use draftsmith_report::serving_text;
use draftsmith_tune::check::{CheckSettings, check};

use crate::commands::DeviceJob;

/// Arguments of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// A head's or an adapter's directory.
    export: PathBuf,
    /// Prompts to decode, instead of those of the recipe's `[evaluate]`.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// The most prompts, spread evenly over the files.
    #[arg(long, value_name = "N", default_value = "64")]
    num_prompts: NonZeroUsize,
    /// The recipe that names the models, instead of the one beside the export.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Pass an export that makes decoding slower on this machine.
    #[arg(long)]
    allow_slower: bool,
}

/// A failed or undecided check. Its results are already on stdout.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct CheckFailed {
    what: String,
    /// The exit code.
    pub(crate) code: u8,
}

impl CheckFailed {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), code: 1 }
    }

    /// Creates the error of an undecided check, with exit code 3.
    pub(crate) fn unknown(what: impl Into<String>) -> Self {
        Self { what: what.into(), code: 3 }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &CheckArguments, job: DeviceJob<'_>) -> Result<()> {
    let DeviceJob { seed, device, dtype, console } = job;
    let settings = CheckSettings {
        export: arguments.export.clone(),
        prompts: arguments.prompts.clone(),
        num_prompts: arguments.num_prompts.get(),
        recipe: arguments.recipe.clone(),
        allow_slower: arguments.allow_slower,
        seed,
        dtype,
    };
    let checked = check(&settings, device, console)?;
    console.text(show::table(&checked))?;
    if checked.passed {
        let ways = serving_text(&checked.serving, console.width());
        console.text(format!("\nwhere to serve it:\n{ways}"))?;
    }
    console.document(&checked)?;
    checked.error.map_or(Ok(()), |error| Err(CheckFailed::new(error).into()))
}
