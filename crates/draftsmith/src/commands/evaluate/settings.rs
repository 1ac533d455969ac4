//! The settings that are compared: plain decoding; the separate draft and each adapter with chains, trees and
//! preceding look-ups, under every rule of the recipe whose signals the drafter has; the same look-ups alone;
//! prompt lookup in fixed lengths; cascades, with their longest round as the length.

use std::iter;

use draftsmith_report::{DecodingName, DrafterName, Road, in_order};
use draftsmith_theory::{Bounds, DrafterId, FixedLengthConfig, StopRuleConfig, StopRuleName};

use super::promise::Promise;
use crate::exports::Exports;
use crate::exports::cascades::{numbered, numbered_merged};
use crate::recipe::{EvaluateRecipe, TreesRecipe};

/// A drafter and a stop rule.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setting {
    pub(crate) drafter: DrafterName,
    /// `None` for plain decoding.
    pub(crate) rule: Option<StopRuleConfig>,
}

impl Setting {
    /// All settings of a recipe under one way of decoding, plain decoding first. Each drafter also gets its
    /// tuned rule, and the fixed length that the rule promises to beat.
    pub(crate) fn all(
        evaluate: &EvaluateRecipe,
        decoding: DecodingName,
        has_draft: bool,
        exports: &Exports,
        promised: &[Promise],
    ) -> Vec<Self> {
        let mut all = vec![Self { drafter: DrafterName::None, rule: None }];
        let mut add = |drafter: DrafterName, has_head: bool, max: usize| {
            let is_self_draft = drafter.road() == Some(Road::SelfDraft);
            let bounds = Bounds { min: 1, max };
            let mut rules = evaluate.stop_rules(is_self_draft, has_head, bounds);
            let id = drafter.id().expect("a drafter with a model");
            for promised in promised.iter().filter(|promised| promised.over == id) {
                let fixed = FixedLengthConfig { candidate_length: promised.best_fixed_length };
                let own = (promised.drafter == drafter).then(|| promised.config.clone());
                for rule in iter::once(fixed.into()).chain(own) {
                    if !rules.contains(&rule) {
                        rules.push(rule);
                    }
                }
            }
            let trees = evaluate.trees.iter().flat_map(TreesRecipe::given);
            let trees = trees.map(|shape| DrafterName::Tree(id, shape));
            let after = evaluate.lookup_first.iter().map(|first| DrafterName::After(*first, id));
            for drafter in iter::once(drafter).chain(after).chain(trees) {
                let of = |rule: &StopRuleConfig| Self { drafter, rule: Some(rule.clone()) };
                all.extend(rules.iter().map(of));
            }
            for promised in promised.iter().filter(|it| it.drafter.id() == Some(id)) {
                let own = Self { drafter: promised.drafter, rule: Some(promised.config.clone()) };
                if !all.contains(&own) {
                    all.push(own);
                }
            }
        };
        if has_draft {
            add(
                DrafterName::Of(DrafterId::Draft),
                exports.head.is_some(),
                evaluate.max_candidate_length,
            );
        }
        for adapter in &exports.adapters {
            add(adapter.drafter().into(), adapter.head.is_some(), evaluate.max_self_draft_length);
        }
        // Beside a drafter after look-ups, the look-ups alone show what the drafter adds.
        let firsts = in_order(all.iter().filter_map(|setting| setting.drafter.lookup_first()));
        all.extend(firsts.into_iter().map(|first| {
            let rule = FixedLengthConfig { candidate_length: first.most };
            Self { drafter: DrafterName::look_ups_alone(first), rule: Some(rule.into()) }
        }));
        if let Some(lookup) = &evaluate.max_gram {
            all.extend(lookup.lengths.iter().map(|candidate_length| {
                let rule = FixedLengthConfig { candidate_length: *candidate_length };
                Self { drafter: DrafterName::Of(DrafterId::MaxGram), rule: Some(rule.into()) }
            }));
        }
        all.extend(numbered(&evaluate.cascades).map(|(id, cascade)| {
            let rule = FixedLengthConfig { candidate_length: cascade.longest(decoding) };
            Self { drafter: DrafterName::Of(id), rule: Some(rule.into()) }
        }));
        for (id, merged) in numbered_merged(&evaluate.merged) {
            let is_self_draft = merged.drafters.iter().any(|id| id.exit_layer().is_some());
            let max = match is_self_draft {
                true => evaluate.max_self_draft_length,
                false => evaluate.max_candidate_length,
            };
            let rules = evaluate.stop_rules(is_self_draft, false, Bounds { min: 1, max });
            let of = |rule| Self { drafter: DrafterName::Of(id), rule: Some(rule) };
            all.extend(rules.into_iter().map(of));
        }
        all
    }

    /// The name of the stop rule in results.
    pub(crate) fn stop_rule(&self) -> StopRuleName {
        self.rule.as_ref().map_or(StopRuleName::None, StopRuleConfig::name)
    }

    /// The name in files and streams of draws: `plain`, `fixed-5`, `head-0.7`, `exit-2-fixed-5`,
    /// `exit-2-confidence-0.6`, `tree-3-2x2x8-fixed-3`.
    pub(crate) fn name(&self) -> String {
        let Some(rule) = &self.rule else {
            return "plain".to_owned();
        };
        let rule = format!("{}-{}", rule.name().file_name(), rule.parameter());
        match self.drafter.prefix() {
            Some(prefix) => format!("{}-{rule}", prefix.replace(", ", "-").replace(' ', "-")),
            None => rule,
        }
    }
}
