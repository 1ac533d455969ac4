//! SVIP: stopping by the draft's entropy.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, KeyValues, RecipeKey, RuleConfig, RuleFamily, RuleSettings, Sweep};
use super::{
    Bounds, DraftSignals, SignalNeeds, StopRule, StopRuleConfig, StopRuleEntry, StopRuleName,
};
use crate::TheoryError;

/// Settings of [`EntropyThreshold`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntropyThresholdConfig {
    /// h: what √(c·H) is compared with.
    pub entropy_threshold: f64,
    /// c.
    pub entropy_scale: f64,
    /// Every so many-th candidate is looked at.
    pub check_interval: usize,
    /// The candidate lengths.
    pub bounds: Bounds,
}

impl EntropyThresholdConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::EntropyThreshold,
        file_name: "entropy",
        symbol: "entropy h",
        text: "entropy",
        family: RuleFamily::Entropy,
        heads: &[],
        settings: RuleSettings::Grid(Grid {
            key: RecipeKey {
                name: "entropy_thresholds",
                doc: "SVIP's h: a round ends when √(c·H) exceeds it",
                values: KeyValues::NonNegative,
                default: &[],
            },
            self_draft_key: None,
            options: &[
                RecipeKey {
                    name: "entropy_scale",
                    doc: "SVIP's c",
                    values: KeyValues::Positive,
                    default: &[EntropyThreshold::ENTROPY_SCALE],
                },
                RecipeKey {
                    name: "entropy_check_interval",
                    doc: "SVIP looks at every so many-th candidate",
                    values: KeyValues::Count,
                    default: &[1.0],
                },
            ],
            sweep: Sweep::Probabilities,
            config: |value, options, bounds| {
                StopRuleConfig::EntropyThreshold(Self {
                    entropy_threshold: value,
                    entropy_scale: options[0],
                    check_interval: options[1] as usize,
                    bounds,
                })
            },
        }),
    }];
}

impl RuleConfig for EntropyThresholdConfig {
    fn name(&self) -> StopRuleName {
        StopRuleName::EntropyThreshold
    }

    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        Ok(Box::new(EntropyThreshold::new(
            self.entropy_threshold,
            self.entropy_scale,
            self.check_interval,
            self.bounds,
        )?))
    }

    fn parameter(&self) -> f64 {
        self.entropy_threshold
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { entropy: true, ..SignalNeeds::default() }
    }
}

/// SVIP (Zhang et al. 2024, §2): stops when √(c·H) exceeds the threshold, H the entropy in
/// nats of the raw distribution that the candidate was drawn from. The candidate still goes to the
/// target.
///
/// 1 − √(c·H) estimates the chance of acceptance. The authors' code has c = 0.15 in front of H; the
/// paper absorbs it into the threshold (c = 1). EAGLE-2 under SVIP looks at every second candidate
/// only.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EntropyThreshold {
    entropy_threshold: f64,
    entropy_scale: f64,
    check_interval: usize,
    bounds: Bounds,
}

impl EntropyThreshold {
    /// c of the authors' code.
    pub const ENTROPY_SCALE: f64 = 0.15;

    /// The rule with threshold h = `entropy_threshold` and c = `entropy_scale`, asked at every
    /// `check_interval`-th candidate; the paper's thresholds are 0.2 to 0.5 with at most 40
    /// candidates.
    ///
    /// # Errors
    /// If the threshold is negative or not finite, the scale is not positive and finite, the
    /// interval is 0, or the bounds are not valid.
    pub fn new(
        entropy_threshold: f64,
        entropy_scale: f64,
        check_interval: usize,
        bounds: Bounds,
    ) -> Result<Self, TheoryError> {
        if !(entropy_threshold >= 0.0 && entropy_threshold.is_finite()) {
            return Err(TheoryError::EntropyThreshold(entropy_threshold));
        }
        if !(entropy_scale > 0.0 && entropy_scale.is_finite()) {
            return Err(TheoryError::EntropyScale(entropy_scale));
        }
        if check_interval == 0 {
            return Err(TheoryError::CheckInterval);
        }
        let bounds = Bounds::new(bounds.min, bounds.max)?;
        Ok(Self { entropy_threshold, entropy_scale, check_interval, bounds })
    }
}

impl StopRule for EntropyThreshold {
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

    fn length(rule: &mut EntropyThreshold, entropies: &[f64]) -> Option<usize> {
        let heard = |entropy: &f64| DraftSignals { entropy: Some(*entropy), ..Default::default() };
        round_length(rule, &entropies.iter().map(heard).collect::<Vec<_>>())
    }

    fn rule(threshold: f64, interval: usize) -> EntropyThreshold {
        EntropyThreshold::new(threshold, 0.15, interval, Bounds { min: 1, max: 40 }).expect("valid")
    }

    #[test]
    fn the_codes_threshold_is_the_papers_scaled() {
        // h = 0.3 with c = 0.15 is H > 0.6 nats, strictly.
        assert_eq!(length(&mut rule(0.3, 1), &[0.1, 0.59, 0.61, 0.1]), Some(3));
        let paper = |threshold| EntropyThreshold::new(threshold, 1.0, 1, Bounds::default());
        let mut paper = paper(0.6_f64.sqrt()).expect("valid");
        assert_eq!(length(&mut paper, &[0.1, 0.59, 0.61]), Some(3));
        assert_eq!(length(&mut rule(0.0, 1), &[0.0, 1e-9]), Some(2));
    }

    #[test]
    fn only_every_so_many_th_candidate_is_looked_at() {
        assert_eq!(length(&mut rule(0.3, 2), &[9.0, 0.1, 9.0, 0.1, 9.0, 9.0]), Some(6));
        assert_eq!(length(&mut rule(0.3, 3), &[9.0, 9.0, 0.1]), None);
    }

    #[test]
    fn senseless_settings_are_refused() {
        let bounds = Bounds::default();
        for threshold in [-0.1, f64::NAN, f64::INFINITY] {
            assert!(EntropyThreshold::new(threshold, 0.15, 1, bounds).is_err());
        }
        for scale in [0.0, -1.0, f64::NAN] {
            assert!(EntropyThreshold::new(0.3, scale, 1, bounds).is_err());
        }
        assert_eq!(EntropyThreshold::new(0.3, 0.15, 0, bounds), Err(TheoryError::CheckInterval));
        let entropy = SignalNeeds { entropy: true, ..SignalNeeds::default() };
        assert_eq!(rule(0.3, 1).needs(), entropy);
    }
}
