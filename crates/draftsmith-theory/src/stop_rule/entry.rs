//! The table of stop rules: each rule's names, its settings in recipes, and the settings that a
//! sweep tries.
//!
//! Every rule's file holds its entries, and the parent module lists the rules. Recipes, results,
//! sweeps and reports read the table and never match on a rule.

use super::{
    AcceptanceSignal, Bounds, HeadTiming, StopRule, StopRuleConfig, StopRuleName, stop_rules,
};
use crate::Result;

/// A row of the table of stop rules. A rule has one row for each form that results distinguish.
#[derive(Debug)]
pub struct StopRuleEntry {
    /// The rule's name in results.
    pub name: StopRuleName,
    /// The short name in recipes, flags, file names and names of random streams, such as `fixed`.
    pub file_name: &'static str,
    /// The rule in words, such as `fixed length`.
    pub text: &'static str,
    /// The group of rules that the rule belongs to.
    pub family: RuleFamily,
    /// The head timings with which this form differs from the rule's other forms. Empty if the rule
    /// reads no head.
    pub heads: &'static [HeadTiming],
    /// The source of the rule's settings.
    pub settings: RuleSettings,
}

impl StopRuleEntry {
    /// Returns the settings that recipes list; None for a rule that is fitted to recordings.
    pub fn grid(&self) -> Option<&Grid> {
        match &self.settings {
            RuleSettings::Grid(grid) => Some(grid),
            RuleSettings::Fitted(_) => None,
        }
    }
}

/// A group of stop rules that read the same signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleFamily {
    /// Rules that read only the number of candidates.
    Length,
    /// Rules that read the acceptance head's predictions.
    Head,
    /// Rules that read the draft's probabilities.
    Confidence,
    /// Rules that read the draft's entropy.
    Entropy,
    /// Rules that weigh the cost of another candidate against its worth.
    Cost,
}

/// The source of a rule's settings.
#[derive(Debug)]
pub enum RuleSettings {
    /// Values of the rule's parameter, given by recipes and flags or tried by sweeps.
    Grid(Grid),
    /// Settings that are fitted to recordings for this signal (see
    /// [`cost_optimal`](crate::cost_optimal)).
    Fitted(AcceptanceSignal),
}

/// The settings of a rule that recipes and flags may give, and the settings that a sweep tries.
#[derive(Debug)]
pub struct Grid {
    /// The parameter's meaning in a few words, as in the table of rules in `recipes/KEYS.md`.
    pub doc: &'static str,
    /// The values that the parameter may have.
    pub values: SettingKind,
    /// The values for a separate draft model if a recipe names none.
    pub default: &'static [f64],
    /// The values for a self-draft if a recipe names none.
    pub self_draft_default: &'static [f64],
    /// The rule's other numbers, which are the same for every value of the parameter.
    pub options: &'static [RuleOption],
    /// The values that a sweep tries.
    pub sweep: Sweep,
    /// The function that makes the rule from the parameter, a number for each of `options`, and the
    /// bounds.
    pub config: fn(f64, &[f64], Bounds) -> StopRuleConfig,
}

impl Grid {
    /// Creates the grid of a rule without options, whose parameter is a probability and has no
    /// values by default.
    pub(super) const fn of_probabilities(
        doc: &'static str,
        config: fn(f64, &[f64], Bounds) -> StopRuleConfig,
    ) -> Self {
        Self {
            doc,
            values: SettingKind::Probability,
            default: &[],
            self_draft_default: &[],
            options: &[],
            sweep: Sweep::Probabilities,
            config,
        }
    }

    /// Finds the grid of the rule with the short name `name`.
    ///
    /// # Errors
    /// If no rule has this name. The error message continues a sentence that begins with the name.
    pub fn of(name: &str) -> Result<&'static Self, String> {
        let listed = || stop_rules().filter_map(|entry| Some((entry.file_name, entry.grid()?)));
        let found = listed().find(|(listed, _)| *listed == name);
        found.map(|(_, grid)| grid).ok_or_else(|| {
            if stop_rules().any(|entry| entry.file_name == name) {
                return "is fitted by `tune` and takes no value; hint: `generate --rule tuned=DIR` takes the rule that \
                        `tune` chose for the head or drafter in DIR"
                    .to_owned();
            }
            format!("is no stop rule, expected one of {}", quoted(listed().map(|(name, _)| name)))
        })
    }

    /// Returns a number for each of `options`: the given number, or else the default.
    ///
    /// # Errors
    /// If the rule lacks a given option or does not allow its number. The error holds the first
    /// such option, and a message that continues a sentence that begins with the option's name.
    pub fn with_options<'n>(
        &self,
        given: impl IntoIterator<Item = (&'n str, f64)>,
    ) -> Result<Vec<f64>, (&'n str, String)> {
        let mut numbers: Vec<f64> = self.options.iter().map(|option| option.default).collect();
        for (name, number) in given {
            let at =
                self.options.iter().position(|option| option.name == name).ok_or_else(|| {
                    let known = quoted(self.options.iter().map(|option| option.name));
                    (name, format!("is not one of the rule's options: [{known}]"))
                })?;
            if let Some(problem) = self.options[at].values.problem(number) {
                return Err((name, problem.to_owned()));
            }
            numbers[at] = number;
        }
        Ok(numbers)
    }

    /// Builds the rule from a value of its parameter and the defaults of its options.
    pub fn at(&self, value: f64, bounds: Bounds) -> StopRuleConfig {
        let options: Vec<f64> = self.options.iter().map(|option| option.default).collect();
        (self.config)(value, &options, bounds)
    }
}

fn quoted(names: impl Iterator<Item = &'static str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// A number that a rule has in addition to its parameter.
#[derive(Debug)]
pub struct RuleOption {
    /// The option's key in a recipe's table of the rule.
    pub name: &'static str,
    /// The option's meaning in a few words, as in `recipes/KEYS.md`.
    pub doc: &'static str,
    /// The values that the option may have.
    pub values: SettingKind,
    /// The value if none is given.
    pub default: f64,
}

/// The range of numbers that a setting may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// A candidate length, a whole number from 1 to 256.
    Length,
    /// A probability from 0 to 1.
    Probability,
    /// A number that is at least 0.
    NonNegative,
    /// A positive number.
    Positive,
    /// A count, a whole number of at least 1.
    Count,
}

impl SettingKind {
    /// Returns the reason why a number is not allowed, worded to follow the setting's name. None if
    /// it is allowed.
    pub fn problem(self, value: f64) -> Option<&'static str> {
        let is_whole = value.fract() == 0.0;
        let (is_allowed, problem) = match self {
            Self::Length => (
                is_whole && (1.0..=256.0).contains(&value),
                "has a length that is not a whole number from 1 to 256",
            ),
            Self::Probability => ((0.0..=1.0).contains(&value), "has a threshold outside 0 to 1"),
            Self::NonNegative => (value >= 0.0 && value.is_finite(), "has a threshold below 0"),
            Self::Positive => (value > 0.0 && value.is_finite(), "is not a positive number"),
            Self::Count => (is_whole && value >= 1.0, "is not a whole number, 1 or more"),
        };
        (!is_allowed).then_some(problem)
    }
}

/// The values of a parameter that a sweep tries.
#[derive(Debug, Clone, Copy)]
pub enum Sweep {
    /// The listed candidate lengths, up to the recorded length.
    Lengths(&'static [usize]),
    /// Evenly spaced probabilities, each with several maximum candidate lengths.
    Probabilities,
}

/// The settings of a stop rule.
pub(super) trait RuleConfig {
    /// Returns the index of the table entry for these settings, among the entries of the rule.
    fn form(&self) -> usize {
        0
    }

    /// Checks all settings except the bounds and a main number that is a probability.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Builds the rule, even if the settings are invalid.
    fn rule(&self) -> Box<dyn StopRule>;
}
