//! `survey`: whether speculation pays for a target and a draft, or for a target without a draft, before
//! anything is trained.

mod show;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use burn::tensor::Device;
use clap::Args;
use draftsmith_model::WeightDtype;
use draftsmith_tune::survey::{SurveySettings, survey};

use crate::console::Console;
use crate::decoding_arguments::{DecodingArguments, EndArguments};

/// Arguments of `survey`.
#[derive(Debug, Args)]
pub(crate) struct SurveyArguments {
    /// The target: a checkpoint directory, or its name on the Hugging Face Hub, `org/name@revision`.
    #[arg(long, value_name = "MODEL")]
    target: PathBuf,
    /// A draft, likewise. Without one, the target's own first layers are surveyed.
    #[arg(long, value_name = "MODEL")]
    draft: Option<PathBuf>,
    /// Prompt files like the prompts that you serve, in any format that a recipe accepts.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    prompts: Vec<PathBuf>,
    /// Number of prompts, spread evenly over all files.
    #[arg(long, value_name = "N", default_value = "50")]
    num_prompts: NonZeroUsize,
    /// The most new tokens per answer.
    #[arg(long, value_name = "N", default_value = "128")]
    max_new_tokens: NonZeroUsize,
    #[command(flatten)]
    decoding: DecodingArguments,
    #[command(flatten)]
    ends: EndArguments,
    /// Ask servers for the target's answers instead of reading its weights: a TOML file with the keys of
    /// a recipe's `[data.server]`. Needs `--draft` and `--costs`.
    #[arg(long, value_name = "FILE", requires = "draft", requires = "costs")]
    server: Option<PathBuf>,
    /// Costs of forwards on the machine that serves, instead of measured ones: a TOML file with the keys
    /// of a recipe's `[tune.costs]`, `draft_ms`, `target_ms` and `rows_ms`.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// The chat template instead of the target's own: `vicuna`, `llama-2`, `alpaca`, a Jinja file,
    /// or `none`.
    #[arg(long, value_name = "NAME|FILE")]
    chat_template: Option<String>,
}

impl SurveyArguments {
    fn settings(&self, seed: u64, dtype: WeightDtype) -> Result<SurveySettings> {
        Ok(SurveySettings {
            target: self.target.clone(),
            draft: self.draft.clone(),
            prompts: self.prompts.clone(),
            num_prompts: self.num_prompts.get(),
            max_new_tokens: self.max_new_tokens.get(),
            decoding: self.decoding.decoding()?,
            ends: self.ends.ends(),
            server: self.server.clone(),
            costs: self.costs.clone(),
            chat_template: self.chat_template.clone(),
            seed,
            dtype,
        })
    }
}

/// Runs the command.
pub(crate) fn run(
    arguments: &SurveyArguments,
    seed: u64,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<()> {
    let survey = survey(&arguments.settings(seed, dtype)?, device, console)?;
    console.text(show::survey(&survey, console.width(), console.colour())?)?;
    console.document(&survey)
}
