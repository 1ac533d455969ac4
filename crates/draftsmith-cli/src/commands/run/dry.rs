//! `run --dry`: computes what a recipe needs before anything is loaded. Of a target on the Hub, only
//! `config.json` is downloaded.

use anyhow::{Context, Result};
use burn::tensor::Device;
use draftsmith_files::in_bytes;
use draftsmith_model::ModelShape;
use draftsmith_recipe::hub::{HubWeights, model_dir};
use draftsmith_recipe::kinds::{KindTraining, TrainingWork};
use draftsmith_recipe::{DataRecipe, Recipe, Workspace, read_sources};
use draftsmith_report::{duration_text, wrapped};
use draftsmith_train::Features;
use serde_json::json;

use crate::console::Console;

/// The assumed length of a prompt in tokens, because no tokenizer is loaded.
const PROMPT_TOKENS: usize = 200;
/// The bytes of a trained weight: itself, its gradient and two moments, each an f32.
const BYTES_PER_TRAINED_WEIGHT: u64 = 16;
/// What our trained and frozen layers reached on an H200 at the shapes of a model of 7 billion weights in bf16, in floating-point
/// operations per second (LOG.md, benches' README).
const TRAINED_FLOPS: f64 = 27e12;
const FROZEN_FLOPS: f64 = 299e12;

/// The tokens of the recipe's data.
struct DataTokens {
    num_prompts: usize,
    of_answer: usize,
    in_answers: usize,
    in_all: usize,
}

/// Prints the weights, disk, memory, tokens and hours of a recipe.
///
/// # Errors
/// If the target's `config.json` cannot be read, or the prompts cannot be counted.
pub(crate) fn run(recipe: &Recipe, console: &Console) -> Result<()> {
    let dir = model_dir(&recipe.models.target, HubWeights::Config, console)?;
    let served_as = recipe.target_elsewhere().map(|server| &*server.model);
    let is_served = served_as.is_some();
    let workspace = Workspace::open(&dir, served_as, &[], None, vec![Device::flex()], console)?;
    let target = workspace.models.target_config()?;
    let num_weights = (!is_served).then(|| target.num_parameters());
    let mut lines = vec![target_line(&target.shape, num_weights)];
    let mut document = json!({ "target": { "num_parameters": num_weights } });
    let tokens = recipe.data.as_ref().map(|data| count_tokens(recipe, data)).transpose()?;
    if let Some(tokens) = &tokens {
        lines.push(format!(
            "data: {} prompts, {} tokens, {} of them in answers (a prompt of {PROMPT_TOKENS} and an answer of {} tokens \
             are assumed)",
            tokens.num_prompts,
            millions(tokens.in_all),
            millions(tokens.in_answers),
            tokens.of_answer
        ));
        document["data"] = json!({
            "num_prompts": tokens.num_prompts,
            "num_tokens": tokens.in_all,
            "num_answer_tokens": tokens.in_answers,
        });
    }
    for (id, training) in recipe.trained_self_drafts() {
        let work = training.work(target).with_context(|| format!("section `[drafters.{id}]`"))?;
        let TrainingNeeds { num_weights: own, disk, seconds } =
            TrainingNeeds::of(training, work, num_weights, tokens.as_ref());
        let memory = own * BYTES_PER_TRAINED_WEIGHT;
        let on_disk = disk.map(|bytes| format!(", hidden states {} on the disk", in_bytes(bytes)));
        let time = seconds.map(|time| format!(", {} of training", duration_text(time)));
        lines.push(format!(
            "`{id}`: {} weights, {} in bf16, {} of memory in training and activations on top{}{}",
            millions(own as usize),
            in_bytes(2 * own),
            in_bytes(memory),
            on_disk.unwrap_or_default(),
            time.unwrap_or_default()
        ));
        document["drafters"][id.as_str()] =
            json!({ "num_parameters": own, "memory": memory, "disk": disk, "seconds": seconds });
    }
    if let Some((id, _)) = recipe.trained_head() {
        lines.push(format!("`{id}`: the time and memory of its head's training are not estimated"));
    }
    lines.push(
        "hours are computed for one H200, without writing the answers, tuning and evaluation"
            .to_owned(),
    );
    for line in lines {
        console.text(wrapped(&line, console.width()).join("\n  ") + "\n")?;
    }
    console.document(&document)
}

/// Describes a target; one on a server has no known number of weights.
fn target_line(shape: &ModelShape, num_weights: Option<usize>) -> String {
    let ModelShape { hidden_size, num_layers, vocab_size, .. } = shape;
    let size = match num_weights {
        Some(num) => format!("{} weights, {} in bf16", millions(num), in_bytes(2 * num as u64)),
        None => "on a server".to_owned(),
    };
    format!("target: {size}; {num_layers} layers of width {hidden_size}, {vocab_size} tokens")
}

/// Counts the tokens of the data. Without the prompt files, `data.num_prompts` of each are assumed.
fn count_tokens(recipe: &Recipe, data: &DataRecipe) -> Result<DataTokens> {
    let is_shared = data.prompts.iter().any(|source| source.weight.is_some());
    let paths: Vec<_> = data.prompts.iter().map(|source| source.path.clone()).collect();
    let limit = data.num_prompts.filter(|_| !is_shared);
    let (num_prompts, num_turns) =
        match (read_sources(&paths, &recipe.reading(data.split)), data.num_prompts) {
            (Ok(sources), _) => {
                let nums = sources.iter().map(|source| source.num_turns(limit));
                nums.fold((0, 0), |(all, turns), (num, more)| (all + num, turns + more))
            }
            (Err(_), Some(num)) if is_shared => (num, num),
            (Err(_), Some(num)) => (num * paths.len(), num * paths.len()),
            (Err(error), None) => return Err(error.context("key `data.prompts`")),
        };
    let (of_answer, of_prompts) = (data.max_new_tokens, num_turns * PROMPT_TOKENS);
    let in_answers = num_turns * of_answer;
    Ok(DataTokens { num_prompts, of_answer, in_answers, in_all: in_answers + of_prompts })
}

/// The work of one training.
struct TrainingNeeds {
    num_weights: u64,
    /// The size of the hidden states on the disk, in bytes, if they are kept there.
    disk: Option<u64>,
    /// Its time on one H200, in seconds.
    seconds: Option<f64>,
}

impl TrainingNeeds {
    /// Computes the work for a target of `num_target` weights; `None` if servers run it.
    ///
    /// A weight takes two operations for each token in a forward and four in a backward. The LM head
    /// computes only the tokens of answers.
    fn of(
        training: &dyn KindTraining,
        work: TrainingWork,
        num_target: Option<usize>,
        tokens: Option<&DataTokens>,
    ) -> Self {
        let lessons = training.lessons();
        let TrainingWork { num_parameters, num_head_weights, has_head, num_steps, .. } = work;
        let of_layers = num_parameters - if has_head { num_head_weights } else { 0 };
        let num_epochs = lessons.optimizer.num_epochs as f64;
        let is_kept = lessons.features != Features::Recompute;
        let lengths = tokens.map(|tokens| {
            let all = tokens.in_all.min(tokens.num_prompts * lessons.max_len);
            (all as f64, tokens.in_answers.min(all) as f64)
        });
        let seconds = lengths.map(|(all, answers)| {
            let of_token = of_layers as f64 * all + num_head_weights as f64 * answers;
            let trained = 6.0 * num_epochs * num_steps as f64 * of_token / TRAINED_FLOPS;
            let passes = if is_kept { 1.0 } else { num_epochs };
            let frozen = 2.0 * passes * num_target.unwrap_or(0) as f64 * all / FROZEN_FLOPS;
            trained + frozen
        });
        let disk = lengths.filter(|_| is_kept).map(|(all, answers)| {
            let num_states = work.num_states as f64 * all + answers;
            (num_states * work.state_bytes as f64) as u64
        });
        Self { num_weights: num_parameters as u64, disk, seconds }
    }
}

/// Formats a count in millions.
fn millions(num: usize) -> String {
    format!("{:.1} M", num as f64 / 1e6)
}
