//! `check`: whether an exported head or adapter may be served.
//!
//! The export is read from disk as a server reads it, and decodes with its tuned rules, or with the default
//! rules of `generate`. The check fails if greedy output differs from plain greedy output, if sampled output
//! does not follow the target's distribution, if the acceptance rate is lower than the one that `tune`
//! promised, or if greedy decoding is slower than with the target alone.

mod measure;
mod show;

use draftsmith_report::{DecodingName, DrafterName};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::Args;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Estimate, LookupFirst, Sampling, StopRuleConfig};
use serde::Serialize;

use self::measure::{Bench, CheckedRule};
use crate::console::Console;
use crate::console::progress::Progress;
use crate::exports::ExportKind;
use crate::exports::tuned::Tuned;
use crate::kinds::loaded::LoadedDrafters;
use crate::prompts::{PromptChoice, read_sources};
use crate::recipe::{Recipe, Split};
use crate::workspace::Workspace;

/// The significance level of the test of sampled output.
const ALPHA: f64 = 1e-4;
/// The most new tokens per turn if the recipe sets none.
const MAX_NEW_TOKENS: usize = 128;

/// Arguments of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// A head's or an adapter's directory.
    export: PathBuf,
    /// Prompts to decode, instead of those of the recipe's `[evaluate]`.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// The most prompts, spread evenly over the files.
    #[arg(long, value_name = "N", default_value = "64")]
    num_prompts: NonZeroUsize,
    /// The recipe that names the models, instead of the one beside the export.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Pass an export that makes decoding slower on this machine.
    #[arg(long)]
    allow_slower: bool,
}

/// The export failed the check; the results are on stdout.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct CheckFailed(String);

/// The document of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct CheckReport {
    /// The head's or adapter's directory.
    export: PathBuf,
    /// Head or adapter.
    kind: &'static str,
    /// The drafter that it is for.
    drafter: DrafterName,
    /// The names of the prompt files.
    prompts: Vec<String>,
    /// Conversations decoded.
    num_prompts: usize,
    /// The most new tokens per turn.
    max_new_tokens: usize,
    /// Whether every check passed.
    passed: bool,
    /// The failures, as on stderr; null if there are none.
    error: Option<String>,
    greedy: DecodingCheck<GreedyOutput>,
    sampled: DecodingCheck<SampledOutput>,
    speed: SpeedCheck,
}

/// The check of one way of decoding.
#[derive(Debug, Serialize)]
struct DecodingCheck<T> {
    /// The look-ups before the drafter, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    lookup_first: Option<LookupFirst>,
    stop_rule: StopRuleConfig,
    /// Whether that is the tuned rule; otherwise it is the default rule.
    is_tuned: bool,
    /// Temperature 0 is greedy.
    #[serde(flatten)]
    sampling: Sampling,
    /// The default is 1, which changes nothing.
    repetition_penalty: f64,
    /// New tokens.
    num_tokens: usize,
    output: T,
    acceptance: Acceptance,
}

/// Greedy output compared with plain greedy output.
#[derive(Debug, Serialize)]
struct GreedyOutput {
    holds: bool,
    /// Mismatches between tokens whose logits are equal up to rounding.
    num_forgiven_ties: usize,
    differences: Vec<AnswerDifference>,
}

/// The first token of an answer that differs from plain decoding.
#[derive(Debug, Serialize)]
struct AnswerDifference {
    /// The id of the prompt's turn.
    id: String,
    /// The index of the new token.
    token: usize,
}

/// Sampled output compared with the target's distribution.
#[derive(Debug, Serialize)]
struct SampledOutput {
    holds: bool,
    /// The p-value of the hypothesis that output follows the target's distribution.
    p_value: f64,
    /// The least `p_value` that passes.
    alpha: f64,
    /// Tokens that the target never samples. One is enough to fail.
    num_impossible: usize,
    /// Ignored tokens at the edge of the nucleus, top-k or min-p, up to rounding.
    num_forgiven_edges: usize,
}

/// The time of greedy decoding, with prefill, compared with the target alone.
#[derive(Debug, Serialize)]
struct SpeedCheck {
    /// False if decoding is certainly slower and that is not allowed; null if the interval contains 1.
    holds: Option<bool>,
    /// Speed over the target alone, with its 95 % interval.
    speedup: Estimate,
}

/// The acceptance rate compared with the promised one.
#[derive(Debug, Serialize)]
struct Acceptance {
    /// Whether the rate is at least the promised one, or consistent with it; null if nothing was promised.
    holds: Option<bool>,
    num_drafted: usize,
    /// Accepted over drafted, with its 99.99 % interval.
    rate: Estimate,
    /// The promised rate; null if nothing was tuned.
    promised: Option<Estimate>,
}

/// Runs the command.
pub(crate) fn run(
    arguments: &CheckArguments,
    seed: Option<u64>,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<()> {
    let dir = &arguments.export;
    let kind = ExportKind::of(dir)?;
    let recipe = Recipe::of_export(dir, arguments.recipe.as_deref(), seed)?;
    let (id, recipe) = kind.alone_in(&recipe, dir)?;
    let (files, split) = prompt_files(arguments, &recipe)?;
    let sources = read_sources(&files, &recipe.reading(split))?;
    let template = recipe.models.chat_template.as_deref();
    let devices = vec![device.clone()];
    let mut workspace = Workspace::open(
        &recipe.models.target,
        None,
        &recipe.drafters.models(),
        template,
        devices,
        console,
    )?;
    (workspace.ends, workspace.dtype) = (recipe.models.ends(), dtype);
    let pair = workspace.pair()?;
    let choice = PromptChoice {
        num_prompts: Some(arguments.num_prompts.get()),
        skip_long: recipe.evaluate.as_ref().is_some_and(|evaluate| evaluate.skip_long_prompts),
    };
    let prompts = choice.of_all(&sources, &pair.text, console)?;
    let drafters = LoadedDrafters::read(&recipe, &workspace, false)?;
    let loaded = drafters.get(id)?;
    let drafter = DrafterName::Of(id);
    let tuned_dir = loaded.tuned_dir().context("it was read just now")?;
    let tuned = Tuned::read_for(tuned_dir, dtype, None, console)?;
    let has_head = loaded.head.is_some();
    let rule = |name| CheckedRule::new(&tuned, name, drafter, has_head, tuned_dir);
    let (mut greedy, mut sampled) = (rule(DecodingName::Greedy)?, rule(DecodingName::Sampled)?);
    let of_evaluate = recipe.evaluate.as_ref().map(|evaluate| evaluate.max_new_tokens);
    let of_data = recipe.data.as_ref().map(|data| data.max_new_tokens);
    let max_new_tokens = of_evaluate.or(of_data).unwrap_or(MAX_NEW_TOKENS);
    let mut bench = Bench::new(pair, &drafters, drafter, max_new_tokens, recipe.seed);
    bench.warm_up(&prompts[0], &mut greedy)?;
    let progress = Progress::new(console, "check", "prompts", prompts.len() as u64);
    for prompt in &prompts {
        console.check_interrupted()?;
        bench.run(prompt, &mut greedy, &mut sampled)?;
        progress.advance(1);
    }
    progress.finish();

    let mut names: Vec<String> = prompts.iter().map(|prompt| prompt.source.clone()).collect();
    names.dedup();
    let speed = bench.speed(arguments.allow_slower);
    let (greedy, sampled) = bench.judge(greedy, sampled)?;
    let mut checked = CheckReport {
        export: dir.clone(),
        kind: kind.text(),
        drafter,
        prompts: names,
        num_prompts: prompts.len(),
        max_new_tokens,
        passed: true,
        error: None,
        greedy,
        sampled,
        speed,
    };
    checked.error = show::failures(&checked);
    checked.passed = checked.error.is_none();
    console.text(show::table(&checked))?;
    console.document(&checked)?;
    match checked.error {
        None => Ok(()),
        Some(error) => Err(CheckFailed(error).into()),
    }
}

/// The given prompt files, or those of the recipe's evaluation with their split.
fn prompt_files(
    arguments: &CheckArguments,
    recipe: &Recipe,
) -> Result<(Vec<PathBuf>, Option<Split>)> {
    if let Some(path) = &arguments.prompts {
        return Ok((vec![path.clone()], None));
    }
    let evaluate = recipe.evaluate.as_ref().context(
        "the recipe has no section `[evaluate]`, which names prompts to check with; \
         hint: give them with `--prompts FILE`",
    )?;
    Ok((evaluate.prompts.clone(), evaluate.split))
}
