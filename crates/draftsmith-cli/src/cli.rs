//! The command line: parses arguments, sets up each command and reports its outcome.

mod help;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use draftsmith_data::{Incomplete, is_panic_caught};
use draftsmith_model::WeightDtype;
use draftsmith_theory::DrafterId;

use crate::commands::attach_head::ConfidenceArguments;
use crate::commands::build_datastore::DatastoreArguments;
use crate::commands::certify::CertifyArguments;
use crate::commands::check::{CheckArguments, CheckFailed};
use crate::commands::costs::CostsArguments;
use crate::commands::doctor::DoctorArguments;
use crate::commands::explain::ExplainArguments;
use crate::commands::export::ExportArguments;
use crate::commands::generate::GenerateArguments;
use crate::commands::import::ImportArguments;
use crate::commands::inspect::PageArguments;
use crate::commands::survey::SurveyArguments;
use crate::commands::train_bigram::BigramArguments;
use crate::commands::tune::servers::LoadArguments;
use crate::commands::{self, DeviceJob, StageJob};
use crate::console::Console;
use crate::console::streams::{eprint_line, is_read_after, leave_closed_terminals, put};
use crate::devices::{self, parse_devices};
use crate::lock::RecipeLock;
use draftsmith_recipe::device::parse_dtype;
use draftsmith_recipe::{
    DeviceChoice, DtypeSource, Interrupted, KernelWatch, NumKernels, Overrides, Recipe, on_pool,
    require_dtype,
};
use draftsmith_servers::settings::ServerKind;
use draftsmith_tune::build_data::DamagedShards;
use draftsmith_tune::evaluate::papers;
use draftsmith_tune::training::TrainingWatch;

pub use help::command;

/// Trains and measures drafters for speculative decoding.
#[derive(Debug, Parser)]
#[command(name = "draftsmith", version, propagate_version = true)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// Flags of all subcommands.
#[derive(Debug, Args)]
#[command(next_help_heading = "Common options")]
struct Common {
    /// Compute on `cpu`, `cuda[:N]` or `wgpu`.
    #[arg(long, global = true, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Compute in `f32`, or on a GPU in `bf16`.
    #[arg(long, global = true, default_value = "f32", value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: WeightDtype,
    /// Seed of all random draws, instead of the recipe's.
    #[arg(long, global = true, value_name = "N")]
    seed: Option<u64>,
    /// Write no progress and notes to stderr.
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Write one JSON document to stdout instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// Also say how many kernels were compiled and launched.
    #[arg(long, global = true, conflicts_with = "quiet")]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run all stages of a recipe, skipping finished ones.
    Run(RunArguments),
    /// Generate responses with the target and label them.
    BuildData(BuildDataArguments),
    /// Train acceptance heads, which end a round in time.
    TrainHead(ReadingData<DrafterTraining>),
    /// Train adapters, EAGLE-3, block drafters.
    #[command(visible_alias = "train-adapter")]
    TrainDrafter(ReadingData<DrafterTraining>),
    /// Train the acceptance head of a block drafter.
    AttachHead(ReadingData<OfRecipe<ConfidenceArguments>>),
    /// Count which token follows which, for prompt lookup.
    TrainBigram(ReadingData<OfRecipe<BigramArguments>>),
    /// Index earlier answers for prompt lookup.
    BuildDatastore(ReadingData<OfRecipe<DatastoreArguments>>),
    /// Record what drafters propose along responses.
    Record(ReadingData<RecipeArguments>),
    /// Measure the speed of drafters beside plain decoding.
    Evaluate(RecipeArguments),
    /// Generate text with a target, and a drafter if you like.
    Generate(Box<GenerateArguments>),
    /// Estimate before training whether speculation pays.
    Survey(Box<SurveyArguments>),
    /// Choose the fastest stop rule by costs and recordings.
    Tune(ReadingData<TuneArguments>),
    /// Show how all stop rules do on recorded test prompts.
    Replay(ReadingData<RecipeArguments>),
    /// Check that a head or adapter is fit to serve.
    Check(CheckArguments),
    /// Time, certify or advise a server that you run.
    #[command(subcommand)]
    Server(ServerCommand),
    /// Write a head, adapter or data for another runtime.
    Export(ExportArguments),
    /// Convert heads, adapters or data of methods' authors.
    Import(ImportArguments),
    /// Show what a model, head, data or results contain.
    Inspect {
        /// A model, head, adapter, training or data directory, a Parquet file or results.json.
        path: PathBuf,
        #[command(flatten)]
        page: PageArguments,
    },
    /// Compare two evaluations, or two trainings.
    Report {
        /// A directory that `evaluate` wrote, or its results.json, or a training's directory.
        first: PathBuf,
        /// Another, which is compared with the first.
        second: PathBuf,
    },
    /// Print the completions of a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Commands for a running server.
#[derive(Debug, Subcommand)]
enum ServerCommand {
    /// Measure a running server's rounds by load.
    Costs(CostsArguments),
    /// Test whether a server's output is its target's.
    Certify(CertifyArguments),
    /// Say what servers will do with anyone's drafter.
    Doctor(DoctorArguments),
    /// Say why a server accepts as much of a drafter as it does.
    Explain(ExplainArguments),
    /// Prove a server's hidden states before a training.
    States(RecipeArguments),
}

impl Command {
    /// Says what an interrupted command keeps, and whether running it again resumes it.
    fn what_is_left(&self) -> &'static str {
        match self {
            Self::Run(_)
            | Self::BuildData(_)
            | Self::TrainHead(_)
            | Self::TrainDrafter(_)
            | Self::Record(_) => "progress is kept: run the same command again to resume",
            Self::Evaluate(_) => {
                "finished measurements are kept: run the same command again to measure the rest"
            }
            _ => "nothing is kept; running it again starts over",
        }
    }
}

#[derive(Debug, Args)]
struct RecipeArguments {
    /// The recipe, a TOML file.
    recipe: PathBuf,
    /// Override a key, as in `--set evaluate.num_prompts=20`; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Fail at the first malformed record of a prompt file instead of skipping it.
    #[arg(long)]
    strict: bool,
}

/// Arguments of `build-data`.
#[derive(Debug, Args)]
struct BuildDataArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Build damaged shards again.
    #[arg(long)]
    repair: bool,
}

/// The arguments of a command for a recipe, and its own.
#[derive(Debug, Args)]
struct OfRecipe<T: Args> {
    #[command(flatten)]
    recipe: RecipeArguments,
    #[command(flatten)]
    own: T,
}

/// Arguments of `tune`.
#[derive(Debug, Args)]
struct TuneArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Write settings for a server: `llama.cpp`, `vllm`, `sglang` or `trtllm`.
    #[arg(long = "for", value_name = "FORM", value_parser = ServerKind::NAMES, hide_possible_values = true)]
    form: Option<String>,
    /// The server's rounds, as `server costs` measured them.
    #[arg(long, alias = "costs", value_name = "FILE", requires = "form")]
    server_costs: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArguments,
}

/// Arguments of commands that train.
#[derive(Debug, Args)]
struct TrainingArguments {
    #[command(flatten)]
    recipe: RecipeArguments,
    /// Train on these devices, as in `cuda:0,cuda:1`; other stages use the first.
    #[arg(long, value_name = "DEVICES", conflicts_with = "device", value_parser = parse_devices)]
    // By its full path, clap takes the list as one value.
    devices: Option<std::vec::Vec<DeviceChoice>>,
    /// Stop after N optimizer steps of all trainings; run again to resume.
    #[arg(long, value_name = "N")]
    steps: Option<NonZeroUsize>,
    /// Stop after H hours, as in `--hours 0.5`; run again to resume.
    #[arg(long, value_name = "H", value_parser = hours)]
    hours: Option<Duration>,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
struct RunArguments {
    #[command(flatten)]
    training: TrainingArguments,
    /// Only print weights, disk, memory, tokens and hours, by `config.json`.
    #[arg(long)]
    dry: bool,
}

/// Arguments of commands that train drafters.
#[derive(Debug, Args)]
struct DrafterTraining {
    #[command(flatten)]
    training: TrainingArguments,
    /// The drafter to train, by its name in the recipe; all if absent.
    drafter: Option<DrafterId>,
}

/// Arguments of commands that read built data.
#[derive(Debug, Args)]
struct ReadingData<T: Args> {
    #[command(flatten)]
    arguments: T,
    /// Use the shards built so far; exports record that the data was incomplete.
    #[arg(long)]
    incomplete_data: bool,
}

impl<T: Args> ReadingData<T> {
    fn incomplete(&self) -> Incomplete {
        if self.incomplete_data { Incomplete::Allowed } else { Incomplete::Refused }
    }
}

/// Parses a positive number of hours.
fn hours(text: &str) -> Result<Duration, String> {
    let hours: f64 = text.parse().map_err(|_| "expected a number of hours".to_owned())?;
    let time = Duration::try_from_secs_f64(hours * 3600.0).ok();
    time.filter(|time| !time.is_zero())
        .ok_or_else(|| "expected a positive number of hours".to_owned())
}

/// Parses the command line, runs the command and reports errors. The exit code is 0 for success, 1 for a
/// failure, 2 for an invalid command line, and for an interrupted job 130 (SIGTERM 143, SIGHUP 129).
pub fn run() -> ExitCode {
    hook_panics();
    let matches = command().try_get_matches();
    let arguments = match matches.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(arguments) => arguments,
        Err(mut error) => {
            tip(&mut error);
            return explain(&error);
        }
    };
    let Common { quiet, json, verbose, .. } = arguments.common;
    let console = match Console::new(quiet, json) {
        Ok(console) => console,
        Err(error) => return fail(&error, json),
    };
    let kernels = KernelWatch::begin(verbose, move |line| {
        if !quiet {
            eprint_line(line);
        }
    });
    let what_is_left = arguments.command.what_is_left();
    let done = execute(arguments, &console);
    let NumKernels { distinct, launches } = kernels.num();
    if verbose {
        console.note(format!(
            "{distinct} distinct kernels, each compiled or read from a cache; {launches} launches"
        ));
    }
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => {
            // The error's context would sound like a failure.
            eprint_line(format!("{Interrupted}; {what_is_left}"));
            ExitCode::from(console.stopped_code())
        }
        // A failed check has already written its document.
        Err(error) => match error.downcast_ref::<CheckFailed>() {
            Some(failed) => {
                fail(&error, false);
                ExitCode::from(failed.code)
            }
            None => fail(&error, json),
        },
    }
}

/// Prints an error, with `--json` also as a document.
fn fail(error: &anyhow::Error, document: bool) -> ExitCode {
    let text = describe(error);
    eprint_line(format!("error: {text}"));
    if document {
        put_error(&text);
    }
    ExitCode::FAILURE
}

/// Writes an error's JSON document.
fn put_error(text: &str) {
    // There is nowhere to report a failure to report.
    let _ = put(&format!("{}\n", serde_json::json!({ "error": text })));
}

const SERVERS: [&str; 4] = ["llama.cpp", "gguf", "sglang", "trtllm"];
const FOR_SERVERS: &str = "servers load the forms `draft-model`, `eagle3` and `dspark`; `export` then prints the conversion to GGUF and \
                           the commands that start servers";

/// Adds a tip to the error of a command of `server` without that word, and of an export that is named after
/// its server.
fn tip(error: &mut clap::Error) {
    let given = |kind| match error.get(kind) {
        Some(ContextValue::String(given)) => given.clone(),
        _ => String::new(),
    };
    let command = given(ContextKind::InvalidSubcommand);
    let is_server = SERVERS.contains(&&*given(ContextKind::InvalidValue));
    let text = if ServerCommand::has_subcommand(&command) {
        format!("a server's command: `draftsmith server {command}`")
    } else if is_server && given(ContextKind::InvalidArg).starts_with("--for") {
        FOR_SERVERS.to_owned()
    } else {
        return;
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![text.into()]));
}

/// Prints the help, the version, or what is wrong with the command line.
fn explain(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    if error.use_stderr() {
        // The command line is invalid, so we look for the flag ourselves.
        if std::env::args_os().take_while(|given| given != "--").any(|given| given == "--json") {
            put_error(&usage_problem(error));
        }
        return ExitCode::from(2);
    }
    match is_read_after(printed) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => fail(&error, false),
    }
}

/// Extracts clap's message on one line, without the usage.
fn usage_problem(error: &clap::Error) -> String {
    if matches!(
        error.kind(),
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        return "no command was given; hint: `draftsmith --help` lists commands".to_owned();
    }
    let text = error.render().to_string();
    let problem = text.split("\n\nUsage:").next().unwrap_or(&text);
    let problem = problem.split("\n\nFor more information").next().unwrap_or(problem);
    let words: Vec<&str> = problem.trim_start_matches("error: ").split_whitespace().collect();
    words.join(" ")
}

fn execute(arguments: Arguments, console: &Console) -> Result<()> {
    let Arguments { common, command } = arguments;
    let setup = CommandSetup { common: &common, console };
    let (seed, dtype) = (common.seed, common.dtype);
    match command {
        Command::Run(a) if a.dry => {
            commands::run::dry::run(&setup.recipe(&a.training.recipe)?, console)
        }
        Command::Run(a) => setup.train(&a.training, Incomplete::Refused, commands::run::run),
        Command::BuildData(a) => {
            let recipe = setup.recipe(&a.recipe)?;
            let rebuilt = if a.repair { DamagedShards::Rebuilt } else { DamagedShards::Refused };
            setup.build_data(&recipe, rebuilt)
        }
        Command::TrainHead(a) => setup.train_drafter(&a, commands::train_head::run),
        Command::TrainDrafter(a) => setup.train_drafter(&a, commands::train_drafter::run),
        Command::AttachHead(a) => {
            let OfRecipe { recipe, own } = &a.arguments;
            setup.run_on_pool(recipe, a.incomplete(), |job| commands::attach_head::run(own, job))
        }
        Command::TrainBigram(a) => {
            let OfRecipe { recipe, own } = &a.arguments;
            setup.run(recipe, a.incomplete(), |job| commands::train_bigram::run(own, job))
        }
        Command::BuildDatastore(a) => {
            let OfRecipe { recipe, own } = &a.arguments;
            setup.run(recipe, a.incomplete(), |job| commands::build_datastore::run(own, job))
        }
        Command::Record(a) => {
            setup.run_on_pool(&a.arguments, a.incomplete(), commands::record::run)
        }
        Command::Evaluate(a) => setup.run_on_pool(&a, Incomplete::Refused, commands::evaluate::run),
        Command::Generate(a) => setup.on_device(|job| commands::generate::run(&a, job)),
        Command::Survey(a) => setup.on_device(|job| commands::survey::run(&a, job)),
        Command::Tune(a) => setup.tune(&a),
        Command::Replay(a) => {
            let recipe = setup.recipe(&a.arguments)?;
            // Replay runs no model. `--dtype` chooses whose recordings it reads.
            let (lock, devices) = (RecipeLock::take(&recipe)?, vec![Device::flex()]);
            setup.run_on(&lock, &recipe, devices, a.incomplete(), commands::replay::run)
        }
        Command::Server(ServerCommand::Costs(a)) => {
            commands::costs::run(&a, seed.unwrap_or(0), console)
        }
        Command::Server(ServerCommand::Certify(a)) => {
            commands::certify::run(&a, seed.unwrap_or(0), console)
        }
        Command::Server(ServerCommand::Doctor(a)) => {
            setup.on_device(|job| commands::doctor::run(&a, job))
        }
        Command::Server(ServerCommand::Explain(a)) => {
            setup.on_device(|job| commands::explain::run(&a, job))
        }
        Command::Server(ServerCommand::States(a)) => {
            setup.run_on_pool(&a, Incomplete::Refused, commands::states::run)
        }
        Command::Check(a) => setup.on_device(|job| commands::check::run(&a, job)),
        Command::Export(a) => setup.on_device(|job| commands::export::run(&a, job)),
        Command::Import(a) => match a.data_recipe(seed, dtype)? {
            None => commands::import::run(&a, console),
            Some(recipe) => setup.build_data(&recipe, DamagedShards::Refused),
        },
        Command::Inspect { path, page } => commands::inspect::run(&path, Some(&page), console)
            .with_context(|| format!("cannot inspect `{}`", path.display())),
        Command::Report { first, second } => commands::report::run([&first, &second], console),
        Command::Completions { shell } => {
            commands::completions::run(shell, &mut help::command(), console)
        }
    }
}

/// Reads recipes, and opens devices and workspaces, by the common flags.
struct CommandSetup<'a> {
    common: &'a Common,
    console: &'a Console,
}

impl CommandSetup<'_> {
    fn recipe(&self, arguments: &RecipeArguments) -> Result<Recipe> {
        let RecipeArguments { recipe, overrides: keys, strict: is_strict } = arguments;
        let Common { seed, dtype, .. } = *self.common;
        let overrides =
            Overrides { keys, seed, dtype, is_strict: *is_strict, ..Overrides::default() };
        let read = Recipe::read(recipe, &overrides)?;
        // The crate of reports knows the keys of papers' tables.
        papers(&read).with_context(|| format!("recipe `{}`", recipe.display()))?;
        Ok(read)
    }

    fn device(&self) -> Result<Device> {
        self.open(self.common.device)
    }

    fn open(&self, choice: DeviceChoice) -> Result<Device> {
        let device = devices::open(choice, self.console)?;
        require_dtype(&device, DtypeSource::Flag, self.common.dtype)?;
        Ok(device)
    }

    /// Runs a job without a recipe, on a thread of the pool.
    fn on_device(&self, job: impl FnOnce(DeviceJob<'_>) -> Result<()> + Send) -> Result<()> {
        let (device, console) = (self.device()?, self.console);
        let Common { seed, dtype, .. } = *self.common;
        on_pool(|| job(DeviceJob { seed, device: &device, dtype, console }))
    }

    /// Runs a job on a recipe's workspace while its lock is held.
    fn run_on<T>(
        &self,
        _lock: &RecipeLock,
        recipe: &Recipe,
        devices: Vec<Device>,
        incomplete: Incomplete,
        job: impl FnOnce(StageJob<'_>) -> Result<T>,
    ) -> Result<()> {
        let served_as = recipe.target_elsewhere().map(|server| &*server.model);
        let mut workspace = recipe.open(served_as, self.common.dtype, devices, self.console)?;
        workspace.artifacts.incomplete_data = incomplete;
        job(StageJob { recipe, workspace: &workspace, console: self.console }).map(drop)
    }

    /// Chooses stop rules for our own decoder, or settings for a server.
    fn tune(&self, a: &ReadingData<TuneArguments>) -> Result<()> {
        let costs = a.arguments.server_costs.as_deref();
        let (recipe, incomplete) = (&a.arguments.recipe, a.incomplete());
        let Some(form) = &a.arguments.form else {
            return self.run_on_pool(recipe, incomplete, commands::tune::run);
        };
        let tuning = a.arguments.load.tuning(form, costs)?;
        self.run_on_pool(recipe, incomplete, |job| {
            commands::tune::servers::run(job.recipe, job.workspace, &tuning, job.console)
        })
    }

    fn run<T>(
        &self,
        arguments: &RecipeArguments,
        incomplete: Incomplete,
        job: impl FnOnce(StageJob<'_>) -> Result<T>,
    ) -> Result<()> {
        let recipe = self.recipe(arguments)?;
        let lock = RecipeLock::take(&recipe)?;
        self.run_on(&lock, &recipe, vec![self.device()?], incomplete, job)
    }

    /// Runs a job that decodes, on a thread of the pool.
    fn run_on_pool<T: Send>(
        &self,
        arguments: &RecipeArguments,
        incomplete: Incomplete,
        job: impl FnOnce(StageJob<'_>) -> Result<T> + Send,
    ) -> Result<()> {
        self.run(arguments, incomplete, |stage| on_pool(|| job(stage)))
    }

    /// Runs a job that trains, within the limits of `--steps` and `--hours`.
    fn train<T>(
        &self,
        arguments: &TrainingArguments,
        incomplete: Incomplete,
        job: impl FnOnce(StageJob<'_>) -> Result<T>,
    ) -> Result<()> {
        let TrainingArguments { recipe, devices, steps, hours } = arguments;
        let recipe = self.recipe(recipe)?;
        let lock = RecipeLock::take(&recipe)?;
        let devices = match devices {
            Some(choices) => {
                choices.iter().map(|choice| self.open(*choice)).collect::<Result<_>>()?
            }
            None => vec![self.device()?],
        };
        self.console.limit_steps(steps.map(NonZeroUsize::get));
        self.run_on(&lock, &recipe, devices, incomplete, |stage| {
            let mut console = stage.console.clone();
            // A time beyond the clock's range sets no deadline.
            console.deadline = hours.and_then(|time| Instant::now().checked_add(time));
            job(StageJob { console: &console, ..stage })
        })
    }

    /// Runs the training of a drafter, or of all.
    fn train_drafter<T>(
        &self,
        arguments: &ReadingData<DrafterTraining>,
        job: impl FnOnce(StageJob<'_>, Option<DrafterId>) -> Result<T>,
    ) -> Result<()> {
        let DrafterTraining { training, drafter } = &arguments.arguments;
        self.train(training, arguments.incomplete(), |stage| job(stage, *drafter))
    }

    fn build_data(&self, recipe: &Recipe, damaged: DamagedShards) -> Result<()> {
        let (lock, devices) = (RecipeLock::take(recipe)?, vec![self.device()?]);
        self.run_on(&lock, recipe, devices, Incomplete::Refused, |stage| {
            commands::build_data::run(stage, damaged)
        })
    }
}

/// Hides library panics that `draftsmith-data` catches and turns into errors naming the corrupt file. The
/// dashboard's panics after its terminal was closed go to `/dev/null`, and training continues.
fn hook_panics() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        leave_closed_terminals();
        if !is_panic_caught() {
            hook(info);
        }
    }));
}

/// Joins an error and its causes into one line, without repetitions, and shortens it if it is too long.
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
    if text.contains("File too large") && !text.contains("hint: ") {
        text += "; hint: raise the limit of file sizes (`ulimit -f`)";
    }
    shortened(text)
}

/// The longest error, in characters. Names and values from files may be of any length.
const LONGEST_ERROR: usize = 2000;

/// Replaces the middle of a text by an ellipsis if it is longer than [`LONGEST_ERROR`].
fn shortened(text: String) -> String {
    let num_chars = text.chars().count();
    if num_chars <= LONGEST_ERROR {
        return text;
    }
    let head: String = text.chars().take(LONGEST_ERROR / 2).collect();
    let tail: String = text.chars().skip(num_chars - LONGEST_ERROR / 4).collect();
    format!("{head} … {tail}")
}
