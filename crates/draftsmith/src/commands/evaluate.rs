//! `evaluate`: what each way of stopping does to decoding speed, measured on prompts.

mod cost_ratios;
mod group;
mod machine;
mod measure;
mod promise;
mod resolved;
mod settings;
mod write;

use std::iter;
use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_data::Prompt;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, DrafterId};
use serde::Serialize;

use self::group::{Evaluated, Group};
use self::measure::Bench;
use self::promise::Promise;
use self::resolved::Resolved;
use self::settings::Setting;
use self::write::write;
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::device::on_pool;
use crate::exports::tuned::{Tuned, TunedRule};
use crate::exports::{Exports, adapter_dirs};
use crate::pair::Pair;
use crate::prompts::{PromptChoice, read_sources};
use crate::recipe::Recipe;
use crate::results::{DecodingName, DrafterName, ResultRow};
use crate::workspace::Workspace;

/// What an evaluation left behind.
#[derive(Debug, Serialize)]
pub(crate) struct Evaluation {
    /// The rows of results.json.
    pub(crate) rows: Vec<ResultRow>,
    /// The HTML page.
    pub(crate) report: PathBuf,
}

/// Runs the stage.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Evaluation> {
    on_pool(|| evaluate(recipe, workspace, console))
}

fn evaluate(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Evaluation> {
    let evaluate = recipe
        .evaluate
        .as_ref()
        .context("the recipe has no section `[evaluate]`: it says which prompts to measure with")?;
    let sources = read_sources(&evaluate.prompts, &recipe.reading(evaluate.split))?;
    let has_others =
        evaluate.max_gram.is_some() || !evaluate.cascades.is_empty() || !evaluate.merged.is_empty();
    if adapter_dirs(recipe, evaluate).is_empty() && !has_others {
        recipe.need_draft("evaluate, where there is neither an adapter nor prompt lookup,")?;
    }
    let pair = workspace.pair()?;
    let choice =
        PromptChoice { num_prompts: evaluate.num_prompts, skip_long: evaluate.skip_long_prompts };
    let datasets = choice.of_each(sources, &pair.text, console)?;
    let exports = Exports::read(recipe, evaluate, workspace)?;
    let self_drafts = exports
        .adapters
        .iter()
        .map(|adapter| DrafterId::SelfDraft { exit_layer: adapter.config.exit_layer });
    let draft = pair.draft.as_ref().map(|_| DrafterId::Draft);
    let drafters: Vec<DrafterId> = draft.into_iter().chain(self_drafts).collect();
    let resolved = Resolved::read(recipe, evaluate, &drafters, &exports, workspace)?;
    let evaluate = &resolved.evaluate;
    let exports = exports.with_others(evaluate, workspace)?;
    let plan = |name: &DecodingName| -> Result<Plan> {
        let decoding = evaluate.decoding(*name);
        let tuned = tuned_rules(&exports, &decoding, workspace.dtype, console)?;
        let promised = tuned.iter().filter_map(Promise::of_rule);
        let promised: Vec<Promise> = promised.chain(resolved.promises(*name)).collect();
        let settings = Setting::all(evaluate, *name, pair.draft.is_some(), &exports, &promised);
        Ok(Plan { decoding, promised, settings })
    };
    let plans: Vec<Plan> = evaluate.decodings.iter().map(plan).collect::<Result<_>>()?;

    let mut bench =
        Bench::new(pair, &exports, evaluate.max_new_tokens, evaluate.batch_size, recipe.seed);
    let num_prompts: usize = datasets.iter().map(|d| d.prompts.len()).sum();
    let num_settings: usize = plans.iter().map(|plan| plan.settings.len()).sum();
    for plan in &plans {
        bench.warm_up(&datasets[0].prompts[0], &plan.decoding, &plan.settings)?;
    }
    let turns =
        datasets.iter().flat_map(|dataset| &dataset.prompts).map(|prompt| prompt.turns.len());
    let most_tokens =
        turns.sum::<usize>() * num_settings * evaluate.max_new_tokens.min(pair.text.context);
    console.note(format!(
        "evaluate: {num_settings} settings in {} decodings, {num_prompts} prompts, at most \
         {most_tokens} tokens",
        plans.len()
    ));
    let num_runs = (num_prompts * num_settings) as u64;
    let progress = Progress::new(console, "evaluate", "runs", num_runs);
    let mut evaluated = Evaluated::new(cost_ratios::cost_by_size(pair, &exports));
    'all: for dataset in &datasets {
        for plan in &plans {
            let mut group = Group::new(dataset, plan);
            let prompts: Vec<&Prompt> = dataset.prompts.iter().collect();
            for (number, batch) in prompts.chunks(evaluate.batch_size).enumerate() {
                progress.message(dataset.name.clone());
                let first = number * evaluate.batch_size;
                for (index, setting) in plan.settings.iter().enumerate() {
                    if console.is_interrupted() {
                        group.keep_whole_prompts();
                        evaluated.add(group, recipe, evaluate)?;
                        break 'all;
                    }
                    for measured in bench.run(first, batch, &plan.decoding, setting)? {
                        group.add(index, measured, &mut bench)?;
                    }
                    progress.advance(batch.len() as u64);
                }
            }
            evaluated.add(group, recipe, evaluate)?;
        }
    }
    progress.finish();
    if console.is_interrupted() && evaluated.rows.is_empty() {
        return Err(Interrupted.into());
    }
    let models = Models { workspace, pair, exports: &exports };
    let evaluation = write(recipe, evaluate, models, &datasets, evaluated, console)?;
    if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(evaluation) }
}

/// What is run under one way of decoding.
struct Plan {
    decoding: Decoding,
    /// What tuning chose for it, and promised.
    promised: Vec<Promise>,
    settings: Vec<Setting>,
}

/// The rules that tuning wrote into what was trained, for a way of decoding.
fn tuned_rules(
    exports: &Exports,
    decoding: &Decoding,
    dtype: WeightDtype,
    console: &Console,
) -> Result<Vec<TunedRule>> {
    let adapters = exports.adapters.iter();
    let drafters = adapters.map(|adapter| {
        DrafterName::Of(DrafterId::SelfDraft { exit_layer: adapter.config.exit_layer })
    });
    let mut rules = Vec::new();
    for (drafter, dir) in iter::once(DrafterName::Of(DrafterId::Draft))
        .chain(drafters)
        .filter_map(|it| Some((it, exports.export_of(it)?)))
    {
        let num_tokens = exports.num_draft_tokens(drafter);
        let tuned = Tuned::read_for(&dir, dtype, num_tokens, Some(decoding), console)?;
        rules.extend(tuned.rule(DecodingName::of(decoding)).cloned());
    }
    Ok(rules)
}

/// Everything that was measured.
#[derive(Clone, Copy)]
struct Models<'a> {
    workspace: &'a Workspace,
    pair: &'a Pair,
    exports: &'a Exports,
}
