//! `evaluate`: measures the decoding speed of each drafter under each stop rule on prompts.
//!
//! All settings run in turn on each batch of prompts, so that a slow minute of the machine affects
//! all settings alike.

mod cost_ratios;
mod group;
mod journal;
mod measure;
mod settings;
mod write;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use draftsmith_data::Prompt;
use draftsmith_report::{Conclusion, CostSummary, FilledTable, PaperTable, ResultRow};
use draftsmith_theory::{Decoding, DecodingName};
use serde::Serialize;

use self::group::{EvaluationResults, MeasuredGroup, seconds_alone};
use self::journal::RunJournal;
use self::measure::Bench;
use self::settings::Setting;
use crate::conversation::{note_ended_by_call, num_ended_by_call};
use crate::decoders::Decoders;
use crate::machine::{Quiet, Span};
use draftsmith_recipe::{
    Bar, Dataset, EvaluateRecipe, Interrupted, LoadedDrafter, LoadedDrafters, NOTHING_DRAFTS, Pair,
    PromptChoice, Recipe, Tuned, TunedRule, Watch, Workspace, read_sources,
};

/// The maximum number of prompts for timing the draft model alone.
const NUM_PROMPTS_ALONE: usize = 16;
/// The maximum number of tokens per answer for timing the draft model alone.
const NUM_TOKENS_ALONE: usize = 64;

/// The result of an evaluation.
#[derive(Debug, Serialize)]
pub struct Evaluation {
    /// The rows of `results.json`.
    pub rows: Vec<ResultRow>,
    /// The path of the HTML report.
    pub report: PathBuf,
    /// The recommended setting to deploy, and reasons to doubt the measurements.
    pub conclusion: Conclusion,
    /// The tables from papers that the recipe lists, filled with the measurements.
    pub papers: Vec<FilledTable>,
    /// Whether the evaluation was stopped before all prompts were measured.
    #[serde(skip)]
    pub is_partial: bool,
}

/// Measures a recipe's drafters and writes the result files.
///
/// # Errors
/// If a file or model is broken, or nothing was measured before a stop.
pub fn evaluate(recipe: &Recipe, workspace: &Workspace, watch: &dyn Watch) -> Result<Evaluation> {
    evaluate_unless_finished(recipe, workspace, false, watch)
}

/// Measures a recipe's drafters as [`evaluate`] does. With `keeps_finished`, measurements of the same evaluation that
/// was finished before are not repeated.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_unless_finished(
    recipe: &Recipe,
    workspace: &Workspace,
    keeps_finished: bool,
    watch: &dyn Watch,
) -> Result<Evaluation> {
    let evaluate = recipe
        .evaluate
        .as_ref()
        .context("the recipe has no section `[evaluate]`: it says which prompts to measure with")?;
    let papers = papers(recipe)?;
    let sources = read_sources(&evaluate.prompts, &recipe.reading(evaluate.split))?;
    ensure!(recipe.evaluated().next().is_some(), "{NOTHING_DRAFTS}");
    let pair = workspace.pair()?;
    let choice =
        PromptChoice { num_prompts: evaluate.num_prompts, skip_long: evaluate.skip_long_prompts };
    let datasets = choice.of_each(sources, &pair.text, watch)?;
    let drafters = recipe.load_drafters(workspace, true)?;
    let models = MeasuredModels { recipe, evaluate, workspace, pair, drafters: &drafters, watch };
    let plans = evaluate.decodings.iter().map(|name| models.plan(*name));
    let plans: Vec<Plan> = plans.collect::<Result<_>>()?;
    let evaluated = models.run(&datasets, &plans, keeps_finished)?;
    if watch.is_interrupted() && evaluated.rows.is_empty() {
        return Err(Interrupted.into());
    }
    models.write(&datasets, evaluated, &papers)
}

/// Reads and checks the tables of papers that the results of a recipe fill.
///
/// # Errors
/// If a key is unknown, or published figures lack some.
pub fn papers(recipe: &Recipe) -> Result<Vec<PaperTable>> {
    let tables: Vec<PaperTable> = recipe.paper_tables()?;
    tables.iter().try_for_each(PaperTable::check)?;
    Ok(tables)
}

/// The settings to measure under one way of decoding.
struct Plan {
    decoding: Decoding,
    /// The rules that `tune` chose, with their predicted gains.
    promised: Vec<TunedRule>,
    settings: Vec<Setting>,
}

impl Plan {
    /// Returns whether `tune` chose this setting.
    fn is_tuned(&self, setting: &Setting) -> bool {
        let is_it = |tuned: &TunedRule| {
            tuned.drafter == setting.drafter && Some(&tuned.config) == setting.rule.as_ref()
        };
        self.promised.iter().any(is_it)
    }
}

/// The models of a recipe, with everything that their measurement needs.
struct MeasuredModels<'a> {
    recipe: &'a Recipe,
    evaluate: &'a EvaluateRecipe,
    workspace: &'a Workspace,
    pair: &'a Pair,
    drafters: &'a LoadedDrafters,
    watch: &'a dyn Watch,
}

impl MeasuredModels<'_> {
    fn plan(&self, name: DecodingName) -> Result<Plan> {
        let decoding = self.evaluate.decoding(name);
        let promised = self.tuned_rules(&decoding)?;
        let settings = Setting::all(self.recipe, self.evaluate, name, self.drafters, &promised);
        Ok(Plan { decoding, promised, settings })
    }

    /// Reads the rules that `tune` wrote into the exports for a way of decoding.
    fn tuned_rules(&self, decoding: &Decoding) -> Result<Vec<TunedRule>> {
        let mut rules = Vec::new();
        for dir in self.drafters.iter().filter_map(LoadedDrafter::tuned_dir) {
            let dtype = self.workspace.models.dtype;
            let tuned = Tuned::read_for(dir, dtype, Some(decoding), self.watch)?;
            rules.extend(tuned.rule(DecodingName::of(decoding)).cloned());
        }
        Ok(rules)
    }

    /// Measures the seconds per forward of the first draft model when it decodes alone, on the
    /// first prompts of a dataset; `None` if there is no draft model.
    fn draft_alone(&self, dataset: &Dataset) -> Result<Option<CostSummary>> {
        let Some(((id, _), draft)) = self.recipe.draft().zip(self.pair.draft.as_ref()) else {
            return Ok(None);
        };
        let text = self.pair.text.clone();
        let alone = Pair { target: draft.clone(), draft: None, text };
        let none = LoadedDrafters::default();
        let max_new_tokens = self.evaluate.max_new_tokens.min(NUM_TOKENS_ALONE);
        let decoders = Decoders::new(&alone, &none, max_new_tokens);
        let mut bench = Bench { pair: &alone, decoders, seed: self.recipe.seed };
        let prompts: Vec<&Prompt> = dataset.prompts.iter().take(NUM_PROMPTS_ALONE).collect();
        bench.warm_up(prompts[0], &Decoding::GREEDY, &[Setting::PLAIN])?;
        let mut runs = Vec::new();
        for (number, prompt) in prompts.iter().enumerate() {
            runs.extend(bench.run(number, &[prompt], &Decoding::GREEDY, &Setting::PLAIN)?);
        }
        Ok(seconds_alone(&runs).map(|seconds| CostSummary::alone(id.into(), seconds)))
    }

    /// Runs all settings on all prompts. After Ctrl-C, the results contain only the prompts that
    /// every setting has completed.
    fn run(
        &self,
        datasets: &[Dataset],
        plans: &[Plan],
        keeps_finished: bool,
    ) -> Result<EvaluationResults> {
        let Self { recipe, evaluate, pair, drafters, watch, .. } = *self;
        let EvaluateRecipe { max_new_tokens, batch_size, repeats, .. } = *evaluate;
        let decoders = Decoders::with_slots(pair, drafters, max_new_tokens, batch_size);
        let mut bench = Bench { pair, decoders, seed: recipe.seed };
        for plan in plans {
            bench.warm_up(&datasets[0].prompts[0], &plan.decoding, &plan.settings)?;
        }
        let prompts = || datasets.iter().flat_map(|dataset| &dataset.prompts);
        let num_prompts = prompts().count();
        let num_turns: usize = prompts().map(|prompt| prompt.turns.len()).sum();
        let num_settings: usize = plans.iter().map(|plan| plan.settings.len()).sum();
        watch.note(format!(
            "evaluate: {num_settings} settings in {} decodings, {num_prompts} prompts, at most {} \
             tokens",
            plans.len(),
            num_turns * num_settings * repeats * max_new_tokens.min(pair.text.context)
        ));
        let num_runs = (num_prompts * num_settings * repeats) as u64;
        let progress = watch.bar("evaluate", "runs", num_runs);
        let cost_by_size = cost_ratios::cost_by_size(pair, drafters);
        let num_parameters = cost_ratios::num_parameters(drafters);
        let roads = recipe.evaluated().map(|(id, drafter)| (id, drafter.kind.road())).collect();
        let journal = RunJournal::open(self, plans, keeps_finished)?;
        if journal.num_known() > 0 {
            watch.note(format!(
                "evaluate: {} measurements of an earlier run are kept",
                journal.num_known()
            ));
        }
        let alone = self.draft_alone(&datasets[0])?;
        let mut evaluated =
            EvaluationResults { cost_by_size, num_parameters, roads, alone, ..Default::default() };
        let mut measuring = Measuring { bench, journal, progress, quiet: Quiet::default() };
        'all: for (of_dataset, dataset) in datasets.iter().enumerate() {
            for (of_plan, plan) in plans.iter().enumerate() {
                let runs = vec![Vec::new(); plan.settings.len()];
                let mut group = MeasuredGroup { dataset, plan, runs };
                let is_whole = self.measure(&mut measuring, &mut group, [of_dataset, of_plan])?;
                if !is_whole {
                    group.keep_whole_prompts();
                }
                evaluated.add(group, recipe, evaluate)?;
                if !is_whole {
                    break 'all;
                }
            }
        }
        measuring.progress.finish();
        if !watch.is_interrupted() {
            measuring.journal.finish();
        }
        evaluated.foreign_load = measuring.quiet.load();
        Ok(evaluated)
    }

    /// Runs all settings of a group in turn on each batch of prompts. Batches that other programs
    /// disturbed are measured again, within [`Quiet`]'s limits. Returns false after Ctrl-C.
    fn measure(
        &self,
        measuring: &mut Measuring<'_>,
        group: &mut MeasuredGroup<'_>,
        [of_dataset, of_plan]: [usize; 2],
    ) -> Result<bool> {
        let Measuring { bench, journal, progress, quiet } = measuring;
        let EvaluateRecipe { batch_size, repeats, .. } = *self.evaluate;
        let (plan, prompts) = (group.plan, &group.dataset.prompts);
        let batches = prompts.len().div_ceil(batch_size);
        progress.message(&group.dataset.name);
        // The runs since the last judgement of the load, which may be repeated.
        let (mut span, mut recent) = (Span::begin(), Vec::new());
        let (mut number, mut first_recent, mut num_counted, mut num_ended) = (0, 0, 0, 0);
        while number < batches * repeats {
            let first = number % batches * batch_size;
            let batch: Vec<&Prompt> = prompts[first..].iter().take(batch_size).collect();
            bench.seed = self.recipe.seed + (number / batches) as u64;
            for (index, setting) in plan.settings.iter().enumerate() {
                if self.watch.is_interrupted() {
                    group.add_all(recent, bench)?;
                    return Ok(false);
                }
                let place = [of_dataset, of_plan, number, index];
                let known = journal.take(place);
                let is_known = known.is_some();
                let runs = match known {
                    Some(runs) => runs,
                    None => {
                        let runs = bench.run(first, &batch, &plan.decoding, setting)?;
                        journal.add(place, &runs)?;
                        runs
                    }
                };
                if index == 0 && (num_counted..batches).contains(&number) {
                    let texts = runs.iter().map(|run| &run.texts);
                    num_ended += num_ended_by_call(&self.pair.text, &batch, texts);
                }
                recent.extend(runs.into_iter().map(|run| (index, run)));
                match batch.len() as u64 {
                    _ if number < num_counted => {}
                    num if is_known => progress.skip(num),
                    num => progress.advance(num as f64),
                }
            }
            number += 1;
            num_counted = num_counted.max(number);
            let judged = span.judge();
            if judged.is_some_and(|(load, seconds)| quiet.repeats(load, seconds)) {
                recent.clear();
                number = first_recent;
            } else if judged.is_some() || number == batches * repeats {
                group.add_all(std::mem::take(&mut recent), bench)?;
                first_recent = number;
            }
            if judged.is_some() {
                span = Span::begin();
            }
        }
        let stage = format!("evaluate: `{}`", group.dataset.name);
        note_ended_by_call(&stage, num_ended, self.watch);
        Ok(true)
    }
}

/// What measures a recipe's settings.
struct Measuring<'a> {
    bench: Bench<'a>,
    journal: RunJournal,
    progress: Box<dyn Bar>,
    quiet: Quiet,
}

#[cfg(test)]
mod tests {
    use draftsmith_recipe::Overrides;

    use super::*;

    #[test]
    fn the_papers_of_all_recipes_of_the_repository_read() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/papers");
        let mut num_tables = 0;
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|it| it == "toml") {
                let recipe = Recipe::read(&path, &Overrides::default()).expect("reads");
                num_tables += papers(&recipe).unwrap_or_else(|error| panic!("{error:#}")).len();
            }
        }
        assert!(num_tables > 15, "{num_tables} tables of papers");
    }
}
