//! `check`: whether an exported head or adapter may be served.
//!
//! The export is read from disk as a server reads it, and decodes with its tuned rules, or with the default
//! rules of `generate`. The check fails if greedy output differs from plain greedy output, if sampled output
//! does not follow the target's distribution, if the acceptance rate is lower than the one that `tune`
//! promised, or if greedy decoding is slower than with the target alone.

mod measure;

use draftsmith_report::{DecodingName, DrafterName};
use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::tensor::Device;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Estimate, LookupFirst, Sampling, StopRuleConfig};
use serde::Serialize;

use self::measure::{Bench, CheckedRule};
use draftsmith_recipe::exports::tuned::Tuned;
use draftsmith_recipe::kinds::Kinds;
use draftsmith_recipe::prompts::{PromptChoice, read_sources};
use draftsmith_recipe::watch::Progress;
use draftsmith_recipe::watch::Watch;
use draftsmith_recipe::{Recipe, Split};

/// The significance level of the test of sampled output.
const ALPHA: f64 = 1e-4;
/// The most new tokens per turn if the recipe sets none.
const MAX_NEW_TOKENS: usize = 128;

/// What is checked, and how.
#[derive(Debug)]
pub struct CheckSettings {
    /// A head's or an adapter's directory.
    pub export: PathBuf,
    /// Prompts to decode, instead of those of the recipe's `[evaluate]`.
    pub prompts: Option<PathBuf>,
    /// The most prompts, spread evenly over the files.
    pub num_prompts: usize,
    /// The recipe that names the models, instead of the one beside the export.
    pub recipe: Option<PathBuf>,
    /// Whether an export that makes decoding slower passes.
    pub allow_slower: bool,
    /// Replaces the recipe's seed.
    pub seed: Option<u64>,
    /// The type that models compute in.
    pub dtype: WeightDtype,
}

/// What a check found.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// The head's or adapter's directory.
    pub export: PathBuf,
    /// Head or adapter.
    pub kind: &'static str,
    /// The drafter that it is for.
    pub drafter: DrafterName,
    /// The names of the prompt files.
    pub prompts: Vec<String>,
    /// Conversations decoded.
    pub num_prompts: usize,
    /// The most new tokens per turn.
    pub max_new_tokens: usize,
    /// Whether every check passed.
    pub passed: bool,
    /// The failures, as on stderr; null if there are none.
    pub error: Option<String>,
    /// Greedy decoding.
    pub greedy: DecodingCheck<GreedyOutput>,
    /// Sampled decoding.
    pub sampled: DecodingCheck<SampledOutput>,
    /// The time of greedy decoding.
    pub speed: SpeedCheck,
}

/// The check of one way of decoding.
#[derive(Debug, Serialize)]
pub struct DecodingCheck<T> {
    /// The look-ups before the drafter, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup_first: Option<LookupFirst>,
    /// The rule.
    pub stop_rule: StopRuleConfig,
    /// Whether that is the tuned rule; otherwise it is the default rule.
    pub is_tuned: bool,
    /// Temperature 0 is greedy.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// The default is 1, which changes nothing.
    pub repetition_penalty: f64,
    /// New tokens.
    pub num_tokens: usize,
    /// The output.
    pub output: T,
    /// The acceptance rate.
    pub acceptance: AcceptanceCheck,
}

/// Greedy output compared with plain greedy output.
#[derive(Debug, Serialize)]
pub struct GreedyOutput {
    /// Whether the check passed.
    pub holds: bool,
    /// Mismatches between tokens whose logits are equal up to rounding.
    pub num_forgiven_ties: usize,
    /// The answers that differ.
    pub differences: Vec<AnswerDifference>,
}

/// The first token of an answer that differs from plain decoding.
#[derive(Debug, Serialize)]
pub struct AnswerDifference {
    /// The id of the prompt's turn.
    pub id: String,
    /// The index of the new token.
    pub token: usize,
}

/// Sampled output compared with the target's distribution.
#[derive(Debug, Serialize)]
pub struct SampledOutput {
    /// Whether the check passed.
    pub holds: bool,
    /// The p-value of the hypothesis that output follows the target's distribution.
    pub p_value: f64,
    /// The least `p_value` that passes.
    pub alpha: f64,
    /// Tokens that the target never samples. One is enough to fail.
    pub num_impossible: usize,
    /// Ignored tokens at the edge of the nucleus, top-k or min-p, up to rounding.
    pub num_forgiven_edges: usize,
}

/// The time of greedy decoding, with prefill, compared with the target alone.
#[derive(Debug, Serialize)]
pub struct SpeedCheck {
    /// False if decoding is certainly slower and that is not allowed; null if the interval contains 1.
    pub holds: Option<bool>,
    /// Speed over the target alone, with its 95 % interval.
    pub speedup: Estimate,
}

/// The acceptance rate compared with the promised one.
#[derive(Debug, Serialize)]
pub struct AcceptanceCheck {
    /// Whether the rate is at least the promised one, or consistent with it; null if nothing was promised.
    pub holds: Option<bool>,
    /// Candidates drafted.
    pub num_drafted: usize,
    /// Accepted over drafted, with its 99.99 % interval.
    pub rate: Estimate,
    /// The promised rate; null if nothing was tuned.
    pub promised: Option<Estimate>,
}

/// Checks an export. Whether it passed is for the caller to judge.
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
    let workspace = recipe.open(None, dtype, vec![device.clone()], watch)?;
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
    let has_head = loaded.head.is_some();
    let rule = |name| CheckedRule::new(&tuned, name, drafter, has_head, tuned_dir);
    let (mut greedy, mut sampled) = (rule(DecodingName::Greedy)?, rule(DecodingName::Sampled)?);
    let of_evaluate = recipe.evaluate.as_ref().map(|evaluate| evaluate.max_new_tokens);
    let of_data = recipe.data.as_ref().map(|data| data.max_new_tokens);
    let max_new_tokens = of_evaluate.or(of_data).unwrap_or(MAX_NEW_TOKENS);
    let mut bench = Bench::new(pair, &drafters, drafter, max_new_tokens, recipe.seed);
    bench.warm_up(&prompts[0], &mut greedy)?;
    let progress = Progress::new(watch, "check", "prompts", prompts.len() as u64);
    for prompt in &prompts {
        watch.check_interrupted()?;
        bench.run(prompt, &mut greedy, &mut sampled)?;
        progress.advance(1);
    }
    progress.finish();

    let mut names: Vec<String> = prompts.iter().map(|prompt| prompt.source.clone()).collect();
    names.dedup();
    let speed = bench.speed(settings.allow_slower);
    let (greedy, sampled) = bench.judge(greedy, sampled)?;
    Ok(CheckReport {
        export: dir.clone(),
        kind: found.export.text,
        drafter,
        prompts: names,
        num_prompts: prompts.len(),
        max_new_tokens,
        passed: true,
        error: None,
        greedy,
        sampled,
        speed,
    })
}

/// Returns the prompt file of `--prompts`, or else the files and the split of the recipe's `[evaluate]`.
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
