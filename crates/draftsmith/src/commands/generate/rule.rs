//! The stop rule that `generate` decodes with.

use anyhow::{Context, Result, bail};
use draftsmith_model::WeightDtype;
use draftsmith_report::DecodingName;
use draftsmith_theory::{
    Bounds, ConfidenceThresholdConfig, Decoding, FixedLengthConfig, LookupFirst,
    RejectionThresholdConfig, StopRuleConfig,
};
use serde::Serialize;

use super::GenerateArguments;
use crate::console::Console;
use crate::exports::found_adapter_head;
use crate::exports::tuned::{Tuned, default_rule};

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
/// If the value of a flag is invalid.
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
    let bounds = |most: usize| {
        Bounds::new(1, arguments.max_candidate_length.unwrap_or(most))
            .context("flag `--max-candidate-length`")
    };
    let head_of_adapter = arguments.adapter.as_deref().and_then(found_adapter_head);
    let asked = if let Some(candidate_length) = arguments.candidate_length {
        let candidate_length = candidate_length.get();
        ("--candidate-length", FixedLengthConfig { candidate_length }.into())
    } else if let Some(stop_threshold) = arguments.stop_threshold {
        if arguments.head.is_none() && head_of_adapter.is_none() {
            bail!(
                "flag `--stop-threshold` needs an acceptance head; hint: give `--head DIR`, or an adapter \
                 whose directory has a `head` in it"
            );
        }
        let (without_lag, bounds) = (false, bounds(20)?);
        let rule = RejectionThresholdConfig { stop_threshold, without_lag, bounds };
        ("--stop-threshold", StopRuleConfig::RejectionThreshold(rule))
    } else if let Some(confidence_threshold) = arguments.confidence_threshold {
        let (before_draw, bounds) = (false, bounds(6)?);
        let rule = ConfidenceThresholdConfig { confidence_threshold, before_draw, bounds };
        ("--confidence-threshold", StopRuleConfig::ConfidenceThreshold(rule))
    } else {
        return Ok(None);
    };
    let (flag, rule) = asked;
    rule.init().with_context(|| format!("flag `{flag}`"))?;
    Ok(chosen(rule))
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
