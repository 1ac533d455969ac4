//! When draft phases end: a rule of the table, or one of the user's.

use std::fmt;
use std::str::FromStr;

use draftsmith_theory::{
    Bounds, FixedLengthConfig, NamedRule, RejectionThresholdConfig, StopRule, StopRuleConfig,
    TheoryError,
};

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
/// | `candidate-prob` | the candidate's own probability falls to it |
/// | `entropy` | the drafter's entropy exceeds it |
pub struct Rule(Kind);

enum Kind {
    Named(NamedRule, Option<usize>),
    Config(StopRuleConfig),
    Custom(Box<dyn StopRule + Send>),
}

impl Rule {
    /// A stop rule of your own.
    pub fn custom(rule: impl StopRule + Send + 'static) -> Self {
        Self(Kind::Custom(Box::new(rule)))
    }

    /// The most candidates of a round, by default 20, and 6 for an adapter. Rules with bounds of their own
    /// are unchanged: fixed lengths, rules from a configuration and custom ones.
    #[must_use]
    pub fn with_max_candidates(self, most: usize) -> Self {
        match self.0 {
            Kind::Named(rule, _) => Self(Kind::Named(rule, Some(most))),
            other => Self(other),
        }
    }

    /// The rule of a drafter that nobody chose one for.
    pub(crate) fn by_default(has_head: bool) -> Self {
        Self(Kind::Config(match has_head {
            true => StopRuleConfig::from(RejectionThresholdConfig {
                stop_threshold: 0.7,
                without_lag: false,
                bounds: Bounds::default(),
            }),
            false => FixedLengthConfig { candidate_length: 5 }.into(),
        }))
    }

    /// The rule, with at most `most` candidates unless it says so itself.
    pub(crate) fn init(&mut self, most: usize) -> Result<RuleInUse<'_>, TheoryError> {
        let config = match &mut self.0 {
            Kind::Named(rule, own) => rule.config(Bounds::new(1, own.unwrap_or(most))?),
            Kind::Config(config) => config.clone(),
            Kind::Custom(rule) => return Ok(RuleInUse::Custom(&mut **rule)),
        };
        Ok(RuleInUse::OfTable(config.init()?))
    }
}

/// A rule that is being asked.
pub(crate) enum RuleInUse<'a> {
    OfTable(Box<dyn StopRule>),
    Custom(&'a mut (dyn StopRule + Send)),
}

impl RuleInUse<'_> {
    pub(crate) fn as_mut(&mut self) -> &mut dyn StopRule {
        match self {
            Self::OfTable(rule) => &mut **rule,
            Self::Custom(rule) => &mut **rule,
        }
    }
}

impl FromStr for Rule {
    type Err = TheoryError;

    fn from_str(text: &str) -> Result<Self, TheoryError> {
        Ok(Self(Kind::Named(text.parse()?, None)))
    }
}

impl From<StopRuleConfig> for Rule {
    fn from(config: StopRuleConfig) -> Self {
        Self(Kind::Config(config))
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Named(rule, most) => {
                formatter.debug_tuple("Rule").field(rule).field(most).finish()
            }
            Kind::Config(config) => formatter.debug_tuple("Rule").field(config).finish(),
            Kind::Custom(_) => formatter.write_str("Rule(custom)"),
        }
    }
}
