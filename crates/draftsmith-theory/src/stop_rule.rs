//! The stop rules, which decide when a draft phase ends, and the signals that they read.
//!
//! The decoding loop draws a candidate, includes it in the round, and then asks the rule. So a rule
//! can end a round only *after* a drawn candidate. Withholding a candidate because of its value
//! would bias the output: with p = q = (½, ½) and token 1 withheld, token 0 is emitted with
//! probability ¾. The loop also applies the rule's bounds.
//!
//! | rule | reads |
//! |---|---|
//! | [`FixedLengthConfig`], [`HeuristicConfig`] | nothing; the heuristic reads the outcome of the last round |
//! | [`RejectionThresholdConfig`] (SpecDec++), with the paper's lag of one candidate or without | an acceptance head |
//! | [`ConfidenceHeadConfig`] (llama.cpp) | an acceptance head, before the draw |
//! | [`ConfidenceThresholdConfig`] (Kangaroo), [`JointConfidenceConfig`], [`OnlineAcceptanceConfig`] (vLLM) | the draft's largest probability |
//! | [`CandidateProbThresholdConfig`] (transformers) | the candidate's own probability |
//! | [`EntropyThresholdConfig`] (SVIP) | the draft's entropy |
//! | [`CostOptimalConfig`] | a head, the confidence or the entropy |
//! | [`Oracle`] (SpecDec++, Lemma 2.1) | the response |
//!
//! Every rule works with a separate draft and with a self-draft. Rules that read an acceptance head
//! need a drafter with a head, and the oracle decodes greedily only. Look-ups and cascades have no
//! probabilities to read, so they allow only fixed lengths and the heuristic. A chain inside a
//! cascade allows every rule that its drafter supports.
//!
//! Each rule with settings has a file in this module and a line in the table below. The file holds
//! the settings, the rule, and its table entries with names and recipe keys.

mod candidate_prob_threshold;
mod confidence_head;
mod confidence_threshold;
mod cost_optimal;
mod entropy_threshold;
mod entry;
mod fixed_length;
mod heuristic;
mod joint_confidence;
mod named_rule;
pub(crate) mod online_acceptance;
mod oracle;
mod rejection_threshold;
mod rule;
mod signals;

use serde::{Deserialize, Serialize};

use self::entry::RuleConfig;
use crate::{Result, TheoryError};

pub use candidate_prob_threshold::CandidateProbThresholdConfig;
pub use confidence_head::ConfidenceHeadConfig;
pub use confidence_threshold::ConfidenceThresholdConfig;
pub use cost_optimal::{CostOptimalConfig, StepFunction};
pub use entropy_threshold::EntropyThresholdConfig;
pub use entry::{Grid, RuleFamily, RuleOption, RuleSettings, SettingKind, StopRuleEntry, Sweep};
pub use fixed_length::FixedLengthConfig;
pub use heuristic::HeuristicConfig;
pub use joint_confidence::JointConfidenceConfig;
pub use named_rule::NamedRule;
pub use online_acceptance::{AcceptanceModel, OnlineAcceptanceConfig, confidence_logit};
pub use oracle::Oracle;
pub use rejection_threshold::RejectionThresholdConfig;
pub use rule::{Bounds, RoundEnd, StopRule};
pub use signals::{
    AcceptanceSignal, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, SoftmaxSummary,
};

/// Generates the table of stop rules from lines `Rule(Settings.main_number): Name, …;`, in the order
/// in which reports show them.
macro_rules! stop_rules {
    ($($rule:ident($config:ident.$main:ident): $($name:ident),+;)+) => {
        /// A stop rule with its settings. Files tag it with the key `stop_rule`.
        /// [`Oracle`](crate::Oracle) is not included, because it belongs to one response.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "stop_rule", rename_all = "snake_case")]
        pub enum StopRuleConfig {
            $(
                #[doc = concat!("[`", stringify!($config), "`](crate::", stringify!($config), ").")]
                $rule($config),
            )+
        }

        /// The name of a stop rule in results. Variants are in the order of reports.
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize
        )]
        #[serde(rename_all = "snake_case")]
        pub enum StopRuleName {
            /// No drafting, so the target decodes by itself.
            #[default]
            None,
            $($(
                #[doc = concat!("A form of [`", stringify!($config), "`](crate::", stringify!($config), ").")]
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

            /// Returns the key and the value of the rule's main number. Lengths are whole numbers.
            fn main_number(&self) -> (&'static str, f64) {
                match self {
                    $(Self::$rule(config) => (stringify!($main), config.$main as _),)+
                }
            }

            /// Returns the rule's name in results.
            pub fn name(&self) -> StopRuleName {
                let entries = match self {
                    $(Self::$rule(_) => $config::ENTRIES,)+
                };
                entries[self.settings().form()].name
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
    FixedLength(FixedLengthConfig.candidate_length): FixedLength;
    Heuristic(HeuristicConfig.initial_length): Heuristic;
    RejectionThreshold(RejectionThresholdConfig.stop_threshold): RejectionThreshold, RejectionThresholdWithoutLag;
    ConfidenceThreshold(ConfidenceThresholdConfig.confidence_threshold): ConfidenceThreshold;
    ConfidenceHead(ConfidenceHeadConfig.acceptance_threshold): ConfidenceHead;
    CandidateProbThreshold(CandidateProbThresholdConfig.confidence_threshold): CandidateProbThreshold;
    JointConfidence(JointConfidenceConfig.confidence_threshold): JointConfidence;
    OnlineAcceptance(OnlineAcceptanceConfig.survival_threshold): OnlineAcceptance;
    EntropyThreshold(EntropyThresholdConfig.entropy_threshold): EntropyThreshold;
    CostOptimal(CostOptimalConfig.least_worth): CostHead, CostConfidence, CostEntropy;
}

/// Yields every entry of the table of stop rules, in the order in which reports show them.
pub fn stop_rules() -> impl Iterator<Item = &'static StopRuleEntry> {
    TABLE.iter().copied().flatten()
}

impl StopRuleConfig {
    /// Returns the default rule: with an acceptance head, the threshold h = 0.7 on its predicted
    /// rejection probability, otherwise five candidates per round.
    pub fn by_default(has_head: bool) -> Self {
        match has_head {
            true => Self::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: 0.7,
                without_lag: false,
                bounds: Bounds::default(),
            }),
            false => Self::FixedLength(FixedLengthConfig { candidate_length: 5 }),
        }
    }

    /// Checks the settings and builds the rule.
    ///
    /// # Errors
    /// If a setting is outside its range.
    pub fn init(&self) -> Result<Box<dyn StopRule>> {
        let rule = self.settings().rule();
        Bounds::new(rule.bounds().min, rule.bounds().max)?;
        let (key, value) = self.main_number();
        let grid = self.name().entry().and_then(StopRuleEntry::grid);
        if grid.is_some_and(|grid| grid.values == SettingKind::Probability) {
            TheoryError::check((0.0..=1.0).contains(&value), key, "lie between 0 and 1", value)?;
        }
        self.settings().check()?;
        Ok(rule)
    }

    /// Returns the signals that the rule reads.
    pub fn needs(&self) -> SignalNeeds {
        self.settings().rule().needs()
    }

    /// Sets the initial coefficients if the rule is [`OnlineAcceptanceConfig`]. Other rules are
    /// returned unchanged.
    #[must_use]
    pub fn starting_from(self, start: &AcceptanceModel) -> Self {
        match self {
            Self::OnlineAcceptance(config) => {
                OnlineAcceptanceConfig { start: start.clone(), ..config }.into()
            }
            other => other,
        }
    }

    /// Returns the rule's main number: the candidate length K, the initial length, a threshold, or
    /// the minimum number of tokens that a draft forward must be worth.
    pub fn parameter(&self) -> f64 {
        self.main_number().1
    }
}

impl StopRuleName {
    /// Returns the rule's entry in the table; None for [`Self::None`].
    pub fn entry(self) -> Option<&'static StopRuleEntry> {
        stop_rules().find(|entry| entry.name == self)
    }

    /// Returns the rule's short name in recipes, flags, file names and names of random streams. It
    /// is `plain` for [`Self::None`].
    pub fn file_name(self) -> &'static str {
        self.entry().map_or("plain", |entry| entry.file_name)
    }

    /// Returns the rule's name in tables: `K` for a fixed length, as in the papers, or else its name in
    /// recipes. None for [`Self::None`].
    pub fn symbol(self) -> Option<&'static str> {
        match self {
            Self::FixedLength => Some("K"),
            _ => self.entry().map(|entry| entry.file_name),
        }
    }

    /// Returns the rule in words, for pages with room; `target alone` for [`Self::None`].
    pub fn text(self) -> &'static str {
        self.entry().map_or("target alone", |entry| entry.text)
    }

    /// Formats the rule with its setting, such as `K = 6`, `head 0.7` or `target alone`.
    pub fn label(self, setting: Option<f64>) -> String {
        let setting = setting_text(setting);
        match self.symbol() {
            Some(symbol) if self == Self::FixedLength => format!("{symbol} = {setting}"),
            Some(symbol) => format!("{symbol} {setting}"),
            None => self.text().into(),
        }
    }
}

/// Formats a setting such as `0.7`, with longer numbers rounded to three digits; `?` for None.
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

    /// Builds an entry's rule at some setting.
    fn config(entry: &StopRuleEntry) -> StopRuleConfig {
        let bounds = Bounds { min: 1, max: 7 };
        match &entry.settings {
            RuleSettings::Grid(grid) => {
                let is_allowed = grid.values.problem(0.25).is_none();
                grid.at(if is_allowed { 0.25 } else { 4.0 }, bounds)
            }
            RuleSettings::Fitted(signal) => fitted(*signal, bounds).into(),
        }
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
    fn every_name_has_an_entry_and_no_two_share_a_name() {
        let names: Vec<StopRuleName> = stop_rules().map(|entry| entry.name).collect();
        assert!(names.is_sorted() && names[0] > StopRuleName::None, "{names:?}");
        // `CostEntropy` is the enum's last name, so no name lacks an entry.
        assert_eq!(names.len(), StopRuleName::CostEntropy as usize);
        let distinct =
            |of: fn(&StopRuleEntry) -> &str| stop_rules().map(of).collect::<BTreeSet<_>>().len();
        assert_eq!(distinct(|entry| entry.file_name), names.len());
        assert_eq!(distinct(|entry| entry.text), names.len());
    }

    #[test]
    fn defaults_are_valid_and_options_have_names_of_their_own() {
        for grid in stop_rules().filter_map(StopRuleEntry::grid) {
            let defaults = grid.default.iter().chain(grid.self_draft_default);
            assert!(defaults.copied().all(|value| grid.values.problem(value).is_none()));
            for (at, option) in grid.options.iter().enumerate() {
                assert_eq!(option.values.problem(option.default), None, "{}", option.name);
                assert!(grid.options[..at].iter().all(|other| other.name != option.name));
                // A recipe's table of the rule has its values under this key.
                assert_ne!(option.name, "values");
            }
        }
    }

    #[test]
    fn invalid_settings_are_errors() {
        let bounds = Bounds { min: 3, max: 2 };
        let wrong = JointConfidenceConfig { confidence_threshold: 0.5, bounds };
        assert!(StopRuleConfig::from(wrong).init().is_err());
        assert!(StopRuleConfig::from(FixedLengthConfig { candidate_length: 0 }).init().is_err());
    }
}
