//! `check`: whether an exported head or adapter may be served.
//!
//! The export is read back from the disk as a server reads it, and decoded with under its tuned
//! rules, or under those that `generate` falls back on. It fails if greedy output is not plain
//! greedy output, if sampled output does not follow the target's distribution, or if candidates are accepted at
//! another rate than tuning promised.

mod measure;
mod show;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::Args;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, DrafterId, LookupFirst, Sampling, StopRuleConfig};
use serde::Serialize;

use self::measure::{Bench, OneDecoding};
use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};
use crate::device::on_pool;
use crate::exports::tuned::{Tuned, default_rule};
use crate::exports::{ExportKind, Exports};
use crate::prompts::{PromptChoice, read_sources};
use crate::recipe::{Recipe, Split};
use crate::results::{DecodingName, DrafterName, Estimate};
use crate::workspace::Workspace;

/// The significance level at which sampled output is held not to follow the target's distribution.
const ALPHA: f64 = 1e-4;
/// The most new tokens a turn where the recipe says nothing about it.
const MAX_NEW_TOKENS: usize = 128;

/// Arguments of `check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// A head's or an adapter's directory.
    export: PathBuf,
    /// Prompts to decode; those of the recipe's `[evaluate]` if absent.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// The most prompts, spread evenly.
    #[arg(long, value_name = "N", default_value = "64")]
    num_prompts: NonZeroUsize,
    /// The recipe that names the models; the one beside the export if absent.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
}

/// The export does not hold what it must; what was found is on stdout.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct CheckFailed(String);

/// What was checked, as `--json` tells it.
#[derive(Debug, Serialize)]
pub(crate) struct Checked {
    /// The head's or adapter's directory.
    export: PathBuf,
    /// What it is, in words.
    kind: &'static str,
    /// What proposes candidates with it.
    drafter: DrafterName,
    /// The prompt files' names.
    prompts: Vec<String>,
    /// Conversations decoded.
    num_prompts: usize,
    /// The most new tokens a turn.
    max_new_tokens: usize,
    /// Whether everything holds.
    passed: bool,
    /// What does not hold, as on stderr; null where all does.
    error: Option<String>,
    /// Under greedy decoding.
    greedy: DecodingCheck<GreedyOutput>,
    /// Under sampled decoding.
    sampled: DecodingCheck<SampledOutput>,
}

/// One way of decoding: what came out, and how candidates fared.
#[derive(Debug, Serialize)]
struct DecodingCheck<T> {
    /// What was looked up before the drafter was asked; left out where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    lookup_first: Option<LookupFirst>,
    /// The rule it was decoded with.
    stop_rule: StopRuleConfig,
    /// Whether that rule is the tuned one; the default one if not.
    is_tuned: bool,
    /// Sampling temperature; 0 is greedy.
    temperature: f64,
    /// Nucleus mass.
    top_p: f64,
    /// Most probable tokens kept; left out where all are.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<usize>,
    /// The min-p; left out where all are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    min_p: Option<f64>,
    /// The repetition penalty; 1 is none.
    repetition_penalty: f64,
    /// New tokens.
    num_tokens: usize,
    /// Whether the output is the target's.
    output: T,
    /// Whether candidates are accepted as promised.
    acceptance: Acceptance,
}

/// Greedy output beside plain greedy output.
#[derive(Debug, Serialize)]
struct GreedyOutput {
    holds: bool,
    /// Mismatches that are ties but for rounding.
    num_forgiven_ties: usize,
    /// Where the output differs.
    differences: Vec<Difference>,
}

/// The first place where an answer is not plain decoding's.
#[derive(Debug, Serialize)]
struct Difference {
    /// The id of the prompt's turn.
    id: String,
    /// The new token, counted from 0.
    token: usize,
}

/// Sampled output beside the target's distribution.
#[derive(Debug, Serialize)]
struct SampledOutput {
    holds: bool,
    /// The chance of output at least so far from the target's distribution, if it follows that.
    p_value: f64,
    /// What `p_value` must not be below.
    alpha: f64,
    /// Tokens that the target never samples; each is proof by itself.
    num_impossible: usize,
    /// Tokens passed over that lie at the edge of the nucleus but for rounding.
    num_forgiven_edges: usize,
}

/// The share of candidates that are accepted beside the promised one.
#[derive(Debug, Serialize)]
struct Acceptance {
    /// Null where nothing was promised.
    holds: Option<bool>,
    num_drafted: usize,
    /// Accepted over drafted, with its 99.99 % interval.
    rate: Estimate,
    /// What tuning promised; null where nothing was tuned.
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
    on_pool(|| check(arguments, seed, device, dtype, console))
}

fn check(
    arguments: &CheckArguments,
    seed: Option<u64>,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<()> {
    let dir = &arguments.export;
    let kind = ExportKind::of(dir)?;
    let recipe = Recipe::of_export(dir, arguments.recipe.as_deref(), seed)?;
    let draft = kind.draft_in(&recipe)?;
    let (files, split) = prompt_files(arguments, &recipe)?;
    let sources = read_sources(&files, &recipe.reading(split))?;
    let template = recipe.models.chat_template.as_deref();
    let devices = vec![device.clone()];
    let mut workspace =
        Workspace::open(&recipe.models.target, None, draft, template, devices, console)?;
    (workspace.ends, workspace.dtype) = (recipe.models.ends(), dtype);
    let pair = workspace.pair()?;
    let choice = PromptChoice {
        num_prompts: Some(arguments.num_prompts.get()),
        skip_long: recipe.evaluate.as_ref().is_some_and(|evaluate| evaluate.skip_long_prompts),
    };
    let prompts = choice.of_all(&sources, &pair.text, console)?;
    let exports = Exports::read_export(kind, dir, &recipe, &workspace)?;
    let drafter = match exports.adapters.first() {
        Some(adapter) => {
            DrafterName::Of(DrafterId::SelfDraft { exit_layer: adapter.config.exit_layer })
        }
        None => DrafterName::Of(DrafterId::Draft),
    };
    let tuned_dir = exports.export_of(drafter).context("it was read just now")?;
    let exported = Exported {
        drafter,
        has_head: exports.heads().next().is_some(),
        tuned: Tuned::read_for(
            &tuned_dir,
            dtype,
            exports.num_draft_tokens(drafter),
            None,
            console,
        )?,
        dir: tuned_dir,
    };
    let greedy = Served::choose(&exported, DecodingName::Greedy)?;
    let sampled = Served::choose(&exported, DecodingName::Sampled)?;

    let max_new_tokens = max_new_tokens(&recipe);
    let mut bench = Bench::new(pair, &exports, drafter, max_new_tokens, recipe.seed);
    let mut greedy = OneDecoding::new(greedy)?;
    let mut sampled = OneDecoding::new(sampled)?;
    let progress = Progress::new(console, "check", "prompts", prompts.len() as u64);
    for prompt in &prompts {
        if console.is_interrupted() {
            return Err(Interrupted.into());
        }
        bench.run(prompt, &mut greedy, &mut sampled)?;
        progress.advance(1);
    }
    progress.finish();

    let mut names: Vec<String> = prompts.iter().map(|prompt| prompt.source.clone()).collect();
    names.dedup();
    let (greedy, sampled) = bench.judge(greedy, sampled)?;
    let mut checked = Checked {
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

/// The prompt files that were given, or those of the recipe's evaluation with their split.
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

fn max_new_tokens(recipe: &Recipe) -> usize {
    let evaluate = recipe.evaluate.as_ref().map(|evaluate| evaluate.max_new_tokens);
    let data = || recipe.data.as_ref().map(|data| data.max_new_tokens);
    evaluate.or_else(data).unwrap_or(MAX_NEW_TOKENS)
}

/// What is known of an export.
struct Exported {
    drafter: DrafterName,
    has_head: bool,
    tuned: Tuned,
    /// Whose `config.json` that is from.
    dir: PathBuf,
}

/// How an export is decoded with.
#[derive(Debug, Clone)]
struct Served {
    /// As tuned, with what is looked up first.
    drafter: DrafterName,
    decoding: Decoding,
    rule: StopRuleConfig,
    is_tuned: bool,
    promised: Option<Estimate>,
}

impl Served {
    /// The tuned rule, or the one that `generate` falls back on, then sampling at temperature 1.
    fn choose(exported: &Exported, name: DecodingName) -> Result<Self> {
        let Exported { drafter, has_head, tuned, dir } = exported;
        let Some(tuned) = tuned.rule(name) else {
            let decoding = match name {
                DecodingName::Greedy => Decoding::GREEDY,
                DecodingName::Sampled => Decoding::sampled(Sampling::default()),
            };
            let rule = default_rule(*has_head);
            let drafter = *drafter;
            return Ok(Self { drafter, decoding, rule, is_tuned: false, promised: None });
        };
        if tuned.drafter.id() != drafter.id() || (tuned.config.needs().acceptance_prob && !has_head)
        {
            bail!(
                "the rule under `tuned` of `{}` is for the drafter `{}`, but the export is for \
                 `{drafter}`; hint: tune it again",
                dir.join("config.json").display(),
                tuned.drafter
            );
        }
        Ok(Self {
            drafter: tuned.drafter,
            decoding: tuned.decoding(),
            rule: tuned.config.clone(),
            is_tuned: true,
            promised: Some(tuned.expected_acceptance_rate),
        })
    }
}
