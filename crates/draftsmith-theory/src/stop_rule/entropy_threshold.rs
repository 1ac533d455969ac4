//! SVIP's stop rule, which reads the draft's entropy.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleOption, RuleSettings, SettingKind, Sweep};
use super::{Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleEntry, StopRuleName};
use crate::{Result, TheoryError};

/// SVIP's rule (Zhang et al. 2024, §2), which stops when √(c·H) exceeds the threshold. H is the
/// entropy in nats of the raw distribution that the candidate was drawn from. The target still
/// verifies the candidate.
///
/// The value 1 − √(c·H) estimates the acceptance probability. The authors' code has c = 0.15, while
/// the paper absorbs c into the threshold (c = 1).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropyThresholdConfig {
    /// The threshold h, at least 0. The paper uses 0.2 to 0.5.
    pub entropy_threshold: f64,
    /// The scale c, above 0.
    pub entropy_scale: f64,
    /// The interval n of checked candidates. The paper uses 1, and 2 with EAGLE-2.
    pub check_interval: usize,
    /// The minimum and maximum candidate length. The paper uses at most 40.
    pub bounds: Bounds,
}

impl EntropyThresholdConfig {
    /// The scale c of the authors' code.
    pub const ENTROPY_SCALE: f64 = 0.15;

    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::EntropyThreshold,
        file_name: "entropy",
        text: "entropy",
        family: RuleFamily::Entropy,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            doc: "SVIP's h: a round ends when √(c·H) exceeds it",
            values: SettingKind::NonNegative,
            default: &[],
            self_draft_default: &[],
            options: &[
                RuleOption {
                    name: "scale",
                    doc: "SVIP's c",
                    values: SettingKind::Positive,
                    default: Self::ENTROPY_SCALE,
                },
                RuleOption {
                    name: "check_interval",
                    doc: "check only every n-th candidate",
                    values: SettingKind::Count,
                    default: 1.0,
                },
            ],
            sweep: Sweep::Probabilities,
            config: |entropy_threshold, options, bounds| {
                let (entropy_scale, check_interval) = (options[0], options[1] as usize);
                Self { entropy_threshold, entropy_scale, check_interval, bounds }.into()
            },
        }),
    }];
}

impl RuleConfig for EntropyThresholdConfig {
    fn check(&self) -> Result<()> {
        let Self { entropy_threshold: threshold, entropy_scale: scale, check_interval, .. } = *self;
        let is_valid = threshold >= 0.0 && threshold.is_finite();
        TheoryError::check(is_valid, "entropy_threshold", "be 0 or more and finite", threshold)?;
        let is_valid = scale > 0.0 && scale.is_finite();
        TheoryError::check(is_valid, "entropy_scale", "be positive and finite", scale)?;
        let interval = check_interval as f64;
        TheoryError::check(check_interval > 0, "check_interval", "be at least 1", interval)
    }

    fn rule(&self) -> Box<dyn StopRule> {
        Box::new(*self)
    }
}

impl StopRule for EntropyThresholdConfig {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        let entropy = signals.entropy.expect("drafters give the signals a rule needs");
        candidates.len().is_multiple_of(self.check_interval)
            && (self.entropy_scale * entropy).sqrt() > self.entropy_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { entropy: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    fn length(mut rule: EntropyThresholdConfig, entropies: &[f64]) -> Option<usize> {
        let signals =
            |entropy: &f64| DraftSignals { entropy: Some(*entropy), ..Default::default() };
        round_length(&mut rule, &entropies.iter().map(signals).collect::<Vec<_>>())
    }

    fn rule(entropy_threshold: f64, check_interval: usize) -> EntropyThresholdConfig {
        let bounds = Bounds { min: 1, max: 40 };
        EntropyThresholdConfig { entropy_threshold, entropy_scale: 0.15, check_interval, bounds }
    }

    #[test]
    fn the_codes_threshold_is_the_papers_scaled() {
        // h = 0.3 with c = 0.15 is H > 0.6 nats, strictly.
        assert_eq!(length(rule(0.3, 1), &[0.1, 0.59, 0.61, 0.1]), Some(3));
        let paper = EntropyThresholdConfig { entropy_scale: 1.0, ..rule(0.6_f64.sqrt(), 1) };
        assert_eq!(length(paper, &[0.1, 0.59, 0.61]), Some(3));
        assert_eq!(length(rule(0.0, 1), &[0.0, 1e-9]), Some(2));
    }

    #[test]
    fn only_every_nth_candidate_is_checked() {
        assert_eq!(length(rule(0.3, 2), &[9.0, 0.1, 9.0, 0.1, 9.0, 9.0]), Some(6));
        assert_eq!(length(rule(0.3, 3), &[9.0, 9.0, 0.1]), None);
    }

    #[test]
    fn invalid_settings_are_errors() {
        for threshold in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(rule(threshold, 1).check().is_err());
        }
        for entropy_scale in [0.0, -1.0, f64::NAN] {
            assert!(EntropyThresholdConfig { entropy_scale, ..rule(0.3, 1) }.check().is_err());
        }
        let error = rule(0.3, 0).check().expect_err("an interval of 0").to_string();
        assert_eq!(error, "check_interval must be at least 1, not `0`");
        let entropy = SignalNeeds { entropy: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.3, 1).needs(), entropy);
    }
}
