//! `generate`: streams text from a target without a drafter, or with a draft, an adapter, prompt lookup or any
//! drafter of a recipe.

mod rule;
mod show;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::Args;
use draftsmith_data::{Message, TextStream};
use draftsmith_decode::{
    Drafters, Finish, Generation, Request, RoundTokens, Sizes, decode_plain, decode_speculative,
};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    DrafterId, LookupFirst, NamedRule, Round, SeededDraws, StopRuleConfig, TreeShape,
};
use serde::Serialize;

use self::rule::{ChosenRule, RuleSource};
use crate::console::Console;
use crate::decoding_arguments::{DecodingArguments, EndArguments};
use draftsmith_recipe::exports::ExportKind;
use draftsmith_recipe::kinds::adapter::AdapterKind;
use draftsmith_recipe::kinds::loaded::{LoadedDrafter, Loading, check_known};
use draftsmith_recipe::kinds::model::ModelKind;
use draftsmith_recipe::kinds::origin::Origin;
use draftsmith_recipe::kinds::prompt_lookup::PromptLookupKind;
use draftsmith_recipe::kinds::{DrafterRecipe, DrafterRecipes, Kind, NOTHING_DRAFTS};
use draftsmith_recipe::pair::Pair;
use draftsmith_recipe::watch::{Interrupted, Watch};
use draftsmith_recipe::workspace::Workspace;
use draftsmith_recipe::{Overrides, Recipe};
use draftsmith_report::{DecodingName, DrafterName};
use draftsmith_tune::decoders::{NO_TREE, proposing};

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// Target: a directory, or a Hugging Face name.
    #[arg(long, value_name = "MODEL", required_unless_present = "recipe")]
    target: Option<PathBuf>,
    /// Instead: a recipe with target and drafters.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["target", "draft", "head", "adapter", "prompt_lookup", "chat_template"]
    )]
    recipe: Option<PathBuf>,
    /// Drafter of the recipe; the first if absent.
    #[arg(long, value_name = "NAME", requires = "recipe")]
    drafter: Option<DrafterId>,
    /// Draft: a directory, or a Hugging Face name.
    #[arg(long, value_name = "MODEL")]
    draft: Option<PathBuf>,
    /// Acceptance head of the draft.
    #[arg(long, value_name = "DIR", requires = "draft")]
    head: Option<PathBuf>,
    /// Self-draft adapter, instead of a draft.
    #[arg(long, value_name = "DIR", conflicts_with = "draft")]
    adapter: Option<PathBuf>,
    /// Propose what followed the same words before.
    #[arg(long, conflicts_with_all = ["draft", "adapter"])]
    prompt_lookup: bool,
    /// Try prompt lookup first, `2x4` by default.
    #[arg(
        long,
        value_name = "AxB",
        num_args = 0..=1,
        default_missing_value = "2x4",
        conflicts_with_all = ["prompt_lookup", "tree"]
    )]
    lookup_first: Option<LookupFirst>,
    /// Propose trees of this shape: `3-2x4x12`.
    #[arg(long, value_name = "SHAPE", conflicts_with = "prompt_lookup")]
    tree: Option<TreeShape>,
    /// The user's message.
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Use the prompt without the chat template.
    #[arg(long)]
    raw: bool,
    /// `vicuna`, `llama-2`, `alpaca`, `none`, a file.
    #[arg(long, value_name = "NAME", conflicts_with = "raw")]
    chat_template: Option<String>,
    #[command(flatten)]
    decoding: DecodingArguments,
    #[command(flatten)]
    ends: EndArguments,
    /// The most new tokens.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_new_tokens: usize,
    /// When a round ends, as in `fixed=4`, `head=0.7`.
    #[arg(long, value_name = "NAME=VALUE", value_parser = rule::parse)]
    rule: Option<NamedRule>,
    /// The most candidates a round.
    #[arg(long, value_name = "K", requires = "rule")]
    max_candidate_length: Option<usize>,
    /// Show where each token came from.
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
    let recipe = recipe_of(arguments, seed)?;
    let asked = arguments.drafter.or_else(|| recipe.drafters.iter().next().map(|(id, _)| id));
    let name = DecodingName::of(&decoding);
    let rule = asked.map(|id| rule::asked_for(arguments, &recipe, id, name)).transpose()?;
    let (drafts, template) = (recipe.drafters.models(), recipe.models.chat_template.as_deref());
    let devices = vec![device.clone()];
    let mut workspace =
        Workspace::open(&recipe.models.target, None, &drafts, template, devices, console)?;
    (workspace.text.ends, workspace.models.dtype) =
        (arguments.ends.or(recipe.models.ends()), dtype);
    let pair = workspace.pair()?;
    let loaded = asked.map(|id| load(&recipe, id, &workspace)).transpose()?;
    let chosen = match (rule.flatten(), &loaded) {
        (Some(rule), _) => rule,
        (None, Some(loaded)) => rule::tuned(loaded, &decoding, dtype, console)?,
        (None, None) => ChosenRule::by_default(false),
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
    let is_speculative = loaded.is_some();
    let has_head = loaded.as_ref().is_some_and(|loaded| loaded.head.is_some());
    let name = asked.map_or(DrafterName::None, |id| {
        match (arguments.tree, arguments.lookup_first.or(chosen.lookup_first)) {
            (Some(shape), _) => DrafterName::Tree(id, shape),
            (_, Some(first)) => DrafterName::After(first, id),
            (None, None) => DrafterName::Of(id),
        }
    });
    let is_marked = arguments.show && is_speculative;
    let stream = pair.text.tokenizer.text_stream(true);
    let mut printer = Printer { console, stream, is_marked, failure: None };
    let (generation, seconds) = decode(pair, loaded.as_ref(), request, name, &mut printer)?;
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
    if arguments.draft.is_none() && arguments.adapter.is_none() && arguments.recipe.is_none() {
        if arguments.rule.is_some() && !arguments.prompt_lookup {
            bail!(
                "flag `--rule` needs a drafter; hint: give `--draft`, `--adapter` or `--prompt-lookup`"
            );
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

/// The recipe that is given, or one of the models and drafters that flags name.
fn recipe_of(arguments: &GenerateArguments, seed: u64) -> Result<Recipe> {
    if let Some(path) = &arguments.recipe {
        let recipe = Recipe::read(path, &Overrides { seed: Some(seed), ..Overrides::default() })?;
        if recipe.drafters.iter().next().is_none() {
            bail!("{NOTHING_DRAFTS}");
        }
        if let Some(asked) = arguments.drafter {
            let known: Vec<DrafterId> = recipe.drafters.iter().map(|(id, _)| id).collect();
            check_known(&known, asked, "drafter")?;
        }
        return Ok(recipe);
    }
    let target = arguments.target.clone().context("a target is given without a recipe")?;
    let mut drafters = DrafterRecipes::default();
    if let Some(model) = &arguments.draft {
        let kind = Kind::Model(ModelKind { model: model.clone() });
        let head = arguments.head.clone().map(Origin::Path);
        drafters.push(DrafterId::DRAFT, DrafterRecipe { head, ..DrafterRecipe::new(kind) });
    }
    if let Some(dir) = &arguments.adapter {
        let kind = Kind::Adapter(AdapterKind::in_dir(dir));
        drafters.push(DrafterId::named("adapter"), DrafterRecipe::new(kind));
    }
    if arguments.prompt_lookup {
        let kind = Kind::PromptLookup(PromptLookupKind::default());
        drafters.push(DrafterId::named("lookup"), DrafterRecipe::new(kind));
    }
    Ok(Recipe::of_drafters(target, arguments.chat_template.clone(), drafters))
}

fn load(recipe: &Recipe, id: DrafterId, workspace: &Workspace) -> Result<LoadedDrafter> {
    let loading = Loading { id, recipe, workspace };
    loading.drafter().kind.load(&loading)
}

/// Decodes with a drafter, or plainly, and returns the seconds that it took.
fn decode(
    pair: &Pair,
    drafter: Option<&LoadedDrafter>,
    request: Request<'_>,
    name: DrafterName,
    printer: &mut Printer<'_>,
) -> Result<(Generation, f64)> {
    let (prompt, decoding, limits) = (request.prompt, request.decoding, request.limits);
    let longest = prompt.len().saturating_add(limits.max_new_tokens).saturating_add(1);
    let capacity = longest.min(pair.text.context);
    let sizes = Sizes { target: &pair.target, capacity, num_slots: 1 };
    let mut drafters = Drafters::new(drafter.map(|it| &it.parts), sizes);
    let mut observe = |round: RoundTokens<'_>| printer.observe(&round);
    let begun = Instant::now();
    let Some(loaded) = drafter else {
        let target = drafters.target();
        let plain = decode_plain(target, &decoding, prompt, limits, request.draws, &mut observe)?;
        return Ok((plain, begun.elapsed().as_secs_f64()));
    };
    let (target, drafter) = drafters.drafting(loaded.id()).context("the drafter was built")?;
    let calibration =
        loaded.head.as_ref().and_then(|head| head.calibration.map(DecodingName::of(&decoding)));
    drafter.set_calibration(calibration);
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
