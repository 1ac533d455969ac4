//! The command line: what can be given, resolved once into what is meant.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};
use draftsmith_data::Incomplete;
use draftsmith_data::is_panic_caught;
use draftsmith_model::WeightDtype;

use crate::commands;
use crate::commands::build_data::Building;
use crate::commands::check::{CheckArguments, CheckFailed};
use crate::commands::export::ExportArguments;
use crate::commands::generate::GenerateArguments;
use crate::commands::import::ImportArguments;
use crate::commands::inspect::PageArguments;
use crate::commands::survey::SurveyArguments;
use crate::commands::train_bigram::BigramArguments;
use crate::console::streams::{leave_closed_terminals, put, reader_of, tell};
use crate::console::{Console, Interrupted};
use crate::device::{DeviceChoice, DtypeSource, Kernels, on_pool, parse_dtype, require_dtype};
use crate::devices::{self, DeviceChoices};
use crate::lock::RecipeLock;
use crate::recipe::{GivenCosts, Models, Overrides, Recipe};
use crate::shard::Shard;
use crate::workspace::Workspace;

/// Trains what makes speculative decoding faster, and proves it.
#[derive(Debug, Parser)]
#[command(name = "draftsmith", version, propagate_version = true)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// Flags of every subcommand.
#[derive(Debug, Args)]
struct Common {
    /// Where to compute: `cpu`, `cuda`, `cuda:N` or `wgpu`.
    #[arg(long, global = true, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
    /// What models compute in: `f32`, or `bf16` on a GPU, in half the memory. A recipe's
    /// `head.dtype` and `adapter.dtype` say otherwise for a training.
    #[arg(long, global = true, default_value = "f32", value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: WeightDtype,
    /// Seed of every draw; overrides the recipe's.
    #[arg(long, global = true)]
    seed: Option<u64>,
    /// No progress and no notes on stderr, only errors.
    #[arg(long, short, global = true)]
    quiet: bool,
    /// One JSON document on stdout instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// Tell at the end how many kernels a device was asked to run.
    #[arg(long, global = true, conflicts_with = "quiet")]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every stage the recipe has, skipping finished ones.
    Run(TrainingArguments),
    /// Generate responses with the target and label them with the draft.
    BuildData(BuildDataArguments),
    /// Train an acceptance head on the built data.
    TrainHead(ReadingData<TrainingArguments>),
    /// Train self-draft adapters on the built data, with their acceptance heads where the recipe
    /// has them.
    TrainAdapter(ReadingData<TrainingArguments>),
    /// Count which token most often follows each, for prompt lookup to go on with.
    TrainBigram(ReadingData<TrainBigramArguments>),
    /// Record what drafters propose along responses, so that stop rules can be replayed without
    /// models.
    Record(ReadingData<RecipeArguments>),
    /// Measure plain decoding against drafting with the draft, its head and the adapters.
    Evaluate(RecipeArguments),
    /// Generate text with one model, with a target and its draft, with a model and its adapter, or
    /// with a model and prompt lookup.
    Generate(Box<GenerateArguments>),
    /// Tell whether speculation is worth it for a target and a draft, or for a target alone, before
    /// anything is trained.
    Survey(SurveyArguments),
    /// Measure costs here, replay all stop rules, and write the best into what was trained.
    Tune(ReadingData<TuneArguments>),
    /// Show what every stop rule would do on the test prompts, from their recordings.
    Replay(ReadingData<RecipeArguments>),
    /// Check that a head or adapter may be served: output and promises hold.
    Check(CheckArguments),
    /// Write what was trained in a form that another runtime loads.
    Export(ExportArguments),
    /// Read a head, an adapter or data of the methods' authors, and write it as ours.
    Import(ImportArguments),
    /// Explain a model, a head, an adapter, a dataset, rollouts or results.
    Inspect {
        /// A model, head or adapter directory, a data directory or Parquet file, or results.json.
        path: PathBuf,
        #[command(flatten)]
        page: PageArguments,
    },
}

impl Command {
    /// What is left of its work where it was stopped before its end.
    fn what_is_left(&self) -> &'static str {
        match self {
            Self::Run(_)
            | Self::BuildData(_)
            | Self::TrainHead(_)
            | Self::TrainAdapter(_)
            | Self::Record(_) => "what is done is kept: run the same command again to resume",
            Self::Evaluate(_) => "what was measured is written, and would be measured again",
            _ => "nothing of it is kept, and the same command begins anew",
        }
    }
}

#[derive(Debug, Args)]
struct RecipeArguments {
    /// The recipe, a TOML file.
    recipe: PathBuf,
    /// Override a key, as in `--set head.num_layers=2`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Stop at the first malformed record of a prompt file, as `data.strict` does; else it is told and
    /// skipped.
    #[arg(long)]
    strict: bool,
}

/// Arguments of `build-data`.
#[derive(Debug, Args)]
struct BuildDataArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Build every n-th shard from the i-th on, counted from 0, beside others that build the rest; by
    /// default as tasks of Slurm arrays and pods of indexed Kubernetes jobs are numbered.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Build shards again that are not what was written.
    #[arg(long)]
    repair: bool,
}

/// Arguments of `train-bigram`.
#[derive(Debug, Args)]
struct TrainBigramArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    #[command(flatten)]
    counted: BigramArguments,
}

/// Arguments of `tune`.
#[derive(Debug, Args)]
struct TuneArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Price adapters as draft models of their own, as `export --for draft-model` makes them, under
    /// the rules that runtimes have.
    #[arg(long = "for", value_name = "FORM")]
    form: Option<TunedForm>,
    /// What forwards cost in the runtime that is going to serve it, instead of the recipe's
    /// `[tune.costs]` or what they cost here: a TOML file with the keys of that table.
    #[arg(long, value_name = "FILE", requires = "form")]
    costs: Option<PathBuf>,
}

/// What else an adapter may be served as.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum TunedForm {
    /// A draft model.
    DraftModel,
}

/// Arguments of commands that train.
#[derive(Debug, Args)]
struct TrainingArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Where to train: a device, or several GPUs that share each step's batches, as in
    /// `--devices cuda:0,cuda:1`; other stages of `run` use the first.
    #[arg(long, value_name = "DEVICES", conflicts_with = "device")]
    devices: Option<DeviceChoices>,
    /// Stop after so many optimiser steps of this run, over all that it trains; run again to resume.
    #[arg(long, value_name = "N")]
    steps: Option<NonZeroUsize>,
    /// Stop after so many hours, as in `--hours 0.5`; run again to resume.
    #[arg(long, value_name = "H", value_parser = hours)]
    hours: Option<Duration>,
}

/// Arguments of commands that read what build-data wrote.
#[derive(Debug, Args)]
struct ReadingData<T: Args> {
    #[command(flatten)]
    arguments: T,
    /// Take the data as far as it is built; what is trained on it says so.
    #[arg(long)]
    incomplete_data: bool,
}

impl<T: Args> ReadingData<T> {
    fn incomplete(&self) -> Incomplete {
        if self.incomplete_data { Incomplete::Allowed } else { Incomplete::Refused }
    }
}

/// Hours as a time.
fn hours(text: &str) -> Result<Duration, String> {
    let hours: f64 = text.parse().map_err(|_| "expected a number of hours".to_owned())?;
    let time = Duration::try_from_secs_f64(hours * 3600.0).ok();
    time.filter(|time| !time.is_zero()).ok_or_else(|| "expected hours above 0".to_owned())
}

/// Parses the command line, runs the command, and reports what went wrong: exit code 0 for success,
/// 1 for a failure, 2 for a command line that cannot be understood; for a job that was stopped before
/// its end 130, or by SIGTERM 143 and by SIGHUP 129.
pub fn run() -> ExitCode {
    hook_panics();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return explain(&error),
    };
    let Common { quiet, json, verbose, .. } = arguments.common;
    let console = match Console::new(quiet, json) {
        Ok(console) => console,
        Err(error) => return fail(&error, json),
    };
    let kernels = verbose.then(Kernels::count);
    let what_is_left = arguments.command.what_is_left();
    let done = execute(arguments, &console);
    if let Some(kernels) = kernels {
        console.note(format!(
            "{} kernels, each compiled or read from a cache",
            kernels.num_distinct()
        ));
    }
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => {
            // Not what it was in the middle of, which may sound like a failure.
            tell(format!("{Interrupted}; {what_is_left}"));
            ExitCode::from(console.stopped_code())
        }
        // A failed check has given its reasons in its own document.
        Err(error) => fail(&error, json && !error.is::<CheckFailed>()),
    }
}

/// Tells what went wrong, as a document too where there is none yet.
fn fail(error: &anyhow::Error, document: bool) -> ExitCode {
    let text = describe(error);
    tell(format!("error: {text}"));
    if document {
        put_error(&text);
    }
    ExitCode::FAILURE
}

/// The document of an error.
fn put_error(text: &str) {
    // There is nobody else to tell that nobody could be told.
    let _ = put(&format!("{}\n", serde_json::json!({ "error": text })));
}

/// Shows the help or the version that was asked for, or what is wrong with the command line.
fn explain(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    if error.use_stderr() {
        // The flag is there to be read, though the line as a whole is not.
        if std::env::args_os().take_while(|given| given != "--").any(|given| given == "--json") {
            put_error(&usage_problem(error));
        }
        return ExitCode::from(2);
    }
    match reader_of(printed) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => fail(&error, false),
    }
}

/// What clap finds wrong, on one line and without the usage.
fn usage_problem(error: &clap::Error) -> String {
    if matches!(
        error.kind(),
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        return "no command is given; hint: `draftsmith --help` lists them".to_owned();
    }
    let text = error.render().to_string();
    let problem = text.split("\n\nUsage:").next().unwrap_or(&text);
    let problem = problem.split("\n\nFor more information").next().unwrap_or(problem);
    let words: Vec<&str> = problem.trim_start_matches("error: ").split_whitespace().collect();
    words.join(" ")
}

fn execute(arguments: Arguments, console: &Console) -> Result<()> {
    let Arguments { common, command } = arguments;
    let dtype = common.dtype;
    let recipe = |arguments: &RecipeArguments| -> Result<Recipe> {
        let overrides = Overrides {
            keys: &arguments.overrides,
            seed: common.seed,
            dtype,
            is_strict: arguments.strict,
        };
        Recipe::read(&arguments.recipe, &overrides)
    };
    let in_dtype = |device: Device| -> Result<Device> {
        require_dtype(&device, DtypeSource::Flag, dtype)?;
        Ok(device)
    };
    let device = || in_dtype(devices::open(common.device, console)?);
    let devices = |a: &TrainingArguments| match &a.devices {
        Some(devices) => devices.open(console)?.into_iter().map(in_dtype).collect(),
        None => Ok(vec![device()?]),
    };
    let until = |a: &TrainingArguments| match a.hours {
        Some(time) => console.clone().stopping_after(time),
        None => console.clone(),
    };
    let workspace = |recipe: &Recipe, devices: Vec<Device>, incomplete: Incomplete| {
        let Models { target, draft, small_draft, chat_template, .. } = &recipe.models;
        let template = chat_template.as_deref();
        let draft = draft.as_deref();
        let workspace = match recipe.target_elsewhere() {
            Some(server) => {
                let target = (&**target, &*server.model);
                let served = Workspace::open_served(target, draft, template, devices, console)?;
                served.with_first_layers(recipe.num_first_layers())
            }
            None => Workspace::open(target, draft, template, devices, console)?,
        };
        let workspace = workspace.with_small_draft(small_draft.as_deref())?;
        let workspace = workspace.ending(recipe.models.ends());
        anyhow::Ok(workspace.computing_in(dtype).with_incomplete_data(incomplete))
    };
    let stage =
        |a: &RecipeArguments, incomplete: Incomplete| -> Result<(Recipe, Workspace, RecipeLock)> {
            let recipe = recipe(a)?;
            let lock = RecipeLock::take(&recipe)?;
            let workspace = workspace(&recipe, vec![device()?], incomplete)?;
            Ok((recipe, workspace, lock))
        };
    let training = |a: &TrainingArguments, incomplete: Incomplete| -> Result<Training> {
        let recipe = recipe(&a.recipe)?;
        let lock = RecipeLock::take(&recipe)?;
        let workspace = workspace(&recipe, devices(a)?, incomplete)?;
        let steps_left = a.steps.map(NonZeroUsize::get);
        Ok(Training { recipe, workspace, steps_left, console: until(a), _lock: lock })
    };
    match command {
        Command::Run(a) => {
            let Training { recipe, workspace, mut steps_left, console, _lock } =
                training(&a, Incomplete::Refused)?;
            commands::run::run(&recipe, &workspace, &mut steps_left, &console)
        }
        Command::BuildData(a) => {
            let recipe = recipe(&a.recipe)?;
            let building = Building { shard: shard(a.shard, console)?, repairs: a.repair };
            let is_part = building.shard.is_part();
            let take = if is_part { RecipeLock::share } else { RecipeLock::take };
            let _lock = take(&recipe)?;
            let workspace = workspace(&recipe, vec![device()?], Incomplete::Refused)?;
            commands::build_data::run(&recipe, building, &workspace, console).map(drop)
        }
        Command::TrainHead(a) => {
            let Training { recipe, workspace, mut steps_left, console, _lock } =
                training(&a.arguments, a.incomplete())?;
            commands::train_head::run(&recipe, &workspace, &mut steps_left, &console).map(drop)
        }
        Command::TrainAdapter(a) => {
            let Training { recipe, workspace, mut steps_left, console, _lock } =
                training(&a.arguments, a.incomplete())?;
            commands::train_adapter::run(&recipe, &workspace, &mut steps_left, &console).map(drop)
        }
        Command::TrainBigram(a) => {
            let TrainBigramArguments { recipe, counted } = &a.arguments;
            let (recipe, workspace, _lock) = stage(recipe, a.incomplete())?;
            commands::train_bigram::run(counted, &recipe, &workspace, console)
        }
        Command::Record(a) => {
            let (recipe, workspace, _lock) = stage(&a.arguments, a.incomplete())?;
            on_pool(|| commands::record::run(&recipe, &workspace, console)).map(drop)
        }
        Command::Evaluate(a) => {
            let (recipe, workspace, _lock) = stage(&a, Incomplete::Refused)?;
            on_pool(|| commands::evaluate::run(&recipe, &workspace, console)).map(drop)
        }
        Command::Generate(a) => {
            let (seed, device) = (common.seed.unwrap_or(0), device()?);
            on_pool(|| commands::generate::run(&a, seed, &device, dtype, console))
        }
        Command::Survey(a) => {
            let (seed, device) = (common.seed.unwrap_or(0), device()?);
            on_pool(|| commands::survey::run(&a, seed, &device, dtype, console))
        }
        Command::Tune(a) => {
            let costs = a.arguments.costs.as_deref().map(GivenCosts::read).transpose()?;
            let (recipe, workspace, _lock) = stage(&a.arguments.recipe, a.incomplete())?;
            on_pool(|| match a.arguments.form {
                None => commands::tune::run(&recipe, &workspace, console).map(drop),
                Some(TunedForm::DraftModel) => commands::tune::run_for_draft_model(
                    &recipe,
                    &workspace,
                    costs.as_ref(),
                    console,
                ),
            })
        }
        Command::Replay(a) => {
            let recipe = recipe(&a.arguments)?;
            // It computes with no model, and `--dtype` says of which it reads what was recorded.
            let _lock = RecipeLock::take(&recipe)?;
            let workspace = workspace(&recipe, vec![DeviceChoice::Cpu.open()?], a.incomplete())?;
            commands::replay::run(&recipe, &workspace, console).map(drop)
        }
        Command::Check(a) => {
            let device = device()?;
            on_pool(|| commands::check::run(&a, common.seed, &device, dtype, console))
        }
        Command::Export(a) => commands::export::run(&a, &device()?, console),
        Command::Import(a) => match a.data_recipe(common.seed, dtype)? {
            None => commands::import::run(&a, console),
            Some(recipe) => {
                let _lock = RecipeLock::take(&recipe)?;
                let workspace = workspace(&recipe, vec![device()?], Incomplete::Refused)?;
                commands::build_data::run(&recipe, Building::ALL, &workspace, console).map(drop)
            }
        },
        Command::Inspect { path, page } => commands::inspect::run(&path, Some(&page), console)
            .with_context(|| format!("cannot inspect `{}`", path.display())),
    }
}

/// The shard that was given, or else the one that the environment says.
fn shard(given: Option<Shard>, console: &Console) -> Result<Shard> {
    if let Some(shard) = given {
        return Ok(shard);
    }
    let Some((shard, variable)) = Shard::of_environment(|name| std::env::var(name).ok())? else {
        return Ok(Shard::WHOLE);
    };
    console.note(format!("build-data: shard {shard}, of `{variable}`"));
    Ok(shard)
}

/// What a command that trains works with.
struct Training {
    recipe: Recipe,
    workspace: Workspace,
    steps_left: Option<usize>,
    console: Console,
    /// Held by all stages of a run together.
    _lock: RecipeLock,
}

/// Keeps off stderr the panics of libraries that `draftsmith-data` catches, where a file is corrupt,
/// and turns into errors that name the file. Those of the dashboard, where its
/// terminal was closed, go nowhere, and training goes on.
fn hook_panics() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        leave_closed_terminals();
        if !is_panic_caught() {
            hook(info);
        }
    }));
}

/// An error and its causes on one line, each cause once.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
