//! The search for the best setting of each stop rule, by replay over recordings.

use anyhow::{Context, Result};
use draftsmith_theory::{
    AcceptanceSignal, Bounds, HeadTiming, LookupFirst, Recordings, RuleSettings, SignalNeeds,
    StopRuleConfig, StopRuleEntry, StopRuleName, Sweep, TimedCounts, cost_optimal, least_by,
    seconds_per_token, stop_rules,
};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::costs::Costs;

/// The maximum candidate lengths to try, besides the recorded maximum.
const MAX_LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 10, 14, 20];
/// The resolution of thresholds, which are multiples of 1/50.
const STEPS: u32 = 50;

/// The minimum match lengths to try for prompt lookup, in tokens.
const MIN_MATCHES: [usize; 4] = [1, 2, 3, 4];
const LOOKUP_LENGTHS: [usize; 6] = [2, 3, 4, 6, 8, 10];

/// Iterates over the thresholds to try for rules that compare a signal with a probability: 0.02,
/// 0.04 … 0.98.
pub fn thresholds() -> impl Iterator<Item = f64> {
    (1..STEPS).map(|step| f64::from(step) / f64::from(STEPS))
}

/// Iterates over the rules that can be replayed over recordings with this kind of head, or without
/// a head.
fn replayable(head: Option<HeadTiming>) -> impl Iterator<Item = &'static StopRuleEntry> {
    stop_rules().filter(move |entry| {
        entry.heads.is_empty() || head.is_some_and(|head| entry.heads.contains(&head))
    })
}

/// Lists all settings to try of every rule that can be replayed. Fitted rules are left out, because
/// they have no grid.
pub fn settings(max_length: usize, head: Option<HeadTiming>) -> Vec<StopRuleConfig> {
    let mut settings = Vec::new();
    for entry in replayable(head) {
        let Some(grid) = entry.grid() else { continue };
        match grid.sweep {
            Sweep::Lengths(lengths) => {
                let bounds = Bounds { min: 1, max: max_length };
                let recorded = lengths.iter().filter(|length| **length <= max_length);
                settings.extend(recorded.map(|length| grid.at(*length as f64, bounds)));
            }
            Sweep::Probabilities => {
                for bounds in caps(max_length) {
                    settings.extend(thresholds().map(|threshold| grid.at(threshold, bounds)));
                }
            }
        }
    }
    settings
}

/// Lists the bounds to try, one for each maximum candidate length up to the recorded one.
fn caps(max_length: usize) -> Vec<Bounds> {
    let shorter = MAX_LENGTHS.into_iter().filter(|max| *max < max_length);
    shorter.chain([max_length]).map(|max| Bounds { min: 1, max }).collect()
}

/// A rule with the setting that gives the fewest seconds per token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RuleChoice {
    /// The settings of prompt lookup in front of the drafter; `None` for no lookup.
    pub lookup_first: Option<LookupFirst>,
    /// The rule's name.
    pub name: StopRuleName,
    /// The rule with its setting.
    pub config: StopRuleConfig,
    /// The modelled seconds per token on the recordings on which the setting was chosen.
    pub seconds_per_token: f64,
}

impl RuleChoice {
    /// Replays a rule over the recordings on which its setting is chosen.
    ///
    /// # Errors
    /// If the rule cannot be replayed over these recordings.
    pub(crate) fn of(
        config: StopRuleConfig,
        recordings: &Recordings,
        costs: &Costs,
    ) -> Result<Self> {
        let spent = recordings.replay(&config, &costs.of_rule(&config))?;
        let (name, seconds_per_token) = (config.name(), seconds_per_token(&spent));
        Ok(Self { lookup_first: None, name, config, seconds_per_token })
    }

    /// Replays the rule over recordings, and returns the counts and modelled seconds of each
    /// response.
    ///
    /// # Errors
    /// If the rule cannot be replayed over these recordings.
    pub fn replay(&self, recordings: &Recordings, costs: &Costs) -> Result<Vec<TimedCounts>> {
        let costs = &costs.of_rule(&self.config);
        Ok(match self.lookup_first {
            None => recordings.replay(&self.config, costs)?,
            Some(first) => recordings.with_look_ups(first).replay(&self.config, costs)?,
        })
    }
}

/// Finds the best setting of every rule, in the order of the rules' names, followed by the best
/// rule with prompt lookup in front of the drafter.
///
/// # Errors
/// If nothing was recorded.
pub fn best_of_all(recordings: &Recordings, costs: &Costs) -> Result<Vec<RuleChoice>> {
    let mut choices = best_of_each(recordings, costs)?;
    choices.push(best_with_look_ups(recordings, costs, cheapest(&choices)?)?);
    Ok(choices)
}

/// Finds the best rule with prompt lookup in front of the drafter. The lookup settings are those
/// that save the most time with `alone`, the best rule without lookup.
fn best_with_look_ups(
    recordings: &Recordings,
    costs: &Costs,
    alone: &RuleChoice,
) -> Result<RuleChoice> {
    let first = best_look_ups(recordings, |first| {
        let behind = RuleChoice { lookup_first: Some(first), ..alone.clone() };
        Ok(seconds_per_token(&behind.replay(recordings, costs)?))
    })?;
    let choices = best_of_each(&recordings.with_look_ups(first), costs)?;
    Ok(RuleChoice { lookup_first: Some(first), ..cheapest(&choices)?.clone() })
}

/// Finds the best settings of prompt lookup without another drafter. Rounds without a match are
/// decoded plainly.
///
/// # Errors
/// If nothing was recorded.
pub fn best_look_ups_alone(recordings: &Recordings, costs: &Costs) -> Result<LookupFirst> {
    best_look_ups(recordings, |first| {
        Ok(seconds_per_token(&recordings.replay_look_ups(first, &costs.rounds)))
    })
}

/// Tries all settings of prompt lookup, and returns the one with the fewest seconds per token. If there
/// are stored answers, it also tries the settings that search them.
fn best_look_ups(
    recordings: &Recordings,
    seconds_per_token: impl Fn(LookupFirst) -> Result<f64> + Sync,
) -> Result<LookupFirst> {
    let firsts = MIN_MATCHES.into_iter().flat_map(|min_match| {
        LOOKUP_LENGTHS.into_iter().map(move |most| LookupFirst::new(min_match, most))
    });
    let in_answers = recordings
        .answers
        .iter()
        .flat_map(|_| firsts.clone().map(|first| LookupFirst { answers: true, ..first }));
    let firsts: Vec<LookupFirst> = firsts.clone().chain(in_answers).collect();
    let tried = firsts.into_par_iter().map(|first| anyhow::Ok((first, seconds_per_token(first)?)));
    let tried: Vec<(LookupFirst, f64)> = tried.collect::<Result<_>>()?;
    let (first, _) = least_by(tried, |(_, seconds)| *seconds).context("several are tried")?;
    Ok(first)
}

/// Finds the best setting of every rule, in the order of the rules' names. Leaves out rules that
/// cannot be fitted because no candidate was accepted.
///
/// # Errors
/// If nothing was recorded.
pub fn best_of_each(recordings: &Recordings, costs: &Costs) -> Result<Vec<RuleChoice>> {
    best_of(recordings, costs, |_| true)
}

/// Finds the best setting of every rule that reads no signal of the drafter.
///
/// # Errors
/// If nothing was recorded.
pub fn best_unread(recordings: &Recordings, costs: &Costs) -> Result<Vec<RuleChoice>> {
    best_of(recordings, costs, |needs| needs == SignalNeeds::default())
}

/// Finds the best setting of every rule whose required signals satisfy `belongs`, in the order of
/// the rules' names.
///
/// # Errors
/// If nothing was recorded.
pub fn best_of(
    recordings: &Recordings,
    costs: &Costs,
    belongs: fn(SignalNeeds) -> bool,
) -> Result<Vec<RuleChoice>> {
    let max_length = recordings.max_length;
    let cost = |config: StopRuleConfig| RuleChoice::of(config, recordings, costs);
    let learned = recordings.learned_acceptance();
    let mut choices: Vec<RuleChoice> = settings(max_length, recordings.head)
        .into_par_iter()
        .filter(|config| belongs(config.needs()))
        .map(|config| cost(config.starting_from(&learned)))
        .collect::<Result<_>>()?;
    let fits: Vec<(AcceptanceSignal, Bounds)> = replayable(recordings.head)
        .filter_map(|entry| match entry.settings {
            RuleSettings::Fitted(signal) if belongs(signal.needs()) => Some(signal),
            _ => None,
        })
        .flat_map(|signal| caps(max_length).into_iter().map(move |bounds| (signal, bounds)))
        .collect();
    let fitted = fits.into_par_iter().map(|(signal, bounds)| -> Result<Option<RuleChoice>> {
        let model = costs.of_needs(signal.needs());
        let found = cost_optimal(recordings, signal, &model, bounds)?;
        found.map(|found| cost(StopRuleConfig::CostOptimal(found.config))).transpose()
    });
    choices.extend(fitted.collect::<Result<Vec<_>>>()?.into_iter().flatten());
    // The sort is stable, so among equal costs the shorter bounds and lower thresholds come first.
    choices.sort_by(|one, other| {
        one.name.cmp(&other.name).then(one.seconds_per_token.total_cmp(&other.seconds_per_token))
    });
    choices.dedup_by_key(|choice| choice.name);
    Ok(choices)
}

/// Returns the choice with the fewest seconds per token.
///
/// # Errors
/// If there are no choices.
pub fn cheapest<'c>(choices: impl IntoIterator<Item = &'c RuleChoice>) -> Result<&'c RuleChoice> {
    let cheapest = least_by(choices, |choice| choice.seconds_per_token);
    cheapest.context("there is no rule to choose from")
}

/// Returns the fixed-length rule at its best length, the baseline for other rules.
///
/// # Errors
/// If `choices` has no fixed-length rule.
pub fn best_fixed(choices: &[RuleChoice]) -> Result<&RuleChoice> {
    let fixed = choices.iter().find(|choice| choice.name == StopRuleName::FixedLength);
    fixed.context("fixed lengths are among the rules")
}

/// Replays the best rule that reads signals, and returns the candidate counts of its rounds in
/// order.
///
/// # Errors
/// If nothing was recorded.
pub fn lengths_under(recordings: &Recordings, costs: &Costs) -> Result<Vec<usize>> {
    let choices = best_of_each(recordings, costs)?;
    let reading = choices.iter().filter(|it| it.config.needs() != SignalNeeds::default());
    let trace = recordings.trace(&cheapest(reading)?.config)?;
    Ok(trace.rounds.iter().map(|round| round.num_drafted).collect())
}

/// Computes the modelled seconds per token over the responses with the indices `some`.
pub fn per_token(spent: &[TimedCounts], some: &[usize]) -> f64 {
    let (mut seconds, mut num_tokens) = (0.0, 0);
    for index in some {
        seconds += spent[*index].seconds;
        num_tokens += spent[*index].counts.num_tokens;
    }
    seconds / num_tokens as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheapest_choice_is_taken_in_any_order() {
        let entries: Vec<StopRuleConfig> = settings(4, None);
        let choice = |seconds_per_token: f64, nth: usize| {
            let config = entries[nth * 37 % entries.len()].clone();
            RuleChoice { lookup_first: None, name: config.name(), config, seconds_per_token }
        };
        for seconds in [[1.0, 3.0, 2.0], [3.0, 1.0, 2.0], [3.0, 2.0, 1.0]] {
            let choices: Vec<RuleChoice> =
                seconds.into_iter().enumerate().map(|(nth, cost)| choice(cost, nth)).collect();
            assert_eq!(cheapest(&choices).expect("there are some").seconds_per_token, 1.0);
        }
        assert!(cheapest(&[]).is_err());
    }

    #[test]
    fn every_rule_is_tried_and_stays_within_what_was_recorded() {
        for max_length in [1, 4, 20, 25] {
            for (head, num_names) in
                [(None, 7), (Some(HeadTiming::AfterRead), 9), (Some(HeadTiming::AtDraw), 8)]
            {
                let settings = settings(max_length, head);
                let mut names: Vec<StopRuleName> =
                    settings.iter().map(StopRuleConfig::name).collect();
                names.sort();
                names.dedup();
                assert_eq!(names.len(), num_names);
                for config in &settings {
                    let rule = config.init().expect("a valid setting");
                    assert!(rule.bounds().max <= max_length);
                    assert!(head.is_some() || !config.needs().acceptance_prob);
                }
            }
        }
    }
}
