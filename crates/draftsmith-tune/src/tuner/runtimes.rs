//! The stop rules of inference runtimes without acceptance heads, and the best setting of each for
//! a target and draft model.

use anyhow::{Context, Result};
use draftsmith_recipe::exports::servers::AS_DRAFT_MODEL;
use draftsmith_report::shown_interval;
use draftsmith_theory::{
    Bounds, CandidateProbThresholdConfig, ConfidenceThresholdConfig, Decoding, Estimate,
    FixedLengthConfig, HeuristicConfig, Recordings, StopRuleConfig, TokenChoice, seconds_per_token,
};
use rayon::prelude::*;
use serde::Serialize;

use crate::costs::Costs;
use crate::sweep::{RuleChoice, per_token, thresholds};

const LLAMA_CPP: &str = "llama.cpp";

/// The best setting of one stop rule of an inference runtime.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RuntimeSetting {
    /// The name of the runtime.
    pub runtime: String,
    /// The setting as flags or keys of the runtime.
    pub setting: String,
    /// The stop rule.
    pub config: StopRuleConfig,
    /// The modelled speed relative to the best fixed length, minus 1.
    pub gain: f64,
    /// The modelled speed relative to plain decoding, with its 95 % interval.
    pub speedup: Estimate,
}

/// A stop rule of an inference runtime, with all settings to try.
struct RuntimeRules {
    runtime: &'static str,
    /// The rule at every setting to try.
    rules: Vec<StopRuleConfig>,
    /// A function that formats a setting as flags or keys of the runtime.
    setting: fn(&StopRuleConfig, Decoding) -> String,
}

/// Finds the best setting of every stop rule of every runtime. llama.cpp is left out for sampled
/// decoding, because it always drafts the most probable token, while sampled recordings draw from
/// the draft distribution.
pub(super) fn best_settings(
    recordings: &Recordings,
    decoding: Decoding,
    costs: &Costs,
    fixed: &RuleChoice,
    seed: u64,
) -> Result<Vec<RuntimeSetting>> {
    let plain = recordings.plain(&costs.rounds);
    let is_recorded = |family: &RuntimeRules| decoding.is_greedy() || family.runtime != LLAMA_CPP;
    let best = |family: RuntimeRules| -> Result<RuntimeSetting> {
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

/// The maximum candidate length to try.
const MAX_LENGTH: usize = 14;

fn families(max_length: usize) -> Vec<RuntimeRules> {
    let lengths = || 1..=MAX_LENGTH.min(max_length);
    let fixed = || -> Vec<StopRuleConfig> {
        lengths().map(|candidate_length| FixedLengthConfig { candidate_length }.into()).collect()
    };
    let heuristic = |initial_length| {
        let bounds = Bounds { min: 1, max: max_length };
        StopRuleConfig::Heuristic(HeuristicConfig { initial_length, bounds })
    };
    let candidate_prob = |confidence_threshold, max| {
        let bounds = Bounds { min: 1, max };
        StopRuleConfig::CandidateProbThreshold(CandidateProbThresholdConfig {
            confidence_threshold,
            bounds,
        })
    };
    let before_draw = |confidence_threshold, max| {
        StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
            confidence_threshold,
            before_draw: true,
            bounds: Bounds { min: 0, max },
        })
    };
    let at_thresholds = |rule: &dyn Fn(f64, usize) -> StopRuleConfig| {
        lengths().flat_map(|max| thresholds().map(move |threshold| rule(threshold, max))).collect()
    };
    let family = |runtime, rules, setting| RuntimeRules { runtime, rules, setting };
    vec![
        family("transformers", fixed(), |config, _| {
            transformers(config.parameter() as usize, "constant", 0.0)
        }),
        family("transformers", lengths().map(heuristic).collect(), |config, _| {
            transformers(config.parameter() as usize, "heuristic", 0.0)
        }),
        family("transformers", at_thresholds(&candidate_prob), |config, _| {
            transformers(most(config), "constant", config.parameter())
        }),
        family(LLAMA_CPP, at_thresholds(&before_draw), |config, _| {
            format!(
                "--spec-type {} --spec-draft-n-max {} --spec-draft-n-min 0 \
                 --spec-draft-p-min {}",
                AS_DRAFT_MODEL.llama_cpp_type,
                most(config),
                config.parameter()
            )
        }),
        family("vLLM", fixed(), |config, decoding| {
            // Without this key, vLLM drafts the most probable token.
            let sampled = match decoding.choice {
                TokenChoice::Greedy => "",
                TokenChoice::Sampled(_) => ", draft_sample_method=\"probabilistic\"",
            };
            format!("num_speculative_tokens={}{sampled}", config.parameter())
        }),
        family("SGLang", fixed(), |config, decoding| {
            let length = config.parameter();
            let sampled = match decoding.choice {
                TokenChoice::Greedy => "",
                TokenChoice::Sampled(_) => " --speculative-use-rejection-sampling",
            };
            format!(
                "--speculative-algorithm {} --speculative-num-steps {length} \
                 --speculative-eagle-topk 1 --speculative-num-draft-tokens {}{sampled}",
                AS_DRAFT_MODEL.sglang_algorithm,
                length + 1.0
            )
        }),
    ]
}

/// Formats a setting for the assisted generation of Hugging Face transformers.
fn transformers(length: usize, schedule: &str, threshold: f64) -> String {
    format!(
        "num_assistant_tokens={length}, num_assistant_tokens_schedule=\"{schedule}\", \
         assistant_confidence_threshold={threshold}"
    )
}

/// Returns the maximum candidate length of a rule.
fn most(config: &StopRuleConfig) -> usize {
    config.init().map_or(0, |rule| rule.bounds().max)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use draftsmith_theory::Sampling;

    use super::*;

    /// The names of settings by runtime, with the version and the source file that defines them.
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

    /// Returns the names of the flags and keys in a setting.
    fn names(setting: &str) -> BTreeSet<&str> {
        let flags = setting.split_whitespace().filter(|word| word.starts_with("--"));
        let keys = setting.split(", ").filter_map(|part| part.split_once('='));
        flags.chain(keys.map(|(key, _)| key)).collect()
    }

    #[test]
    fn settings_are_what_the_runtimes_call_them() {
        let sampled = Decoding::sampled(Sampling::default());
        let mut found_names: Vec<(&str, BTreeSet<String>)> = Vec::new();
        for family in families(20) {
            for decoding in [Decoding::GREEDY, sampled] {
                let setting = (family.setting)(&family.rules[0], decoding);
                let found = names(&setting).into_iter().map(str::to_owned);
                match found_names.iter_mut().find(|(runtime, _)| *runtime == family.runtime) {
                    Some((_, all)) => all.extend(found),
                    None => found_names.push((family.runtime, found.collect())),
                }
            }
        }
        let readme = include_str!("../../../../checkpoints/README.md");
        for ((runtime, found), (expected, version, source, names)) in found_names.iter().zip(NAMES)
        {
            assert_eq!(*runtime, expected);
            assert!(
                found.iter().map(String::as_str).eq(names.iter().copied().collect::<BTreeSet<_>>())
            );
            let row = readme.lines().find(|line| line.contains(&format!("| {runtime} {version}")));
            let row = row.unwrap_or_else(|| panic!("{runtime} {version} ({source}) has no row"));
            for name in names {
                assert!(row.contains(name), "`{name}` is not in: {row}");
            }
        }
        assert_eq!(found_names.len(), NAMES.len());
    }

    #[test]
    fn settings_contain_the_numbers_of_their_rules() {
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
