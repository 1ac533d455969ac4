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

use crate::costs::Costs;
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
    pub(super) costs: &'r Costs,
    pub(super) cost_source: CostSource,
    pub(super) decoding: Decoding,
    pub(super) dtype: WeightDtype,
    pub(super) fixed_length: usize,
    /// The costs of the best fixed length, one entry per response.
    pub(super) fixed_spent: Vec<TimedCounts>,
    pub(super) seed: u64,
}

impl Baseline<'_> {
    /// Estimates the gain over the best fixed length, with its 95 % interval from resampled
    /// responses.
    fn gain(&self, spent: &[TimedCounts]) -> Estimate {
        let gain = |some: &[usize]| over(&self.fixed_spent, spent, some);
        shown_interval(spent.len(), self.seed, gain)
    }

    /// Computes the modelled seconds per token of plain decoding.
    fn plain_seconds(&self) -> f64 {
        seconds_per_token(&self.recordings.plain(&self.costs.rounds))
    }

    /// Replays prompt lookup without another drafter, at the setting that is best on these
    /// recordings.
    pub(super) fn look_ups_alone(&self) -> Result<LookUps> {
        let look_ups = best_look_ups_alone(self.recordings, self.costs)?;
        let spent = self.recordings.replay_look_ups(look_ups, &self.costs.rounds);
        let plain = self.recordings.plain(&self.costs.rounds);
        Ok(LookUps { look_ups, speedup: speedup(&plain, &spent, self.seed) })
    }

    pub(super) fn rule_gain(&self, choice: &RuleChoice) -> Result<RuleGain> {
        Ok(RuleGain {
            lookup_first: choice.lookup_first,
            stop_rule: choice.name,
            config: choice.config.clone(),
            speedup: self.plain_seconds() / choice.seconds_per_token,
            gain: self.gain(&choice.replay(self.recordings, self.costs)?),
        })
    }

    /// Builds the record of a rule for an export, with its predicted gain and acceptance rate.
    pub(super) fn tuned_rule(&self, choice: &RuleChoice) -> Result<TunedRule> {
        let spent = choice.replay(self.recordings, self.costs)?;
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
            expected_gain: self.gain(&spent),
            expected_acceptance_rate: promise_interval(num_prompts, self.seed, acceptance_rate),
            best_fixed_length: self.fixed_length,
            costs: self.costs.of_rule(&choice.config).line(self.costs.drafter)?,
            num_prompts,
            dtype: self.dtype,
            cost_source: self.cost_source,
        })
    }
}
