//! Stop rules, which end draft phases: built-in or custom.

use std::fmt;
use std::str::FromStr;

use draftsmith_theory::{Bounds, NamedRule, StopRule, StopRuleConfig, TheoryError};

/// A stop rule: a built-in rule given by its short name and value, as in `draftsmith generate
/// --rule`, or your own [`StopRule`].
///
/// ```
/// use draftsmith::Rule;
/// let fixed: Rule = "fixed=4".parse()?;
/// let entropy = "entropy=0.3,check_interval=2".parse::<Rule>()?.with_max_candidates(8);
/// # Ok::<(), draftsmith::theory::TheoryError>(())
/// ```
///
/// | name | a round ends when |
/// |---|---|
/// | `fixed` | the number of candidates reaches the value |
/// | `heuristic` | it reaches a length that starts at the value and adapts to each round |
/// | `head`, `head-without-lag` | the acceptance head's rejection probability exceeds the value |
/// | `confidence` | the drafter's largest probability falls to the value |
/// | `confidence-head` | a block drafter's head predicts less than the value, before the draw |
/// | `joint-confidence` | the product of these probabilities falls to the value |
/// | `online-acceptance` | vLLM's online estimate that all candidates are accepted falls below the value |
/// | `candidate-prob` | the drafter's probability of the candidate falls to the value |
/// | `entropy` | the entropy of the drafter's distribution exceeds the value |
pub struct Rule(RuleForm);

enum RuleForm {
    Named(NamedRule, Option<usize>),
    Config(StopRuleConfig),
    Custom(Box<dyn StopRule + Send>),
}

impl Rule {
    /// Wraps a custom stop rule.
    pub fn custom(rule: impl StopRule + 'static) -> Self {
        Self(RuleForm::Custom(Box::new(rule)))
    }

    /// Sets the maximum number of candidates in a round. The default is 20, or 6 for an adapter.
    /// Rules with their own bounds ignore it: fixed lengths, rules from a configuration, and custom
    /// rules.
    #[must_use]
    pub fn with_max_candidates(self, most: usize) -> Self {
        match self.0 {
            RuleForm::Named(rule, _) => Self(RuleForm::Named(rule, Some(most))),
            other => Self(other),
        }
    }

    /// Returns the stop rule for a drafter whose user chose none.
    pub(crate) fn by_default(has_head: bool) -> Self {
        StopRuleConfig::by_default(has_head).into()
    }

    /// Returns whether this is a custom stop rule.
    pub(crate) fn is_custom(&self) -> bool {
        matches!(self.0, RuleForm::Custom(_))
    }

    /// Builds the stop rule for each of `num` sequences, with at most `most` candidates unless the
    /// rule has its own limit. A custom rule serves only one sequence. The built rules are stored
    /// in `place`.
    pub(crate) fn for_each<'r>(
        &'r mut self,
        most: usize,
        num: usize,
        place: &'r mut Vec<Box<dyn StopRule>>,
    ) -> Result<Vec<&'r mut dyn StopRule>, TheoryError> {
        let config = match &mut self.0 {
            RuleForm::Named(rule, own) => rule.config(Bounds::new(1, own.unwrap_or(most))?),
            RuleForm::Config(config) => config.clone(),
            RuleForm::Custom(rule) => return Ok(vec![&mut **rule]),
        };
        *place = (0..num).map(|_| config.init()).collect::<Result<_, _>>()?;
        Ok(place.iter_mut().map(|rule| &mut **rule as _).collect())
    }
}

impl FromStr for Rule {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self, TheoryError> {
        Ok(Self(RuleForm::Named(text.parse()?, None)))
    }
}

impl From<StopRuleConfig> for Rule {
    fn from(config: StopRuleConfig) -> Self {
        Self(RuleForm::Config(config))
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Rule").finish_non_exhaustive()
    }
}
