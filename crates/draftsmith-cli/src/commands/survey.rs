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
    /// Target: a directory, or a name on the Hugging Face Hub.
    #[arg(long, value_name = "MODEL")]
    target: PathBuf,
    /// Draft; the target's own first layers if absent.
    #[arg(long, value_name = "MODEL")]
    draft: Option<PathBuf>,
    /// Prompts like those that you serve, in a recipe's forms.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    prompts: Vec<PathBuf>,
    /// Number of prompts, spread evenly over the files.
    #[arg(long, value_name = "N", default_value = "50")]
    num_prompts: NonZeroUsize,
    /// The most new tokens per answer.
    #[arg(long, value_name = "N", default_value = "128")]
    max_new_tokens: NonZeroUsize,
    #[command(flatten)]
    decoding: DecodingArguments,
    #[command(flatten)]
    ends: EndArguments,
    /// Servers that answer for the target: a TOML file with the keys of `[data.server]`; needs `--costs`.
    #[arg(long, value_name = "FILE", requires = "draft", requires = "costs")]
    server: Option<PathBuf>,
    /// Costs of forwards where you serve: a TOML file with the keys of `[tune.costs]`; measured if absent.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// `vicuna`, `llama-2`, `alpaca`, `none` or a Jinja file.
    #[arg(long, value_name = "NAME")]
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
