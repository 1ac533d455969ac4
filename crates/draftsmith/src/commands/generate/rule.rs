//! The stop rule that `generate` decodes with.

use anyhow::{Context, Result, bail};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Bounds, Decoding, FixedLengthConfig, LookupFirst, StopRuleConfig};
use serde::Serialize;

use super::GenerateArguments;
use crate::console::Console;
use crate::exports::found_adapter_head;
use crate::exports::tuned::{Tuned, default_rule};
use crate::results::DecodingName;

/// A rule, and who chose it.
#[derive(Debug, Clone)]
pub(super) struct ChosenRule {
    pub(super) config: StopRuleConfig,
    /// Look-ups before the drafter, which tuning may choose too.
    pub(super) lookup_first: Option<LookupFirst>,
    pub(super) chosen_by: RuleSource,
}

/// Who chose a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RuleSource {
    /// A flag.
    Flag,
    /// `tune`, which wrote it into the export.
    Tuning,
    /// Nobody: it is the default.
    Default,
}

impl ChosenRule {
    /// The rule and who chose it, and whether it leaves a head unused: `K = 1, tuned; the head is not used`.
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

/// The rule that flags ask for, if any.
///
/// # Errors
/// If a bound is invalid, or the drafter lacks what the rule reads.
pub(super) fn asked_for(
    arguments: &GenerateArguments,
    decoding: DecodingName,
) -> Result<Option<ChosenRule>> {
    let chosen =
        |config| Some(ChosenRule { config, lookup_first: None, chosen_by: RuleSource::Flag });
    if let Some(cascade) = &arguments.cascade {
        let longest = FixedLengthConfig { candidate_length: cascade.longest(decoding) };
        return Ok(chosen(longest.into()));
    }
    let Some(asked) = &arguments.rule else { return Ok(None) };
    let most = if arguments.adapter.is_some() { 6 } else { 20 };
    let bounds = Bounds::new(1, arguments.max_candidate_length.unwrap_or(most))
        .context("flag `--max-candidate-length`")?;
    let config = asked.config(bounds);
    let (name, needs) = (config.name().file_name(), config.needs());
    if !needs.is_nothing() && arguments.prompt_lookup {
        bail!(
            "flag `--rule`: `{name}` reads the drafter's predictions, and `--prompt-lookup` has none; \
             hint: give a number of candidates, `--rule fixed=4`"
        );
    }
    let adapter = arguments.adapter.as_deref();
    let has_head = arguments.head.is_some() || adapter.and_then(found_adapter_head).is_some();
    if needs.acceptance_prob && !has_head {
        bail!(
            "flag `--rule`: `{name}` needs an acceptance head; hint: give `--head DIR`, or an adapter \
             whose directory has a `head` in it"
        );
    }
    let rule = config.init().context("flag `--rule`")?;
    if arguments.max_candidate_length.is_some() && rule.bounds() != bounds {
        bail!("flag `--max-candidate-length` does not apply to the rule `{name}`: leave it out");
    }
    Ok(chosen(config))
}

/// The rule that was tuned for the head or adapter, with its look-ups, or else the default rule.
///
/// # Errors
/// If the tuned rule cannot be read.
pub(super) fn tuned(
    arguments: &GenerateArguments,
    decoding: &Decoding,
    dtype: WeightDtype,
    console: &Console,
) -> Result<ChosenRule> {
    let head_of_adapter = arguments.adapter.as_deref().and_then(found_adapter_head);
    let head = arguments.head.as_ref().or(head_of_adapter.as_ref());
    let export = head.or(arguments.adapter.as_ref());
    let tuned = export.map(|dir| Tuned::read_for(dir, dtype, Some(decoding), console));
    let tuned = tuned.transpose()?.unwrap_or_default();
    Ok(match tuned.rule(DecodingName::of(decoding)) {
        Some(tuned) => ChosenRule {
            config: tuned.config.clone(),
            lookup_first: tuned.drafter.lookup_first(),
            chosen_by: RuleSource::Tuning,
        },
        None => ChosenRule {
            config: default_rule(head.is_some()),
            lookup_first: None,
            chosen_by: RuleSource::Default,
        },
    })
}
