//! The same training in torch:
//! `cargo bench -p xtask --bench parity -- --python PATH --data DIR
//! --target DIR --draft DIR`. `../README.md` says what is compared and how.
//!
//! The bench writes down the input of our trainer (every step's batches with their mixtures and labels, the
//! rows held out, the initial weights) and trains; `parity.py` then trains the same in torch. The exit code
//! is 1 if one of the first losses differs.

#[path = "../../../draftsmith-cli/src/allocator.rs"]
mod allocator;
mod trainings;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::{Parser, ValueEnum};
use draftsmith_data::{Incomplete, ResponseRow, read_dir};
use draftsmith_model::{AdapterConfig, CausalLm, WeightDtype};
use draftsmith_train::{
    AdapterTraining, Clipping, HeadTraining, OptimizerSettings, Schedule, StepExamples,
    TrainingRun, first_head, first_self_draft, head_examples, self_draft_examples, train_heads,
    train_self_drafts,
};
use serde::Deserialize;
use serde_json::{Value, json};

use self::trainings::{adapter_training, head_training};

/// The largest number of threads on either side.
const NUM_THREADS: usize = 2;
/// The number of first losses that must be equal.
const NUM_EQUAL: usize = 20;
/// The largest difference between equal losses.
const TOLERANCE: f64 = 1e-3;

/// Compares our training with the same training in torch.
#[derive(Debug, Parser)]
struct Arguments {
    /// A Python with torch, transformers, safetensors, numpy and pyarrow.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// The recipe whose first draft model gives the head's training, and first adapter the adapter's.
    #[arg(long, value_name = "FILE", default_value = "recipes/tiny.toml")]
    recipe: PathBuf,
    /// Directory of its data.
    #[arg(long, value_name = "DIR", default_value = "data/tiny")]
    data: PathBuf,
    /// Directory of the adapter's target.
    #[arg(long, value_name = "DIR", default_value = "checkpoints/tiny/target")]
    target: PathBuf,
    /// Directory of the head's draft.
    #[arg(long, value_name = "DIR", default_value = "checkpoints/tiny/draft")]
    draft: PathBuf,
    /// Train only the head or only the adapter.
    #[arg(long)]
    only: Option<What>,
    /// Number of trainings on each side.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// An argument that cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    Head,
    Adapter,
}

/// One side's training.
#[derive(Debug, Deserialize)]
struct Training {
    /// The loss of each step.
    losses: Vec<f64>,
    /// The validation score after each epoch: a head's KL divergence, an adapter's cross-entropy.
    validation: Vec<f64>,
    /// The number of tokens trained on.
    num_tokens: usize,
    seconds: f64,
    /// The number of threads; for torch the faster of 1 and 2.
    #[serde(default)]
    num_threads: usize,
    #[serde(default)]
    torch: String,
}

/// The settings of one training, for both sides.
struct Task {
    what: What,
    model_dir: PathBuf,
    steps: Vec<StepExamples>,
    settings: Value,
    /// The adapter's exit layer.
    exit_layer: usize,
}

fn main() -> Result<ExitCode> {
    // `cargo test --benches` runs benches too, only to see that they start.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(ExitCode::SUCCESS);
    }
    allocator::keep_freed_pages();
    let arguments = Arguments::parse();
    let Some(python) = &arguments.python else {
        eprintln!(
            "parity: skipped; hint: `cargo bench -p xtask --bench parity -- --python PATH`, a \
             Python with torch, transformers, safetensors, numpy and pyarrow"
        );
        return Ok(ExitCode::SUCCESS);
    };
    // Cargo runs benches in the crate's directory, but paths start at the repository's root.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let from_root = |path: &Path| root.join(path);
    rayon::ThreadPoolBuilder::new().num_threads(NUM_THREADS).build_global()?;
    let recipe = std::fs::read_to_string(from_root(&arguments.recipe))
        .with_context(|| format!("cannot read `{}`", arguments.recipe.display()))?;
    let recipe: toml::Table = toml::from_str(&recipe)?;
    let seed = recipe.get("seed").and_then(toml::Value::as_integer).unwrap_or(0) as u64;
    let rows = read_dir(&from_root(&arguments.data), Incomplete::Refused)?.rows;
    let wanted = |what| arguments.only.is_none_or(|only| only == what);
    let mut is_same = true;
    if wanted(What::Head) {
        let training = head_training(&recipe)?;
        let dir = from_root(&arguments.draft);
        is_same &= head(&dir, &rows, &training, seed, python, arguments.rounds)?;
    }
    if wanted(What::Adapter) {
        let training = adapter_training(&recipe)?;
        let dir = from_root(&arguments.target);
        is_same &= adapter(&dir, &rows, &training, seed, python, arguments.rounds)?;
    }
    Ok(if is_same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn head(
    dir: &Path,
    rows: &[ResponseRow],
    training: &HeadTraining,
    seed: u64,
    python: &Path,
    rounds: usize,
) -> Result<bool> {
    let draft = CausalLm::from_model_dir(dir, &Device::flex())?;
    let steps = head_examples(&draft, rows, training, seed)?;
    let settings = for_torch(json!(training), &steps, &training.optimizer)?;
    let task =
        Task { what: What::Head, model_dir: dir.to_path_buf(), steps, settings, exit_layer: 0 };
    let place = tempfile::tempdir()?;
    let (config, first) = first_head(&draft, training, seed);
    first.write_dir(&place.path().join("first"), &config)?;
    let ours = |state: &Path| -> Result<Training> {
        let begun = Instant::now();
        let heads = std::slice::from_ref(training);
        let trained = train_heads(&draft, rows, heads, seed, TrainingRun::new(state, ""))?;
        let seconds = begun.elapsed().as_secs_f64();
        let trained =
            trained.best().and_then(|mut all| all.pop()).context("nothing was trained")?;
        Ok(Training {
            losses: step_losses(state)?,
            validation: trained.epochs.iter().map(|epoch| epoch.validation.kl).collect(),
            num_tokens: trained.num_supervised,
            seconds,
            num_threads: NUM_THREADS,
            torch: String::new(),
        })
    };
    compare(&task, place.path(), python, rounds, ours)
}

fn adapter(
    dir: &Path,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
    python: &Path,
    rounds: usize,
) -> Result<bool> {
    let target = CausalLm::from_model_dir(dir, &Device::flex())?;
    let exit_layer = training.exit_layer;
    let steps = self_draft_examples(&target, rows, training, seed)?;
    let settings = for_torch(json!(training), &steps, &training.common.optimizer)?;
    let task =
        Task { what: What::Adapter, model_dir: dir.to_path_buf(), steps, settings, exit_layer };
    let place = tempfile::tempdir()?;
    let (config, first) = first_self_draft(&target, training, seed)?;
    // The initial weights.
    let config = AdapterConfig { dtype: WeightDtype::F32, ..config };
    first.write_dir(&place.path().join("first"), &config)?;
    let ours = |state: &Path| -> Result<Training> {
        let begun = Instant::now();
        let (trainings, run) = (std::slice::from_ref(training), TrainingRun::new(state, ""));
        let trained = train_self_drafts(&target, rows, trainings, seed, run)?;
        let seconds = begun.elapsed().as_secs_f64();
        let trained =
            trained.best().and_then(|mut all| all.pop()).context("nothing was trained")?;
        Ok(Training {
            losses: step_losses(state)?,
            validation: trained.epochs.iter().map(|epoch| epoch.validation.cross_entropy).collect(),
            num_tokens: trained.num_supervised,
            seconds,
            num_threads: NUM_THREADS,
            torch: String::new(),
        })
    };
    compare(&task, place.path(), python, rounds, ours)
}

/// Trains on both sides in turn, prints the comparison, and returns whether the first losses are equal.
fn compare(
    task: &Task,
    place: &Path,
    python: &Path,
    rounds: usize,
    ours: impl Fn(&Path) -> Result<Training>,
) -> Result<bool> {
    let curriculum = place.join("curriculum.jsonl");
    let mut file = BufWriter::new(File::create(&curriculum)?);
    for step in &task.steps {
        serde_json::to_writer(&mut file, step)?;
        file.write_all(b"\n")?;
    }
    file.into_inner()?;
    let name = match task.what {
        What::Head => "head",
        What::Adapter => "adapter",
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers/parity.py");
    let theirs = || -> Result<Training> {
        let output = Command::new(python)
            .arg(script.as_os_str())
            .args(["--what", name, "--settings", &task.settings.to_string()])
            .arg("--model")
            .arg(&task.model_dir)
            .arg("--curriculum")
            .arg(&curriculum)
            .arg("--first")
            .arg(place.join("first/model.safetensors"))
            .args(["--exit-layer", &task.exit_layer.to_string()])
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stderr(std::process::Stdio::inherit())
            .output()?;
        if !output.status.success() {
            bail!("`parity.py` failed");
        }
        serde_json::from_slice(&output.stdout).context("`parity.py` did not answer")
    };
    let mut is_same = true;
    println!("{name}: {} steps", task.steps.iter().filter(|step| step.epoch > 0).count());
    for round in 0..rounds {
        let (our, their) = (ours(&place.join(format!("state-{round}")))?, theirs()?);
        is_same &= report(&our, &their)?;
    }
    Ok(is_same)
}

/// Prints one round.
fn report(our: &Training, their: &Training) -> Result<bool> {
    if our.losses.len() != their.losses.len() || our.num_tokens != their.num_tokens {
        bail!(
            "the two sides trained on {} and {} tokens in {} and {} steps",
            our.num_tokens,
            their.num_tokens,
            our.losses.len(),
            their.losses.len()
        );
    }
    let off = |num_steps: usize| {
        let pairs = our.losses.iter().zip(&their.losses).take(num_steps);
        pairs.map(|(our, their)| (our - their).abs()).fold(0.0, f64::max)
    };
    let first = off(NUM_EQUAL);
    println!(
        "  losses differ by at most {first:.1e} in the first {NUM_EQUAL} steps (bar {TOLERANCE:.0e}), \
         by {:.1e} in all",
        off(usize::MAX)
    );
    for (epoch, (our, their)) in our.validation.iter().zip(&their.validation).enumerate() {
        let ratio = our / their;
        println!("  epoch {}: validation {our:.5}, theirs {their:.5}: {ratio:.4}x", epoch + 1);
    }
    let rate = |training: &Training| training.num_tokens as f64 / training.seconds;
    println!(
        "  {:.0} tokens/s, theirs {:.0} (torch {}, {} threads): {:.2}x",
        rate(our),
        rate(their),
        their.torch,
        their.num_threads,
        rate(our) / rate(their)
    );
    Ok(first <= TOLERANCE)
}

/// The settings as one flat object, the optimizer's included, with what torch's schedule and clipping need.
fn for_torch(
    mut settings: Value,
    steps: &[StepExamples],
    optimizer: &OptimizerSettings,
) -> Result<Value> {
    let (Schedule::Cosine, Clipping::Norm(max_norm)) = (optimizer.schedule, optimizer.clipping)
    else {
        bail!("torch's side only has the cosine schedule and clipping by norm");
    };
    let num_steps = steps.iter().filter(|step| step.epoch > 0).count();
    if let Value::Object(keys) = json!(optimizer) {
        keys.into_iter().for_each(|(key, value)| settings[key] = value);
    }
    let num_warmup_steps = (optimizer.warmup_ratio * num_steps as f64).ceil() as usize;
    settings["num_warmup_steps"] = json!(num_warmup_steps);
    settings["max_grad_norm"] = json!(max_norm);
    Ok(settings)
}

/// The losses that training logged.
fn step_losses(state: &Path) -> Result<Vec<f64>> {
    #[derive(Deserialize)]
    struct Line {
        loss: f64,
    }
    let text = std::fs::read_to_string(state.join("metrics.jsonl"))?;
    text.lines().map(|line| Ok(serde_json::from_str::<Line>(line)?.loss)).collect()
}
