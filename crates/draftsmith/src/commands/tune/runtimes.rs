//! Settings that runtimes without heads have, and the best of each for this pair.

use anyhow::{Context, Result};
use draftsmith_theory::{
    Bounds, CandidateProbThresholdConfig, ConfidenceThresholdConfig, Decoding, FixedLengthConfig,
    HeuristicConfig, Recordings, StopRuleConfig, TokenChoice, seconds_per_token,
};
use rayon::prelude::*;

use crate::costs::Costs;
use crate::exports::draft_model::RuntimeSetting;
use crate::statistics::shown_interval;
use crate::sweep::{Choice, per_token, thresholds};

/// A way in which a runtime ends draft phases.
struct Family {
    runtime: &'static str,
    rules: Vec<StopRuleConfig>,
    setting: fn(&StopRuleConfig, Decoding) -> String,
    /// Whether the runtime drafts the most probable token also where it samples.
    drafts_greedily: bool,
}

/// The best setting of every family, where the recordings say what it would do: runtimes that always
/// draft greedily do not sample as was recorded.
pub(super) fn best_settings(
    recordings: &Recordings,
    decoding: Decoding,
    costs: &Costs,
    fixed: &Choice,
    seed: u64,
) -> Result<Vec<RuntimeSetting>> {
    let plain = recordings.plain(&costs.rounds);
    let is_recorded = |family: &Family| decoding.is_greedy() || !family.drafts_greedily;
    let best = |family: Family| -> Result<RuntimeSetting> {
        let spent = |config: &StopRuleConfig| recordings.replay(config, &costs.of_rule(config));
        let seconds = family.rules.par_iter().map(|config| Ok(seconds_per_token(&spent(config)?)));
        let seconds = seconds.collect::<Result<Vec<f64>>>()?;
        let all = family.rules.iter().zip(seconds);
        let best = all.min_by(|one, other| one.1.total_cmp(&other.1));
        let (config, least) = best.context("a runtime has settings")?;
        let spent = spent(config)?;
        let speedup = |some: &[usize]| per_token(&plain, some) / per_token(&spent, some);
        Ok(RuntimeSetting {
            runtime: family.runtime.to_owned(),
            setting: (family.setting)(config, decoding),
            config: config.clone(),
            gain: fixed.seconds_per_token / least - 1.0,
            speedup: shown_interval(recordings.responses.len(), seed, speedup),
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
            setting: |config, _| {
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
            setting: |config, _| {
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
            setting: |config, _| {
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
            setting: |config, _| {
                let (threshold, most) = (config.parameter(), most(config));
                format!(
                    "--spec-type draft-simple --spec-draft-n-max {most} --spec-draft-n-min 0 \
                     --spec-draft-p-min {threshold}"
                )
            },
            drafts_greedily: true,
        },
        Family {
            runtime: "vLLM",
            rules: fixed(),
            setting: |config, decoding| {
                let length = config.parameter();
                match decoding.choice {
                    TokenChoice::Greedy => format!("num_speculative_tokens={length}"),
                    // It takes the most probable token otherwise.
                    TokenChoice::Sampled(_) => format!(
                        "num_speculative_tokens={length}, draft_sample_method=\"probabilistic\""
                    ),
                }
            },
            drafts_greedily: false,
        },
        Family {
            runtime: "SGLang",
            rules: fixed(),
            setting: |config, decoding| {
                let length = config.parameter();
                let sampled = match decoding.choice {
                    TokenChoice::Greedy => "",
                    TokenChoice::Sampled(_) => " --speculative-use-rejection-sampling",
                };
                format!(
                    "--speculative-algorithm STANDALONE --speculative-num-steps {length} \
                     --speculative-eagle-topk 1 --speculative-num-draft-tokens {}{sampled}",
                    length + 1.0
                )
            },
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
    use std::collections::BTreeSet;

    use draftsmith_theory::Sampling;

    use super::*;

    /// What each runtime calls its settings, as of which version, and where that stands.
    const NAMES: [(&str, &str, &str, &[&str]); 4] = [
        (
            "transformers",
            "5.23.0",
            "generation/configuration_utils.py, GenerationConfig",
            &[
                "num_assistant_tokens",
                "num_assistant_tokens_schedule",
                "assistant_confidence_threshold",
            ],
        ),
        (
            "llama.cpp",
            "b11434",
            "common/arg.cpp",
            &["--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"],
        ),
        (
            "vLLM",
            "0.33.0",
            "vllm/config/speculative.py, SpeculativeConfig",
            &["num_speculative_tokens", "draft_sample_method"],
        ),
        (
            "SGLang",
            "0.5.23",
            "sglang/srt/server_args.py",
            &[
                "--speculative-algorithm",
                "--speculative-num-steps",
                "--speculative-eagle-topk",
                "--speculative-num-draft-tokens",
                "--speculative-use-rejection-sampling",
            ],
        ),
    ];

    /// The names in a setting.
    fn names(setting: &str) -> BTreeSet<&str> {
        let flags = setting.split_whitespace().filter(|word| word.starts_with("--"));
        let keys = setting.split(", ").filter_map(|part| part.split_once('='));
        flags.chain(keys.map(|(key, _)| key)).collect()
    }

    #[test]
    fn settings_are_what_the_runtimes_call_them() {
        let sampled = Decoding::sampled(Sampling::default());
        let mut told: Vec<(&str, BTreeSet<String>)> = Vec::new();
        for family in families(20) {
            for decoding in [Decoding::GREEDY, sampled] {
                let setting = (family.setting)(&family.rules[0], decoding);
                let found = names(&setting).into_iter().map(str::to_owned);
                match told.iter_mut().find(|(runtime, _)| *runtime == family.runtime) {
                    Some((_, all)) => all.extend(found),
                    None => told.push((family.runtime, found.collect())),
                }
            }
        }
        let readme = include_str!("../../../../../checkpoints/README.md");
        for ((runtime, found), (expected, version, source, names)) in told.iter().zip(NAMES) {
            assert_eq!(*runtime, expected);
            assert!(
                found.iter().map(String::as_str).eq(names.iter().copied().collect::<BTreeSet<_>>())
            );
            let row = readme.lines().find(|line| line.contains(&format!("| {runtime} {version}")));
            let row =
                row.unwrap_or_else(|| panic!("{runtime} {version} ({source}) is not told of"));
            for name in names {
                assert!(row.contains(name), "`{name}` is not in: {row}");
            }
        }
        assert_eq!(told.len(), NAMES.len());
    }

    #[test]
    fn numbers_stand_where_they_belong() {
        let families = families(20);
        let sampled = Decoding::sampled(Sampling::default());
        let text = |family: usize, rule: usize, decoding| {
            (families[family].setting)(&families[family].rules[rule], decoding)
        };
        assert!(text(0, 3, Decoding::GREEDY).starts_with("num_assistant_tokens=4, "));
        assert!(text(1, 0, Decoding::GREEDY).contains("\"heuristic\""));
        assert!(text(2, 0, sampled).ends_with("assistant_confidence_threshold=0.02"));
        assert_eq!(
            text(3, 0, Decoding::GREEDY),
            "--spec-type draft-simple --spec-draft-n-max 1 --spec-draft-n-min 0 \
             --spec-draft-p-min 0.02"
        );
        assert_eq!(text(4, 4, Decoding::GREEDY), "num_speculative_tokens=5");
        assert!(text(4, 4, sampled).ends_with("draft_sample_method=\"probabilistic\""));
        assert_eq!(
            text(5, 4, Decoding::GREEDY),
            "--speculative-algorithm STANDALONE --speculative-num-steps 5 \
             --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
        );
        assert!(text(5, 4, sampled).ends_with(" --speculative-use-rejection-sampling"));
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
