//! Comparison of stop rules with the best fixed length, over the recordings of one drafter and way
//! of decoding.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_report::{CostSource, DrafterName, LookUps, promise_interval};
use draftsmith_theory::{
    Counts, Decoding, Estimate, LookupFirst, Recordings, Sampling, StopRuleConfig, StopRuleName,
    TimedCounts, seconds_per_token,
};
use serde::Serialize;

use super::racing::{Prefilling, Raced};
use crate::costs::{Costs, MeasuredCosts};
use crate::judging::{at_each, gain, speedup};
use crate::sweep::{RuleChoice, best_look_ups_alone};
use draftsmith_recipe::TunedRule;

/// A rule at its best setting, with its gain.
#[derive(Debug, Serialize)]
pub struct RuleGain {
    /// The settings of prompt lookup in front of the drafter; null for no lookup.
    pub lookup_first: Option<LookupFirst>,
    /// The rule's name.
    pub stop_rule: StopRuleName,
    /// The rule with its setting.
    pub config: StopRuleConfig,
    /// The modelled speed relative to plain decoding, with the prefill that the race measured.
    pub speedup: f64,
    /// The modelled speed relative to the best fixed length, minus 1.
    pub gain: Estimate,
}

/// Recordings with their best fixed length, the baseline for other rules.
pub(super) struct Baseline<'r> {
    pub(super) recordings: &'r Recordings,
    pub(super) measured: &'r MeasuredCosts,
    pub(super) cost_source: CostSource,
    pub(super) decoding: Decoding,
    pub(super) dtype: WeightDtype,
    /// The best fixed length.
    pub(super) fixed: RuleChoice,
    /// The race, if there was one.
    pub(super) raced: Option<&'r Raced>,
    pub(super) seed: u64,
}

impl Baseline<'_> {
    fn costs(&self) -> &Costs {
        &self.measured.costs
    }

    /// Estimates a rule's gain over the best fixed length. The 95 % interval covers resampled
    /// responses and the uncertainty of the costs.
    fn gain(&self, choice: &RuleChoice) -> Result<Estimate> {
        let costs = self.measured.drawn(self.seed);
        let [fixed, own] = [&self.fixed, choice]
            .map(|choice| at_each(&costs, |costs| choice.replay(self.recordings, costs)));
        Ok(gain(&fixed?, &own?, costs.len(), self.seed))
    }

    /// Estimates the speed relative to plain decoding of what `replayed` replays at given costs, with
    /// the prefill of `prefilling`. The 95 % interval covers resampled responses and the uncertainty
    /// of the costs.
    pub(super) fn speedup(
        &self,
        prefilling: Prefilling,
        replayed: impl Fn(&Costs) -> Result<Vec<TimedCounts>>,
    ) -> Result<Estimate> {
        let costs = self.measured.drawn(self.seed);
        let plain = at_each(&costs, |costs| Ok(self.recordings.plain(&costs.rounds)))?;
        let speedup = speedup(&plain, &at_each(&costs, replayed)?, costs.len(), self.seed);
        Ok(self.raced.map_or(speedup, |raced| speedup.map(raced.with_prefill(prefilling))))
    }

    /// Replays prompt lookup without another drafter, at the setting that is best on these
    /// recordings.
    pub(super) fn look_ups_alone(&self) -> Result<LookUps> {
        let look_ups = best_look_ups_alone(self.recordings, self.costs())?;
        let replayed = |costs: &Costs| Ok(self.recordings.replay_look_ups(look_ups, &costs.rounds));
        Ok(LookUps { look_ups, speedup: self.speedup(Prefilling::Target, replayed)? })
    }

    pub(super) fn rule_gain(&self, choice: &RuleChoice) -> Result<RuleGain> {
        let plain = seconds_per_token(&self.recordings.plain(&self.costs().rounds));
        let speedup = plain / choice.seconds_per_token;
        let seen = self.raced.map(|raced| raced.with_prefill(Prefilling::Both)(speedup));
        Ok(RuleGain {
            lookup_first: choice.lookup_first,
            stop_rule: choice.name,
            config: choice.config.clone(),
            speedup: seen.unwrap_or(speedup),
            gain: self.gain(choice)?,
        })
    }

    /// Builds the record of a rule for an export, with its predicted acceptance rate, and its gain in
    /// the race if it was in one.
    pub(super) fn tuned_rule(&self, choice: &RuleChoice) -> Result<TunedRule> {
        let spent = choice.replay(self.recordings, self.costs())?;
        let acceptance_rate = |some: &[usize]| {
            some.iter().map(|index| spent[*index].counts).sum::<Counts>().acceptance_rate()
        };
        let num_prompts = spent.len();
        let raced = self.raced.and_then(|raced| raced.gain(choice, &self.fixed));
        let Sampling { temperature, top_p, top_k, min_p } = self.decoding.sampling();
        Ok(TunedRule {
            drafter: DrafterName::from(self.recordings.drafter).with_lookup(choice.lookup_first),
            config: choice.config.clone(),
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: self.decoding.repetition_penalty,
            expected_gain: raced.map_or_else(|| self.gain(choice), Ok)?,
            expected_acceptance_rate: promise_interval(num_prompts, self.seed, acceptance_rate),
            best_fixed_length: self.fixed.config.parameter() as usize,
            costs: self.costs().of_rule(&choice.config).line(self.costs().drafter)?,
            num_prompts,
            dtype: self.dtype,
            cost_source: self.cost_source,
        })
    }
}
