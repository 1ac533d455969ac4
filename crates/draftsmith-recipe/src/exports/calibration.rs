//! The calibration of a head's predictions: the key `calibration` of its `config.json`.
//!
//! Greedy and sampled decoding have separate calibrations because their acceptance probabilities differ.
//! `tune` fits and writes them together with the rule chosen under them; decoding with the head applies
//! them. Rollouts hold uncalibrated predictions, so a new calibration does not invalidate them.

use std::path::Path;

use anyhow::Result;
use draftsmith_report::{DecodingName, FittedCalibration};
use draftsmith_theory::Calibration;
use serde::{Deserialize, Serialize};

use crate::exports::config_keys::read_key;

/// The calibrations of one head.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadCalibration {
    /// For greedy decoding; null if calibration did not help, or the head was not tuned.
    pub greedy: Option<FittedCalibration>,
    /// For sampled decoding, likewise.
    pub sampled: Option<FittedCalibration>,
}

impl HeadCalibration {
    /// The key in `config.json`.
    pub const KEY: &str = "calibration";

    /// Reads the calibrations of the head in `dir`; empty if it was not tuned.
    ///
    /// # Errors
    /// If `config.json` cannot be read, or the value is invalid.
    pub fn read(dir: &Path) -> Result<Self> {
        Ok(read_key(dir, Self::KEY)?.unwrap_or_default())
    }

    /// The calibration for a way of decoding.
    pub fn of(&self, decoding: DecodingName) -> Option<&FittedCalibration> {
        match decoding {
            DecodingName::Greedy => self.greedy.as_ref(),
            DecodingName::Sampled => self.sampled.as_ref(),
        }
    }

    /// The entry for a way of decoding.
    pub fn slot(&mut self, decoding: DecodingName) -> &mut Option<FittedCalibration> {
        match decoding {
            DecodingName::Greedy => &mut self.greedy,
            DecodingName::Sampled => &mut self.sampled,
        }
    }

    /// The map for a way of decoding.
    pub fn map(&self, decoding: DecodingName) -> Option<&Calibration> {
        self.of(decoding).map(|fitted| &fitted.map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use draftsmith_theory::HeadScores;
    use serde_json::{Value, json};

    use crate::exports::config_keys::write_keys;

    fn scores() -> HeadScores {
        HeadScores {
            num_labels: 640,
            kl: 0.25,
            unshifted_kl: None,
            bce: 0.5,
            auroc: Some(0.75),
            brier: 0.125,
            ece: 0.0625,
            mean_label: 0.5,
            mean_predicted: 0.375,
        }
    }

    fn fitted(map: Calibration) -> FittedCalibration {
        FittedCalibration { map, num_prompts: 40, before: scores(), after: scores() }
    }

    fn dir_with(calibration: Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("config.json"), r#"{"num_layers": 2}"#).expect("written");
        write_keys(dir.path(), vec![(HeadCalibration::KEY, calibration)]).expect("written");
        dir
    }

    #[test]
    fn calibrations_read_back() {
        let greedy = Calibration::new(0.75, 1.5).expect("valid");
        let written = HeadCalibration { greedy: Some(fitted(greedy)), sampled: None };
        let dir = dir_with(serde_json::to_value(&written).expect("plain numbers"));
        let read = HeadCalibration::read(dir.path()).expect("reads");
        assert_eq!(read, written);
        assert_eq!(read.map(DecodingName::Greedy), Some(&greedy));
        assert_eq!(read.map(DecodingName::Sampled), None);
        let text = std::fs::read_to_string(dir.path().join("config.json")).expect("reads");
        let config: Value = serde_json::from_str(&text).expect("JSON");
        let expected = json!({ "kind": "platt", "scale": 0.75, "bias": 1.5 });
        assert_eq!(config["calibration"]["greedy"]["map"], expected);

        let untuned = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(untuned.path().join("config.json"), "{}").expect("written");
        let read = HeadCalibration::read(untuned.path()).expect("reads");
        assert_eq!(read, HeadCalibration::default());
    }

    #[test]
    fn errors_name_the_invalid_part() {
        let map = Calibration::new(1.0, 0.0).expect("valid");
        let whole = serde_json::to_value(fitted(map)).expect("plain numbers");
        let refused = |key: &str, value: Value, expected: &str| {
            let mut sampled = whole.clone();
            sampled[key] = value;
            let dir = dir_with(json!({ "greedy": null, "sampled": sampled }));
            let error = HeadCalibration::read(dir.path()).expect_err("refused");
            let message = format!("{error:#}");
            for part in ["config.json", "calibration", expected] {
                assert!(message.contains(part), "`{part}` is not in: {message}");
            }
        };
        refused("map", json!({ "kind": "platt", "scale": -1.0, "bias": 0.0 }), "scale");
        refused("map", json!({ "kind": "platt", "scale": 1.0, "bias": 0.0, "more": 1 }), "more");
        refused("map", json!({ "kind": "beta", "scale": 1.0 }), "beta");
        refused("num_prompts", json!("many"), "many");
        refused("since", json!(2), "since");
    }
}
