//! `survey`: estimates whether speculation pays for a target, with a draft model, a trained drafter or
//! neither.

mod show;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Arg, Args};
use draftsmith_model::WeightDtype;
use draftsmith_servers::settings::ServerKind;
use draftsmith_servers::survey::{SurveySettings, survey};

use crate::commands::DeviceJob;
use crate::commands::tune::servers::{self, LoadArguments};
use crate::decoding_arguments::{DecodingArguments, EndArguments};

/// Arguments of `survey`.
#[derive(Debug, Args)]
#[command(mut_args(hide_rare_loads))]
pub(crate) struct SurveyArguments {
    /// Target: a directory, Hub name or GGUF file.
    #[arg(long, value_name = "MODEL")]
    target: PathBuf,
    /// Directory of a GGUF target's tokenizer.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Drafter; the target's own first layers if absent.
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
    /// A server that answers for the target, or a file with keys of `[data.server]`; needs `--costs`.
    #[arg(long, value_name = "URL", requires = "draft", requires = "costs")]
    server: Option<String>,
    /// Stored answers, or `earlier`: those so far.
    #[arg(long, value_name = "FILE")]
    answers: Option<PathBuf>,
    /// Times of forwards where you serve, as keys of `[tune.costs]`; measured if absent.
    #[arg(long, value_name = "TOML")]
    costs: Option<PathBuf>,
    /// Also write settings for `llama.cpp`, `vllm`, `sglang` or `trtllm`; takes the loads of `tune`.
    #[arg(
        long = "for",
        value_name = "SERVER",
        value_parser = ServerKind::NAMES,
        hide_possible_values = true,
        requires = "server_costs"
    )]
    form: Option<String>,
    /// Times of rounds, written by `server costs`.
    #[arg(long, value_name = "JSON", requires = "form")]
    server_costs: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArguments,
    /// `vicuna`, `llama-2`, `alpaca`, `none` or a file.
    #[arg(long, value_name = "NAME")]
    chat_template: Option<String>,
}

/// Hides flags that `tune --help` explains, so that the help text fits on a screen.
fn hide_rare_loads(argument: Arg) -> Arg {
    let is_rare = ["load", "rate", "schedule_keys"].contains(&argument.get_id().as_str());
    argument.hide(is_rare)
}

impl SurveyArguments {
    fn settings(&self, seed: u64, dtype: WeightDtype) -> Result<SurveySettings> {
        anyhow::ensure!(
            self.draft.is_some()
                || self.form.as_ref().is_none_or(|form| form == ServerKind::LlamaCpp.name())
                || self.answers.is_some() && self.form.as_deref() == Some("vllm"),
            "`--for` needs `--draft`; without one, only llama.cpp's look-ups have settings, and vLLM's with `--answers`"
        );
        let costs = self.server_costs.as_deref();
        let tuning = self.form.as_ref().map(|form| self.load.tuning(form, costs));
        Ok(SurveySettings {
            tuning: tuning.transpose()?,
            target: self.target.clone(),
            tokenizer: self.tokenizer.clone(),
            draft: self.draft.clone(),
            prompts: self.prompts.clone(),
            num_prompts: self.num_prompts.get(),
            max_new_tokens: self.max_new_tokens.get(),
            decoding: self.decoding.decoding()?,
            ends: self.ends.ends(),
            server: self.server.clone(),
            answers: self.answers.clone(),
            costs: self.costs.clone(),
            chat_template: self.chat_template.clone(),
            seed,
            dtype,
        })
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &SurveyArguments, job: DeviceJob<'_>) -> Result<()> {
    let DeviceJob { seed, device, dtype, console } = job;
    let mut survey = survey(&arguments.settings(seed.unwrap_or(0), dtype)?, device, console)?;
    if let (Some(form), Some(settings)) = (&arguments.form, survey.server_mut()) {
        servers::write(settings, format!("survey-{form}").as_ref())?;
    }
    console.text(show::survey(&survey, console.width(), console.colour())?)?;
    console.document(&survey)
}
