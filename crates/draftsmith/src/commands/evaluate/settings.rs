//! What is compared: the target alone; a separate draft with fixed lengths and its head's thresholds;
//! each adapter with fixed lengths and confidence thresholds.

use draftsmith_theory::{
    Bounds, ConfidenceThreshold, FixedLength, RejectionThreshold, StopRule, TheoryError,
};

use crate::recipe::EvaluateRecipe;
use crate::results::{DrafterName, StopRuleName};

/// One way of decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Setting {
    /// The target alone.
    Plain,
    /// The separate draft.
    Draft(Rule),
    /// The target's own layers up to one, and the adapter behind it.
    SelfDraft { exit_layer: usize, rule: Rule },
}

/// When a draft phase ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    /// K candidates a round.
    FixedLength(usize),
    /// SpecDec++ with threshold h and so many candidates at most.
    RejectionThreshold(f64, usize),
    /// Kangaroo with threshold η and so many candidates at most.
    ConfidenceThreshold(f64, usize),
}

impl Setting {
    /// All settings of a recipe, plain decoding first: those of a draft, a head and adapters where
    /// they are.
    pub(super) fn all(
        evaluate: &EvaluateRecipe,
        has_draft: bool,
        has_head: bool,
        exit_layers: &[usize],
    ) -> Vec<Self> {
        let mut all = vec![Self::Plain];
        let fixed = |lengths: &[usize]| -> Vec<Rule> {
            lengths.iter().map(|length| Rule::FixedLength(*length)).collect()
        };
        if has_draft {
            all.extend(fixed(&evaluate.candidate_lengths).into_iter().map(Self::Draft));
        }
        if has_head {
            let rule = |h: &f64| Rule::RejectionThreshold(*h, evaluate.max_candidate_length);
            all.extend(evaluate.stop_thresholds.iter().map(rule).map(Self::Draft));
        }
        for &exit_layer in exit_layers {
            let most = evaluate.max_self_draft_length;
            let confidence = |eta: &f64| Rule::ConfidenceThreshold(*eta, most);
            let mut rules = fixed(&evaluate.self_draft_lengths);
            rules.extend(evaluate.confidence_thresholds.iter().map(confidence));
            all.extend(rules.into_iter().map(|rule| Self::SelfDraft { exit_layer, rule }));
        }
        all
    }

    fn rule_of(self) -> Option<Rule> {
        match self {
            Self::Plain => None,
            Self::Draft(rule) | Self::SelfDraft { rule, .. } => Some(rule),
        }
    }

    /// The stop rule, or none for plain decoding.
    ///
    /// # Errors
    /// If the setting is outside the rule's range.
    pub(super) fn rule(self) -> Result<Option<Box<dyn StopRule>>, TheoryError> {
        Ok(match self.rule_of() {
            None => None,
            Some(Rule::FixedLength(length)) => Some(Box::new(FixedLength::new(length)?)),
            Some(Rule::RejectionThreshold(h, most)) => {
                Some(Box::new(RejectionThreshold::new(h, Bounds::new(1, most)?)?))
            }
            Some(Rule::ConfidenceThreshold(eta, most)) => {
                Some(Box::new(ConfidenceThreshold::new(eta, Bounds::new(1, most)?)?))
            }
        })
    }

    /// The drafter's name in results.
    pub(super) fn drafter(self) -> DrafterName {
        match self {
            Self::Plain => DrafterName::None,
            Self::Draft(_) => DrafterName::Draft,
            Self::SelfDraft { exit_layer, .. } => DrafterName::SelfDraft { exit_layer },
        }
    }

    /// The stop rule's name in results.
    pub(super) fn stop_rule(self) -> StopRuleName {
        match self.rule_of() {
            None => StopRuleName::None,
            Some(Rule::FixedLength(_)) => StopRuleName::FixedLength,
            Some(Rule::RejectionThreshold(..)) => StopRuleName::RejectionThreshold,
            Some(Rule::ConfidenceThreshold(..)) => StopRuleName::ConfidenceThreshold,
        }
    }

    /// The rule's parameter in results: K, h or η.
    pub(super) fn parameter(self) -> Option<f64> {
        self.rule_of().map(|rule| match rule {
            Rule::FixedLength(length) => length as f64,
            Rule::RejectionThreshold(h, _) => h,
            Rule::ConfidenceThreshold(eta, _) => eta,
        })
    }

    /// What files and streams of draws call it: `plain`, `fixed-5`, `head-0.7`, `exit-2-fixed-5`,
    /// `exit-2-confidence-0.6`.
    pub(super) fn name(self) -> String {
        let rule = match self.rule_of() {
            None => return "plain".to_owned(),
            Some(Rule::FixedLength(length)) => format!("fixed-{length}"),
            Some(Rule::RejectionThreshold(h, _)) => format!("head-{h}"),
            Some(Rule::ConfidenceThreshold(eta, _)) => format!("confidence-{eta}"),
        };
        match self {
            Self::SelfDraft { exit_layer, .. } => format!("exit-{exit_layer}-{rule}"),
            Self::Plain | Self::Draft(_) => rule,
        }
    }
}
