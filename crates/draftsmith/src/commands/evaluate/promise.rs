//! Whether what tuning promised came true: the tuned rule against the best fixed length, as
//! measured here.

use draftsmith_theory::{FixedLengthConfig, Interval, StopRuleConfig, Trace};

use super::measure::Measured;
use super::settings::Setting;
use crate::exports::tuned::TunedRule;
use crate::results::{DrafterName, Estimate, PromiseSummary};
use crate::statistics::shown_interval;

/// What was promised of the rules in `tuned`, beside what the runs of one group gave; rules that
/// were not run are left out.
pub(super) fn promises(
    tuned: &[TunedRule],
    settings: &[Setting],
    runs: &[Vec<Measured>],
    seed: u64,
) -> Vec<PromiseSummary> {
    let runs_of = |drafter: DrafterName, rule: &StopRuleConfig| {
        let is_it =
            |setting: &Setting| setting.drafter == drafter && setting.rule.as_ref() == Some(rule);
        settings.iter().position(is_it).map(|index| &runs[index])
    };
    let promise = |tuned: &TunedRule| {
        let candidate_length = tuned.best_fixed_length;
        let fixed = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length });
        let own = runs_of(tuned.drafter, &tuned.config)?;
        let fixed = runs_of(tuned.drafter.id()?.into(), &fixed)?;
        let seconds = |runs: &[Measured], some: &[usize]| -> f64 {
            let traces = || some.iter().map(|index| &runs[*index].trace);
            let seconds: f64 = traces().map(|trace| trace.decode_time().as_secs_f64()).sum();
            seconds / traces().map(|trace: &Trace| trace.num_tokens as f64).sum::<f64>()
        };
        let gain = |some: &[usize]| seconds(fixed, some) / seconds(own, some) - 1.0;
        let measured = shown_interval(own.len(), seed, gain);
        let Estimate { value, low, high } = tuned.expected_gain;
        let expected = Interval { value, low, high };
        Some(PromiseSummary {
            drafter: tuned.drafter,
            stop_rule: tuned.config.name(),
            best_fixed_length: candidate_length,
            expected_gain: tuned.expected_gain,
            measured_gain: measured.into(),
            holds: measured.value >= value || measured.agrees_with(&expected),
        })
    };
    // What costs of another machine promise cannot be measured here.
    tuned.iter().filter(|tuned| tuned.cost_source.is_machine()).filter_map(promise).collect()
}
