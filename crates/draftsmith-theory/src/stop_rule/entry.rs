//! What the table of stop rules says of each: its names, its recipe keys, what a sweep tries.
//!
//! Every rule's file holds its entries, and the parent lists the rules. Recipes, results, sweeps
//! and reports read the table and match on no rule.

use super::{AcceptanceSignal, Bounds, HeadTiming, SignalNeeds, StopRule};
use super::{StopRuleConfig, StopRuleName};
use crate::TheoryError;

/// A stop rule as the table has it; a rule whose forms results tell apart has an entry for each.
#[derive(Debug)]
pub struct StopRuleEntry {
    /// The name in results.
    pub name: StopRuleName,
    /// The name in files' names and of streams of draws: `fixed`.
    pub file_name: &'static str,
    /// What the parameter is called, in ASCII: `K`.
    pub symbol: &'static str,
    /// The rule in words: `fixed length`.
    pub text: &'static str,
    /// The rules it is shown among.
    pub family: RuleFamily,
    /// The timings of acceptance heads with which it is a rule of its own; empty where it reads no
    /// head.
    pub heads: &'static [HeadTiming],
    /// Where its settings come from.
    pub settings: RuleSettings,
}

/// Stop rules that look at the same thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleFamily {
    /// How many candidates there are.
    Length,
    /// What the acceptance head predicts.
    Head,
    /// The draft's probabilities.
    Confidence,
    /// The draft's entropy.
    Entropy,
    /// What another candidate costs and is worth.
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
    /// The numbers that the rule takes besides, the same at every value of the parameter.
    pub options: &'static [RecipeKey],
    /// What a sweep tries.
    pub sweep: Sweep,
    /// The rule: the parameter, a number for each of `options`, and the bounds.
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
    /// What it lists or says, in a few words: the table of keys in `recipes/README.md` has them.
    pub doc: &'static str,
    /// What it may hold.
    pub values: KeyValues,
    /// What it holds where a recipe leaves it out.
    pub default: &'static [f64],
}

/// What a recipe key may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyValues {
    /// A list of candidate lengths.
    Lengths,
    /// A list of probabilities.
    Probabilities,
    /// A list of numbers from 0 on.
    NonNegative,
    /// One positive number.
    Positive,
    /// One count.
    Count,
}

impl KeyValues {
    /// Whether the key holds a list; else it holds one number.
    pub fn is_list(self) -> bool {
        matches!(self, Self::Lengths | Self::Probabilities | Self::NonNegative)
    }

    /// Whether values are whole numbers.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Lengths | Self::Count)
    }

    /// What is wrong with a value; None of one that is allowed.
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
    /// These candidate lengths, as far as rounds were recorded.
    Lengths(&'static [usize]),
    /// Probabilities in even steps, each within bounds of several greatest lengths.
    Probabilities,
}

/// What the settings of a rule tell of it.
pub(super) trait RuleConfig {
    /// The entry they belong to.
    fn name(&self) -> StopRuleName;

    /// The rule, or which setting is outside its range.
    fn init(&self) -> Result<Box<dyn StopRule>, TheoryError>;

    /// The number that tells settings of the rule apart.
    fn parameter(&self) -> f64;

    /// The signals the rule reads.
    fn needs(&self) -> SignalNeeds {
        SignalNeeds::default()
    }
}
