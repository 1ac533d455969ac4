//! The table of stop rules: each rule's names, its settings in recipes, and those that a sweep tries.
//!
//! Every rule's file holds its entries, and the parent module lists the rules. Recipes, results,
//! sweeps and reports read the table and never match on a rule.

use super::{
    AcceptanceSignal, Bounds, HeadTiming, StopRule, StopRuleConfig, StopRuleName, stop_rules,
};
use crate::TheoryError;

/// A row of the table. A rule has one for each of its forms that results distinguish.
#[derive(Debug)]
pub struct StopRuleEntry {
    /// The name in results.
    pub name: StopRuleName,
    /// The short name: in recipes, flags, file names and the names of random streams: `fixed`.
    pub file_name: &'static str,
    /// The parameter's symbol, in ASCII: `K`.
    pub symbol: &'static str,
    /// The rule in words: `fixed length`.
    pub text: &'static str,
    /// The rules that it is grouped with.
    pub family: RuleFamily,
    /// The head timings with which this form differs from the others; empty if the rule reads no
    /// head.
    pub heads: &'static [HeadTiming],
    /// Where its settings come from.
    pub settings: RuleSettings,
}

impl StopRuleEntry {
    /// Returns the settings that recipes list; None for a rule that is fitted.
    pub fn grid(&self) -> Option<&Grid> {
        match &self.settings {
            RuleSettings::Grid(grid) => Some(grid),
            RuleSettings::Fitted(_) => None,
        }
    }
}

/// A group of stop rules that read the same thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleFamily {
    /// The number of candidates.
    Length,
    /// The acceptance head's predictions.
    Head,
    /// The draft's probabilities.
    Confidence,
    /// The draft's entropy.
    Entropy,
    /// What another candidate costs, and what it is worth.
    Cost,
}

/// Where the settings of a rule come from.
#[derive(Debug)]
pub enum RuleSettings {
    /// Recipes and flags give values of its parameter, and sweeps try many.
    Grid(Grid),
    /// They are fitted to recordings by this signal, see [`cost_optimal`](crate::cost_optimal).
    Fitted(AcceptanceSignal),
}

/// The settings of a rule that recipes list and a flag gives, and those that a sweep tries.
#[derive(Debug)]
pub struct Grid {
    /// The parameter's meaning in a few words, as in the table of rules in `recipes/README.md`.
    pub doc: &'static str,
    /// The values that the parameter may have.
    pub values: SettingKind,
    /// The values for a separate draft if a recipe names none.
    pub default: &'static [f64],
    /// The values for a self-draft if a recipe names none.
    pub self_draft_default: &'static [f64],
    /// The rule's other numbers, which are the same for every value of the parameter.
    pub options: &'static [RuleOption],
    /// The values that a sweep tries.
    pub sweep: Sweep,
    /// Makes the rule from the parameter, a number for each of `options`, and the bounds.
    pub config: fn(f64, &[f64], Bounds) -> StopRuleConfig,
}

impl Grid {
    /// Finds the grid of the rule with a short name.
    ///
    /// # Errors
    /// What is wrong with the name, to be read after it.
    pub fn of(name: &str) -> Result<&'static Self, String> {
        let listed = || stop_rules().filter_map(|entry| Some((entry.file_name, entry.grid()?)));
        let found = listed().find(|(listed, _)| *listed == name);
        found.map(|(_, grid)| grid).ok_or_else(|| {
            format!("is no stop rule, expected one of {}", quoted(listed().map(|(name, _)| name)))
        })
    }

    /// Returns a number for each of `options`: the given one, else the default.
    ///
    /// # Errors
    /// The first given option that the rule lacks or that has another kind of number, and what is wrong with
    /// it, to be read after its name.
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

    /// Builds the rule at a value of its parameter, with the options' defaults.
    pub fn at(&self, value: f64, bounds: Bounds) -> StopRuleConfig {
        let options: Vec<f64> = self.options.iter().map(|option| option.default).collect();
        (self.config)(value, &options, bounds)
    }
}

fn quoted(names: impl Iterator<Item = &'static str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// A number of a rule beside its parameter.
#[derive(Debug)]
pub struct RuleOption {
    /// Its key in a recipe's table of the rule.
    pub name: &'static str,
    /// Its meaning in a few words, as in `recipes/README.md`.
    pub doc: &'static str,
    /// The values that it may have.
    pub values: SettingKind,
    /// The value if it is not given.
    pub default: f64,
}

/// The numbers that a setting may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    /// A candidate length.
    Length,
    /// A probability.
    Probability,
    /// A number that is at least 0.
    NonNegative,
    /// A positive number.
    Positive,
    /// A count.
    Count,
}

impl SettingKind {
    /// Describes what is wrong with a number, to be read after its name; None if it is allowed.
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
    /// These candidate lengths, up to the recorded length.
    Lengths(&'static [usize]),
    /// Evenly spaced probabilities, each with several maximum lengths.
    Probabilities,
}

/// The settings of a rule.
pub(super) trait RuleConfig {
    /// Returns the index of these settings' entry among the rule's entries.
    fn form(&self) -> usize {
        0
    }

    /// Checks all settings except the bounds.
    fn check(&self) -> Result<(), TheoryError> {
        Ok(())
    }

    /// Builds the rule; the settings need not be valid.
    fn rule(&self) -> Box<dyn StopRule>;

    /// Returns the number that distinguishes settings of the rule.
    fn parameter(&self) -> f64;
}
