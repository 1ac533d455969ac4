//! When a draft phase ends: the stop rules and what they may read.
//!
//! The round loop draws a candidate, includes it, and then asks. So a rule can end a round only
//! *after* the last drawn candidate: withholding a candidate because of its own value would bias
//! the output (with p = q = (½, ½) and token 1 withheld, token 0 comes out with chance ¾). The loop
//! also applies the rule's bounds, so a rule need not count.
//!
//! | rule | reads |
//! |---|---|
//! | [`FixedLength`], [`Heuristic`] | nothing; the heuristic how the last round went |
//! | [`RejectionThreshold`] (SpecDec++), with the paper's lag of one candidate or without | an acceptance head |
//! | [`ConfidenceThreshold`] (Kangaroo), [`JointConfidence`] | the draft's largest probability |
//! | [`CandidateProbThreshold`] (transformers) | the candidate's own probability |
//! | [`EntropyThreshold`] (SVIP) | the draft's entropy |
//! | [`CostOptimal`] | a head, the confidence or the entropy |
//! | [`Oracle`] (SpecDec++, Lemma 2.1) | the answers |
//!
//! Each rule that has settings has a file here and a line in the table below. The file holds the rule,
//! its settings (`FooConfig`) and its entries in the table: what recipes, results, sweeps and
//! reports call it and try of it.

mod bounds;
mod candidate_prob_threshold;
mod confidence_threshold;
mod cost_optimal;
mod entropy_threshold;
mod entry;
mod fixed_length;
mod heuristic;
mod joint_confidence;
mod oracle;
mod rejection_threshold;
mod rule;
mod signals;

use serde::{Deserialize, Serialize};

use self::entry::RuleConfig;
use crate::TheoryError;

pub use bounds::Bounds;
pub use candidate_prob_threshold::{CandidateProbThreshold, CandidateProbThresholdConfig};
pub use confidence_threshold::{ConfidenceThreshold, ConfidenceThresholdConfig};
pub use cost_optimal::{CostOptimal, CostOptimalConfig, StepFunction};
pub use entropy_threshold::{EntropyThreshold, EntropyThresholdConfig};
pub use entry::{Grid, KeyValues, RecipeKey, RuleFamily, RuleSettings, StopRuleEntry, Sweep};
pub use fixed_length::{FixedLength, FixedLengthConfig};
pub use heuristic::{Heuristic, HeuristicConfig};
pub use joint_confidence::{JointConfidence, JointConfidenceConfig};
pub use oracle::Oracle;
pub use rejection_threshold::{RejectionThreshold, RejectionThresholdConfig};
pub use rule::{RoundEnd, StopRule};
pub use signals::{
    AcceptanceSignal, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, SoftmaxSummary,
    largest_prob,
};

/// Makes the table of lines `Rule(Settings): Name, …;`, in the order that rules are shown in.
macro_rules! stop_rules {
    ($($rule:ident($config:ident): $($name:ident),+;)+) => {
        /// A stop rule and its settings; a table with the key `stop_rule` in files.
        /// [`Oracle`](crate::Oracle) is none: it belongs to one response.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "stop_rule", rename_all = "snake_case")]
        pub enum StopRuleConfig {
            $(
                #[doc = concat!("[`", stringify!($rule), "`](crate::", stringify!($rule), ").")]
                $rule($config),
            )+
        }

        /// What ends a draft phase, as results name it; in the order rows are shown.
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize
        )]
        #[serde(rename_all = "snake_case")]
        pub enum StopRuleName {
            /// Nothing is drafted: the target decodes alone.
            None,
            $($(
                #[doc = concat!("A name of [`", stringify!($rule), "`](crate::", stringify!($rule), ").")]
                $name,
            )+)+
        }

        const TABLE: &[&[StopRuleEntry]] = &[$($config::ENTRIES),+];

        impl StopRuleConfig {
            fn settings(&self) -> &dyn RuleConfig {
                match self {
                    $(Self::$rule(config) => config,)+
                }
            }
        }

        $(
            impl From<$config> for StopRuleConfig {
                fn from(config: $config) -> Self {
                    Self::$rule(config)
                }
            }
        )+
    };
}

stop_rules! {
    FixedLength(FixedLengthConfig): FixedLength;
    Heuristic(HeuristicConfig): Heuristic;
    RejectionThreshold(RejectionThresholdConfig): RejectionThreshold, RejectionThresholdWithoutLag;
    ConfidenceThreshold(ConfidenceThresholdConfig): ConfidenceThreshold;
    CandidateProbThreshold(CandidateProbThresholdConfig): CandidateProbThreshold;
    JointConfidence(JointConfidenceConfig): JointConfidence;
    EntropyThreshold(EntropyThresholdConfig): EntropyThreshold;
    CostOptimal(CostOptimalConfig): CostOptimalHead, CostOptimalConfidence, CostOptimalEntropy;
}

/// Every entry of the table, in the order that rules are shown in.
pub fn stop_rules() -> impl Iterator<Item = &'static StopRuleEntry> {
    TABLE.iter().copied().flatten()
}

impl StopRuleConfig {
    /// The rule.
    ///
    /// # Errors
    /// If a setting is outside its range.
    pub fn init(&self) -> Result<Box<dyn StopRule>, TheoryError> {
        self.settings().init()
    }

    /// The signals the rule reads.
    pub fn needs(&self) -> SignalNeeds {
        self.settings().needs()
    }

    /// The number that tells the rule's settings apart: K, the first length, a threshold, or the
    /// least worth of a draft forward in tokens.
    pub fn parameter(&self) -> f64 {
        self.settings().parameter()
    }

    /// The name that results have for the rule.
    pub fn name(&self) -> StopRuleName {
        self.settings().name()
    }
}

impl StopRuleName {
    /// The rule's entry in the table; None where nothing is drafted.
    pub fn entry(self) -> Option<&'static StopRuleEntry> {
        stop_rules().find(|entry| entry.name == self)
    }

    /// What files and streams of draws call the rule.
    pub fn file_name(self) -> &'static str {
        self.entry().map_or("plain", |entry| entry.file_name)
    }

    /// What the rule's number is called, in ASCII; None without a rule.
    pub fn symbol(self) -> Option<&'static str> {
        self.entry().map(|entry| entry.symbol)
    }

    /// The rule in words: what goes on a page that has room.
    pub fn text(self) -> &'static str {
        self.entry().map_or("target alone", |entry| entry.text)
    }

    /// The rule at a setting: `target alone`, `K = 6`, `h = 0.7`.
    pub fn label(self, setting: Option<f64>) -> String {
        match self.symbol() {
            Some(symbol) => format!("{symbol} = {}", setting_text(setting)),
            None => self.text().into(),
        }
    }
}

/// A setting's number alone: `6`, `0.7`, three digits of one that was fitted; `?` of none.
pub fn setting_text(setting: Option<f64>) -> String {
    let Some(setting) = setting else { return "?".into() };
    let text = setting.to_string();
    if text.len() <= 5 || !setting.is_finite() || setting == 0.0 {
        return text;
    }
    let decimals = (2.0 - setting.abs().log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{setting:.decimals$}");
    if decimals == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').into() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A setting of an entry's rule.
    fn config(entry: &StopRuleEntry) -> StopRuleConfig {
        let bounds = Bounds { min: 1, max: 7 };
        match &entry.settings {
            RuleSettings::Grid(grid) => grid.at(if whole(grid) { 4.0 } else { 0.25 }, bounds),
            RuleSettings::Fitted(signal) => fitted(*signal, bounds).into(),
        }
    }

    fn whole(grid: &Grid) -> bool {
        grid.key.values.is_whole()
    }

    fn fitted(signal: AcceptanceSignal, bounds: Bounds) -> CostOptimalConfig {
        CostOptimalConfig {
            signal,
            least_worth: 0.25,
            least_draw_worth: 0.05,
            estimate: StepFunction::new(vec![0.5], vec![0.4, 0.9]).expect("valid"),
            draw_outlook: StepFunction::constant(0.8).expect("valid"),
            outlook: StepFunction::constant(0.8).expect("valid"),
            initial_outlook: 0.6,
            bounds,
        }
    }

    #[test]
    fn an_entry_makes_the_rule_it_names() {
        for entry in stop_rules() {
            let config = config(entry);
            assert_eq!(config.name(), entry.name);
            assert_eq!(entry.name.entry().map(|found| found.name), Some(entry.name));
            assert!([4.0, 0.25].contains(&config.parameter()), "{config:?}");
            let needs = config.needs();
            assert_eq!(config.init().expect("valid").needs(), needs, "{config:?}");
            assert_eq!(needs.acceptance_prob, !entry.heads.is_empty(), "{config:?}");
        }
    }

    #[test]
    fn every_name_has_an_entry_and_no_two_share_a_word_or_a_key() {
        let names: Vec<StopRuleName> = stop_rules().map(|entry| entry.name).collect();
        assert!(names.is_sorted() && names[0] > StopRuleName::None, "{names:?}");
        // The last name of the enum: one without an entry would stand before it or after it.
        assert_eq!(names.len(), StopRuleName::CostOptimalEntropy as usize);
        let distinct =
            |of: fn(&StopRuleEntry) -> &str| stop_rules().map(of).collect::<BTreeSet<_>>().len();
        assert_eq!(distinct(|entry| entry.file_name), names.len());
        assert_eq!(distinct(|entry| entry.symbol), names.len());
        assert_eq!(distinct(|entry| entry.text), names.len());
        let keys: Vec<&str> = stop_rules()
            .filter_map(|entry| match &entry.settings {
                RuleSettings::Grid(grid) => Some(grid),
                RuleSettings::Fitted(_) => None,
            })
            .flat_map(|grid| grid.keys().map(|key| key.name))
            .collect();
        assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len(), "{keys:?}");
    }

    #[test]
    fn defaults_are_values_that_their_key_may_hold() {
        for entry in stop_rules() {
            let RuleSettings::Grid(grid) = &entry.settings else { continue };
            for key in grid.keys() {
                assert!(key.default.iter().all(|value| key.values.problem(*value).is_none()));
                assert!(key.values.is_list() || key.default.len() == 1, "{}", key.name);
            }
        }
    }

    #[test]
    fn senseless_settings_are_refused() {
        let bounds = Bounds { min: 3, max: 2 };
        let wrong = JointConfidenceConfig { confidence_threshold: 0.5, bounds };
        assert!(StopRuleConfig::from(wrong).init().is_err());
        assert!(StopRuleConfig::from(FixedLengthConfig { candidate_length: 0 }).init().is_err());
    }
}
