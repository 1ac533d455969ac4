//! The best setting of each inference runtime for a drafter, by replay at this machine's costs.
//!
//! Runtimes other than draftsmith lack most stop rules, acceptance heads, and prompt lookup in front
//! of a drafter. So the best setting there is found separately, and its gain is smaller.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_recipe::exports::servers::transformers_with_head;
use draftsmith_recipe::{Runtime, ServedDrafter, served_path};
use draftsmith_report::{ServingWay, rule_label};
use draftsmith_theory::{
    Bounds, CandidateProbThresholdConfig, Counts, Drafting, Estimate, HeadTiming, NgramSimple,
    Recordings, RoundCosts, RoundLengths, StopRuleConfig, TimedCounts, least_by, seconds_per_token,
};
use rayon::prelude::*;

use super::baseline::Baseline;
use super::racing::Prefilling;
use crate::costs::Costs;
use crate::sweep::{RuleChoice, thresholds};

/// The maximum candidate length to try.
const MAX_LENGTH: usize = 14;
/// The match lengths and candidate numbers of llama.cpp's lookup to try.
pub const LOOK_UP_MATCHES: [usize; 5] = [2, 3, 4, 6, 8];
/// The maximum numbers of candidates of llama.cpp's lookup to try.
pub const LOOK_UP_LENGTHS: [usize; 7] = [2, 3, 4, 6, 8, 12, 16];

/// Finds the best way to serve a drafter in each runtime, and llama.cpp's lookup without a drafter.
/// `lost` lists what the tuned rule has and runtimes lack.
pub(super) fn best_ways(
    baseline: &Baseline<'_>,
    served: &ServedDrafter,
    lost: &[String],
) -> Result<Vec<ServingWay>> {
    let most = MAX_LENGTH.min(baseline.recordings.max_length);
    let is_sampled = !baseline.decoding.is_greedy();
    let mut ways = Vec::new();
    for runtime in Runtime::ALL {
        let mut tried = tried(runtime, most);
        if runtime == Runtime::LlamaCpp && !served.flags.llama_cpp_cuts(baseline.recordings.head) {
            tried.retain(|drafting| drafting.least_prob == 0.0);
        }
        tried.retain(|it| served.whole_block.is_none_or(|whole| it.num_candidates == whole));
        // llama.cpp always drafts the most probable token, while sampled recordings draw from the
        // draft distribution.
        let is_recorded = !(is_sampled && runtime == Runtime::LlamaCpp);
        let is_lacking = !served.flags.is_loaded_by(runtime);
        if !is_recorded || is_lacking || tried.is_empty() {
            continue;
        }
        let spent = |drafting: &Drafting| {
            let rule = rule(runtime, *drafting, baseline.recordings.head);
            let costs = baseline.measured.costs.of_rule(&rule);
            anyhow::Ok((*drafting, baseline.recordings.replay(&rule, &costs)?))
        };
        let tried = tried.par_iter().map(spent).collect::<Result<Vec<_>>>()?;
        let best = fastest(tried)?;
        let rule = rule(runtime, best, baseline.recordings.head);
        let replayed =
            |costs: &Costs| Ok(baseline.recordings.replay(&rule, &costs.of_rule(&rule))?);
        let speedup = baseline.speedup(Prefilling::Both, replayed)?;
        ways.push(way(baseline, served, (runtime, best, speedup), lost));
    }
    let look_ups = LOOK_UP_MATCHES.into_iter().flat_map(|num_matched| {
        let lengths = LOOK_UP_LENGTHS.into_iter().filter(move |most| *most >= num_matched);
        lengths.map(move |most| NgramSimple { num_matched, most })
    });
    let looked_up = |ngram, costs: &Costs| looked_up(baseline.recordings, ngram, &costs.rounds);
    let spent = look_ups.map(|ngram| (ngram, looked_up(ngram, &baseline.measured.costs)));
    let ngram = fastest(spent.collect())?;
    let speedup = baseline.speedup(Prefilling::Target, |costs| Ok(looked_up(ngram, costs)))?;
    let best = (Runtime::LlamaCpp, Drafting::look_up(ngram), speedup);
    ways.push(way(baseline, served, best, &["the drafter".to_owned()]));
    Ok(ways)
}

/// Lists the settings of a runtime to try.
fn tried(runtime: Runtime, most: usize) -> Vec<Drafting> {
    let fixed = (1..=most).map(Drafting::fixed);
    match runtime {
        Runtime::Vllm | Runtime::Sglang => fixed.collect(),
        Runtime::LlamaCpp | Runtime::Transformers => fixed
            .flat_map(|fixed| {
                let with_least =
                    thresholds().map(move |prob| Drafting { least_prob: prob, ..fixed });
                [fixed].into_iter().chain(with_least)
            })
            .collect(),
    }
}

/// Returns the stop rule that a runtime applies under a setting.
fn rule(runtime: Runtime, drafting: Drafting, head: Option<HeadTiming>) -> StopRuleConfig {
    if runtime == Runtime::Transformers && drafting.least_prob > 0.0 {
        return StopRuleConfig::CandidateProbThreshold(CandidateProbThresholdConfig {
            confidence_threshold: drafting.least_prob,
            bounds: Bounds { min: 1, max: drafting.num_candidates },
        });
    }
    drafting.rule(head)
}

/// Computes the modelled seconds of each response with llama.cpp's lookup.
fn looked_up(recordings: &Recordings, ngram: NgramSimple, rounds: &RoundCosts) -> Vec<TimedCounts> {
    let spent = |response: RoundLengths| {
        let all = response.by_length.iter().enumerate();
        let seconds = all.map(|(length, num)| *num as f64 * rounds.verify_seconds(length + 1));
        let counts = Counts { num_tokens: response.num_tokens, ..Counts::default() };
        TimedCounts { counts, seconds: seconds.sum() }
    };
    recordings.ngram_lengths(ngram).into_iter().map(spent).collect()
}

fn fastest<S>(tried: Vec<(S, Vec<TimedCounts>)>) -> Result<S> {
    let best = least_by(tried, |(_, spent)| seconds_per_token(spent));
    Ok(best.context("a runtime has settings")?.0)
}

fn way(
    baseline: &Baseline<'_>,
    served: &ServedDrafter,
    (runtime, drafting, speedup): (Runtime, Drafting, Estimate),
    lost: &[String],
) -> ServingWay {
    ServingWay {
        runtime: runtime.name().to_owned(),
        drafter: baseline.recordings.drafter.into(),
        setting: drafting.text(),
        drafting: Some(drafting),
        speedup,
        costs: Some(baseline.cost_source),
        lost: lost.to_vec(),
        start: served.start(runtime, drafting, !baseline.decoding.is_greedy()),
    }
}

/// Returns the way to serve a drafter with its acceptance head in transformers. `dir` has the head,
/// or the adapter with its head.
pub(super) fn with_head(
    baseline: &Baseline<'_>,
    choice: &RuleChoice,
    dir: &Path,
    lost: Vec<String>,
) -> Result<ServingWay> {
    let id = baseline.recordings.drafter;
    let replayed = |costs: &Costs| choice.replay(baseline.recordings, costs);
    let out = served_path(Path::new(&format!("exported/{id}")), true);
    Ok(ServingWay {
        runtime: Runtime::Transformers.name().to_owned(),
        drafter: id.into(),
        setting: rule_label(None, &choice.config),
        drafting: None,
        speedup: baseline.speedup(Prefilling::Both, replayed)?,
        costs: Some(baseline.cost_source),
        lost,
        start: transformers_with_head(dir, &out),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_valid_within_what_was_recorded() {
        for most in [1, 5, 14] {
            for runtime in Runtime::ALL {
                let all = tried(runtime, most);
                assert!(all.len() >= most);
                for drafting in all {
                    let rule = rule(runtime, drafting, None).init().expect("valid");
                    assert_eq!(rule.bounds().max, drafting.num_candidates);
                    assert!(drafting.num_candidates <= most);
                }
            }
        }
    }
}
