//! `survey`: whether speculation is worth it for a target and a draft, or for a target alone, before
//! anything is trained.
//!
//! The target answers some prompts, the draft is recorded along the answers as `record` does it, and
//! every rule is replayed at costs that are measured as `tune` measures them, or given. Prompts are few,
//! so each half of them is judged by what was chosen, and learnt, on the other. Nothing is written
//! but in memory and a temporary directory. A target that is served elsewhere answers there, and of it
//! is known what its servers say.

mod costs;
mod look_ups;
mod pair;
mod probe;
mod read_out;
mod show;
mod target_alone;
#[cfg(test)]
mod tests;
mod verdict;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::Args;
use draftsmith_model::WeightDtype;
use draftsmith_theory::Decoding;
use serde::Serialize;

use self::pair::PairSurvey;
use self::target_alone::TargetSurvey;
use crate::console::Console;
use crate::console::progress::Progress;
use crate::conversation::SetPrompt;
use crate::decoding_arguments::DecodingArguments;
use crate::device::{DeviceChoice, on_pool};
use crate::prompt_files::Reading;
use crate::prompts::{PromptChoice, read_sources};
use crate::recipe::{GivenCosts, ServerRecipe};
use crate::recorder::{Answer, Recorder};
use crate::recordings::RecordedModels;
use crate::served::ServerAccess;
use crate::text_side::EndArguments;
use crate::workspace::Workspace;

/// The greatest number of candidates a round.
const MAX_LENGTH: usize = 10;

/// The fewest answers of which halves say anything.
const MIN_ANSWERS: usize = 4;

/// Arguments of `survey`.
#[derive(Debug, Args)]
pub(crate) struct SurveyArguments {
    /// The target: a checkpoint directory, or its name on the Hugging Face Hub, `org/name@revision`.
    #[arg(long, value_name = "MODEL")]
    target: PathBuf,
    /// A draft, likewise. Without one, the target's own first layers are looked at.
    #[arg(long, value_name = "MODEL")]
    draft: Option<PathBuf>,
    /// Prompt files like what you serve, in any of the forms that a recipe's may have.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    prompts: Vec<PathBuf>,
    /// How many prompts are used, spread evenly over all files.
    #[arg(long, value_name = "N", default_value = "50")]
    num_prompts: NonZeroUsize,
    /// The most new tokens an answer.
    #[arg(long, value_name = "N", default_value = "128")]
    max_new_tokens: NonZeroUsize,
    #[command(flatten)]
    decoding: DecodingArguments,
    #[command(flatten)]
    ends: EndArguments,
    /// Ask servers of the target for its answers, whose weights are then not read: a TOML file with the
    /// keys of a recipe's `[data.server]`. Takes `--draft` and `--costs`.
    #[arg(long, value_name = "FILE", requires = "draft", requires = "costs")]
    server: Option<PathBuf>,
    /// What forwards cost where you serve, instead of here: a TOML file with the keys of a recipe's
    /// `[tune.costs]`, `draft_ms`, `target_ms` and `rows_ms`.
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// The chat template instead of the target's own: `vicuna`, `llama-2`, `alpaca`, a Jinja file,
    /// or `none`.
    #[arg(long, value_name = "NAME|FILE")]
    chat_template: Option<String>,
}

/// All that a survey found, as `--json` tells it.
#[derive(Debug, Serialize)]
struct Survey {
    target: PathBuf,
    /// Null where the target was looked at alone.
    draft: Option<PathBuf>,
    /// How answers were decoded.
    decoding: Decoding,
    seed: u64,
    num_prompts: usize,
    /// Answers, one a turn.
    num_answers: usize,
    /// Their tokens.
    num_tokens: usize,
    #[serde(flatten)]
    found: Found,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Found {
    Pair(Box<PairSurvey>),
    Target(Box<TargetSurvey>),
}

/// What both kinds of survey work with.
struct Surveyor<'a> {
    workspace: &'a Workspace,
    models: RecordedModels<'a>,
    answers: &'a [Answer],
    decoding: Decoding,
    max_new_tokens: usize,
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
    let survey = on_pool(|| survey(arguments, seed, device, dtype, console))?;
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
    let (draft, template) = (arguments.draft.as_deref(), arguments.chat_template.as_deref());
    let devices = vec![device.clone()];
    let server = arguments.server.as_deref().map(ServerRecipe::read).transpose()?;
    server.iter().try_for_each(|server| check_server(server, &decoding))?;
    let served_as = server.as_ref().map(|server| &*server.model);
    let mut workspace =
        Workspace::open(&arguments.target, served_as, draft, template, devices, console)?;
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
    let num_turns: usize = prompts.iter().map(|prompt| prompt.turns.len()).sum();
    let prompts: Vec<SetPrompt> = prompts.into_iter().map(SetPrompt::Conversation).collect();
    let progress = Progress::new(console, "survey", "answers", num_turns as u64);
    progress.message("target");
    let max_new_tokens = arguments.max_new_tokens.get();
    let recorder = Recorder {
        models: models.clone(),
        max_new_tokens,
        seed,
        max_length: MAX_LENGTH,
        labels: true,
        on_cpu: DeviceChoice::is_cpu(workspace.device()),
        console,
        progress: &progress,
    };
    let answers = recorder.answer(&prompts, decoding)?;
    progress.clear();
    if answers.len() < MIN_ANSWERS {
        bail!(
            "there are {} answers, and a survey needs {MIN_ANSWERS} or more; hint: some 50 prompts \
             tell enough",
            answers.len()
        );
    }
    let surveyor = Surveyor {
        workspace: &workspace,
        models,
        answers: &answers,
        decoding,
        max_new_tokens,
        given: given.as_ref(),
        seed,
        console,
    };
    let found = match draft {
        Some(_) => Found::Pair(Box::new(pair::survey(&surveyor)?)),
        None => Found::Target(Box::new(target_alone::survey(&surveyor)?)),
    };
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

/// Checks that what servers say is enough.
fn check_server(server: &ServerRecipe, decoding: &Decoding) -> Result<()> {
    if server.takes_weights() {
        bail!(
            "key `labels` of the server is `weights`, and a survey with `--server` reads none; hint: leave \
             it out, or survey without `--server`"
        );
    }
    if !decoding.is_greedy() && decoding.is_penalised() {
        bail!(
            "log-probabilities of servers do not tell what a repetition penalty makes of them; hint: \
             leave it out, or survey greedy answers"
        );
    }
    Ok(())
}

impl Surveyor<'_> {
    /// The answers in two halves, conversations alternating: the numbers of each half's.
    fn halves(&self) -> [Vec<usize>; 2] {
        let mut halves = [Vec::new(), Vec::new()];
        let mut first: Option<&str> = None;
        let mut half = 1;
        for (nth, answer) in self.answers.iter().enumerate() {
            // A turn's id is its conversation's with `#turn` behind it, and follows it.
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
