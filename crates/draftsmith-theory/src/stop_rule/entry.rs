//! The table of stop rules: each rule's names, its recipe keys and the settings that a sweep tries.
//!
//! Every rule's file holds its entries, and the parent module lists the rules. Recipes, results,
//! sweeps and reports read the table and never match on a rule.

use super::{AcceptanceSignal, Bounds, HeadTiming, StopRule};
use super::{StopRuleConfig, StopRuleName};
use crate::TheoryError;

/// A row of the table. A rule has one for each of its forms that results distinguish.
#[derive(Debug)]
pub struct StopRuleEntry {
    /// The name in results.
    pub name: StopRuleName,
    /// The name in file names and in the names of random streams: `fixed`.
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
    /// Recipes list values of its parameter, and sweeps try many.
    Grid(Grid),
    /// They are fitted to recordings by this signal, see [`cost_optimal`](crate::cost_optimal).
    Fitted(AcceptanceSignal),
}

/// A parameter's recipe keys, and the values that a sweep tries.
#[derive(Debug)]
pub struct Grid {
    /// Lists the values for a separate draft, and for self-drafts if they have no key of their own.
    pub key: RecipeKey,
    /// Lists the values for self-drafts.
    pub self_draft_key: Option<RecipeKey>,
    /// The rule's other numbers, which are the same for every value of the parameter.
    pub options: &'static [RecipeKey],
    /// The values that a sweep tries.
    pub sweep: Sweep,
    /// Makes the rule from the parameter, a number for each of `options`, and the bounds.
    pub config: fn(f64, &[f64], Bounds) -> StopRuleConfig,
}

impl Grid {
    /// Every key, those of `options` last.
    pub fn keys(&self) -> impl Iterator<Item = &RecipeKey> {
        std::iter::once(&self.key).chain(&self.self_draft_key).chain(self.options)
    }

    /// The rule at a value of its parameter, with the options' defaults.
    pub fn at(&self, value: f64, bounds: Bounds) -> StopRuleConfig {
        let options: Vec<f64> = self.options.iter().map(|option| option.default[0]).collect();
        (self.config)(value, &options, bounds)
    }
}

/// A key of a recipe's section `[evaluate]`.
#[derive(Debug)]
pub struct RecipeKey {
    /// The key.
    pub name: &'static str,
    /// Its meaning in a few words, as in the table of keys in `recipes/README.md`.
    pub doc: &'static str,
    /// The values that it may hold.
    pub values: KeyValues,
    /// The value if a recipe omits the key.
    pub default: &'static [f64],
}

/// The values that a recipe key may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyValues {
    /// A list of candidate lengths.
    Lengths,
    /// A list of probabilities.
    Probabilities,
    /// A list of numbers, each at least 0.
    NonNegative,
    /// One positive number.
    Positive,
    /// One count.
    Count,
}

impl KeyValues {
    /// Whether the key holds a list; otherwise it holds one number.
    pub fn is_list(self) -> bool {
        matches!(self, Self::Lengths | Self::Probabilities | Self::NonNegative)
    }

    /// Whether values are whole numbers.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Lengths | Self::Count)
    }

    /// What is wrong with a value; None if it is allowed.
    pub fn problem(self, value: f64) -> Option<&'static str> {
        let (is_allowed, problem) = match self {
            Self::Lengths => ((1.0..=256.0).contains(&value), "has a length outside 1 to 256"),
            Self::Probabilities => ((0.0..=1.0).contains(&value), "has a threshold outside 0 to 1"),
            Self::NonNegative => (value >= 0.0 && value.is_finite(), "has a threshold below 0"),
            Self::Positive => (value > 0.0 && value.is_finite(), "is not a positive number"),
            Self::Count => (value >= 1.0, "is 0, expected 1 or more"),
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
    /// The index of their entry among the rule's entries.
    fn form(&self) -> usize {
        0
    }

    /// Checks all settings except the bounds.
    fn check(&self) -> Result<(), TheoryError> {
        Ok(())
    }

    /// The rule; the settings need not be valid.
    fn rule(&self) -> Box<dyn StopRule>;

    /// The number that distinguishes settings of the rule.
    fn parameter(&self) -> f64;
}
