//! What tuning wrote into an export: the key `tuned` of a head's or an adapter's `config.json`.
//!
//! Per way of decoding, the stop rule that is best on the machine it was tuned on, and what it promises. `tune` writes
//! it, `generate` decodes with it, `check` holds the export to it. Those who load the head or adapter alone pass the
//! key over. Training writes `config.json` anew, and so takes the key away with the weights that it was about.

use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_theory::{Bounds, CostModel, Decoding, Interval, Sampling, StopRuleConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::recipe::{decoding, write_text};
use crate::results::{DecodingName, DrafterName, Estimate};

/// The key in `config.json`.
const KEY: &str = "tuned";

/// The best rules for one head or adapter.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tuned {
    /// For greedy decoding, if that was tuned.
    pub(crate) greedy: Option<TunedRule>,
    /// For sampled decoding, if that was tuned.
    pub(crate) sampled: Option<TunedRule>,
}

/// A rule, and what it promises.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TunedRule {
    /// What proposes the candidates.
    pub(crate) drafter: DrafterName,
    /// The rule and its settings.
    pub(crate) config: StopRuleConfig,
    /// The sampling temperature it was tuned for; 0 is greedy.
    pub(crate) temperature: f64,
    /// The nucleus mass it was tuned for.
    pub(crate) top_p: f64,
    /// Modelled speed over the best fixed length, minus 1, with its 95 % interval.
    pub(crate) expected_gain: Estimate,
    /// Candidates accepted over candidates drafted, with its 99.99 % interval.
    pub(crate) expected_acceptance_rate: Estimate,
    /// The fixed length that the gain is over.
    pub(crate) best_fixed_length: usize,
    /// The costs it is best for.
    pub(crate) costs: CostModel,
    /// Prompts it was tuned on.
    pub(crate) num_prompts: usize,
}

impl Tuned {
    /// Reads what tuning wrote into the export in `dir`; None where it has not been tuned.
    ///
    /// # Errors
    /// If `config.json` cannot be read, or what the key holds makes no sense.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        let Some(value) = read_config(dir)?.remove(KEY) else {
            return Ok(None);
        };
        let named = || format!("key `{KEY}` of `{}`", dir.join("config.json").display());
        let tuned: Self = serde_json::from_value(value).with_context(named)?;
        tuned.check().with_context(named)?;
        Ok(Some(tuned))
    }

    /// Writes it into the `config.json` of the export in `dir`, whole or not at all. All other keys stay, in their
    /// order.
    ///
    /// # Errors
    /// If `config.json` is not there, or cannot be replaced.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let mut config = read_config(dir)?;
        config.insert(KEY.to_owned(), serde_json::to_value(self)?);
        let text = serde_json::to_string_pretty(&config)?;
        write_text(&dir.join("config.json"), &(text + "\n"))
    }

    /// The rule for a way of decoding.
    pub(crate) fn rule(&self, decoding: DecodingName) -> Option<&TunedRule> {
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
            if DecodingName::of(&rule.decoding()) != name {
                bail!("`{key}.temperature` is {}: 0 is greedy, more is sampled", rule.temperature);
            }
            interval(&rule.expected_gain).with_context(|| format!("`{key}.expected_gain`"))?;
            interval(&rule.expected_acceptance_rate)
                .with_context(|| format!("`{key}.expected_acceptance_rate`"))?;
        }
        Ok(())
    }
}

impl TunedRule {
    /// The way of decoding it was tuned for.
    pub(crate) fn decoding(&self) -> Decoding {
        decoding(Sampling { temperature: self.temperature, top_p: self.top_p, top_k: None })
    }
}

/// The rule that `generate` decodes with where nothing was tuned: h = 0.7 with a head, else five candidates.
pub(crate) fn default_rule(has_head: bool) -> StopRuleConfig {
    if has_head {
        StopRuleConfig::RejectionThreshold {
            stop_threshold: 0.7,
            without_lag: false,
            bounds: Bounds::default(),
        }
    } else {
        StopRuleConfig::FixedLength { candidate_length: 5 }
    }
}

/// An estimate as an interval that holds its value.
pub(crate) fn interval(estimate: &Estimate) -> Result<Interval> {
    Ok(Interval::new(estimate.value, estimate.low, estimate.high)?)
}

fn read_config(dir: &Path) -> Result<Map<String, Value>> {
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read `{}`", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("`{}` is not a JSON object", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig};

    fn rule(temperature: f64) -> TunedRule {
        let estimate = |value: f64| Estimate { value, low: value - 0.125, high: value + 0.25 };
        TunedRule {
            drafter: DrafterName::Draft,
            config: default_rule(true),
            temperature,
            top_p: 1.0,
            expected_gain: estimate(0.25),
            expected_acceptance_rate: estimate(0.5),
            best_fixed_length: 4,
            costs: CostModel { draft_seconds: 0.5, target_seconds: 2.0, row_seconds: 0.0 },
            num_prompts: 40,
        }
    }

    fn tuned() -> Tuned {
        Tuned { greedy: Some(rule(0.0)), sampled: Some(rule(1.0)) }
    }

    fn dir_with(config: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), config).expect("written");
        dir
    }

    #[test]
    fn what_is_written_reads_back_and_other_keys_stay_in_their_order() {
        let dir = dir_with(r#"{"zeta": 1, "exit_layer": 2, "alpha": {"b": 0.25, "a": []}}"#);
        assert_eq!(Tuned::read(dir.path()).expect("reads"), None);
        for tuned in [tuned(), Tuned { greedy: None, ..tuned() }] {
            tuned.write(dir.path()).expect("written");
            assert_eq!(Tuned::read(dir.path()).expect("reads"), Some(tuned));
        }
        let config = read_config(dir.path()).expect("reads");
        assert_eq!(config.keys().collect::<Vec<_>>(), ["zeta", "exit_layer", "alpha", "tuned"]);
        assert_eq!(config["alpha"].to_string(), r#"{"b":0.25,"a":[]}"#);
        let names: Vec<_> = std::fs::read_dir(dir.path()).expect("listed").collect();
        assert_eq!(names.len(), 1, "no temporary file is left");
    }

    #[test]
    fn a_tuned_head_is_the_same_head() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let config = AcceptanceHeadConfig::new(8, 1, true);
        config.init(&Device::flex()).write_dir(dir.path(), &config).expect("written");
        tuned().write(dir.path()).expect("written");
        let (read, _) = AcceptanceHead::from_dir(dir.path(), 8, &Device::flex()).expect("reads");
        assert_eq!(read, config);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let check = |spoil: fn(&mut TunedRule), expected: &str| {
            let mut tuned = tuned();
            tuned.sampled.iter_mut().for_each(spoil);
            let dir = dir_with("{}");
            tuned.write(dir.path()).expect("written");
            let message = format!("{:#}", Tuned::read(dir.path()).expect_err("refused"));
            for part in ["config.json", "tuned", "sampled", expected] {
                assert!(message.contains(part), "`{part}` is not in: {message}");
            }
        };
        check(|rule| rule.temperature = 0.0, "temperature");
        check(|rule| rule.top_p = 0.0, "top_p");
        check(|rule| rule.expected_acceptance_rate.low = 0.75, "expected_acceptance_rate");
        check(|rule| rule.expected_gain.value = 7.0, "expected_gain");
        check(|rule| rule.config = StopRuleConfig::FixedLength { candidate_length: 0 }, "config");
        for (config, expected) in
            [("{", "config.json"), ("[]", "config.json"), (r#"{"tuned": {"fast": 1}}"#, "fast")]
        {
            let dir = dir_with(config);
            let message = format!("{:#}", Tuned::read(dir.path()).expect_err("refused"));
            assert!(message.contains(expected), "{message}");
        }
        assert!(Tuned::read(Path::new("absent")).is_err());
    }
}
