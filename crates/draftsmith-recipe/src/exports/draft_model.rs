//! Tuned settings of an adapter that is exported as a draft model: the key `tuned_draft_model` of the
//! adapter's `config.json`.
//!
//! Runtimes without support for adapters run the target's first layers twice: in the draft and in the
//! verification. `tune --for draft-model` replays the adapter's rollouts at those costs under the
//! runtimes' rules and writes this key. `export --for draft-model` copies it into the draft model's
//! `generation_config.json`.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_model::WeightDtype;
use draftsmith_report::DecodingName;
use draftsmith_theory::{Estimate, StopRuleConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::exports::config_keys::{named, read_key};

/// The best setting that a runtime supports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuntimeSetting {
    /// The runtime.
    pub runtime: String,
    /// The setting in the runtime's words.
    pub setting: String,
    /// The stop rule.
    pub config: StopRuleConfig,
    /// Modelled speed relative to the best fixed length, minus 1.
    pub gain: f64,
    /// Modelled speed relative to plain decoding, with its 95 % interval.
    pub speedup: Estimate,
}

/// The best settings of runtimes for an adapter's draft model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedDraftModel {
    /// For greedy decoding, if that was tuned.
    pub greedy: Option<Vec<RuntimeSetting>>,
    /// For sampled decoding, if that was tuned.
    pub sampled: Option<Vec<RuntimeSetting>>,
    /// Number of prompts of the tuning.
    pub num_prompts: usize,
    /// The type that models computed in.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub dtype: WeightDtype,
}

impl TunedDraftModel {
    /// The key in `config.json`.
    pub const KEY: &str = "tuned_draft_model";

    /// Reads the settings of the adapter in `dir`; None if it was not tuned.
    ///
    /// # Errors
    /// If `config.json` cannot be read, or the value is invalid.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let tuned: Option<Self> = read_key(dir, Self::KEY)?;
        for setting in tuned.iter().flat_map(Self::settings).flat_map(|(_, settings)| settings) {
            setting.config.init().with_context(|| named(dir, Self::KEY))?;
        }
        Ok(tuned)
    }

    /// Returns the settings for each tuned way of decoding, greedy first.
    pub fn settings(&self) -> impl Iterator<Item = (DecodingName, &Vec<RuntimeSetting>)> {
        let both = [(DecodingName::Greedy, &self.greedy), (DecodingName::Sampled, &self.sampled)];
        both.into_iter().filter_map(|(name, settings)| Some((name, settings.as_ref()?)))
    }

    /// Returns the entry for a way of decoding, to be filled.
    pub fn slot(&mut self, name: DecodingName) -> &mut Option<Vec<RuntimeSetting>> {
        match name {
            DecodingName::Greedy => &mut self.greedy,
            DecodingName::Sampled => &mut self.sampled,
        }
    }

    /// Returns the keys that transformers' assisted generation reads from a draft model's
    /// `generation_config.json`, set to the fastest rule that transformers supports. They are for greedy
    /// decoding if that was tuned, or else for sampled decoding; `None` without such a rule.
    pub fn assistant_keys(&self) -> Option<[(&'static str, Value); 3]> {
        let (_, settings) = self.settings().next()?;
        let keys = settings.iter().filter_map(|setting| {
            let (num_tokens, threshold) = match &setting.config {
                StopRuleConfig::FixedLength(fixed) => (fixed.candidate_length, 0.0),
                StopRuleConfig::CandidateProbThreshold(rule) => {
                    (rule.bounds.max, rule.confidence_threshold)
                }
                _ => return None,
            };
            let keys = [
                ("num_assistant_tokens", json!(num_tokens)),
                ("num_assistant_tokens_schedule", json!("constant")),
                ("assistant_confidence_threshold", json!(threshold)),
            ];
            Some((setting.speedup.value, keys)).filter(|_| setting.runtime == "transformers")
        });
        keys.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, keys)| keys)
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::{Bounds, CandidateProbThresholdConfig, FixedLengthConfig};

    use super::*;
    use crate::exports::config_keys::write_keys;

    fn setting(runtime: &str, config: StopRuleConfig, speedup: f64) -> RuntimeSetting {
        let speedup = Estimate { value: speedup, low: speedup - 0.125, high: speedup + 0.125 };
        let (runtime, setting) = (runtime.to_owned(), "as it spells it".to_owned());
        RuntimeSetting { runtime, setting, config, gain: 0.25, speedup }
    }

    fn fixed(candidate_length: usize) -> StopRuleConfig {
        StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length })
    }

    fn tuned() -> TunedDraftModel {
        let config = StopRuleConfig::CandidateProbThreshold(CandidateProbThresholdConfig {
            confidence_threshold: 0.5,
            bounds: Bounds { min: 1, max: 6 },
        });
        let settings = vec![
            setting("vLLM", fixed(9), 3.0),
            setting("transformers", fixed(2), 1.25),
            setting("transformers", config, 1.5),
        ];
        TunedDraftModel { greedy: Some(settings), num_prompts: 4, ..TunedDraftModel::default() }
    }

    #[test]
    fn settings_read_back_and_errors_name_the_key() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), "{}").expect("written");
        assert_eq!(TunedDraftModel::read(dir.path()).expect("reads"), None);
        let write = |tuned: &TunedDraftModel| {
            let value = serde_json::to_value(tuned).expect("plain numbers");
            write_keys(dir.path(), vec![(TunedDraftModel::KEY, value)]).expect("written");
        };
        write(&tuned());
        assert_eq!(TunedDraftModel::read(dir.path()).expect("reads"), Some(tuned()));
        let wrong = setting("vLLM", fixed(0), 1.0);
        write(&TunedDraftModel { sampled: Some(vec![wrong]), ..tuned() });
        let error = format!("{:#}", TunedDraftModel::read(dir.path()).expect_err("refused"));
        assert!(error.contains("tuned_draft_model"), "{error}");
    }

    #[test]
    fn transformers_gets_the_best_rule_it_supports() {
        let keys = tuned().assistant_keys().expect("it was tuned");
        assert_eq!(
            keys,
            [
                ("num_assistant_tokens", json!(6)),
                ("num_assistant_tokens_schedule", json!("constant")),
                ("assistant_confidence_threshold", json!(0.5)),
            ]
        );
        let one = vec![setting("transformers", fixed(2), 1.25)];
        let sampled = TunedDraftModel { greedy: None, sampled: Some(one), ..tuned() };
        let [(_, length), _, (_, threshold)] = sampled.assistant_keys().expect("it was tuned");
        assert_eq!((length, threshold), (json!(2), json!(0.0)));
        assert_eq!(TunedDraftModel::default().assistant_keys(), None);
    }
}
