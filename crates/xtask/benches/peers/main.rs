//! The same work on the same checkpoints with draftsmith and with transformers and torch on this machine:
//! `cargo bench -p xtask --bench peers -- --python PATH`, with `--model DIR` on your model.
//! `../README.md` says what is compared and how.
//!
//! The two sides take turns, several times. A ratio compares two neighbouring runs, so that other load
//! affects both.

#[path = "../../../draftsmith-cli/src/allocator.rs"]
mod allocator;
#[path = "../binary.rs"]
mod binary;
mod ours;
#[path = "../../../draftsmith-data/src/peak.rs"]
mod peak;
mod table;
mod theirs;
mod timed;
mod trainings;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::Parser;
use draftsmith_model::CausalLm;
use serde::Deserialize;
use serde_json::{Value, json};

use self::ours::{Models, Ours};
use self::peak::peak_bytes;
use self::table::{Row, print_table};
use self::theirs::Peer;

/// The largest number of threads on either side.
const NUM_THREADS: usize = 2;
/// The number of candidates a round.
const CANDIDATE_LENGTH: usize = 5;
/// The adapter's exit layer.
const EXIT_LAYER: usize = 2;
/// The number of prompts to decode.
const NUM_PROMPTS: usize = 12;
/// The number of prompts to label: both sides take seconds for them, and two threads can share them.
const NUM_LABEL_PROMPTS: usize = 24;
/// The number of prompts to label with the user's models: as many as one forward serves.
const NUM_MODEL_LABEL_PROMPTS: usize = 16;
/// For the user's model: the lengths of the long prompt that is read and of the short prompt, and the number
/// of tokens decoded after the latter.
const PROMPT_LEN: usize = 1000;
const SHORT_PROMPT_LEN: usize = 16;
const NUM_DECODED: usize = 64;
/// The share of processor time that other processes may use before a comparison means little: a thread that
/// waits for another one that is not running can slow either side down several times.
const MOST_BUSY: f64 = 0.05;
/// The number of rows in an epoch of an adapter or a block drafter.
const NUM_FIRST_ROWS: usize = 128;
/// The number of rows to train on with the user's model.
const NUM_MODEL_ROWS: usize = 48;

/// Compares our speed with transformers and torch.
#[derive(Debug, Parser)]
struct Arguments {
    /// A Python with torch, transformers, safetensors, numpy and pyarrow.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Directory of your model, to read a prompt, decode and train with instead of the embedded pair. It
    /// drafts for itself.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Directory of a draft with the same tokenizer: labels responses with both models and trains nothing.
    #[arg(long, value_name = "DIR", requires = "model")]
    draft: Option<PathBuf>,
    /// The same weights for llama.cpp; the Python needs `llama-cpp-python`.
    #[arg(long, value_name = "FILE", requires = "model")]
    gguf: Option<PathBuf>,
    /// Number of repetitions on each side.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Run only works whose names contain this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// An argument that cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One measurement of a work.
#[derive(Debug, Clone, Deserialize)]
struct Measurement {
    num_tokens: usize,
    seconds: f64,
    /// The prompts, if tokens are compared.
    #[serde(default)]
    prompt_ids: Vec<Vec<u32>>,
    /// The peak memory of its process, if the system reports it.
    #[serde(default)]
    peak_bytes: Option<usize>,
    /// The answers, if tokens are compared.
    #[serde(default)]
    token_ids: Vec<Vec<u32>>,
}

impl Measurement {
    fn of(num_tokens: usize, time: Duration) -> Self {
        let (prompt_ids, token_ids) = (Vec::new(), Vec::new());
        let seconds = time.as_secs_f64();
        Self { num_tokens, seconds, prompt_ids, token_ids, peak_bytes: None }
    }

    fn tokens_per_second(&self) -> f64 {
        self.num_tokens as f64 / self.seconds
    }
}

/// Work that both sides can do.
struct Work<'a> {
    name: &'static str,
    /// The lowest ratio that we promise.
    bar: f64,
    ours: Box<dyn Fn() -> Result<Measurement> + 'a>,
    script: &'static str,
    flags: Vec<String>,
}

fn main() -> Result<()> {
    // `cargo test --benches` runs benches too, only to see that they start.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    allocator::keep_freed_pages();
    let arguments = Arguments::parse();
    let Some(python) = &arguments.python else {
        eprintln!(
            "peers: skipped; hint: `cargo bench -p xtask --bench peers -- --python PATH`, a \
             Python with torch, transformers, safetensors, numpy and pyarrow"
        );
        return Ok(());
    };
    if arguments.rounds == 0 {
        bail!("`--rounds` is 0, expected 1 or more");
    }
    rayon::ThreadPoolBuilder::new().num_threads(NUM_THREADS).build_global()?;
    let busy_before = busy_share();
    // On a pooled thread, as in the commands, so that a second thread shares the prefill.
    let rows = rayon::scope(|_| match &arguments.model {
        Some(dir) => {
            let model = CausalLm::from_model_dir(dir, &Device::flex())?;
            let draft = arguments.draft.as_deref();
            let (names, num_rows): (&[&str], _) = match draft {
                Some(_) => (&[LABELLING], NUM_MODEL_LABEL_PROMPTS),
                None => (&[HEAD_TRAINING, ADAPTER_TRAINING, BLOCK_TRAINING], NUM_MODEL_ROWS),
            };
            let ours = names
                .iter()
                .any(|name| name.contains(&arguments.only))
                .then(|| {
                    eprintln!("peers: building data");
                    Ours::prepare(Models::Own { target: dir, draft }, num_rows)
                })
                .transpose()?;
            let mut works = works_on(&model, dir, arguments.gguf.as_deref());
            match (&ours, draft) {
                (Some(ours), Some(draft)) => {
                    let models = [("model", dir.as_path()), ("draft", draft)];
                    works.push(labelling(ours, NUM_MODEL_LABEL_PROMPTS, &models));
                }
                (Some(ours), None) => {
                    works.extend(trainings(ours, Some(dir), NUM_MODEL_ROWS, 1.2)?);
                }
                (None, _) => {}
            }
            compare_all(works, &arguments, python)
        }
        None => {
            eprintln!("peers: building the data to train on");
            let ours = Ours::prepare(Models::Embedded, NUM_PROMPTS)?;
            compare_all(works(&ours)?, &arguments, python)
        }
    })?;
    print_table(&rows, arguments.rounds);
    let busy = busy_before.into_iter().chain(busy_share()).fold(0.0, f64::max);
    if busy > MOST_BUSY {
        println!(
            "The machine had other work ({:.0} % of its processors): these are no results.",
            busy * 100.0
        );
    }
    Ok(())
}

fn compare_all(works: Vec<Work<'_>>, arguments: &Arguments, python: &Path) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for work in works.iter().filter(|work| work.name.contains(&arguments.only)) {
        let row = compare(work, python, arguments.rounds).with_context(|| work.name)?;
        eprintln!("peers: {}: ratio {:.2}", work.name, row.ratio());
        rows.push(row);
    }
    Ok(rows)
}

/// Command-line arguments of names and values.
fn flags(flags: &[(&str, String)]) -> Vec<String> {
    flags.iter().flat_map(|(name, value)| [format!("--{name}"), value.clone()]).collect()
}

/// The works on the user's model.
fn works_on<'a>(model: &'a CausalLm, dir: &Path, gguf: Option<&Path>) -> Vec<Work<'a>> {
    let answered = |prompt: Vec<u32>, num_tokens, part: fn(&timed::Answer) -> (usize, Duration)| {
        Box::new(move || {
            let answer = timed::answer(model, &prompt, num_tokens)?;
            let (num_tokens, time) = part(&answer);
            Ok(Measurement {
                prompt_ids: vec![prompt.clone()],
                token_ids: vec![answer.token_ids],
                ..Measurement::of(num_tokens, time)
            })
        })
    };
    let mut works = vec![Work {
        name: "a prompt of 1,000 tokens",
        bar: 1.1,
        ours: answered(timed::prompt(PROMPT_LEN), 1, |answer| (PROMPT_LEN, answer.to_first)),
        script: "prefill.py",
        flags: flags(&[
            ("model", dir.display().to_string()),
            ("num-tokens", PROMPT_LEN.to_string()),
        ]),
    }];
    if let Some(gguf) = gguf {
        works.push(Work {
            name: "decoding (llama.cpp)",
            bar: 1.3,
            ours: answered(timed::prompt(SHORT_PROMPT_LEN), NUM_DECODED + 1, |answer| {
                (answer.token_ids.len() - 1, answer.to_last)
            }),
            script: "llama_cpp_decode.py",
            flags: flags(&[
                ("gguf", gguf.display().to_string()),
                ("prompt-len", SHORT_PROMPT_LEN.to_string()),
                ("num-tokens", NUM_DECODED.to_string()),
            ]),
        });
    }
    works
}

/// The works on the embedded pair.
fn works(ours: &Ours) -> Result<Vec<Work<'_>>> {
    let num_prompts = ("num-prompts", NUM_PROMPTS.to_string());
    let mut assisted =
        flags(&[num_prompts.clone(), ("candidate-length", CANDIDATE_LENGTH.to_string())]);
    assisted.push("--assisted".to_owned());
    let mut works = vec![
        Work {
            name: "plain greedy decoding",
            bar: 4.0,
            ours: Box::new(|| ours.plain()),
            script: "decode.py",
            flags: flags(&[num_prompts]),
        },
        Work {
            name: "speculative greedy decoding",
            bar: 4.0,
            ours: Box::new(|| ours.speculative()),
            script: "decode.py",
            flags: assisted,
        },
        labelling(ours, NUM_LABEL_PROMPTS, &[]),
    ];
    works.extend(trainings(ours, None, NUM_FIRST_ROWS, 1.0)?);
    Ok(works)
}

const LABELLING: &str = "labelled responses";

/// Labelled responses to the first prompts, with the embedded pair or with models from directories.
fn labelling<'a>(ours: &'a Ours, num_prompts: usize, models: &[(&str, &Path)]) -> Work<'a> {
    let dirs = models.iter().map(|(name, dir)| (*name, dir.display().to_string()));
    let all = std::iter::once(("num-prompts", num_prompts.to_string())).chain(dirs);
    Work {
        name: LABELLING,
        bar: 4.0,
        ours: Box::new(move || ours.label(num_prompts)),
        script: "label.py",
        flags: flags(&all.collect::<Vec<_>>()),
    }
}

const HEAD_TRAINING: &str = "head training";
const ADAPTER_TRAINING: &str = "adapter training";
const BLOCK_TRAINING: &str = "block training";

/// An epoch of a head over all rows, and an epoch each of an adapter and of a block drafter over the first
/// rows, for the embedded pair or for the model in a directory.
fn trainings<'a>(
    ours: &'a Ours,
    model: Option<&Path>,
    num_first_rows: usize,
    adapter_bar: f64,
) -> Result<[Work<'a>; 3]> {
    // Settings go to the script as JSON with all defaults, which the recipe does not contain.
    let flags = |training: Value, more: &[(&str, String)]| {
        let data = ("data", ours.data_dir().display().to_string());
        let model = model.map(|dir| ("model", dir.display().to_string()));
        let all = [data, ("settings", training.to_string())].into_iter().chain(model);
        flags(&all.chain(more.iter().cloned()).collect::<Vec<_>>())
    };
    let num_rows = ("num-rows", num_first_rows.to_string());
    let of_adapter = [num_rows.clone(), ("exit-layer", EXIT_LAYER.to_string())];
    Ok([
        Work {
            name: HEAD_TRAINING,
            bar: 1.5,
            ours: Box::new(|| ours.train_head()),
            script: "train_head.py",
            flags: flags(json!(ours.head_training()?), &[]),
        },
        Work {
            name: ADAPTER_TRAINING,
            bar: adapter_bar,
            ours: Box::new(move || ours.train_adapter(num_first_rows)),
            script: "train_adapter.py",
            flags: flags(json!(ours.adapter_training()?), &of_adapter),
        },
        Work {
            name: BLOCK_TRAINING,
            bar: 1.5,
            ours: Box::new(move || ours.train_block(num_first_rows)),
            script: "train_block.py",
            flags: flags(json!(ours.block_training()?), &[num_rows]),
        },
    ])
}

/// Runs both sides in turn; each comes first in every other round.
fn compare(work: &Work<'_>, python: &Path, rounds: usize) -> Result<Row> {
    let mut peer = Peer::start(python, work.script, &work.flags)?;
    (work.ours)()?;
    let ours = || {
        forget_peak();
        let measured = (work.ours)()?;
        anyhow::Ok(Measurement { peak_bytes: peak_bytes(), ..measured })
    };
    let mut pairs = Vec::with_capacity(rounds);
    for round in 0..rounds {
        pairs.push(if round % 2 == 0 {
            let our = ours()?;
            (our, peer.measure()?)
        } else {
            let their = peer.measure()?;
            (ours()?, their)
        });
    }
    if pairs.first().is_some_and(|(our, their)| our.prompt_ids != their.prompt_ids) {
        bail!("the two sides encode the prompts differently");
    }
    Ok(Row::new(work.name, work.bar, &pairs, &peer.hello))
}

/// Resets Linux's count of this process's peak memory.
fn forget_peak() {
    // If this fails, the figure covers all works so far.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The share of processor time that is in use during one second, if the system reports it.
fn busy_share() -> Option<f64> {
    let [(busy, all), (later_busy, later_all)] = [Duration::ZERO, Duration::from_secs(1)]
        .map(|wait| {
            std::thread::sleep(wait);
            processor_times()
        })
        .map(|times| times.unwrap_or_default());
    (later_all > all).then(|| (later_busy - busy) as f64 / (later_all - all) as f64)
}

/// Linux's counts of busy ticks and of all ticks since the start.
fn processor_times() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let ticks = text.lines().next()?.split_whitespace().skip(1).map(str::parse);
    let ticks: Vec<u64> = ticks.collect::<Result<_, _>>().ok()?;
    // user, nice, system, idle, iowait, irq, softirq, steal; the first two include guests.
    let all = ticks.iter().take(8).sum();
    Some((all - ticks.get(3)? - ticks.get(4)?, all))
}
