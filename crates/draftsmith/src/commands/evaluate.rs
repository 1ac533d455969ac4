//! `evaluate`: what each way of stopping does to decoding speed, measured on prompts.

mod group;
mod machine;
mod measure;
mod settings;
mod write;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::Prompt;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig};
use draftsmith_theory::Decoding;
use serde::Serialize;

use self::group::{Evaluated, Group};
use self::measure::Bench;
use self::settings::Setting;
use self::write::write;
use crate::commands::build_data::{Source, read_sources};
use crate::console::{Console, Interrupted};
use crate::device::on_pool;
use crate::pair::{Pair, hash_dir};
use crate::progress::Progress;
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::results::ResultRow;

/// What an evaluation left behind.
#[derive(Debug, Serialize)]
pub(crate) struct Evaluation {
    /// The rows of results.json.
    pub(crate) rows: Vec<ResultRow>,
    /// The HTML page.
    pub(crate) report: PathBuf,
}

/// Runs the stage.
pub(crate) fn run(recipe: &Recipe, device: &Device, console: &Console) -> Result<Evaluation> {
    on_pool(|| evaluate(recipe, device, console))
}

fn evaluate(recipe: &Recipe, device: &Device, console: &Console) -> Result<Evaluation> {
    let evaluate = recipe
        .evaluate
        .as_ref()
        .context("the recipe has no section `[evaluate]`: it says which prompts to measure with")?;
    let sources = read_sources(&evaluate.prompts)?;
    let adapter_dirs = match &evaluate.adapters {
        Some(dirs) => dirs.clone(),
        None => recipe.adapter_dirs().into_iter().map(|(_, dir)| dir).collect(),
    };
    if adapter_dirs.is_empty() {
        recipe.need_draft("evaluate, where there is no adapter,")?;
    }
    let pair = Pair::load(&recipe.models.target, recipe.models.draft.as_deref(), device)?;
    let datasets = choose_prompts(evaluate, sources, &pair, console)?;
    for dataset in &datasets {
        for prompt in &dataset.prompts {
            pair.check_fits(&prompt.id, &pair.encode(&prompt.messages(0, &[]))?)?;
        }
    }
    let head = read_head(recipe, evaluate, &pair, device)?;
    let adapters = read_adapters(recipe, adapter_dirs, &pair, device)?;
    let exit_layers: Vec<usize> = adapters.iter().map(|a| a.config.exit_layer).collect();
    let settings = Setting::all(evaluate, pair.draft.is_some(), head.is_some(), &exit_layers);
    let decodings: Vec<Decoding> =
        evaluate.decodings.iter().map(|name| evaluate.decoding(*name)).collect();

    let mut bench = Bench::new(
        &pair,
        head.as_ref().map(|h| &h.head),
        adapters.iter().map(|a| (a.config.exit_layer, &a.adapter)),
        evaluate.max_new_tokens,
        recipe.seed,
    );
    let num_prompts: usize = datasets.iter().map(|d| d.prompts.len()).sum();
    let num_runs = num_prompts * settings.len() * decodings.len();
    bench.warm_up(&datasets[0].prompts[0], &decodings, &settings)?;
    console.note(format!(
        "evaluate: {} settings, {} decodings, {num_prompts} prompts",
        settings.len(),
        decodings.len()
    ));
    let progress = Progress::new(console, "evaluate", "runs", num_runs as u64);
    let mut evaluated = Evaluated::default();
    'all: for dataset in &datasets {
        for decoding in &decodings {
            let mut group = Group::new(dataset, *decoding, &settings);
            for (number, prompt) in dataset.prompts.iter().enumerate() {
                progress.message(dataset.name.clone());
                for (index, setting) in settings.iter().enumerate() {
                    if console.is_interrupted() {
                        group.keep_whole_prompts();
                        evaluated.add(group, recipe)?;
                        break 'all;
                    }
                    let measured = bench.run(number, prompt, decoding, *setting)?;
                    group.add(index, measured, &mut bench)?;
                    progress.advance(1);
                }
            }
            evaluated.add(group, recipe)?;
        }
    }
    progress.finish();
    if console.is_interrupted() && evaluated.rows.is_empty() {
        return Err(Interrupted.into());
    }
    let models = Models { pair: &pair, head: head.as_ref(), adapters: &adapters };
    let evaluation = write(recipe, evaluate, device, models, &datasets, evaluated, console)?;
    if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(evaluation) }
}

/// A prompt file's prompts.
struct Dataset {
    name: String,
    prompts: Vec<Prompt>,
}

/// Of each file at most `num_prompts` prompts, spread evenly, so that a file sorted by category
/// gives all of them.
fn choose_prompts(
    evaluate: &EvaluateRecipe,
    sources: Vec<Source>,
    pair: &Pair,
    console: &Console,
) -> Result<Vec<Dataset>> {
    sources
        .into_iter()
        .map(|mut source| {
            if evaluate.skip_long_prompts {
                source.drop_long(pair, console)?;
            }
            let all = source.prompts;
            let count = evaluate.num_prompts.unwrap_or(all.len()).min(all.len());
            let name = all.first().map(|p| p.source.clone()).unwrap_or_default();
            let total = all.len();
            let chosen: Vec<usize> = (0..count).map(|i| i * total / count).collect();
            let prompts = all
                .into_iter()
                .enumerate()
                .filter(|(i, _)| chosen.binary_search(i).is_ok())
                .map(|(_, prompt)| prompt)
                .collect();
            Ok(Dataset { name, prompts })
        })
        .collect()
}

/// Everything that was measured.
#[derive(Clone, Copy)]
struct Models<'a> {
    pair: &'a Pair,
    head: Option<&'a Head>,
    adapters: &'a [TrainedAdapter],
}

/// An adapter and where it came from.
struct TrainedAdapter {
    adapter: Adapter,
    config: AdapterConfig,
    dir: PathBuf,
}

/// Reads adapters, each of another exit layer and all of this target.
fn read_adapters(
    recipe: &Recipe,
    dirs: Vec<PathBuf>,
    pair: &Pair,
    device: &Device,
) -> Result<Vec<TrainedAdapter>> {
    if dirs.is_empty() {
        return Ok(Vec::new());
    }
    let target_hash = hash_dir(&recipe.models.target)?;
    let mut adapters: Vec<TrainedAdapter> = Vec::with_capacity(dirs.len());
    for dir in dirs {
        if !dir.join("config.json").is_file() {
            bail!(
                "there is no adapter in `{}`; hint: run `draftsmith train-adapter` with this \
                 recipe first, or set `evaluate.adapters`",
                dir.display()
            );
        }
        let (config, adapter) = pair.read_adapter(&dir, &target_hash, device)?;
        if adapters.iter().any(|other| other.config.exit_layer == config.exit_layer) {
            bail!(
                "two adapters sit behind layer {}, the second in `{}`: evaluate one at a time",
                config.exit_layer,
                dir.display()
            );
        }
        adapters.push(TrainedAdapter { adapter, config, dir });
    }
    adapters.sort_by_key(|adapter| adapter.config.exit_layer);
    Ok(adapters)
}

/// A head and where it came from.
struct Head {
    head: AcceptanceHead,
    config: AcceptanceHeadConfig,
    dir: PathBuf,
}

/// Reads the head that the recipe names, or trains.
fn read_head(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    pair: &Pair,
    device: &Device,
) -> Result<Option<Head>> {
    let dir = match (&evaluate.head, &recipe.head) {
        (Some(dir), _) => dir.clone(),
        (None, Some(_)) => recipe.head_dir(),
        (None, None) => return Ok(None),
    };
    if !dir.join("config.json").is_file() {
        bail!(
            "there is no acceptance head in `{}`; \
             hint: run `draftsmith train-head` with this recipe first, or set `evaluate.head`",
            dir.display()
        );
    }
    let Some(draft) = &pair.draft else {
        bail!("an acceptance head needs its draft; hint: set `models.draft`, or drop the head");
    };
    let (config, head) = AcceptanceHead::from_dir(&dir, draft.config().hidden_size, device)?;
    let draft_hash = hash_dir(recipe.need_draft("evaluate")?)?;
    if config.draft_hash.as_ref().is_some_and(|hash| *hash != draft_hash) {
        bail!(
            "the head in `{}` was trained on another draft (hash {}, this one's is {draft_hash}): \
             train it again, or point `models.draft` at the draft it belongs to",
            dir.display(),
            config.draft_hash.unwrap_or_default()
        );
    }
    Ok(Some(Head { head, config, dir }))
}
