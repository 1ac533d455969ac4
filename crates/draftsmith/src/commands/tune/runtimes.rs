//! Settings that runtimes without heads have, and the best of each for this pair.

use anyhow::Result;
use draftsmith_theory::{
    Bounds, CandidateProbThresholdConfig, ConfidenceThresholdConfig, Decoding, DrafterId,
    FixedLengthConfig, HeuristicConfig, Recordings, StopRuleConfig, seconds_per_token,
};
use rayon::prelude::*;
use serde::Serialize;

use crate::costs::Costs;
use crate::results::DrafterName;
use crate::sweep::{Choice, thresholds};

/// The best setting that a runtime can express.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RuntimeSetting {
    /// The runtimes that know it.
    pub(crate) runtime: &'static str,
    /// The setting, as they spell it.
    pub(crate) setting: String,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

/// A way in which a runtime ends draft phases.
struct Family {
    runtime: &'static str,
    rules: Vec<StopRuleConfig>,
    setting: fn(&StopRuleConfig) -> String,
    /// Whether the runtime drafts the most probable token also where it samples.
    drafts_greedily: bool,
}

/// The best setting of every family, where the recordings say what it would do. Runtimes have no
/// self-drafts, and those that always draft greedily do not sample as was recorded.
pub(super) fn best_settings(
    recordings: &Recordings,
    drafter: DrafterName,
    decoding: Decoding,
    costs: &Costs,
    fixed: &Choice,
) -> Result<Vec<RuntimeSetting>> {
    if drafter != DrafterName::Of(DrafterId::Draft) {
        return Ok(Vec::new());
    }
    let is_recorded = |family: &Family| decoding == Decoding::Greedy || !family.drafts_greedily;
    let best = |family: Family| -> Result<RuntimeSetting> {
        let costs = |config: &StopRuleConfig| -> Result<f64> {
            Ok(seconds_per_token(&recordings.replay(config, &costs.of_rule(config))?))
        };
        let seconds = family.rules.par_iter().map(costs).collect::<Result<Vec<f64>>>()?;
        let (index, least) = seconds
            .iter()
            .enumerate()
            .min_by(|one, other| one.1.total_cmp(other.1))
            .unwrap_or((0, &f64::NAN));
        Ok(RuntimeSetting {
            runtime: family.runtime,
            setting: (family.setting)(&family.rules[index]),
            gain: fixed.seconds_per_token / least - 1.0,
        })
    };
    families(recordings.max_length).into_iter().filter(is_recorded).map(best).collect()
}

/// The greatest candidate length that is tried.
const MAX_LENGTH: usize = 14;

fn families(max_length: usize) -> Vec<Family> {
    let lengths = || 1..=MAX_LENGTH.min(max_length);
    let bounds = |min| move |max| Bounds { min, max };
    let fixed = || -> Vec<StopRuleConfig> {
        lengths()
            .map(|candidate_length| {
                StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length })
            })
            .collect()
    };
    let whole = Bounds { min: 1, max: max_length };
    let heuristic = lengths()
        .map(|initial_length| {
            StopRuleConfig::Heuristic(HeuristicConfig { initial_length, bounds: whole })
        })
        .collect();
    let candidate_prob = lengths()
        .map(bounds(1))
        .flat_map(|bounds| {
            thresholds().map(move |confidence_threshold| {
                StopRuleConfig::CandidateProbThreshold(CandidateProbThresholdConfig {
                    confidence_threshold,
                    bounds,
                })
            })
        })
        .collect();
    let before_draw = lengths()
        .map(bounds(0))
        .flat_map(|bounds| {
            thresholds().map(move |confidence_threshold| {
                StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
                    confidence_threshold,
                    before_draw: true,
                    bounds,
                })
            })
        })
        .collect();
    vec![
        Family {
            runtime: "transformers",
            rules: fixed(),
            setting: |config| {
                let length = config.parameter();
                format!(
                    "num_assistant_tokens={length}, num_assistant_tokens_schedule=\"constant\", \
                     assistant_confidence_threshold=0"
                )
            },
            drafts_greedily: false,
        },
        Family {
            runtime: "transformers",
            rules: heuristic,
            setting: |config| {
                let length = config.parameter();
                format!(
                    "num_assistant_tokens={length}, num_assistant_tokens_schedule=\"heuristic\", \
                     assistant_confidence_threshold=0"
                )
            },
            drafts_greedily: false,
        },
        Family {
            runtime: "transformers",
            rules: candidate_prob,
            setting: |config| {
                let (threshold, most) = (config.parameter(), most(config));
                format!(
                    "num_assistant_tokens={most}, num_assistant_tokens_schedule=\"constant\", \
                     assistant_confidence_threshold={threshold}"
                )
            },
            drafts_greedily: false,
        },
        Family {
            runtime: "llama.cpp",
            rules: before_draw,
            setting: |config| {
                let (threshold, most) = (config.parameter(), most(config));
                format!("--draft-max {most} --draft-min 0 --draft-p-min {threshold}")
            },
            drafts_greedily: true,
        },
        Family {
            runtime: "vLLM, SGLang",
            rules: fixed(),
            setting: |config| format!("num_speculative_tokens={}", config.parameter()),
            drafts_greedily: false,
        },
    ]
}

/// The greatest candidate length of a rule.
fn most(config: &StopRuleConfig) -> usize {
    config.init().map_or(0, |rule| rule.bounds().max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_what_the_runtimes_call_them() {
        let families = families(20);
        let first = |index: usize| (families[index].setting)(&families[index].rules[0]);
        assert!(first(0).starts_with("num_assistant_tokens=1, "));
        assert!(first(1).contains("\"heuristic\""));
        assert!(first(2).ends_with("assistant_confidence_threshold=0.02"));
        assert_eq!(first(3), "--draft-max 1 --draft-min 0 --draft-p-min 0.02");
        assert_eq!(first(4), "num_speculative_tokens=1");
    }

    #[test]
    fn every_setting_is_valid_within_what_was_recorded() {
        for max_length in [1, 5, 30] {
            for family in families(max_length) {
                assert!(!family.rules.is_empty());
                for config in &family.rules {
                    assert!(config.init().expect("valid").bounds().max <= max_length);
                }
            }
        }
    }
}
