//! The settings that an evaluation compares. These are plain decoding, every drafter under each of
//! its stop rules, and prompt lookup alone. A drafter that drafts step by step is also run with
//! trees and with prompt lookup in front.

use std::iter;

use draftsmith_theory::{FixedLengthConfig, StopRuleConfig, StopRuleName};

use draftsmith_recipe::{EvaluateRecipe, LoadedDrafters, Recipe, Role, TunedRule};
use draftsmith_report::{DecodingName, DrafterName, in_order};

/// One setting to measure: a drafter and a stop rule.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Setting {
    pub(super) drafter: DrafterName,
    /// The stop rule; `None` for plain decoding.
    pub(super) rule: Option<StopRuleConfig>,
}

impl Setting {
    /// Plain decoding by the target alone.
    pub(super) const PLAIN: Self = Self { drafter: DrafterName::None, rule: None };

    /// Lists all settings of a recipe under one way of decoding, plain decoding first. They include
    /// each drafter's tuned rule, and the fixed length that the rule promises to beat.
    pub(super) fn all(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        decoding: DecodingName,
        drafters: &LoadedDrafters,
        promised: &[TunedRule],
    ) -> Vec<Self> {
        let mut all = vec![Self::PLAIN];
        for (id, drafter) in recipe.evaluated() {
            let promised = || promised.iter().filter(|it| it.drafter.id() == Some(id));
            let loaded = drafters.get(id).ok();
            let has_head = loaded.is_some_and(|loaded| loaded.head_timing().is_some());
            let has_steps = drafter.kind.role() == Role::Steps;
            let mut rules = drafter.stop_rules(&evaluate.rules, decoding, has_head);
            for promised in promised() {
                let fixed = FixedLengthConfig { candidate_length: promised.best_fixed_length };
                let own = (promised.drafter == id.into()).then(|| promised.config.clone());
                for rule in iter::once(fixed.into()).chain(own) {
                    if !rules.contains(&rule) {
                        rules.push(rule);
                    }
                }
            }
            let trees = evaluate.trees.iter();
            let trees = trees.filter(|it| it.drafters.is_empty() || it.drafters.contains(&id));
            let trees = trees.flat_map(|trees| trees.shapes.iter().copied());
            let trees = trees.map(|shape| DrafterName::Tree(id, shape));
            let after = evaluate.lookup_first.iter().map(|first| DrafterName::After(*first, id));
            let others = after.chain(trees).filter(|_| has_steps);
            for drafter in iter::once(DrafterName::Of(id)).chain(others) {
                let of = |rule: &StopRuleConfig| Self { drafter, rule: Some(rule.clone()) };
                all.extend(rules.iter().map(of));
            }
            for promised in promised() {
                let own = Self { drafter: promised.drafter, rule: Some(promised.config.clone()) };
                if !all.contains(&own) {
                    all.push(own);
                }
            }
        }
        // For each lookup in front of a drafter, the lookup alone shows what the drafter adds.
        let firsts = in_order(all.iter().filter_map(|setting| setting.drafter.lookup_first()));
        all.extend(firsts.into_iter().map(|first| {
            let rule = FixedLengthConfig { candidate_length: first.most };
            Self { drafter: DrafterName::look_ups_alone(first), rule: Some(rule.into()) }
        }));
        all
    }

    /// Returns the name of the stop rule in results.
    pub(super) fn stop_rule(&self) -> StopRuleName {
        self.rule.as_ref().map_or(StopRuleName::None, StopRuleConfig::name)
    }

    /// Returns the setting's name in file names and streams of random draws, for example `plain`,
    /// `fixed-5`, `head-0.7`, `exit-2-fixed-5`, `exit-2-confidence-0.6` or `tree-3-2x2x8-fixed-3`.
    pub(super) fn name(&self) -> String {
        let Some(rule) = &self.rule else {
            return "plain".to_owned();
        };
        let rule = format!("{}-{}", rule.name().file_name(), rule.parameter());
        match self.drafter.prefix() {
            Some(prefix) => {
                format!("{}-{rule}", prefix.replace(", ", "-").replace([' ', ':'], "-"))
            }
            None => rule,
        }
    }
}
