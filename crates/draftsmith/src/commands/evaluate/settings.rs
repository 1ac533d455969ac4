//! What is compared: the target alone; a separate draft and each adapter under every rule that the
//! recipe names and that reads what the drafter gives.

use draftsmith_theory::{Bounds, StopRuleConfig};

use crate::exports::Exports;
use crate::exports::tuned::TunedRule;
use crate::recipe::EvaluateRecipe;
use crate::results::{DrafterName, StopRuleName};

/// One way of decoding.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setting {
    pub(crate) drafter: DrafterName,
    /// None for the target alone.
    pub(crate) rule: Option<StopRuleConfig>,
}

impl Setting {
    /// The target alone.
    pub(crate) const PLAIN: Self = Self { drafter: DrafterName::None, rule: None };

    /// All settings of a recipe under one way of decoding, plain decoding first: those of a draft,
    /// a head and adapters where they are, and of each the tuned rule with the fixed length that it
    /// promises to beat.
    pub(crate) fn all(
        evaluate: &EvaluateRecipe,
        has_draft: bool,
        exports: &Exports,
        tuned: &[TunedRule],
    ) -> Vec<Self> {
        let mut all = vec![Self::PLAIN];
        let mut add = |drafter, mut rules: Vec<StopRuleConfig>| {
            for tuned in tuned.iter().filter(|tuned| tuned.drafter == drafter) {
                let candidate_length = tuned.best_fixed_length;
                for rule in [StopRuleConfig::FixedLength { candidate_length }, tuned.config.clone()]
                {
                    if !rules.contains(&rule) {
                        rules.push(rule);
                    }
                }
            }
            all.extend(rules.into_iter().map(|rule| Self { drafter, rule: Some(rule) }));
        };
        if has_draft {
            let bounds = Bounds { min: 1, max: evaluate.max_candidate_length };
            let mut rules = fixed(&evaluate.candidate_lengths);
            rules.extend(heuristic(evaluate, bounds));
            if exports.head.is_some() {
                rules.extend(head_rules(evaluate, bounds));
            }
            rules.extend(signal_rules(evaluate, &evaluate.draft_confidence_thresholds, bounds));
            add(DrafterName::Draft, rules);
        }
        for adapter in &exports.adapters {
            let bounds = Bounds { min: 1, max: evaluate.max_self_draft_length };
            let mut rules = fixed(&evaluate.self_draft_lengths);
            rules.extend(heuristic(evaluate, bounds));
            if adapter.head.is_some() {
                rules.extend(head_rules(evaluate, bounds));
            }
            rules.extend(signal_rules(evaluate, &evaluate.confidence_thresholds, bounds));
            add(DrafterName::SelfDraft { exit_layer: adapter.config.exit_layer }, rules);
        }
        all
    }

    /// The stop rule's name in results.
    pub(crate) fn stop_rule(&self) -> StopRuleName {
        self.rule.as_ref().map_or(StopRuleName::None, StopRuleName::of)
    }

    /// The rule's number in results.
    pub(crate) fn parameter(&self) -> Option<f64> {
        self.rule.as_ref().map(StopRuleConfig::parameter)
    }

    /// What files and streams of draws call it: `plain`, `fixed-5`, `head-0.7`, `exit-2-fixed-5`,
    /// `exit-2-confidence-0.6`.
    pub(crate) fn name(&self) -> String {
        let Some(rule) = &self.rule else {
            return "plain".to_owned();
        };
        let rule = format!("{}-{}", StopRuleName::of(rule).file_name(), rule.parameter());
        match self.drafter {
            DrafterName::SelfDraft { exit_layer } => format!("exit-{exit_layer}-{rule}"),
            DrafterName::None | DrafterName::Draft => rule,
        }
    }
}

fn fixed(lengths: &[usize]) -> Vec<StopRuleConfig> {
    let fixed = |length: &usize| StopRuleConfig::FixedLength { candidate_length: *length };
    lengths.iter().map(fixed).collect()
}

fn heuristic(evaluate: &EvaluateRecipe, bounds: Bounds) -> Vec<StopRuleConfig> {
    let rule = |length: &usize| StopRuleConfig::Heuristic {
        initial_length: (*length).min(bounds.max),
        bounds,
    };
    evaluate.initial_lengths.iter().map(rule).collect()
}

/// The head's rules.
fn head_rules(evaluate: &EvaluateRecipe, bounds: Bounds) -> Vec<StopRuleConfig> {
    let rule = |without_lag| {
        move |stop_threshold: &f64| StopRuleConfig::RejectionThreshold {
            stop_threshold: *stop_threshold,
            without_lag,
            bounds,
        }
    };
    let mut rules: Vec<_> = evaluate.stop_thresholds.iter().map(rule(false)).collect();
    rules.extend(evaluate.stop_thresholds_without_lag.iter().map(rule(true)));
    rules
}

/// The rules that read what every drafter gives.
fn signal_rules(
    evaluate: &EvaluateRecipe,
    confidence_thresholds: &[f64],
    bounds: Bounds,
) -> Vec<StopRuleConfig> {
    let confidence =
        confidence_thresholds.iter().map(|threshold| StopRuleConfig::ConfidenceThreshold {
            confidence_threshold: *threshold,
            before_draw: false,
            bounds,
        });
    let candidate = evaluate.candidate_prob_thresholds.iter().map(|threshold| {
        StopRuleConfig::CandidateProbThreshold { confidence_threshold: *threshold, bounds }
    });
    let joint = evaluate.joint_confidence_thresholds.iter().map(|threshold| {
        StopRuleConfig::JointConfidence { confidence_threshold: *threshold, bounds }
    });
    let entropy =
        evaluate.entropy_thresholds.iter().map(|threshold| StopRuleConfig::EntropyThreshold {
            entropy_threshold: *threshold,
            entropy_scale: evaluate.entropy_scale,
            check_interval: evaluate.entropy_check_interval,
            bounds,
        });
    confidence.chain(candidate).chain(joint).chain(entropy).collect()
}
