//! `attach-head`: trains the confidence head of a block drafter on built data, and writes the
//! drafter with it.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use draftsmith_theory::DrafterId;
use draftsmith_tune::confidence::{ConfidenceOptions, train_confidence_head};

use crate::commands::StageJob;

/// Arguments of `attach-head`, without the recipe.
#[derive(Debug, Args)]
pub(crate) struct ConfidenceArguments {
    /// The directory to write: the drafter with its new head.
    out: PathBuf,
    /// The block drafter, by its name in the recipe; the first if absent.
    #[arg(long, value_name = "NAME")]
    drafter: Option<DrafterId>,
    /// The weight of rejections in the loss; 1 keeps predictions calibrated.
    #[arg(long, value_name = "W", default_value_t = 1.0)]
    rejection_weight: f64,
    /// Change no tensor but the head's, even if it predicts worse.
    #[arg(long)]
    keep_markov_head: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &ConfidenceArguments, job: StageJob<'_>) -> Result<()> {
    let StageJob { recipe, workspace, console } = job;
    let ConfidenceArguments { out, drafter, rejection_weight, keep_markov_head } = arguments;
    let options = ConfidenceOptions {
        rejection_weight: *rejection_weight,
        keeps_markov_head: *keep_markov_head,
    };
    let outcome = train_confidence_head((recipe, *drafter), workspace, out, options, console)?;
    console.document(&outcome)?;
    for line in outcome.lines() {
        console.paragraph(&line)?;
    }
    Ok(())
}
