//! The stop rule that `generate` decodes with.

use anyhow::{Context, Result, bail};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    Bounds, ConfidenceThresholdConfig, Decoding, FixedLengthConfig, LookupFirst,
    RejectionThresholdConfig, StopRule, StopRuleConfig,
};

use super::GenerateArguments;
use crate::console::Console;
use crate::exports::found_adapter_head;
use crate::exports::tuned::{Tuned, default_rule};
use crate::results::DecodingName;

/// The rule that flags ask for, if any.
///
/// # Errors
/// If the value of a flag is invalid.
pub(super) fn asked_for(
    arguments: &GenerateArguments,
    decoding: DecodingName,
) -> Result<Option<Box<dyn StopRule>>> {
    if let Some(cascade) = &arguments.cascade {
        let longest = FixedLengthConfig { candidate_length: cascade.longest(decoding) };
        return Ok(Some(StopRuleConfig::FixedLength(longest).init()?));
    }
    let bounds = |most: usize| {
        Bounds::new(1, arguments.max_candidate_length.unwrap_or(most))
            .context("flag `--max-candidate-length`")
    };
    let head_of_adapter = arguments.adapter.as_deref().and_then(found_adapter_head);
    let asked = if let Some(candidate_length) = arguments.candidate_length {
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
    rule.init().map(Some).with_context(|| format!("flag `{flag}`"))
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
) -> Result<(Box<dyn StopRule>, Option<LookupFirst>)> {
    let head_of_adapter = arguments.adapter.as_deref().and_then(found_adapter_head);
    let head = arguments.head.as_ref().or(head_of_adapter.as_ref());
    let export = head.or(arguments.adapter.as_ref());
    let tuned = export.map(|dir| Tuned::read_for(dir, dtype, Some(decoding), console));
    let tuned = tuned.transpose()?.unwrap_or_default();
    let (rule, lookup_first) = match tuned.rule(DecodingName::of(decoding)) {
        Some(tuned) => (tuned.config.clone(), tuned.drafter.lookup_first()),
        None => (default_rule(head.is_some()), None),
    };
    Ok((rule.init()?, lookup_first))
}
