//! Stop rules as settings: what recipes, exported configs and results name.

use serde::{Deserialize, Serialize};

use super::{
    Bounds, CandidateProbThreshold, ConfidenceThreshold, CostOptimal, CostOptimalConfig,
    EntropyThreshold, FixedLength, Heuristic, JointConfidence, RejectionThreshold, SignalNeeds,
    StopRule,
};
use crate::TheoryError;

/// A stop rule and its settings; a table with the key `stop_rule` in files.
/// [`Oracle`](crate::Oracle) is none: it belongs to one response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "stop_rule", rename_all = "snake_case", deny_unknown_fields)]
pub enum StopRuleConfig {
    /// [`FixedLength`].
    FixedLength {
        /// K, candidates a round.
        candidate_length: usize,
    },
    /// [`Heuristic`].
    Heuristic {
        /// Candidates in the first round.
        initial_length: usize,
        /// The lengths it moves within.
        bounds: Bounds,
    },
    /// [`RejectionThreshold`].
    RejectionThreshold {
        /// h, a probability.
        stop_threshold: f64,
        /// Ask about a candidate before the next is drawn.
        #[serde(default)]
        without_lag: bool,
        /// The candidate lengths.
        bounds: Bounds,
    },
    /// [`ConfidenceThreshold`].
    ConfidenceThreshold {
        /// η, a probability.
        confidence_threshold: f64,
        /// Ask before a candidate is drawn, which then is not.
        #[serde(default)]
        before_draw: bool,
        /// The candidate lengths.
        bounds: Bounds,
    },
    /// [`CandidateProbThreshold`].
    CandidateProbThreshold {
        /// A probability.
        confidence_threshold: f64,
        /// The candidate lengths.
        bounds: Bounds,
    },
    /// [`JointConfidence`].
    JointConfidence {
        /// A probability.
        confidence_threshold: f64,
        /// The candidate lengths.
        bounds: Bounds,
    },
    /// [`EntropyThreshold`].
    EntropyThreshold {
        /// h: what √(c·H) is compared with.
        entropy_threshold: f64,
        /// c.
        entropy_scale: f64,
        /// Every so many-th candidate is looked at.
        check_interval: usize,
        /// The candidate lengths.
        bounds: Bounds,
    },
    /// [`CostOptimal`].
    CostOptimal(CostOptimalConfig),
}

impl StopRuleConfig {
    /// The rule.
    ///
    /// # Errors
    /// If a setting is outside its range.
    pub fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        Ok(match self {
            Self::FixedLength { candidate_length } => {
                Box::new(FixedLength::new(*candidate_length)?)
            }
            Self::Heuristic { initial_length, bounds } => {
                Box::new(Heuristic::new(*initial_length, *bounds)?)
            }
            Self::RejectionThreshold { stop_threshold, without_lag, bounds } => {
                let rule = RejectionThreshold::new(*stop_threshold, *bounds)?;
                Box::new(if *without_lag { rule.without_lag() } else { rule })
            }
            Self::ConfidenceThreshold { confidence_threshold, before_draw, bounds } => {
                let rule = ConfidenceThreshold::new(*confidence_threshold, *bounds)?;
                Box::new(if *before_draw { rule.before_draw() } else { rule })
            }
            Self::CandidateProbThreshold { confidence_threshold, bounds } => {
                Box::new(CandidateProbThreshold::new(*confidence_threshold, *bounds)?)
            }
            Self::JointConfidence { confidence_threshold, bounds } => {
                Box::new(JointConfidence::new(*confidence_threshold, *bounds)?)
            }
            Self::EntropyThreshold { entropy_threshold, entropy_scale, check_interval, bounds } => {
                Box::new(EntropyThreshold::new(
                    *entropy_threshold,
                    *entropy_scale,
                    *check_interval,
                    *bounds,
                )?)
            }
            Self::CostOptimal(config) => Box::new(CostOptimal::new(config.clone())?),
        })
    }

    /// The signals the rule reads.
    pub fn needs(&self) -> SignalNeeds {
        let none = SignalNeeds::default();
        match self {
            Self::FixedLength { .. } | Self::Heuristic { .. } => none,
            Self::RejectionThreshold { .. } => SignalNeeds { acceptance_prob: true, ..none },
            Self::ConfidenceThreshold { .. } | Self::JointConfidence { .. } => {
                SignalNeeds { confidence: true, ..none }
            }
            Self::CandidateProbThreshold { .. } => SignalNeeds { candidate_prob: true, ..none },
            Self::EntropyThreshold { .. } => SignalNeeds { entropy: true, ..none },
            Self::CostOptimal(config) => config.signal.needs(),
        }
    }

    /// Whether the rule ends rounds before a draw, so that a draft forward may come without a
    /// candidate.
    pub fn stops_before_draw(&self) -> bool {
        match self {
            Self::RejectionThreshold { without_lag, .. } => *without_lag,
            Self::ConfidenceThreshold { before_draw, .. } => *before_draw,
            Self::CostOptimal(config) => config.least_draw_worth > 0.0,
            _ => false,
        }
    }

    /// The number that tells the rule's settings apart: K, the first length, a threshold, or the
    /// least worth of a draft forward in tokens.
    pub fn parameter(&self) -> f64 {
        match self {
            Self::FixedLength { candidate_length } => *candidate_length as f64,
            Self::Heuristic { initial_length, .. } => *initial_length as f64,
            Self::RejectionThreshold { stop_threshold, .. } => *stop_threshold,
            Self::ConfidenceThreshold { confidence_threshold, .. }
            | Self::CandidateProbThreshold { confidence_threshold, .. }
            | Self::JointConfidence { confidence_threshold, .. } => *confidence_threshold,
            Self::EntropyThreshold { entropy_threshold, .. } => *entropy_threshold,
            Self::CostOptimal(config) => config.least_worth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AcceptanceSignal, StepFunction};
    use super::*;

    fn all() -> Vec<StopRuleConfig> {
        let bounds = Bounds::default();
        vec![
            StopRuleConfig::FixedLength { candidate_length: 4 },
            StopRuleConfig::Heuristic { initial_length: 5, bounds },
            StopRuleConfig::RejectionThreshold { stop_threshold: 0.7, without_lag: false, bounds },
            StopRuleConfig::RejectionThreshold { stop_threshold: 0.7, without_lag: true, bounds },
            StopRuleConfig::ConfidenceThreshold {
                confidence_threshold: 0.6,
                before_draw: true,
                bounds,
            },
            StopRuleConfig::CandidateProbThreshold { confidence_threshold: 0.4, bounds },
            StopRuleConfig::JointConfidence { confidence_threshold: 0.4, bounds },
            StopRuleConfig::EntropyThreshold {
                entropy_threshold: 0.3,
                entropy_scale: 0.15,
                check_interval: 2,
                bounds,
            },
            StopRuleConfig::CostOptimal(CostOptimalConfig {
                signal: AcceptanceSignal::AcceptanceProb,
                least_worth: 0.1,
                least_draw_worth: 0.05,
                estimate: StepFunction::new(vec![0.5], vec![0.4, 0.9]).expect("valid"),
                draw_outlook: StepFunction::constant(0.8).expect("valid"),
                outlook: StepFunction::constant(0.8).expect("valid"),
                initial_outlook: 0.6,
                bounds,
            }),
        ]
    }

    #[test]
    fn a_config_makes_the_rule_it_names_and_asks_for_the_same_signals() {
        for config in all() {
            let rule = config.init().expect("valid");
            assert_eq!(rule.needs(), config.needs(), "{config:?}");
        }
    }

    #[test]
    fn senseless_settings_are_refused() {
        let bounds = Bounds { min: 3, max: 2 };
        let wrong = StopRuleConfig::JointConfidence { confidence_threshold: 0.5, bounds };
        assert!(wrong.init().is_err());
        assert!(StopRuleConfig::FixedLength { candidate_length: 0 }.init().is_err());
    }
}
