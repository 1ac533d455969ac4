//! Comparison of stop rules with the best fixed length, over the recordings of one drafter and way
//! of decoding.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_report::{CostSource, DrafterName, LookUps, promise_interval, shown_interval};
use draftsmith_theory::{
    Counts, Decoding, Estimate, LookupFirst, Recordings, Sampling, StopRuleConfig, StopRuleName,
    TimedCounts, seconds_per_token,
};
use serde::Serialize;

use crate::costs::{Costs, MeasuredCosts};
use crate::judging::{over, speedup};
use crate::sweep::{RuleChoice, best_look_ups_alone};
use draftsmith_recipe::exports::tuned::TunedRule;

/// A rule at its best setting, with its gain.
#[derive(Debug, Serialize)]
pub struct RuleGain {
    /// The settings of prompt lookup in front of the drafter; null for no lookup.
    pub lookup_first: Option<LookupFirst>,
    /// The rule's name.
    pub stop_rule: StopRuleName,
    /// The rule with its setting.
    pub config: StopRuleConfig,
    /// The modelled speed relative to plain decoding.
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
    pub(super) seed: u64,
}

impl Baseline<'_> {
    fn costs(&self) -> &Costs {
        &self.measured.costs
    }

    /// Replays a rule at its best setting, one entry per response.
    fn spent(&self, choice: &RuleChoice) -> Result<Vec<TimedCounts>> {
        choice.replay(self.recordings, self.costs())
    }

    /// Estimates a rule's gain over the best fixed length. The 95 % interval covers resampled
    /// responses and the uncertainty of the costs.
    fn gain(&self, choice: &RuleChoice) -> Result<Estimate> {
        let (fixed, own) = (self.spent(&self.fixed)?, self.spent(choice)?);
        let gain = shown_interval(own.len(), self.seed, |some| over(&fixed, &own, some));
        let all: Vec<usize> = (0..own.len()).collect();
        let (mut low, mut high) = (0.0_f64, 0.0_f64);
        for costs in self.measured.ends() {
            let [fixed, own] =
                [&self.fixed, choice].map(|rule| rule.replay(self.recordings, &costs));
            let moved = over(&fixed?, &own?, &all) - gain.value;
            (low, high) = (low.min(moved), high.max(moved));
        }
        Ok(Estimate {
            value: gain.value,
            low: gain.value - low.hypot(gain.value - gain.low),
            high: gain.value + high.hypot(gain.high - gain.value),
        })
    }

    /// Computes the modelled seconds per token of plain decoding.
    fn plain_seconds(&self) -> f64 {
        seconds_per_token(&self.recordings.plain(&self.costs().rounds))
    }

    /// Replays prompt lookup without another drafter, at the setting that is best on these
    /// recordings.
    pub(super) fn look_ups_alone(&self) -> Result<LookUps> {
        let look_ups = best_look_ups_alone(self.recordings, self.costs())?;
        let spent = self.recordings.replay_look_ups(look_ups, &self.costs().rounds);
        let plain = self.recordings.plain(&self.costs().rounds);
        Ok(LookUps { look_ups, speedup: speedup(&plain, &spent, self.seed) })
    }

    pub(super) fn rule_gain(&self, choice: &RuleChoice) -> Result<RuleGain> {
        Ok(RuleGain {
            lookup_first: choice.lookup_first,
            stop_rule: choice.name,
            config: choice.config.clone(),
            speedup: self.plain_seconds() / choice.seconds_per_token,
            gain: self.gain(choice)?,
        })
    }

    /// Builds the record of a rule for an export, with its predicted gain and acceptance rate.
    pub(super) fn tuned_rule(&self, choice: &RuleChoice) -> Result<TunedRule> {
        let spent = self.spent(choice)?;
        let acceptance_rate = |some: &[usize]| {
            some.iter().map(|index| spent[*index].counts).sum::<Counts>().acceptance_rate()
        };
        let num_prompts = spent.len();
        let Sampling { temperature, top_p, top_k, min_p } = self.decoding.sampling();
        Ok(TunedRule {
            drafter: DrafterName::from(self.recordings.drafter).with_lookup(choice.lookup_first),
            config: choice.config.clone(),
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: self.decoding.repetition_penalty,
            expected_gain: self.gain(choice)?,
            expected_acceptance_rate: promise_interval(num_prompts, self.seed, acceptance_rate),
            best_fixed_length: self.fixed.config.parameter() as usize,
            costs: self.costs().of_rule(&choice.config).line(self.costs().drafter)?,
            num_prompts,
            dtype: self.dtype,
            cost_source: self.cost_source,
        })
    }
}
