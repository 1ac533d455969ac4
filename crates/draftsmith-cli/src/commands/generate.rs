//! `generate`: streams text from a target, alone or with a draft model, an adapter, prompt lookup
//! or any drafter of a recipe.

mod arguments;
mod printer;
mod rule;
mod show;

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use draftsmith_data::Message;
use draftsmith_decode::{
    Drafters, Finish, Generation, Request, RoundTokens, Sizes, decode_plain, decode_speculative,
};
use draftsmith_theory::{Round, SeededDraws, StopRuleConfig, StoredAnswers};
use serde::Serialize;

use self::arguments::{check_flags, recipe_of};
use self::printer::Printer;
use self::rule::{ChosenRule, RuleSource};
use crate::commands::DeviceJob;
use draftsmith_recipe::{Interrupted, LoadedDrafter, Pair, Watch};
use draftsmith_report::DrafterName;
use draftsmith_tune::decoders::proposing;

pub(crate) use self::arguments::GenerateArguments;

/// The document that `--json` prints.
#[derive(Debug, Serialize)]
struct GeneratedText<'a> {
    prompt_ids: &'a [u32],
    /// The ids of the new tokens only.
    token_ids: &'a [u32],
    text: String,
    /// The drafter's name; `none` for the target alone.
    drafter: DrafterName,
    /// The stop rule; null for the target alone.
    stop_rule: Option<&'a StopRuleConfig>,
    rule_chosen_by: Option<RuleSource>,
    /// The reason why the text ends: `eos`, `stop_string`, `length`, or `stopped` after Ctrl-C.
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
pub(crate) fn run(arguments: &GenerateArguments, job: DeviceJob<'_>) -> Result<()> {
    let DeviceJob { device, dtype, console, .. } = job;
    let seed = job.seed.unwrap_or(0);
    let decoding = arguments.decoding.decoding()?;
    check_flags(arguments)?;
    let recipe = recipe_of(arguments, seed)?;
    let asked =
        arguments.drafter_name()?.or_else(|| recipe.drafters.iter().next().map(|(id, _)| id));
    let of_models = (dtype, console);
    let rule = asked.map(|id| rule::asked_for(arguments, &recipe, id, &decoding, of_models));
    let rule = rule.transpose()?;
    let mut workspace = recipe.open(None, dtype, vec![device.clone()], console)?;
    workspace.text.ends = arguments.ends.or(recipe.models.ends());
    let pair = workspace.pair()?;
    let loaded = asked.map(|id| recipe.loading(id, &workspace).load()).transpose()?;
    let chosen = match (rule.flatten(), &loaded) {
        (Some(rule), _) => rule,
        (None, Some(loaded)) => rule::tuned(loaded, &decoding, dtype, console)?,
        (None, None) => ChosenRule::by_default(false),
    };
    let mut rule = chosen.config.init()?;
    let prompt_ids = if arguments.raw {
        pair.text.tokenizer.encode(&arguments.prompt, true)?
    } else {
        let encoded = pair.text.encode(&[Message::user(&arguments.prompt)]);
        encoded.map_err(|error| match error.to_string().contains("no chat template") {
            true => anyhow!("{error}; `--raw` uses the prompt without one"),
            false => error,
        })?
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
    let has_head = loaded.as_ref().is_some_and(|loaded| loaded.head_timing().is_some());
    let name = asked.map_or(DrafterName::None, |id| {
        match (arguments.tree, arguments.lookup_first.or(chosen.lookup_first)) {
            (Some(shape), _) => DrafterName::Tree(id, shape),
            (_, Some(first)) => DrafterName::After(first, id),
            (None, None) => DrafterName::Of(id),
        }
    });
    if name.lookup_first().is_some_and(|first| first.answers) && recipe.answers.is_none() {
        console.note(
            "look-ups search only the text, because no earlier answers are given; hint: `--answers FILE`, or the \
             recipe's key `answers`",
        );
    }
    let is_marked = arguments.show && is_speculative;
    let stream = pair.text.tokenizer.text_stream(true);
    let mut printer = Printer { console, stream, is_marked, failure: None };
    let answers = workspace.answers()?;
    let (generation, seconds) =
        decode(pair, loaded.as_ref(), request, name, answers.as_ref(), &mut printer)?;
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

/// Decodes with a drafter or the target alone. Also returns the elapsed seconds.
fn decode(
    pair: &Pair,
    drafter: Option<&LoadedDrafter>,
    request: Request<'_>,
    name: DrafterName,
    answers: Option<&Arc<StoredAnswers>>,
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
    let generation = proposing(drafter, (name, answers), 1, |drafter| {
        Ok(decode_speculative(target, drafter, request, &mut observe)?)
    })?;
    Ok((generation, begun.elapsed().as_secs_f64()))
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
