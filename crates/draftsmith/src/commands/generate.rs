//! `generate`: streams text from a target without a drafter, or with a draft, an adapter, prompt lookup or a
//! cascade.

mod rule;
mod show;

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::{ArgGroup, Args};
use draftsmith_data::{Message, TextStream};
use draftsmith_decode::{
    DrafterParts, Drafters, Finish, Generation, Request, RoundTokens, decode_plain,
    decode_speculative,
};
use draftsmith_model::WeightDtype;
use draftsmith_report::{DecodingName, DrafterName};
use draftsmith_theory::{
    DrafterId, LookupFirst, MaxGramConfig, Round, SeededDraws, StopRuleConfig, TreeShape,
};
use serde::Serialize;

use self::rule::RuleSource;
use crate::console::{Console, Interrupted};
use crate::decoders::{NO_TREE, drafters_of, proposing};
use crate::decoding_arguments::DecodingArguments;
use crate::exports::cascades::Cascades;
use crate::exports::lookup::Lookup;
use crate::exports::{
    AdapterExport, ExportKind, Exports, HeadExport, read_adapter_head, read_draft_head,
};
use crate::pair::Pair;
use crate::recipe::CascadeRecipe;
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
    /// A self-draft adapter of the target, instead of a draft, with its acceptance head if its
    /// directory has one.
    #[arg(long, value_name = "DIR", conflicts_with = "draft")]
    adapter: Option<PathBuf>,
    /// Draft without a model: propose what followed the same words earlier in the text. Pays if answers
    /// repeat their prompts or themselves.
    #[arg(long, conflicts_with_all = ["draft", "adapter", "threshold"])]
    prompt_lookup: bool,
    /// With a draft or an adapter: try prompt lookup first, and draft only without a match. `2x4`, the
    /// default value, proposes up to four tokens after a match of at least two.
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
    /// rounds; `lenience = 2` lets drafters accept less probable candidates, looked-up ones only with
    /// `lenient_lookup = true`.
    #[arg(
        long,
        value_name = "KEYS",
        conflicts_with_all = ["lookup_first", "tree", "threshold", "candidate_length"]
    )]
    cascade: Option<CascadeRecipe>,
    /// A second, smaller draft for a cascade.
    #[arg(long, value_name = "MODEL", requires = "cascade")]
    small_draft: Option<PathBuf>,
    /// With prompt lookup, also in a cascade: a table of bigrams, the `bigrams.safetensors` of
    /// `train-bigram`, that continues where the text has no match.
    #[arg(long, value_name = "FILE", requires = "looks_up")]
    bigrams: Option<PathBuf>,
    /// Propose trees of candidates. `3-2x4x12`: three children of the root, two of every other node; a
    /// draft forward reads four nodes; at most twelve nodes beside the chain. `3-2.0.1`: the root's three
    /// children have two, no and one child. With the suffix `-drawn`, children of sampled text are drawn
    /// without replacement.
    #[arg(long, value_name = "SHAPE", conflicts_with = "prompt_lookup")]
    tree: Option<TreeShape>,
    /// The user's message.
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Use the prompt without the chat template.
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
    /// With a draft or an adapter: end a round after a candidate whose probability is at most this.
    #[arg(long, value_name = "ETA", conflicts_with = "candidate_length")]
    confidence_threshold: Option<f64>,
    /// Candidates per round. Without this or a threshold, rounds end by the rule that `tune` wrote into the
    /// head or adapter. Without such a rule they end by H = 0.7 with a head, and after 5 candidates
    /// otherwise.
    #[arg(long, value_name = "K", conflicts_with = "stop_threshold")]
    candidate_length: Option<NonZeroUsize>,
    /// With a head of the draft or the adapter: end a round when the probability of a rejection exceeds
    /// this.
    #[arg(long, value_name = "H")]
    stop_threshold: Option<f64>,
    /// With a threshold: the most candidates per round, by default 20 with a head's threshold and 6 with
    /// a confidence threshold.
    #[arg(long, value_name = "K", requires = "threshold")]
    max_candidate_length: Option<usize>,
    /// Colour accepted, corrected and bonus tokens, and print the table of rounds on stderr.
    #[arg(long, conflicts_with = "json")]
    show: bool,
}

/// The document of `--json`.
#[derive(Debug, Serialize)]
struct GeneratedText<'a> {
    prompt_ids: &'a [u32],
    /// The new tokens only.
    token_ids: &'a [u32],
    text: String,
    /// `none` for the target alone.
    drafter: DrafterName,
    /// Null for the target alone.
    stop_rule: Option<&'a StopRuleConfig>,
    rule_chosen_by: Option<RuleSource>,
    /// `eos`, `stop_string`, `length`, or `stopped` after Ctrl-C.
    finish_reason: &'static str,
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
    let decoding = arguments.decoding.decoding()?;
    check_flags(arguments)?;
    let rule = rule::asked_for(arguments, DecodingName::of(&decoding))?;
    let (draft, template) = (arguments.draft.as_deref(), arguments.chat_template.as_deref());
    let devices = vec![device.clone()];
    let mut workspace =
        Workspace::open(&arguments.target, None, draft, template, devices, console)?
            .with_small_draft(arguments.small_draft.as_deref())?;
    (workspace.ends, workspace.dtype) = (arguments.ends.ends(), dtype);
    let pair = workspace.pair()?;
    let exports = read_exports(arguments, &workspace)?;
    let chosen = match rule {
        Some(rule) => rule,
        None => rule::tuned(arguments, &decoding, dtype, console)?,
    };
    let mut rule = chosen.config.init()?;
    let prompt_ids = if arguments.raw {
        pair.text.tokenizer.encode(&arguments.prompt, true)?
    } else {
        pair.text.encode(&[Message::user(&arguments.prompt)])?
    };
    pair.text.check_fits("--prompt", &prompt_ids)?;
    let request = Request {
        prompt: &prompt_ids,
        decoding,
        limits: &pair.text.limits(arguments.max_new_tokens),
        rule: Some(rule.as_mut()),
        draws: &mut SeededDraws::new(seed, &["generate"]),
    };
    // The draft is the first drafter, and drafts if there is no other.
    let drafter = drafters_of(pair, &exports).pop();
    let is_speculative = drafter.is_some();
    let has_head = drafter.as_ref().is_some_and(|(_, head)| head.is_some());
    let name = drafter.as_ref().map_or(DrafterName::None, |(parts, _)| {
        match (arguments.tree, arguments.lookup_first.or(chosen.lookup_first)) {
            (Some(shape), _) => DrafterName::Tree(parts.id(), shape),
            (_, Some(first)) => DrafterName::After(first, parts.id()),
            (None, None) => DrafterName::Of(parts.id()),
        }
    });
    let is_marked = arguments.show && is_speculative;
    let stream = pair.text.tokenizer.text_stream(true);
    let mut printer = Printer { console, stream, is_marked, failure: None };
    let (generation, seconds) = decode(pair, drafter, request, name, &mut printer)?;
    printer.finish()?;
    console.document(&GeneratedText {
        prompt_ids: &prompt_ids,
        token_ids: &generation.token_ids,
        text: pair.text.tokenizer.decode(&generation.token_ids, true)?,
        drafter: name,
        stop_rule: is_speculative.then_some(&chosen.config),
        rule_chosen_by: is_speculative.then_some(chosen.chosen_by),
        finish_reason: finish_reason(generation.finish),
        rounds: rounds(&generation),
        seconds,
    })?;
    if is_marked {
        console.note(format!("\n{}\n{}", show::LEGEND, show::table(&generation.trace.rounds)));
    }
    if is_speculative {
        console.note(format!("{}: {}", name.text(), chosen.text(has_head)));
    }
    console.note(summary(&generation, seconds, is_speculative));
    if console.is_interrupted() { Err(Interrupted.into()) } else { Ok(()) }
}

/// Checks flags that need a file or a drafter.
fn check_flags(arguments: &GenerateArguments) -> Result<()> {
    for (kind, flag, dir) in [
        (ExportKind::Head, "--head", &arguments.head),
        (ExportKind::Adapter, "--adapter", &arguments.adapter),
    ] {
        dir.iter().try_for_each(|dir| kind.check(flag, dir))?;
    }
    if arguments.draft.is_none() && arguments.adapter.is_none() {
        let has_drafter = arguments.prompt_lookup || arguments.cascade.is_some();
        for (flag, is_given) in [
            ("--candidate-length", arguments.candidate_length.is_some() && !has_drafter),
            ("--confidence-threshold", arguments.confidence_threshold.is_some()),
        ] {
            if is_given {
                bail!("flag `{flag}` needs a drafter; hint: give `--draft` or `--adapter`");
            }
        }
        if arguments.tree.is_some() {
            bail!("flag `--tree`: {NO_TREE}; hint: give `--draft` or `--adapter`");
        }
        if arguments.lookup_first.is_some() {
            bail!(
                "flag `--lookup-first` needs a drafter for rounds without a match; hint: give `--draft` \
                 or `--adapter`, or `--prompt-lookup` instead"
            );
        }
    }
    Ok(())
}

/// Reads what the flags name: a head, an adapter, prompt lookup, or the drafters of a cascade.
fn read_exports(arguments: &GenerateArguments, workspace: &Workspace) -> Result<Exports> {
    let head = arguments.head.as_deref().map(|dir| read_draft_head(dir, workspace)).transpose()?;
    let mut adapters = Vec::new();
    if let Some(dir) = &arguments.adapter {
        let mut adapter = AdapterExport::without_head(dir, workspace)?;
        adapter.head = read_adapter_head(dir, &adapter.config, workspace)?;
        adapters.push(adapter);
    }
    let read_lookup =
        || Lookup::read(MaxGramConfig::default(), arguments.bigrams.as_deref(), workspace);
    let lookup = arguments.prompt_lookup.then(read_lookup).transpose()?;
    let cascades = match &arguments.cascade {
        None => None,
        Some(cascade) => {
            check_named(cascade, arguments, &adapters)?;
            let asked = (std::slice::from_ref(cascade), &[][..]);
            Cascades::read(asked, read_lookup, head.as_ref(), &adapters, workspace)?
        }
    };
    let drafters = arguments.cascade.iter().flat_map(|cascade| &cascade.drafters);
    let exports = Exports { head, adapters, lookup, cascades, ..Exports::default() };
    exports.with_small_draft(drafters, workspace)
}

/// Decodes with a drafter, or plainly, and returns the seconds that it took.
fn decode(
    pair: &Pair,
    drafter: Option<(DrafterParts<'_>, Option<&HeadExport>)>,
    request: Request<'_>,
    name: DrafterName,
    printer: &mut Printer<'_>,
) -> Result<(Generation, f64)> {
    let (prompt, decoding, limits) = (request.prompt, request.decoding, request.limits);
    let longest = prompt.len().saturating_add(limits.max_new_tokens).saturating_add(1);
    let parts = drafter.iter().map(|(parts, _)| parts.clone());
    let mut drafters = Drafters::new(&pair.target, parts, longest.min(pair.text.context), 1);
    let mut observe = |round: RoundTokens<'_>| printer.observe(&round);
    let begun = Instant::now();
    let Some((parts, head)) = drafter else {
        let target = drafters.target();
        let plain = decode_plain(target, &decoding, prompt, limits, request.draws, &mut observe)?;
        return Ok((plain, begun.elapsed().as_secs_f64()));
    };
    let (target, drafter) = drafters.drafting(parts.id()).context("the drafter was built")?;
    drafter
        .set_calibration(head.and_then(|head| head.calibration.map(DecodingName::of(&decoding))));
    let generation = proposing(drafter, name, 1, |drafter| {
        Ok(decode_speculative(target, drafter, request, &mut observe)?)
    })?;
    Ok((generation, begun.elapsed().as_secs_f64()))
}

/// Prints tokens as they are decoded, and stops decoding on Ctrl-C or if nobody reads the output.
struct Printer<'a> {
    console: &'a Console,
    stream: TextStream<'a>,
    /// Whether tokens are marked by where they come from.
    is_marked: bool,
    /// Why nothing more was printed.
    failure: Option<anyhow::Error>,
}

impl Printer<'_> {
    fn observe(&mut self, round: &RoundTokens<'_>) -> ControlFlow<()> {
        let Self { console, .. } = self;
        if console.is_interrupted() || console.is_reader_gone() {
            return ControlFlow::Break(());
        }
        if !console.json
            && let Err(error) = self.print(round)
        {
            self.failure = Some(error);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn print(&mut self, round: &RoundTokens<'_>) -> Result<()> {
        for (id, origin) in round.kept.iter().zip(show::origins(round)) {
            let Some(text) = self.stream.push(*id)? else { continue };
            match self.is_marked {
                true => self.console.text(show::marked(&text, origin, self.console.colour()))?,
                false => self.console.text(text)?,
            }
        }
        Ok(())
    }

    /// Prints the rest of the text.
    fn finish(self) -> Result<()> {
        if let Some(error) = self.failure {
            return Err(error);
        }
        if let Some(rest) = self.stream.finish()? {
            self.console.text(rest)?;
        }
        self.console.text("\n")
    }
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

fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Eos => "eos",
        Finish::StopString => "stop_string",
        Finish::Length => "length",
        Finish::Stopped => "stopped",
    }
}

fn rounds(generation: &Generation) -> Vec<RoundSummary> {
    let summary = |round: &Round| RoundSummary {
        num_drafted: round.num_drafted,
        num_accepted: round.num_accepted,
        draft_seconds: round.draft_time.as_secs_f64(),
        verify_seconds: round.verify_time.as_secs_f64(),
    };
    generation.trace.rounds.iter().map(summary).collect()
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
