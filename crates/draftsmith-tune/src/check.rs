//! `check`: tests whether an exported acceptance head or adapter is correct and fast enough to
//! serve.
//!
//! The export is loaded from disk and decodes with its tuned rules, or with the default rules of
//! `generate`. The check fails if greedy output differs from plain greedy output, or sampled output
//! does not follow the target's distribution. It also fails if the acceptance rate is lower than
//! `tune` predicted, or greedy decoding is slower than with the target alone.

mod failures;
mod measure;

use draftsmith_report::{
    DRAFTSMITH, DecodingName, DrafterName, ServingWay, fastest_ways, rule_label,
};
use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::tensor::Device;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{DrafterId, Estimate, LookupFirst, Sampling, StopRuleConfig};
use serde::Serialize;

pub use self::failures::{p_value_text, rate_text};
use self::measure::{Bench, CheckedRule};
use crate::machine::ProcessorTime;
use crate::serving::tuned_ways;
use draftsmith_recipe::exports::servers::target_argument;
use draftsmith_recipe::{
    Kinds, PromptChoice, Recipe, Split, Tuned, Watch, quoted, read_sources, served_path,
};

/// The significance level of the test of sampled output.
const ALPHA: f64 = 1e-4;
/// The maximum number of new tokens per turn if the recipe does not set it.
const MAX_NEW_TOKENS: usize = 128;

/// The settings of a check.
#[derive(Debug)]
pub struct CheckSettings {
    /// The directory of a head or an adapter.
    pub export: PathBuf,
    /// A file of prompts to decode, instead of the recipe's prompts in `[evaluate]`.
    pub prompts: Option<PathBuf>,
    /// The maximum number of prompts, spread evenly over the files.
    pub num_prompts: usize,
    /// The path of the recipe that names the models, instead of the recipe beside the export.
    pub recipe: Option<PathBuf>,
    /// Whether an export may pass although it makes decoding slower.
    pub allow_slower: bool,
    /// A seed that replaces the recipe's seed.
    pub seed: Option<u64>,
    /// The dtype that the models compute in.
    pub dtype: WeightDtype,
}

/// The result of a check.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// The head's or adapter's directory.
    pub export: PathBuf,
    /// The kind of export, a head or an adapter.
    pub kind: &'static str,
    /// The drafter that the export belongs to.
    pub drafter: DrafterName,
    /// The names of the prompt files.
    pub prompts: Vec<String>,
    /// The number of decoded conversations.
    pub num_prompts: usize,
    /// The maximum number of new tokens per turn.
    pub max_new_tokens: usize,
    /// Whether every check passed.
    pub passed: bool,
    /// The description of all failures, as on stderr; null if there are none.
    pub error: Option<String>,
    /// The check of greedy decoding.
    pub greedy: DecodingCheck<GreedyOutput>,
    /// The check of sampled decoding.
    pub sampled: DecodingCheck<SampledOutput>,
    /// The check of the speed of greedy decoding.
    pub speed: SpeedCheck,
    /// The ways to serve the drafter, the measured one first. They hold if every check passed.
    pub serving: Vec<ServingWay>,
}

/// The check of one way of decoding.
#[derive(Debug, Serialize)]
pub struct DecodingCheck<T> {
    /// The settings of prompt lookup in front of the drafter, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup_first: Option<LookupFirst>,
    /// The stop rule.
    pub stop_rule: StopRuleConfig,
    /// Whether the stop rule was tuned. Otherwise it is the default rule.
    pub is_tuned: bool,
    /// The sampling settings. A temperature of 0 means greedy decoding.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// The repetition penalty; 1 means no penalty.
    pub repetition_penalty: f64,
    /// The number of new tokens.
    pub num_tokens: usize,
    /// The check of the output.
    pub output: T,
    /// The check of the acceptance rate.
    pub acceptance: AcceptanceCheck,
}

/// The comparison of greedy output with plain greedy output.
#[derive(Debug, Serialize)]
pub struct GreedyOutput {
    /// Whether the check passed.
    pub holds: bool,
    /// The number of forgiven mismatches, between tokens whose logits are equal up to rounding.
    pub num_forgiven_ties: usize,
    /// The answers that differ by more than rounding.
    pub differences: Vec<AnswerDifference>,
}

/// The position of the first token in an answer that differs from plain decoding.
#[derive(Debug, Serialize)]
pub struct AnswerDifference {
    /// The id of the prompt's turn.
    pub id: String,
    /// The index of the token in the answer.
    pub token: usize,
}

/// The test of sampled output against the target's distribution.
#[derive(Debug, Serialize)]
pub struct SampledOutput {
    /// Whether the check passed.
    pub holds: bool,
    /// The p-value of the hypothesis that output follows the target's distribution.
    pub p_value: f64,
    /// The significance level: the smallest `p_value` that passes.
    pub alpha: f64,
    /// The number of tokens that the target can never sample. A single one fails the check.
    pub num_impossible: usize,
    /// The number of ignored tokens, which lie at the limit of top-p, top-k or min-p up to
    /// rounding.
    pub num_forgiven_edges: usize,
}

/// The speed of greedy decoding, including prefill, compared with the target alone.
#[derive(Debug, Serialize)]
pub struct SpeedCheck {
    /// False if the whole interval is below 1 and that is not allowed. Null if the interval contains
    /// 1, there are fewer than 4 turns, or other programs were too busy to call a slow export slow.
    pub holds: Option<bool>,
    /// The speed relative to the target alone, with its 95 % interval, from pairs of answers in turn.
    pub speedup: Estimate,
    /// The share of all processors that other programs used meanwhile, from 0 to 1. Null if unknown.
    pub foreign_load: Option<f64>,
}

/// The comparison of the acceptance rate with the rate that `tune` predicted.
#[derive(Debug, Serialize)]
pub struct AcceptanceCheck {
    /// Whether the rate is at least the predicted one, or agrees with it within the intervals; null
    /// without a prediction.
    pub holds: Option<bool>,
    /// The number of drafted candidates.
    pub num_drafted: usize,
    /// The share of drafted candidates that were accepted, with its 99.99 % interval.
    pub rate: Estimate,
    /// The predicted rate; null if the rule was not tuned.
    pub promised: Option<Estimate>,
}

/// Runs all checks on an export.
///
/// # Errors
/// If a file or model is broken.
pub fn check(settings: &CheckSettings, device: &Device, watch: &dyn Watch) -> Result<CheckReport> {
    let CheckSettings { dtype, seed, .. } = *settings;
    let dir = &settings.export;
    let found = Kinds::default().trained_in(dir)?;
    let recipe = Recipe::of_export(dir, settings.recipe.as_deref(), seed)?;
    let (id, recipe) = recipe.only_of(found, dir)?;
    let (files, split) = prompt_files(settings, &recipe)?;
    let sources = read_sources(&files, &recipe.reading(split))?;
    let served_as = recipe.states_server().map(|server| &*server.model);
    let workspace = recipe.open(served_as, dtype, vec![device.clone()], watch)?;
    let pair = workspace.pair()?;
    let choice = PromptChoice {
        num_prompts: Some(settings.num_prompts),
        skip_long: recipe.evaluate.as_ref().is_some_and(|evaluate| evaluate.skip_long_prompts),
    };
    let prompts = choice.of_all(&sources, &pair.text, watch)?;
    let drafters = recipe.load_drafters(&workspace, true)?;
    let loaded = drafters.get(id)?;
    let drafter = DrafterName::Of(id);
    let tuned_dir = loaded.tuned_dir().context("it was read just now")?;
    let tuned = Tuned::read_for(tuned_dir, dtype, None, watch)?;
    let has_head = loaded.head_timing().is_some();
    let rule = |name| CheckedRule::new(&tuned, name, drafter, has_head, tuned_dir);
    let (mut greedy, mut sampled) = (rule(DecodingName::Greedy)?, rule(DecodingName::Sampled)?);
    let of_evaluate = recipe.evaluate.as_ref().map(|evaluate| evaluate.max_new_tokens);
    let of_data = recipe.data.as_ref().map(|data| data.max_new_tokens);
    let max_new_tokens = of_evaluate.or(of_data).unwrap_or(MAX_NEW_TOKENS);
    let mut bench = Bench::new(pair, &drafters, drafter, max_new_tokens, recipe.seed);
    bench.warm_up(&prompts[0], &mut greedy)?;
    let begun = ProcessorTime::now();
    let progress = watch.bar("check", "prompts", prompts.len() as u64);
    for prompt in &prompts {
        watch.check_interrupted()?;
        bench.run(prompt, &mut greedy, &mut sampled)?;
        progress.advance(1.0);
    }
    progress.finish();

    let mut names: Vec<String> = prompts.iter().map(|prompt| prompt.source.clone()).collect();
    names.dedup();
    bench.race(&mut greedy, watch)?;
    let foreign_load = begun.and_then(ProcessorTime::foreign_load);
    let speed = bench.speed(settings.allow_slower, foreign_load);
    let (greedy, sampled) = bench.judge(greedy, sampled)?;
    let mut serving = vec![own_way(id, &recipe, &greedy, speed.speedup)];
    let ways = fastest_ways(&tuned_ways(&recipe, DecodingName::Greedy, Some(id))?);
    serving.extend(ways.into_iter().map(|way| way.as_unsure_as(speed.speedup)));
    let mut report = CheckReport {
        serving,
        export: dir.clone(),
        kind: found.export.text,
        drafter,
        prompts: names,
        num_prompts: prompts.len(),
        max_new_tokens,
        passed: false,
        error: None,
        greedy,
        sampled,
        speed,
    };
    report.error = report.failures();
    report.passed = report.error.is_none();
    Ok(report)
}

/// Returns the way to decode with draftsmith, as it was checked.
fn own_way(
    id: DrafterId,
    recipe: &Recipe,
    checked: &DecodingCheck<GreedyOutput>,
    speedup: Estimate,
) -> ServingWay {
    let target = quoted(&served_path(&recipe.models.target, false));
    let target = target_argument(&target, recipe.models.tokenizer.as_deref());
    let drafter = match recipe.drafters.get(id) {
        Some(it) if it.kind.model().is_some() => {
            let of = |path: Option<PathBuf>| quoted(&served_path(&path.unwrap_or_default(), true));
            let model = it.kind.model().map(PathBuf::from);
            format!("--draft {} --head {}", of(model), of(recipe.head_dir(id)))
        }
        Some(it) => {
            let given = it.kind.path().map(|dir| dir.path.clone());
            let dir = given.unwrap_or_else(|| recipe.export_dir(id));
            format!("--drafter {}", quoted(&served_path(&dir, true)))
        }
        None => String::new(),
    };
    ServingWay {
        runtime: DRAFTSMITH.to_owned(),
        drafter: id.into(),
        setting: rule_label(checked.lookup_first, &checked.stop_rule),
        drafting: None,
        speedup,
        costs: None,
        lost: Vec::new(),
        start: vec![format!("draftsmith generate --target {target} {drafter} --prompt TEXT")],
    }
}

/// Returns the prompt file in `settings`, or else the prompt files and the split in the recipe's
/// `[evaluate]`.
fn prompt_files(
    settings: &CheckSettings,
    recipe: &Recipe,
) -> Result<(Vec<PathBuf>, Option<Split>)> {
    if let Some(path) = &settings.prompts {
        return Ok((vec![path.clone()], None));
    }
    let evaluate = recipe.evaluate.as_ref().context(
        "the recipe has no section `[evaluate]`, which names prompts to check with; \
         hint: give them with `--prompts FILE`",
    )?;
    Ok((evaluate.prompts.clone(), evaluate.split))
}
