//! `survey`: whether speculation pays for a target and a draft, or for a target without a draft, before
//! anything is trained.
//!
//! The target answers some prompts, the draft is recorded along the answers as in `record`, and every
//! stop rule is replayed at costs that are measured as in `tune`, or given. With so few prompts results
//! are cross-validated: each half of the answers is judged with the settings and heads of the other half.
//! Only a temporary directory is written. If servers answer for the target, only what they return is known
//! of it.

mod costs;
mod halves;
mod pair;
mod probe;
mod read_out;
mod show;
mod target_alone;
#[cfg(test)]
mod tests;
mod verdict;

use draftsmith_report::duration_text;
use draftsmith_served::ServerRecipe;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::Args;
use draftsmith_data::Prompt;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, DrafterId};
use serde::Serialize;

use self::pair::PairSurvey;
use self::target_alone::TargetSurvey;
use crate::console::Console;
use crate::console::progress::Progress;
use crate::conversation::SetPrompt;
use crate::decoders::target_speed;
use crate::decoding_arguments::DecodingArguments;
use crate::prompt_files::Reading;
use crate::prompts::{PromptChoice, read_sources};
use crate::recipe::{GivenCosts, read_server};
use crate::recorder::{Answer, RecordedModels, Recorder};
use crate::server_access::ServerAccess;
use crate::text_side::EndArguments;
use crate::workspace::Workspace;

/// The most candidates a round.
const MAX_LENGTH: usize = 10;

/// The fewest answers that can be cross-validated.
const MIN_ANSWERS: usize = 4;

/// About the share of a survey's time in which the target answers.
const SHARE_OF_ANSWERS: f64 = 0.15;

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

/// The document of `--json`.
#[derive(Debug, Serialize)]
struct Survey {
    target: PathBuf,
    /// Null if the target was surveyed without a draft.
    draft: Option<PathBuf>,
    /// How the answers were decoded.
    decoding: Decoding,
    seed: u64,
    num_prompts: usize,
    /// Answers, one per turn.
    num_answers: usize,
    /// Tokens of all answers.
    num_tokens: usize,
    #[serde(flatten)]
    found: SurveyResult,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum SurveyResult {
    Pair(Box<PairSurvey>),
    Target(Box<TargetSurvey>),
}

/// The input of both kinds of survey.
struct Surveyor<'a> {
    workspace: &'a Workspace,
    models: RecordedModels<'a>,
    answers: Vec<Answer>,
    decoding: Decoding,
    max_new_tokens: usize,
    /// Costs that the user gave.
    given: Option<&'a GivenCosts>,
    seed: u64,
    console: &'a Console,
}

/// Runs the command.
pub(crate) fn run(
    arguments: &SurveyArguments,
    seed: u64,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<()> {
    let survey = survey(arguments, seed, device, dtype, console)?;
    console.text(show::survey(&survey, console.width(), console.colour())?)?;
    console.document(&survey)
}

fn survey(
    arguments: &SurveyArguments,
    seed: u64,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<Survey> {
    let decoding = arguments.decoding.decoding()?;
    let given = arguments.costs.as_deref().map(GivenCosts::read).transpose()?;
    let sources = read_sources(&arguments.prompts, &Reading::default())?;
    let server = arguments.server.as_deref().map(read_server).transpose()?;
    server.iter().try_for_each(|server| check_server(server, &decoding))?;
    let template = arguments.chat_template.as_deref();
    let drafts = arguments.draft.as_deref().map(|dir| (DrafterId::DRAFT, dir));
    let drafts: Vec<(DrafterId, &Path)> = drafts.into_iter().collect();
    let (devices, served_as) = (vec![device.clone()], server.as_ref().map(|it| &*it.model));
    let mut workspace =
        Workspace::open(&arguments.target, served_as, &drafts, template, devices, console)?;
    (workspace.ends, workspace.dtype) = (arguments.ends.ends(), dtype);
    let dir = tempfile::tempdir().context("cannot make a temporary directory")?;
    let models = match &server {
        None => RecordedModels::Pair(workspace.pair()?),
        Some(server) => {
            let journal = dir.path().join("served.jsonl");
            let access = ServerAccess { server, seed, journal };
            RecordedModels::served(&workspace, access)?
        }
    };
    let num_prompts = Some(arguments.num_prompts.get());
    let choice = PromptChoice { num_prompts, skip_long: true };
    let prompts = choice.of_all(&sources, models.text(), console)?;
    let mut surveyor = Surveyor {
        workspace: &workspace,
        models,
        answers: Vec::new(),
        decoding,
        max_new_tokens: arguments.max_new_tokens.get(),
        given: given.as_ref(),
        seed,
        console,
    };
    surveyor.note_duration(&prompts)?;
    let prompts: Vec<SetPrompt> = prompts.into_iter().map(SetPrompt::Conversation).collect();
    surveyor.answers = surveyor.answer(&prompts)?;
    let found = match arguments.draft {
        Some(_) => SurveyResult::Pair(Box::new(pair::survey(&surveyor)?)),
        None => SurveyResult::Target(Box::new(target_alone::survey(&surveyor)?)),
    };
    let answers = &surveyor.answers;
    Ok(Survey {
        target: arguments.target.clone(),
        draft: arguments.draft.clone(),
        decoding,
        seed,
        num_prompts: prompts.len(),
        num_answers: answers.len(),
        num_tokens: answers.iter().map(|answer| answer.response_ids.len()).sum(),
        found,
    })
}

/// Refuses servers and decodings for which server responses do not suffice.
fn check_server(server: &ServerRecipe, decoding: &Decoding) -> Result<()> {
    if server.takes_weights() {
        bail!(
            "key `labels` of the server is `weights`, and a survey with `--server` reads none; hint: leave \
             it out, or survey without `--server`"
        );
    }
    if !decoding.is_greedy() && decoding.is_penalised() {
        bail!(
            "servers return log-probabilities without a repetition penalty; hint: leave the penalty \
             out, or survey greedy answers"
        );
    }
    Ok(())
}

impl Surveyor<'_> {
    /// Notes how many tokens are decoded, and about how long the survey takes.
    fn note_duration(&self, prompts: &[Prompt]) -> Result<()> {
        let num_turns: usize = prompts.iter().map(|prompt| prompt.turns.len()).sum();
        let num_tokens = num_turns * self.max_new_tokens;
        let RecordedModels::Pair(pair) = &self.models else { return Ok(()) };
        let first = prompts.first().context("there is a prompt")?;
        let speed = target_speed(pair, &pair.text.encode(&first.messages(0, &[]))?)?;
        let seconds = SHARE_OF_ANSWERS.recip() * num_tokens as f64 / speed;
        self.console.note(format!(
            "survey: {num_turns} answers of at most {num_tokens} tokens in all; about {} at the target's \
             {speed:.0} tokens/s",
            duration_text(seconds)
        ));
        Ok(())
    }

    fn recorder<'r>(&'r self, progress: &'r Progress) -> Recorder<'r> {
        Recorder {
            models: self.models.clone(),
            max_new_tokens: self.max_new_tokens,
            seed: self.seed,
            max_length: MAX_LENGTH,
            labels: true,
            console: self.console,
            progress,
        }
    }

    /// The target's answers to prompts.
    fn answer(&self, prompts: &[SetPrompt]) -> Result<Vec<Answer>> {
        let num_turns: usize = prompts.iter().map(SetPrompt::num_turns).sum();
        let progress = Progress::new(self.console, "survey", "answers", num_turns as u64);
        progress.message("target");
        let answers = self.recorder(&progress).answer(prompts, self.decoding)?;
        progress.clear();
        if answers.len() < MIN_ANSWERS {
            bail!(
                "there are {} answers, and a survey needs {MIN_ANSWERS} or more; hint: some 50 prompts \
                 are enough",
                answers.len()
            );
        }
        Ok(answers)
    }

    /// The numbers of the answers in two halves; conversations alternate between them.
    fn halves(&self) -> [Vec<usize>; 2] {
        let mut halves = [Vec::new(), Vec::new()];
        let mut first: Option<&str> = None;
        let mut half = 1;
        for (nth, answer) in self.answers.iter().enumerate() {
            // The ids of later turns are the id of the first turn followed by `#turn`.
            let goes_on = first.is_some_and(|first| {
                answer.id.strip_prefix(first).is_some_and(|rest| rest.starts_with('#'))
            });
            if !goes_on {
                first = Some(&answer.id);
                half = 1 - half;
            }
            halves[half].push(nth);
        }
        halves
    }
}
