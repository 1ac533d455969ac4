//! Tuned stop rules: the key `tuned` in a head's or an adapter's `config.json`.
//!
//! For greedy and for sampled decoding, the key stores the best stop rule on the tuning machine,
//! with the speed gain and acceptance rate that tuning expects. `tune` writes the key, `generate`
//! decodes with the rule, and `check` compares measurements with the expected values.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    CostModel, CostSource, Decoding, DecodingName, DrafterName, Estimate, Sampling, StopRuleConfig,
};
use serde::{Deserialize, Serialize};

use crate::exports::config_keys::{named, read_key};
use crate::recipe::keys::decoding;
use crate::watch::Watch;

/// The tuned stop rules of a head or adapter.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// The rule for greedy decoding; `None` if that was not tuned.
    pub greedy: Option<TunedRule>,
    /// The rule for sampled decoding; `None` if that was not tuned.
    pub sampled: Option<TunedRule>,
}

/// A tuned stop rule with its expected gain and acceptance rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedRule {
    /// The name of the drafter that was tuned.
    pub drafter: DrafterName,
    /// The stop rule and its settings.
    pub config: StopRuleConfig,
    /// The sampling temperature during tuning; 0 means greedy.
    pub temperature: f64,
    /// The top-p value during tuning.
    pub top_p: f64,
    /// The top-k value during tuning; `None` means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// The min-p value during tuning; `None` means no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// The repetition penalty during tuning; 1, the default, has no effect.
    #[serde(
        default = "draftsmith_data::no_penalty",
        skip_serializing_if = "draftsmith_data::is_no_penalty"
    )]
    pub repetition_penalty: f64,
    /// The modelled speed relative to the best fixed candidate length, minus 1, with its 95 %
    /// interval.
    pub expected_gain: Estimate,
    /// The expected ratio of accepted to drafted candidates, with its 99.99 % interval.
    pub expected_acceptance_rate: Estimate,
    /// The best fixed candidate length, which is the baseline of the expected gain.
    pub best_fixed_length: usize,
    /// The costs of forwards that tuning used.
    pub costs: CostModel,
    /// The number of prompts that the rule was tuned on.
    pub num_prompts: usize,
    /// The dtype that the models computed in. Costs and acceptance depend on it.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub dtype: WeightDtype,
    /// The source of the costs. Costs given for another machine predict no speed on this one.
    #[serde(default, skip_serializing_if = "CostSource::is_machine")]
    pub cost_source: CostSource,
}

impl TunedRule {
    /// Returns whether the rule was tuned for models of this dtype, and, if `decoding` is given,
    /// for its repetition penalty.
    pub fn fits(&self, dtype: WeightDtype, decoding: Option<&Decoding>) -> bool {
        let is_same = |decoding: &Decoding| decoding.repetition_penalty == self.repetition_penalty;
        self.dtype == dtype && decoding.is_none_or(is_same)
    }

    /// Returns the decoding settings that the rule was tuned for.
    pub fn decoding(&self) -> Decoding {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *self;
        decoding(Sampling { temperature, top_p, top_k, min_p }).penalising(repetition_penalty)
    }
}

impl Tuned {
    /// The key of `config.json` that stores the tuned rules.
    pub const KEY: &str = "tuned";

    /// Reads the tuned rules of the export in `dir`; `None` if it was not tuned.
    ///
    /// # Errors
    /// If `config.json` cannot be read, or the value is invalid.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let tuned: Option<Self> = read_key(dir, Self::KEY)?;
        if let Some(tuned) = &tuned {
            tuned.check().with_context(|| named(dir, Self::KEY))?;
        }
        Ok(tuned)
    }

    /// Reads the tuned rules that match the models' dtype and, if `decoding` is given, its
    /// repetition penalty. Other rules are left out with a note.
    ///
    /// # Errors
    /// As [`Tuned::read`].
    pub fn read_for(
        dir: &Path,
        dtype: WeightDtype,
        decoding: Option<&Decoding>,
        watch: &dyn Watch,
    ) -> Result<Self> {
        let Self { greedy, sampled } = Self::read(dir)?.unwrap_or_default();
        let fitting = |rule: Option<TunedRule>| {
            let rule = rule?;
            if rule.fits(dtype, decoding) {
                return Some(rule);
            }
            let tuned_with = if rule.dtype != dtype {
                let (then, now) = (rule.dtype.name(), dtype.name());
                format!("with `--dtype {then}`, and is left out; hint: tune with `--dtype {now}`")
            } else {
                let now = decoding.map_or(1.0, |decoding| decoding.repetition_penalty);
                let then = rule.repetition_penalty;
                format!(
                    "for a repetition penalty of {then}, and is left out for one of {now}; hint: tune \
                     with `evaluate.repetition_penalty = {now}`"
                )
            };
            watch.note(format!(
                "the rule for {} decoding under `{}` of `{}` was tuned {tuned_with}",
                DecodingName::of(&rule.decoding()).text(),
                Self::KEY,
                dir.join("config.json").display(),
            ));
            None
        };
        Ok(Self { greedy: fitting(greedy), sampled: fitting(sampled) })
    }

    /// Returns the rule for greedy or for sampled decoding; `None` if that was not tuned.
    pub fn rule(&self, decoding: DecodingName) -> Option<&TunedRule> {
        match decoding {
            DecodingName::Greedy => self.greedy.as_ref(),
            DecodingName::Sampled => self.sampled.as_ref(),
        }
    }

    fn check(&self) -> Result<()> {
        for name in [DecodingName::Greedy, DecodingName::Sampled] {
            let Some(rule) = self.rule(name) else { continue };
            let key = if name == DecodingName::Greedy { "greedy" } else { "sampled" };
            rule.config.init().with_context(|| format!("`{key}.config`"))?;
            rule.decoding().validate().with_context(|| format!("`{key}`"))?;
            ensure!(
                DecodingName::of(&rule.decoding()) == name,
                "`{key}.temperature` is {}: expected 0 for greedy and more for sampled decoding",
                rule.temperature
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Silent;
    use burn::tensor::Device;
    use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig};
    use draftsmith_theory::DrafterId;
    use draftsmith_theory::FixedLengthConfig;

    use crate::exports::config_keys::write_keys;

    fn rule(temperature: f64) -> TunedRule {
        let estimate = |value: f64| Estimate { value, low: value - 0.125, high: value + 0.25 };
        TunedRule {
            drafter: DrafterName::Of(DrafterId::DRAFT),
            config: StopRuleConfig::by_default(true),
            temperature,
            top_p: 1.0,
            top_k: None,
            min_p: None,
            repetition_penalty: 1.0,
            expected_gain: estimate(0.25),
            expected_acceptance_rate: estimate(0.5),
            best_fixed_length: 4,
            costs: CostModel { draft_seconds: 0.5, target_seconds: 2.0, row_seconds: 0.0 },
            num_prompts: 40,
            dtype: WeightDtype::F32,
            cost_source: CostSource::Machine,
        }
    }

    fn tuned() -> Tuned {
        Tuned { greedy: Some(rule(0.0)), sampled: Some(rule(1.0)) }
    }

    fn write(tuned: &Tuned, dir: &Path) {
        let value = serde_json::to_value(tuned).expect("plain numbers");
        write_keys(&dir.join("config.json"), [(Tuned::KEY, value)]).expect("written");
    }

    fn dir_with(config: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), config).expect("written");
        dir
    }

    #[test]
    fn tuned_rules_read_back() {
        let dir = dir_with(r#"{"exit_layer": 2}"#);
        assert_eq!(Tuned::read(dir.path()).expect("reads"), None);
        let few = TunedRule { top_k: Some(5), ..rule(1.0) };
        for tuned in
            [tuned(), Tuned { greedy: None, ..tuned() }, Tuned { sampled: Some(few), ..tuned() }]
        {
            write(&tuned, dir.path());
            let text = std::fs::read_to_string(dir.path().join("config.json")).expect("reads");
            let top_k = tuned.sampled.as_ref().and_then(|rule| rule.top_k);
            assert_eq!(text.contains("top_k"), top_k.is_some());
            assert_eq!(Tuned::read(dir.path()).expect("reads"), Some(tuned));
        }
    }

    #[test]
    fn a_rule_needs_the_type_and_the_penalty_of_its_tuning() {
        let dir = dir_with("{}");
        let reduced = TunedRule { dtype: WeightDtype::Bf16, ..rule(1.0) };
        let tuned = Tuned { sampled: Some(reduced), ..tuned() };
        write(&tuned, dir.path());
        let text = std::fs::read_to_string(dir.path().join("config.json")).expect("reads");
        assert_eq!(text.matches("dtype").count(), 1, "f32 is not named: {text}");
        assert_eq!(Tuned::read(dir.path()).expect("reads"), Some(tuned));
        let left = |dtype, decoding| {
            let tuned = Tuned::read_for(dir.path(), dtype, decoding, &Silent);
            let Tuned { greedy, sampled } = tuned.expect("reads");
            (greedy.is_some(), sampled.is_some())
        };
        assert_eq!(left(WeightDtype::F32, Some(&Decoding::GREEDY)), (true, false));
        assert_eq!(left(WeightDtype::Bf16, Some(&Decoding::GREEDY)), (false, true));
        let penalised = TunedRule { repetition_penalty: 1.3, ..rule(0.0) };
        write(&Tuned { greedy: Some(penalised), sampled: Some(rule(1.0)) }, dir.path());
        assert_eq!(left(WeightDtype::F32, Some(&Decoding::GREEDY)), (false, true));
        let decoding = Decoding::GREEDY.penalising(1.3);
        assert_eq!(left(WeightDtype::F32, Some(&decoding)), (true, false));
        assert_eq!(left(WeightDtype::F32, None), (true, true));
    }

    #[test]
    fn tuning_keeps_the_head_readable() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let config = AcceptanceHeadConfig::new(8, 1, true);
        config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
        write(&tuned(), dir.path());
        let (read, _) = AcceptanceHead::from_dir(dir.path(), 8, &Device::flex()).expect("reads");
        assert_eq!(read, config);
    }

    #[test]
    fn errors_name_the_invalid_part() {
        let check = |spoil: fn(&mut TunedRule), expected: &str| {
            let mut tuned = tuned();
            tuned.sampled.iter_mut().for_each(spoil);
            let dir = dir_with("{}");
            write(&tuned, dir.path());
            let message = format!("{:#}", Tuned::read(dir.path()).expect_err("refused"));
            for part in ["config.json", "tuned", "sampled", expected] {
                assert!(message.contains(part), "`{part}` is not in: {message}");
            }
        };
        check(|rule| rule.temperature = 0.0, "temperature");
        check(|rule| rule.top_p = 0.0, "top_p");
        check(|rule| rule.top_k = Some(0), "top_k");
        check(|rule| rule.expected_acceptance_rate.low = 0.75, "expected_acceptance_rate");
        check(|rule| rule.expected_gain.value = 7.0, "expected_gain");
        check(
            |rule| {
                rule.config = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: 0 })
            },
            "config",
        );
        let message = format!(
            "{:#}",
            Tuned::read(dir_with(r#"{"tuned": {"fast": 1}}"#).path()).expect_err("refused")
        );
        assert!(message.contains("fast"), "{message}");
        assert!(Tuned::read(Path::new("absent")).is_err());
    }
}
