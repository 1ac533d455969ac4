//! When draft phases end: a rule of the table, or one of the user's.

use std::fmt;
use std::str::FromStr;

use draftsmith_theory::{Bounds, NamedRule, StopRule, StopRuleConfig, TheoryError};

/// A stop rule: a rule of the table by its short name and value, as in `draftsmith generate --rule`, or your
/// own [`StopRule`].
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
/// | `fixed` | it has this many candidates |
/// | `heuristic` | its length, which adapts to the last round, is reached; this is the first length |
/// | `head`, `head-without-lag` | the acceptance head's probability of a rejection exceeds the threshold |
/// | `confidence`, `joint-confidence` | the drafter's largest probability, or their product, falls to it |
/// | `online-acceptance` | vLLM's online estimate that all candidates are accepted falls below it |
/// | `candidate-prob` | the candidate's own probability falls to it |
/// | `entropy` | the drafter's entropy exceeds it |
pub struct Rule(RuleForm);

enum RuleForm {
    Named(NamedRule, Option<usize>),
    Config(StopRuleConfig),
    Custom(Box<dyn StopRule + Send>),
}

impl Rule {
    /// Wraps a stop rule of your own.
    pub fn custom(rule: impl StopRule + 'static) -> Self {
        Self(RuleForm::Custom(Box::new(rule)))
    }

    /// Sets the most candidates of a round, by default 20, and 6 for an adapter. Rules with bounds of their own are
    /// unchanged: fixed lengths, rules from a configuration and custom ones.
    #[must_use]
    pub fn with_max_candidates(self, most: usize) -> Self {
        match self.0 {
            RuleForm::Named(rule, _) => Self(RuleForm::Named(rule, Some(most))),
            other => Self(other),
        }
    }

    /// Returns the rule for a drafter whose user chose none.
    pub(crate) fn by_default(has_head: bool) -> Self {
        StopRuleConfig::by_default(has_head).into()
    }

    /// Returns whether it is a rule of the user's own.
    pub(crate) fn is_custom(&self) -> bool {
        matches!(self.0, RuleForm::Custom(_))
    }

    /// Builds the rule for each of `num` sequences, with at most `most` candidates unless it sets its own limit. A custom
    /// rule is for one. Rules of the table are kept in `place`.
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
