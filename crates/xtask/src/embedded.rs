//! Makes the embedded default models: writes the prompts, trains the tokenizer, pre-trains the target and two
//! drafts, and measures how often they answer correctly.
//!
//! ```text
//! cargo run --release -p xtask -- embedded prompts
//! cargo run --release -p xtask -- embedded pretrain target 2600
//! cargo run --release -p xtask -- embedded pretrain draft 6000
//! cargo run --release -p xtask -- embedded pretrain draft-small 6000
//! ```

mod corpus;
mod measure;
mod pretrain;
mod tokenizer;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use draftsmith_model::{CausalLm, ModelConfig, ModelShape, WeightDtype};

use pretrain::Pretraining;

/// Seed of the corpus and of everything trained on it.
const SEED: u64 = 20_260;
/// The first index of examples that are never trained on.
const FIRST_UNSEEN: u64 = 1 << 40;
const VOCAB_SIZE: usize = 1024;

/// What to make.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Repository root.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write the prompt sets of `data/tiny/prompts`.
    Prompts,
    /// Print two examples of each kind.
    Samples,
    /// Print the share of correct greedy answers, kind by kind.
    Measure {
        /// The model.
        model: String,
        /// Number of unseen examples.
        #[arg(default_value_t = 400)]
        count: u64,
    },
    /// Train one model: `target`, `draft` or `draft-small`.
    Pretrain {
        /// The model.
        model: String,
        /// Optimizer steps.
        num_steps: usize,
        /// Rows of 192 tokens in a step.
        #[arg(long, default_value_t = 16)]
        batch_size: usize,
        /// Highest learning rate.
        #[arg(long, default_value_t = 3e-3)]
        learning_rate: f64,
        /// Continue with the existing weights, from this example on.
        #[arg(long)]
        continue_from: Option<u64>,
        /// Rows of each batch that repeat random tokens instead of holding examples.
        #[arg(long, default_value_t = 0)]
        repetition_rows: usize,
    },
}

/// Runs it.
pub(crate) fn run(arguments: Arguments) -> Result<()> {
    let root = &arguments.root;
    match arguments.command {
        Command::Prompts => {
            let dir = root.join("data/tiny/prompts");
            std::fs::create_dir_all(&dir)?;
            corpus::write_prompts(
                &dir.join("train.jsonl"),
                SEED,
                FIRST_UNSEEN..FIRST_UNSEEN + 2000,
            )?;
            for (name, first) in [("tune", 5_000), ("test", 10_000)] {
                let first = FIRST_UNSEEN + first;
                corpus::write_prompts(
                    &dir.join(name).with_extension("jsonl"),
                    SEED,
                    first..first + 200,
                )?;
            }
            Ok(())
        }
        Command::Samples => {
            for index in 0..60 {
                let example = corpus::example(SEED, FIRST_UNSEEN + index);
                println!("[{}] {}\n--\n{}\n", example.kind.name(), example.prompt, example.answer);
            }
            Ok(())
        }
        Command::Measure { model, count } => {
            let dir = root.join("checkpoints/tiny").join(model);
            measure::measure(&dir, SEED, FIRST_UNSEEN + 20_000, count)
        }
        Command::Pretrain {
            model,
            num_steps,
            batch_size,
            learning_rate,
            continue_from,
            repetition_rows,
        } => {
            let plan = Pretraining {
                batch_size,
                row_len: 192,
                num_steps,
                learning_rate,
                seed: SEED,
                first_example: continue_from.unwrap_or(0),
                num_repetition_rows: repetition_rows,
            };
            let dir = root.join("checkpoints/tiny").join(&model);
            let device = pretrain::training_device();
            let start = if continue_from.is_some() {
                CausalLm::from_model_dir(&dir, &device)?
            } else {
                device.seed(SEED);
                shape(&model)?.init(&device)
            };
            train(&model, start, &plan, &dir)
        }
    }
}

fn train(name: &str, start: CausalLm, plan: &Pretraining, dir: &Path) -> Result<()> {
    let texts = (0..20_000)
        .map(|index| corpus::example(SEED, index))
        .flat_map(|example| [example.prompt, example.answer]);
    let trained = tokenizer::train(texts, VOCAB_SIZE)?;
    eprintln!("{name}: {} parameters, {plan:?}", start.config().num_parameters());
    tokenizer::write_model_dir_files(dir, &trained)?;
    let save = |model: &CausalLm| {
        model.write_model_dir(dir, WeightDtype::Bf16).map_err(anyhow::Error::from)
    };
    pretrain::pretrain(name, start, &trained, plan, 200, save)?;
    Ok(())
}

/// A deep target, a shallow draft, and a draft of one layer.
fn shape(name: &str) -> Result<ModelConfig> {
    let (hidden_size, num_layers, heads, kv_heads) = match name {
        "target" => (192, 8, 6, 2),
        "draft" => (96, 2, 3, 1),
        "draft-small" => (64, 1, 2, 1),
        other => bail!("`{other}` is none of `target`, `draft`, `draft-small`"),
    };
    Ok(ModelConfig::llama(
        ModelShape {
            vocab_size: VOCAB_SIZE,
            hidden_size,
            num_layers,
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_dim: 32,
            context: 256,
            bos_token_id: Some(0),
            eos_token_ids: vec![1],
        },
        hidden_size * 8 / 3,
    )
    .with_tied_embeddings(true))
}
