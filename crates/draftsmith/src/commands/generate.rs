//! `generate`: text as it comes, from one model, from a target and its draft, from a model and its
//! adapter, or from a model and what it has read.

mod rule;
mod show;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::{ArgGroup, Args};
use draftsmith_data::Message;
use draftsmith_decode::{
    Drafters, Generation, Request, RoundTokens, decode_plain, decode_speculative,
};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{DrafterId, LookupFirst, MaxGramConfig, SeededDraws, TreeShape};
use serde::Serialize;

use crate::console::{Console, Interrupted};
use crate::decoders::{NO_TREE, drafters_of, proposing};
use crate::decoding_arguments::DecodingArguments;
use crate::device::on_pool;
use crate::exports::cascades::Cascades;
use crate::exports::draft_vocabulary::DraftTokens;
use crate::exports::lookup::Lookup;
use crate::exports::{AdapterExport, ExportKind, Exports, read_adapter_head, read_draft_head};
use crate::recipe::CascadeRecipe;
use crate::results::{DecodingName, DrafterName};
use crate::text_side::EndArguments;
use crate::workspace::Workspace;

/// Arguments of `generate`.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("threshold").args(["stop_threshold", "confidence_threshold"]),
    group = ArgGroup::new("looks_up").args(["prompt_lookup", "cascade"])
)]
pub(crate) struct GenerateArguments {
    /// The target: a checkpoint directory, or its name on the Hugging Face Hub, `org/name@revision`.
    #[arg(long, value_name = "MODEL")]
    target: PathBuf,
    /// A draft, likewise, for speculative decoding.
    #[arg(long, value_name = "MODEL")]
    draft: Option<PathBuf>,
    /// An acceptance head for the draft; without one, candidates are drafted in fixed lengths.
    #[arg(long, value_name = "DIR", requires = "draft")]
    head: Option<PathBuf>,
    /// The tokens that the draft may draw: the `draft_vocabulary.safetensors` that a recipe with
    /// `evaluate.draft_vocabulary` leaves in its checkpoints.
    #[arg(long, value_name = "FILE", requires = "draft")]
    draft_vocabulary: Option<PathBuf>,
    /// A self-draft adapter of the target, instead of a draft, with its acceptance head if its
    /// directory has one.
    #[arg(long, value_name = "DIR", conflicts_with = "draft")]
    adapter: Option<PathBuf>,
    /// Draft without a model: go on as the text went on where it last looked like this. Pays where
    /// answers repeat their prompts or themselves.
    #[arg(long, conflicts_with_all = ["draft", "adapter", "threshold"])]
    prompt_lookup: bool,
    /// With a draft or an adapter: look up first, and draft where nothing is found. `2x4`, if nothing
    /// is said, looks up to four candidates behind a match of two tokens or more.
    #[arg(
        long,
        value_name = "MATCHxLENGTH",
        num_args = 0..=1,
        default_missing_value = "2x4",
        conflicts_with_all = ["prompt_lookup", "tree"]
    )]
    lookup_first: Option<LookupFirst>,
    /// Combine drafters, by the keys of a recipe's `[[evaluate.cascades]]`:
    /// `drafters = ["draft", "max_gram"], lengths = [[4, 6], [0, 8]]`. The matrix sets the lengths of
    /// rounds; `leading = 8` adds first tokens up to eight; `lenience = 2` lets drafters accept less
    /// probable candidates, looked-up ones only with `lenient_lookup = true`.
    #[arg(
        long,
        value_name = "KEYS",
        conflicts_with_all = ["lookup_first", "tree", "threshold", "candidate_length"]
    )]
    cascade: Option<CascadeRecipe>,
    /// A second, smaller draft for a cascade.
    #[arg(long, value_name = "MODEL", requires = "cascade")]
    small_draft: Option<PathBuf>,
    /// With prompt lookup, alone or in a cascade: the table of bigrams that goes on where the text
    /// says nothing, a `bigrams.safetensors` of `train-bigram`.
    #[arg(long, value_name = "FILE", requires = "looks_up")]
    bigrams: Option<PathBuf>,
    /// Propose trees of candidates: `3-2x4x12` has three children behind the text and two behind each
    /// node, of which a draft forward reads four, and twelve nodes at most beside the chain; `3-2.0.1`
    /// has two behind the first of three, one behind the last, and nothing else. With the suffix
    /// `-drawn`, children of sampled text are drawn without replacement.
    #[arg(long, value_name = "SHAPE", conflicts_with = "prompt_lookup")]
    tree: Option<TreeShape>,
    /// The user's message.
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Give the prompt to the model as it is, without its chat template.
    #[arg(long)]
    raw: bool,
    /// The chat template instead of the target's own: `vicuna`, `llama-2`, `alpaca`, a Jinja file,
    /// or `none`.
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "raw")]
    chat_template: Option<String>,
    #[command(flatten)]
    decoding: DecodingArguments,
    #[command(flatten)]
    ends: EndArguments,
    /// The most new tokens.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// With an adapter: end a round after a candidate whose probability is at most this.
    #[arg(long, value_name = "ETA", requires = "adapter", conflicts_with = "candidate_length")]
    confidence_threshold: Option<f64>,
    /// Candidates a round. Without this or a threshold, rounds end by the rule that tuning wrote
    /// into the head or adapter; where none did, by H = 0.7 with a head, and after 5 candidates
    /// without.
    #[arg(long, value_name = "K", conflicts_with = "stop_threshold")]
    candidate_length: Option<usize>,
    /// With a head, the draft's or the adapter's: end a round when the chance of a rejection
    /// exceeds this.
    #[arg(long, value_name = "H")]
    stop_threshold: Option<f64>,
    /// With a threshold: the most candidates a round; 20 for a head's, 6 for a confidence if
    /// absent.
    #[arg(long, value_name = "K", requires = "threshold")]
    max_candidate_length: Option<usize>,
    /// Colour accepted, corrected and bonus tokens, and print the table of rounds on stderr.
    #[arg(long, conflicts_with = "json")]
    show: bool,
}

/// The document of `--json`.
#[derive(Debug, Serialize)]
struct Generated<'a> {
    prompt_ids: &'a [u32],
    /// The new tokens only.
    token_ids: &'a [u32],
    text: String,
    rounds: Vec<RoundSummary>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct RoundSummary {
    num_drafted: usize,
    num_accepted: usize,
    draft_seconds: f64,
    verify_seconds: f64,
}

/// Runs the command.
pub(crate) fn run(
    arguments: &GenerateArguments,
    seed: u64,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<()> {
    on_pool(|| generate(arguments, seed, device, dtype, console))
}

fn generate(
    arguments: &GenerateArguments,
    seed: u64,
    device: &Device,
    dtype: WeightDtype,
    console: &Console,
) -> Result<()> {
    let decoding = arguments.decoding.decoding()?;
    for (kind, flag, dir) in [
        (ExportKind::Head, "--head", &arguments.head),
        (ExportKind::Adapter, "--adapter", &arguments.adapter),
    ] {
        dir.iter().try_for_each(|dir| kind.check(flag, dir))?;
    }
    if arguments.draft.is_none() && arguments.adapter.is_none() {
        if arguments.tree.is_some() {
            bail!("flag `--tree`: {NO_TREE}; hint: give `--draft` or `--adapter`");
        }
        if arguments.lookup_first.is_some() {
            bail!(
                "flag `--lookup-first` needs what drafts where nothing is found; hint: give `--draft` \
                 or `--adapter`, or `--prompt-lookup` instead"
            );
        }
    }
    let rule = rule::asked_for(arguments, DecodingName::of(&decoding))?;
    let draft = arguments.draft.as_deref();
    let template = arguments.chat_template.as_deref();
    let devices = vec![device.clone()];
    let mut workspace =
        Workspace::open(&arguments.target, None, draft, template, devices, console)?
            .with_small_draft(arguments.small_draft.as_deref())?;
    (workspace.ends, workspace.dtype) = (arguments.ends.ends(), dtype);
    let pair = workspace.pair()?;
    let head = arguments.head.as_deref().map(|dir| read_draft_head(dir, &workspace)).transpose()?;
    let mut adapters = Vec::new();
    if let Some(dir) = &arguments.adapter {
        let mut adapter = AdapterExport::without_head(dir, &workspace)?;
        adapter.head = read_adapter_head(dir, &adapter.config, &workspace)?;
        adapters.push(adapter);
    }
    let draft_tokens = arguments.draft_vocabulary.as_deref();
    let draft_tokens = draft_tokens.map(|path| DraftTokens::read(path, workspace.vocab_size()?));
    let read_lookup =
        || Lookup::read(MaxGramConfig::default(), arguments.bigrams.as_deref(), &workspace);
    let lookup = arguments.prompt_lookup.then(read_lookup);
    let (draft_tokens, lookup) = (draft_tokens.transpose()?, lookup.transpose()?);
    let cascades = match &arguments.cascade {
        None => None,
        Some(cascade) => {
            check_named(cascade, arguments, &adapters)?;
            let asked = (std::slice::from_ref(cascade), &[][..]);
            Cascades::read(asked, read_lookup, head.as_ref(), &adapters, &workspace)?
        }
    };
    let drafters = arguments.cascade.iter().flat_map(|cascade| &cascade.drafters);
    let exports = Exports { head, draft_tokens, adapters, lookup, cascades, ..Exports::default() };
    let exports = exports.with_small_draft(drafters, &workspace)?;
    let num_tokens = exports.draft_tokens.as_ref().map(DraftTokens::len);
    let (mut rule, tuned_first) = match rule {
        Some(rule) => (rule, None),
        None => rule::tuned(arguments, &decoding, dtype, num_tokens, console)?,
    };
    // An adapter, prompt lookup, or a cascade serves instead of a draft.
    let drafter = drafters_of(pair, &exports).pop();
    let speculative = drafter.is_some();
    let prompt_ids = if arguments.raw {
        pair.text.tokenizer.encode(&arguments.prompt, true)?
    } else {
        pair.text.encode(&[Message::user(&arguments.prompt)])?
    };
    pair.text.check_fits("--prompt", &prompt_ids)?;

    let limits = pair.text.limits(arguments.max_new_tokens);
    let longest = prompt_ids.len().saturating_add(arguments.max_new_tokens).saturating_add(1);
    let capacity = longest.min(pair.text.context);
    let mut draws = SeededDraws::new(seed, &["generate"]);
    let mut stream = Some(pair.text.tokenizer.text_stream(true));
    let mut failure: Option<anyhow::Error> = None;
    let mut observe = |round: RoundTokens<'_>| -> ControlFlow<()> {
        if console.is_interrupted() || console.is_reader_gone() {
            return ControlFlow::Break(());
        }
        if console.json {
            return ControlFlow::Continue(());
        }
        let mut print = || -> Result<()> {
            let stream = stream.as_mut().context("the text stream is open")?;
            for (id, origin) in round.kept.iter().zip(show::origins(&round)) {
                let Some(text) = stream.push(*id)? else { continue };
                if arguments.show && speculative {
                    console.text(show::marked(&text, origin, console.colour()))?;
                } else {
                    console.text(text)?;
                }
            }
            Ok(())
        };
        match print() {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let parts = drafter.iter().map(|(parts, _)| parts.clone());
    let mut drafters = Drafters::new(&pair.target, parts, capacity, 1);
    let begun = Instant::now();
    let generation = match drafter {
        None => {
            let target = drafters.target();
            decode_plain(target, &decoding, &prompt_ids, &limits, &mut draws, &mut observe)?
        }
        Some((parts, head)) => {
            let built = drafters.drafting(parts.id());
            let (target, drafter) = built.context("the drafter was built")?;
            let calibration =
                head.and_then(|head| head.calibration.map(DecodingName::of(&decoding)));
            drafter.set_calibration(calibration);
            let name = match (arguments.tree, arguments.lookup_first.or(tuned_first)) {
                (Some(shape), _) => DrafterName::Tree(parts.id(), shape),
                (_, Some(first)) => DrafterName::After(first, parts.id()),
                (None, None) => DrafterName::Of(parts.id()),
            };
            proposing(drafter, name, 1, |drafter| {
                Ok(decode_speculative(
                    target,
                    drafter,
                    Request {
                        prompt: &prompt_ids,
                        decoding,
                        limits: &limits,
                        rule: Some(rule.as_mut()),
                        draws: &mut draws,
                    },
                    &mut observe,
                )?)
            })?
        }
    };
    let seconds = begun.elapsed().as_secs_f64();
    if let Some(error) = failure {
        return Err(error);
    }
    if let Some(rest) = stream.take().map(|stream| stream.finish()).transpose()?.flatten() {
        console.text(rest)?;
    }
    console.text("\n")?;
    console.document(&Generated {
        prompt_ids: &prompt_ids,
        token_ids: &generation.token_ids,
        text: pair.text.tokenizer.decode(&generation.token_ids, true)?,
        rounds: rounds(&generation),
        seconds,
    })?;
    if arguments.show && speculative {
        console.note(format!("\n{}\n{}", show::LEGEND, show::table(&generation.trace.rounds)));
    }
    console.note(summary(&generation, seconds, speculative));
    if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(()) }
}

/// Checks that the drafters of a cascade were given.
fn check_named(
    cascade: &CascadeRecipe,
    arguments: &GenerateArguments,
    adapters: &[AdapterExport],
) -> Result<()> {
    for id in &cascade.drafters {
        let (is_given, flag) = match id {
            DrafterId::Draft => (arguments.draft.is_some(), "--draft"),
            DrafterId::SmallDraft => (arguments.small_draft.is_some(), "--small-draft"),
            id => {
                let exit = id.exit_layer();
                let is_it = |it: &AdapterExport| Some(it.config.exit_layer) == exit;
                (exit.is_none() || adapters.iter().any(is_it), "--adapter")
            }
        };
        if !is_given {
            bail!("flag `--cascade` has the drafter `{id}`; hint: give it with `{flag}`");
        }
    }
    Ok(())
}

fn rounds(generation: &Generation) -> Vec<RoundSummary> {
    let rounds = generation.trace.rounds.iter();
    rounds
        .map(|round| RoundSummary {
            num_drafted: round.num_drafted,
            num_accepted: round.num_accepted,
            draft_seconds: round.draft_time.as_secs_f64(),
            verify_seconds: round.verify_time.as_secs_f64(),
        })
        .collect()
}

fn summary(generation: &Generation, seconds: f64, speculative: bool) -> String {
    let counts = generation.trace.counts();
    let mut text = format!(
        "{} tokens in {seconds:.2} s, {:.0} tokens/s",
        counts.num_tokens,
        counts.num_tokens as f64 / seconds
    );
    if speculative && counts.num_target_forwards > 0 {
        text += &format!(
            "; {:.2} tokens a target forward, {} of {} candidates accepted",
            counts.compression_rate(),
            counts.num_accepted,
            counts.num_drafted
        );
    }
    text
}
