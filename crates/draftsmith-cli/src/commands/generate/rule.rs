//! The stop rule that `generate` decodes with.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    Bounds, Decoding, DrafterId, LookupFirst, NamedRule, StopRuleConfig, TheoryError,
};
use serde::Serialize;

use super::GenerateArguments;
use crate::console::Console;
use draftsmith_recipe::{LoadedDrafter, Recipe, Tuned, found_adapter_head};
use draftsmith_report::DecodingName;

/// A stop rule and its origin.
#[derive(Debug, Clone)]
pub(super) struct ChosenRule {
    pub(super) config: StopRuleConfig,
    /// Prompt lookup before the drafter, which tuning may have added.
    pub(super) lookup_first: Option<LookupFirst>,
    pub(super) chosen_by: RuleSource,
}

/// The origin of a stop rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RuleSource {
    /// The rule was given by the flag `--rule`.
    Flag,
    /// `tune` wrote the rule into the export.
    Tuning,
    /// The rule is the default.
    Default,
}

/// What is wrong with a directory without a tuned rule.
const UNTUNED: &str = "has no tuned rule for this decoding; hint: `draftsmith tune RECIPE` writes one, and says where";

/// A stop rule as given by `--rule`.
#[derive(Debug, Clone)]
pub(super) enum AskedRule {
    /// A rule with its value.
    Named(NamedRule),
    /// The rule that `tune` wrote into this directory.
    Tuned(PathBuf),
}

/// Parses a stop rule from the command line. The error states only the problem, because clap
/// repeats the text.
pub(super) fn parse(text: &str) -> Result<AskedRule, String> {
    if let Some(dir) = text.strip_prefix("tuned=") {
        return Ok(AskedRule::Tuned(dir.into()));
    }
    text.parse().map(AskedRule::Named).map_err(|error| match error {
        TheoryError::NamedRule { problem, .. } => problem,
        other => other.to_string(),
    })
}

impl ChosenRule {
    /// Creates the default rule, for a drafter that was not tuned.
    pub(super) fn by_default(has_head: bool) -> Self {
        let config = StopRuleConfig::by_default(has_head);
        Self { config, lookup_first: None, chosen_by: RuleSource::Default }
    }

    /// Describes the rule and its origin, and whether it ignores the head: `K = 1, tuned; this rule
    /// does not use the head`.
    pub(super) fn text(&self, has_head: bool) -> String {
        let by = match self.chosen_by {
            RuleSource::Flag => "as given",
            RuleSource::Tuning => "tuned",
            RuleSource::Default => "the default",
        };
        let unused = match has_head && !self.config.needs().acceptance_prob {
            true => "; this rule does not use the head",
            false => "",
        };
        format!("{}, {by}{unused}", self.config.name().label(Some(self.config.parameter())))
    }
}

/// Returns the rule given by `--rule`, or else the only rule that the drafter supports. `None` if
/// neither exists.
///
/// # Errors
/// If a bound is invalid, or the drafter lacks a signal that the rule reads.
pub(super) fn asked_for(
    arguments: &GenerateArguments,
    recipe: &Recipe,
    id: DrafterId,
    decoding: &Decoding,
    (dtype, console): (WeightDtype, &Console),
) -> Result<Option<ChosenRule>> {
    let drafter = recipe.drafters.get(id).context("the recipe has the drafter")?;
    let own = drafter.kind.own_rule(DecodingName::of(decoding));
    let Some(asked) = &arguments.rule else {
        return Ok(own.map(|config| ChosenRule { config, ..ChosenRule::by_default(false) }));
    };
    ensure!(
        own.is_none(),
        "flag `--rule`: the rounds of `{id}` have the lengths of its own settings; leave it out"
    );
    let most = drafter.max_candidate_length.unwrap_or(drafter.kind.max_candidate_length());
    let bounds = Bounds::new(1, arguments.max_candidate_length.unwrap_or(most))
        .context("flag `--max-candidate-length`")?;
    let chosen = match asked {
        AskedRule::Named(rule) => ChosenRule {
            config: rule.config(bounds),
            lookup_first: None,
            chosen_by: RuleSource::Flag,
        },
        AskedRule::Tuned(dir) => tuned_in(dir, decoding, dtype, console)
            .context("flag `--rule`")?
            .with_context(|| format!("flag `--rule`: `{}` {UNTUNED}", dir.display()))?,
    };
    let config = &chosen.config;
    let (name, needs) = (config.name().file_name(), config.needs());
    ensure!(
        needs.is_nothing() || drafter.kind.has_signals(),
        "flag `--rule`: `{name}` reads the drafter's predictions, and `{id}` has none; hint: give a \
         number of candidates, `--rule fixed=4`"
    );
    let beside = || drafter.kind.path().and_then(|dir| found_adapter_head(dir));
    let has_head = || recipe.head_dir(id).or_else(beside).is_some();
    ensure!(
        !needs.acceptance_prob || drafter.kind.own_head().is_some() || has_head(),
        "flag `--rule`: `{name}` needs an acceptance head; hint: give `--head DIR`, or an adapter \
         whose directory has a `head` in it"
    );
    let rule = config.init().context("flag `--rule`")?;
    ensure!(
        arguments.max_candidate_length.is_none() || rule.bounds().max == bounds.max,
        "flag `--max-candidate-length` does not apply to the rule `{name}`: leave it out"
    );
    Ok(Some(chosen))
}

/// Reads the rule that `tune` wrote into a directory, with its prompt lookup. `None` if there is none for these
/// models and this way of decoding.
fn tuned_in(
    dir: &Path,
    decoding: &Decoding,
    dtype: WeightDtype,
    console: &Console,
) -> Result<Option<ChosenRule>> {
    let tuned = Tuned::read_for(dir, dtype, Some(decoding), console)?;
    Ok(tuned.rule(DecodingName::of(decoding)).map(|rule| ChosenRule {
        config: rule.config.clone(),
        lookup_first: rule.drafter.lookup_first(),
        chosen_by: RuleSource::Tuning,
    }))
}

/// Returns the tuned rule of the drafter's head or adapter, or the default rule if none was tuned.
///
/// # Errors
/// If the tuned rule cannot be read.
pub(super) fn tuned(
    drafter: &LoadedDrafter,
    decoding: &Decoding,
    dtype: WeightDtype,
    console: &Console,
) -> Result<ChosenRule> {
    let tuned = drafter.tuned_dir().map(|dir| tuned_in(dir, decoding, dtype, console));
    let has_head = drafter.head_timing().is_some();
    Ok(tuned.transpose()?.flatten().unwrap_or_else(|| ChosenRule::by_default(has_head)))
}
