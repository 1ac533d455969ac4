//! Our side of each work, in this process; `build-data` runs as a process.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::{ChatFormat, Incomplete, Prompts, ResponseRow, TextTokenizer, read_dir};
use draftsmith_decode::{
    Generation, Limits, ModelSession, Request, SeparateDraft, decode_plain, decode_speculative,
};
use draftsmith_model::{CausalLm, HeadForm};
use draftsmith_theory::{Decoding, FixedLengthConfig, SeededDraws};
use draftsmith_train::{
    AdapterTraining, BlockTraining, HeadLabels, HeadTraining, OptimizerSettings, TrainingRun,
    discard, train_heads, train_self_drafts,
};
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

use crate::binary::binary;
use crate::trainings::{adapter_training, head_training};
use crate::{CANDIDATE_LENGTH, EXIT_LAYER, Measurement, NUM_THREADS};

/// The recipe whose prompts, sizes and rates both sides use; `common.py` names it too.
const RECIPE: &str = "recipes/tiny-full.toml";
/// The share that the trainers hold out, as they must. Our time includes it, our tokens do not.
const VALIDATION_FRACTION: f64 = 0.05;

/// The models that are measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Models<'a> {
    /// The embedded pair, with prompts to answer and all the recipe's data.
    Embedded,
    /// A model with its draft, or drafting for itself, with a row for each of the first prompts.
    Own { target: &'a Path, draft: Option<&'a Path> },
}

/// A pair, prompts to answer and rows to train on.
pub(crate) struct Ours {
    root: PathBuf,
    target_dir: PathBuf,
    draft_dir: PathBuf,
    recipe: toml::Table,
    seed: u64,
    target: CausalLm,
    draft: CausalLm,
    limits: Limits,
    prompts: Vec<Vec<u32>>,
    /// The directory with the rows, for the scripts.
    data_dir: PathBuf,
    rows: Vec<ResponseRow>,
    scratch: TempDir,
}

/// The summary that build-data prints.
#[derive(Deserialize)]
struct BuiltData {
    data_dir: PathBuf,
    num_new_tokens: usize,
}

impl Ours {
    /// Loads the pair, encodes the first prompts to be answered, and builds data.
    pub(crate) fn prepare(models: Models<'_>, num_prompts: usize) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
        let recipe: toml::Table = toml::from_str(&std::fs::read_to_string(root.join(RECIPE))?)?;
        let embedded = root.join("checkpoints/tiny");
        let (target_dir, draft_dir) = match models {
            Models::Embedded => (embedded.join("target"), embedded.join("draft")),
            Models::Own { target, draft } => {
                (target.canonicalize()?, draft.unwrap_or(target).canonicalize()?)
            }
        };
        let target = CausalLm::from_model_dir(&target_dir, &Device::flex())?;
        let draft = match models {
            Models::Own { draft: None, .. } => target.clone(),
            _ => CausalLm::from_model_dir(&draft_dir, &Device::flex())?,
        };
        let evaluate = recipe.get("evaluate").context("the recipe has `[evaluate]`")?;
        let eos_token_ids = target.shape().eos_token_ids.clone();
        let limits = Limits::new(number(evaluate, "max_new_tokens")?, eos_token_ids);
        let file =
            evaluate.get("prompts").and_then(|all| all.get(0)).and_then(|file| file.as_str());
        let file = file.context("the recipe has prompts to evaluate with")?;
        let prompts = encode(&target_dir, &root.join(file), num_prompts)?;
        let seed = recipe.get("seed").and_then(toml::Value::as_integer).unwrap_or(0) as u64;
        let scratch = tempfile::tempdir()?;
        let (data_dir, rows) = (PathBuf::new(), Vec::new());
        let mut ours = Self {
            root,
            target_dir,
            draft_dir,
            recipe,
            seed,
            target,
            draft,
            limits,
            prompts,
            data_dir,
            rows,
            scratch,
        };
        let num_rows = matches!(models, Models::Own { .. }).then_some(num_prompts);
        let (built, _) = ours.build_data(num_rows)?;
        ours.rows = read_dir(&built.data_dir, Incomplete::Refused)?.rows;
        ours.data_dir = built.data_dir;
        Ok(ours)
    }

    /// The directory with the rows to train on.
    pub(crate) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Plain greedy decoding.
    pub(crate) fn plain(&self) -> Result<Measurement> {
        let mut target = self.session();
        let mut draws = SeededDraws::new(self.seed, &["greedy"]);
        self.decode(|prompt| {
            let go_on = &mut |_: draftsmith_decode::RoundTokens<'_>| ControlFlow::Continue(());
            let greedy = &Decoding::GREEDY;
            Ok(decode_plain(&mut target, greedy, prompt, &self.limits, &mut draws, go_on)?)
        })
    }

    /// Greedy decoding with the draft.
    pub(crate) fn speculative(&self) -> Result<Measurement> {
        let mut target = self.session();
        let vocab_size = self.target.shape().vocab_size;
        let context = self.draft.shape().context;
        let mut draft = SeparateDraft::new(&self.draft, None, vocab_size, context, 1);
        let mut rule = FixedLengthConfig { candidate_length: CANDIDATE_LENGTH };
        let mut draws = SeededDraws::new(self.seed, &["greedy"]);
        self.decode(|prompt| {
            Ok(decode_speculative(
                &mut target,
                &mut draft,
                Request {
                    prompt,
                    decoding: Decoding::GREEDY,
                    limits: &self.limits,
                    rule: Some(&mut rule),
                    draws: &mut draws,
                },
                &mut |_| ControlFlow::Continue(()),
            )?)
        })
    }

    fn session(&self) -> ModelSession<'_> {
        ModelSession::new(&self.target, self.target.shape().context, "target")
    }

    fn decode(
        &self,
        mut answer: impl FnMut(&[u32]) -> Result<Generation> + Send,
    ) -> Result<Measurement> {
        // On a pooled thread, as in the commands, so that a second thread shares the prefill.
        rayon::scope(|_| {
            let begun = Instant::now();
            let answers: Result<Vec<Vec<u32>>> =
                self.prompts.iter().map(|prompt| Ok(answer(prompt)?.token_ids)).collect();
            let (seconds, token_ids) = (begun.elapsed().as_secs_f64(), answers?);
            let num_tokens = token_ids.iter().map(Vec::len).sum();
            let prompt_ids = self.prompts.clone();
            Ok(Measurement { num_tokens, seconds, token_ids, prompt_ids, peak_bytes: None })
        })
    }

    /// Labelled responses to the first training prompts. The time of the command with nothing left to do,
    /// for its start and loading, is subtracted.
    pub(crate) fn label(&self, num_prompts: usize) -> Result<Measurement> {
        let (built, time) = self.build_data(Some(num_prompts))?;
        let (_, idle) = self.build_data(Some(num_prompts))?;
        std::fs::remove_dir_all(&built.data_dir)?;
        Ok(Measurement::of(built.num_new_tokens, time.saturating_sub(idle)))
    }

    /// Runs build-data in the scratch directory, on the first prompts or on all.
    fn build_data(&self, num_prompts: Option<usize>) -> Result<(BuiltData, Duration)> {
        let path = |path: &str| toml::Value::from(self.root.join(path).display().to_string());
        let mut command = Command::new(binary());
        command
            .current_dir(self.scratch.path())
            .env("RAYON_NUM_THREADS", NUM_THREADS.to_string())
            .args(["--quiet", "--json", "build-data"])
            .arg(self.root.join(RECIPE));
        let mut set = |key: &str, value: toml::Value| {
            command.args(["--set", &format!("{key}={value}")]);
        };
        set("models.target", self.target_dir.display().to_string().into());
        set("drafters.draft.model", self.draft_dir.display().to_string().into());
        set("data.prompts", vec![path("data/tiny/prompts/train.jsonl")].into());
        if let Some(num_prompts) = num_prompts {
            set("name", "label".into());
            set("data.num_prompts", (num_prompts as i64).into());
        }
        let begun = Instant::now();
        let output = command.output()?;
        let time = begun.elapsed();
        if !output.status.success() {
            bail!("build-data failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let mut built: BuiltData = serde_json::from_slice(&output.stdout)?;
        built.data_dir = self.scratch.path().join(built.data_dir);
        Ok((built, time))
    }

    /// Settings of head training: the recipe's sizes and rates with the paper's form, labels and depth, as
    /// on torch's side.
    pub(crate) fn head_training(&self) -> Result<HeadTraining> {
        let mut training = HeadTraining {
            num_layers: 3,
            form: HeadForm::Candidate,
            inputs: Vec::new(),
            labels: HeadLabels::Sampled,
            ..head_training(&self.recipe)?
        };
        one_epoch(&mut training.optimizer);
        Ok(training)
    }

    /// Settings of adapter training.
    pub(crate) fn adapter_training(&self) -> Result<AdapterTraining> {
        let mut training = adapter_training(&self.recipe)?.with(|it| it.exit_layer = EXIT_LAYER);
        one_epoch(&mut training.common.optimizer);
        Ok(training)
    }

    /// Settings of a block drafter's training: the default sizes with the adapter's batches and rate.
    pub(crate) fn block_training(&self) -> Result<BlockTraining> {
        let adapter = self.adapter_training()?.common.optimizer;
        let num_layers = self.target.shape().num_layers;
        let layers = json!([2, num_layers / 2, num_layers - 3]);
        let mut training: BlockTraining = serde_json::from_value(json!({ "layers": layers }))?;
        let optimizer = &mut training.common.optimizer;
        (optimizer.batch_size, optimizer.gradient_accumulation) = (adapter.batch_size, 1);
        optimizer.learning_rate = adapter.learning_rate;
        one_epoch(optimizer);
        Ok(training)
    }

    /// An epoch of a block drafter over the first rows.
    pub(crate) fn train_block(&self, num_rows: usize) -> Result<Measurement> {
        let training = self.block_training()?;
        let dir = self.scratch.path().join("block-training");
        // A completed training in the directory would be resumed with nothing left to do.
        discard(&dir)?;
        let begun = Instant::now();
        let rows = &self.rows[..num_rows.min(self.rows.len())];
        let (trainings, run) = (std::slice::from_ref(&training), run_in(&dir));
        let trained = train_self_drafts(&self.target, rows, trainings, self.seed, run)?;
        let trained = trained.best().context("nothing was trained")?.remove(0);
        Ok(Measurement::of(trained.num_supervised, begun.elapsed()))
    }

    /// An epoch of an acceptance head over all rows.
    pub(crate) fn train_head(&self) -> Result<Measurement> {
        let training = self.head_training()?;
        let dir = self.scratch.path().join("head-training");
        // A completed training in the directory would be resumed with nothing left to do.
        discard(&dir)?;
        let begun = Instant::now();
        let (heads, run) = (std::slice::from_ref(&training), run_in(&dir));
        let trained = train_heads(&self.draft, &self.rows, heads, self.seed, run)?;
        let trained = trained.best().context("nothing was trained")?.remove(0);
        Ok(Measurement::of(trained.num_supervised, begun.elapsed()))
    }

    /// An epoch of an adapter over the first rows.
    pub(crate) fn train_adapter(&self, num_rows: usize) -> Result<Measurement> {
        let training = self.adapter_training()?;
        let dir = self.scratch.path().join("adapter-training");
        // A completed training in the directory would be resumed with nothing left to do.
        discard(&dir)?;
        let begun = Instant::now();
        let rows = &self.rows[..num_rows.min(self.rows.len())];
        let run = run_in(&dir);
        let trained = train_self_drafts(&self.target, rows, &[training], self.seed, run)?;
        let trained = trained.best().context("nothing was trained")?.remove(0);
        Ok(Measurement::of(trained.num_supervised, begun.elapsed()))
    }
}

/// A training on the CPU with a thread for each of a step's batches, as in the commands.
fn run_in(dir: &Path) -> TrainingRun<'_> {
    TrainingRun { more_devices: vec![Device::flex(); NUM_THREADS - 1], ..TrainingRun::new(dir, "") }
}

fn one_epoch(optimizer: &mut OptimizerSettings) {
    optimizer.num_epochs = 1;
    optimizer.validation_fraction = VALIDATION_FRACTION;
}

fn number(section: &toml::Value, key: &str) -> Result<usize> {
    let value = section.get(key).and_then(toml::Value::as_integer);
    Ok(value.with_context(|| format!("the recipe has no number `{key}`"))?.try_into()?)
}

/// The ids of a file's first prompts, through the model's chat template.
fn encode(model: &Path, file: &Path, num_prompts: usize) -> Result<Vec<Vec<u32>>> {
    let tokenizer = TextTokenizer::from_model_dir(model)?;
    let format = ChatFormat::choose(model, None)?;
    Prompts::open(file)?
        .take(num_prompts)
        .map(|prompt| Ok(tokenizer.encode_chat(&format, &prompt?.messages(0, &[]))?))
        .collect()
}
