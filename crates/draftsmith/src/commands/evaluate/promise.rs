//! What tuning promised, a rule's or tree's gain over the best fixed length, and whether it came true.

use draftsmith_theory::{DrafterId, FixedLengthConfig, StopRuleConfig, Trace};

use super::measure::Measured;
use super::settings::Setting;
use crate::exports::tuned::TunedRule;
use crate::results::{DrafterName, Estimate, PromiseSummary};
use crate::statistics::shown_interval;
use crate::sweep::static_trees::rule_of;
use crate::tuning::TunedTree;

/// A setting that was tuned, and its gain.
#[derive(Debug, Clone)]
pub(super) struct Promise {
    pub(super) drafter: DrafterName,
    pub(super) config: StopRuleConfig,
    /// Whose best fixed length the gain is over.
    pub(super) over: DrafterId,
    pub(super) best_fixed_length: usize,
    expected_gain: Estimate,
    /// Gains at the costs of another machine cannot be measured here.
    is_of_this_machine: bool,
}

impl Promise {
    /// A tree's gain over its drafter's chains.
    pub(super) fn of_tree(tuned: &TunedTree) -> Self {
        Self {
            drafter: DrafterName::Tree(tuned.drafter, tuned.shape),
            config: rule_of(tuned.shape).into(),
            over: tuned.drafter,
            best_fixed_length: tuned.best_fixed_length,
            expected_gain: tuned.expected_gain,
            is_of_this_machine: tuned.cost_source.is_machine(),
        }
    }

    /// A rule's; None for the target alone.
    pub(super) fn of_rule(tuned: &TunedRule) -> Option<Self> {
        Some(Self {
            drafter: tuned.drafter,
            config: tuned.config.clone(),
            over: tuned.drafter.id()?,
            best_fixed_length: tuned.best_fixed_length,
            expected_gain: tuned.expected_gain,
            is_of_this_machine: tuned.cost_source.is_machine(),
        })
    }
}

/// Compares what was promised with what the runs of one group gave; settings that were not run are left
/// out.
pub(super) fn promises(
    promised: &[Promise],
    settings: &[Setting],
    runs: &[Vec<Measured>],
    seed: u64,
) -> Vec<PromiseSummary> {
    let runs_of = |drafter: DrafterName, rule: &StopRuleConfig| {
        let is_it =
            |setting: &Setting| setting.drafter == drafter && setting.rule.as_ref() == Some(rule);
        settings.iter().position(is_it).map(|index| &runs[index])
    };
    let promise = |promised: &Promise| {
        let candidate_length = promised.best_fixed_length;
        let fixed = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
        let own = runs_of(promised.drafter, &promised.config)?;
        let fixed = runs_of(promised.over.into(), &fixed)?;
        let seconds = |runs: &[Measured], some: &[usize]| -> f64 {
            let traces = || some.iter().map(|index| &runs[*index].trace);
            let seconds: f64 = traces().map(|trace| trace.decode_time().as_secs_f64()).sum();
            seconds / traces().map(|trace: &Trace| trace.num_tokens as f64).sum::<f64>()
        };
        let gain = |some: &[usize]| seconds(fixed, some) / seconds(own, some) - 1.0;
        let measured = shown_interval(own.len(), seed, gain);
        let expected = promised.expected_gain;
        Some(PromiseSummary {
            drafter: promised.drafter,
            stop_rule: promised.config.name(),
            best_fixed_length: candidate_length,
            expected_gain: expected,
            measured_gain: measured,
            holds: measured.value >= expected.value || measured.agrees_with(&expected),
        })
    };
    promised.iter().filter(|promised| promised.is_of_this_machine).filter_map(promise).collect()
}
