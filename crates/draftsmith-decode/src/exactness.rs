//! The proof that speculative decoding preserves the target's distribution. The tests run the
//! shipped decoding loop on probability tables and enumerate every random draw and every stop map.
//! `networks.rs` replaces the tables by real networks.
//!
//! A stop map lists the drafted prefixes after which a round stops. For vocabularies of 2 and 3
//! tokens the tests run all maps. For a vocabulary of 4 at depth 3 there are 2^20 maps, but the
//! output's distribution is a sum over the first candidate y₁, and each term depends only on the
//! map's bits for prefixes that begin with y₁. So it is enough to give one branch each of its 2^5
//! maps while the other branches continue to the bound: the distribution under any other map is a
//! sum of terms that occur there.

mod cascade;
mod chain_rules;
mod first_tokens;
mod lookup_first;
mod many;
mod max_gram;
mod merged;
mod networks;
mod replay;
mod tables;
mod trees;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_theory::{
    AcceptanceModel, AcceptanceSignal, Bounds, CandidateProbThresholdConfig, ConfidenceHeadConfig,
    ConfidenceThresholdConfig, CostOptimalConfig, Decoding, EntropyThresholdConfig,
    FixedLengthConfig, HeadTiming, HeuristicConfig, JointConfidenceConfig, OnlineAcceptanceConfig,
    Oracle, RejectionThresholdConfig, Sampling, SeededDraws, StepFunction, StopRule,
    StopRuleConfig, argmax, distribution_of, enumerate,
};

use self::tables::{Advanced, Advancing, Asked, Drafting, EndsWith, StopMap, Table};
use crate::decode::{decode_plain, decode_speculative};
use crate::drafter::Drafter;
use crate::sequence::{Limits, Request};
use crate::target::Target;

/// The absolute tolerance of a probability: the rounding of a sum of some thousand f64 products.
const TOLERANCE: f64 = 1e-12;

/// Both kinds of acceptance heads, by the time at which they predict.
const HEADS: [HeadTiming; 3] = [HeadTiming::AfterRead, HeadTiming::AtDraw, HeadTiming::BeforeDraw];

struct Case {
    target: Table,
    draft: Table,
    decoding: Decoding,
    limits: Limits,
    /// Whether a draft forward may propose more than one candidate.
    branches: bool,
}

impl Case {
    fn new(vocab_size: usize, max_new_tokens: usize, eos: Option<u32>, seed: u64) -> Self {
        let table = |seed| Table {
            vocab_size,
            seed,
            context: 64,
            head: HeadTiming::AfterRead,
            num_drawn: u32::MAX,
            never: 0.2,
        };
        Self {
            target: table(2 * seed),
            draft: table(2 * seed + 1),
            decoding: Decoding::sampled(Sampling::default()),
            limits: Limits::new(max_new_tokens, eos.into_iter().collect()),
            branches: false,
        }
    }

    /// Adds a stop string to the case.
    fn stopping(mut self, stop: &'static [u32]) -> Self {
        self.limits.text_end = Some(Arc::new(EndsWith(stop)));
        self
    }

    /// Changes when the draft's head predicts.
    fn with_head(mut self, head: HeadTiming) -> Self {
        self.draft.head = head;
        self
    }

    /// Computes the target's distribution over responses as products of probabilities, without the decoding loop.
    fn target_distribution(&self) -> BTreeMap<Vec<u32>, f64> {
        self.target_distribution_after(&[0])
    }

    /// Computes the target's distribution over responses to another prompt.
    fn target_distribution_after(&self, prompt: &[u32]) -> BTreeMap<Vec<u32>, f64> {
        let mut distribution = BTreeMap::new();
        let mut open = vec![(prompt.to_vec(), 1.0)];
        while let Some((tokens, prob)) = open.pop() {
            let new = &tokens[prompt.len()..];
            let by_token = new.last().is_some_and(|id| self.limits.eos_token_ids.contains(id));
            let by_text = || match &self.limits.text_end {
                Some(end) => !new.is_empty() && end.is_reached(&mut tokens.iter().rev().copied()),
                None => false,
            };
            let ended = by_token || by_text();
            if ended || new.len() == self.limits.max_new_tokens {
                distribution.insert(new.to_vec(), prob);
                continue;
            }
            let row = self.target.row(&tokens);
            let probs = self.decoding.probs(&self.decoding.penalised(&row, tokens.clone()));
            for (id, p) in probs.into_iter().enumerate().filter(|(_, p)| *p > 0.0) {
                let mut longer = tokens.clone();
                longer.push(id as u32);
                open.push((longer, prob * p));
            }
        }
        distribution
    }

    fn speculative_distribution(&self, rule: &StopMap) -> BTreeMap<Vec<u32>, f64> {
        self.output_distribution(&self.target, &Drafting::from(&self.draft), &|| {
            Box::new(rule.clone())
        })
    }

    /// Computes the distribution of the output with a drafter that advances the target, as a self-draft does.
    fn self_speculative_distribution(
        &self,
        rule: &dyn Fn() -> Box<dyn StopRule>,
    ) -> BTreeMap<Vec<u32>, f64> {
        self.output_distribution(&Advanced::from(&self.target), &Advancing::from(&self.draft), rule)
    }

    fn output_distribution<T: Target + Clone, D: Drafter<T> + Clone>(
        &self,
        target: &T,
        drafter: &D,
        rule: &dyn Fn() -> Box<dyn StopRule>,
    ) -> BTreeMap<Vec<u32>, f64> {
        distribution_of(enumerate(|draws| {
            let generation = decode_speculative(
                &mut target.clone(),
                &mut drafter.clone(),
                Request {
                    prompt: &[0],
                    decoding: self.decoding,
                    limits: &self.limits,
                    rule: Some(&mut *rule()),
                    draws,
                },
                &mut |_| ControlFlow::Continue(()),
            )
            .expect("tables do not fail");
            let counts = generation.trace.counts();
            // If a round ends before a draw, its last forward gives no candidate.
            assert!(self.branches || counts.num_draft_forwards >= counts.num_drafted);
            if counts.num_draft_forwards == counts.num_drafted {
                counts.check_forward_identity().expect("one draft forward for each candidate");
            }
            generation.token_ids
        }))
    }
}

fn assert_same_distribution(found: &BTreeMap<Vec<u32>, f64>, expected: &BTreeMap<Vec<u32>, f64>) {
    for tokens in found.keys().chain(expected.keys()) {
        let [a, b] =
            [found, expected].map(|distribution| distribution.get(tokens).copied().unwrap_or(0.0));
        assert!((a - b).abs() <= TOLERANCE, "{tokens:?}: {a} for {b}");
    }
}

#[test]
fn every_stop_map_leaves_the_targets_distribution_at_vocabularies_of_two_and_three() {
    for (vocab_size, depth, max_new_tokens) in
        [(2, 1, 3), (2, 2, 4), (2, 3, 5), (3, 1, 3), (3, 2, 4), (3, 3, 4)]
    {
        let num_maps = 1_u64 << StopMap::num_prefixes(vocab_size, depth);
        // Use fewer random tables if there are many stop maps.
        let num_seeds = if num_maps > 1000 { 1 } else { 4 };
        for seed in 0..num_seeds {
            for eos in [None, Some(1)] {
                let case = Case::new(vocab_size, max_new_tokens, eos, seed);
                let expected = case.target_distribution();
                for bits in 0..num_maps {
                    let rule = StopMap::new(vocab_size, depth, bits);
                    assert_same_distribution(&case.speculative_distribution(&rule), &expected);
                }
            }
        }
    }
}

#[test]
fn stopping_before_a_draw_and_skipping_rounds_leave_the_targets_distribution() {
    for (vocab_size, depth, max_new_tokens) in [(2, 2, 4), (2, 3, 5), (3, 2, 4)] {
        for asked in [Asked::BeforeDraw, Asked::EverySecondRound { skips: true }] {
            for eos in [None, Some(1)] {
                let case = Case::new(vocab_size, max_new_tokens, eos, 500);
                let expected = case.target_distribution();
                for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                    let rule = StopMap { asked, ..StopMap::new(vocab_size, depth, bits) };
                    assert_same_distribution(&case.speculative_distribution(&rule), &expected);
                    let found = case.self_speculative_distribution(&|| Box::new(rule.clone()));
                    assert_same_distribution(&found, &expected);
                }
            }
        }
    }
}

/// Returns every configurable rule, with thresholds that sometimes stop.
fn rules(depth: usize) -> Vec<StopRuleConfig> {
    let bounds = Bounds { min: 1, max: depth };
    let mut rules = vec![StopRuleConfig::Heuristic(HeuristicConfig { initial_length: 1, bounds })];
    rules.extend((1..=depth).map(|candidate_length| {
        StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length })
    }));
    for threshold in [0.3, 0.6] {
        rules.extend([false, true].map(|without_lag| {
            StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: threshold,
                without_lag,
                bounds,
            })
        }));
        let confidence_threshold = threshold;
        rules.extend([false, true].map(|before_draw| {
            StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
                confidence_threshold,
                before_draw,
                bounds: Bounds { min: usize::from(!before_draw), ..bounds },
            })
        }));
        rules.push(StopRuleConfig::CandidateProbThreshold(CandidateProbThresholdConfig {
            confidence_threshold,
            bounds,
        }));
        rules.push(StopRuleConfig::JointConfidence(JointConfidenceConfig {
            confidence_threshold,
            bounds,
        }));
        rules.push(StopRuleConfig::OnlineAcceptance(OnlineAcceptanceConfig {
            survival_threshold: threshold,
            start: AcceptanceModel::default(),
            bounds,
        }));
        rules.extend([1, 2].map(|check_interval| {
            StopRuleConfig::EntropyThreshold(EntropyThresholdConfig {
                entropy_threshold: threshold / 2.0,
                entropy_scale: 0.15,
                check_interval,
                bounds,
            })
        }));
    }
    use AcceptanceSignal::{AcceptanceProb, Confidence, Entropy};
    rules.extend([AcceptanceProb, Confidence, Entropy].map(|signal| {
        let steps = |low, high| StepFunction::new(vec![0.5], vec![low, high]).expect("ascending");
        StopRuleConfig::CostOptimal(CostOptimalConfig {
            signal,
            least_worth: 0.4,
            least_draw_worth: 0.3,
            estimate: steps(0.5, 0.9),
            draw_outlook: steps(0.4, 0.8),
            outlook: steps(0.9, 0.6),
            initial_outlook: 0.7,
            bounds,
        })
    }));
    rules
}

/// Returns all rules for the first kind of head, and only the rules that read a head for the other
/// kinds.
fn rules_with(head: HeadTiming, depth: usize) -> Vec<StopRuleConfig> {
    let mut rules = rules(depth);
    rules.retain(|config| head == HEADS[0] || config.needs().acceptance_prob);
    if head == HeadTiming::BeforeDraw {
        let bounds = Bounds { min: 0, max: depth };
        rules.extend([0.3, 0.6].map(|acceptance_threshold| {
            ConfidenceHeadConfig { acceptance_threshold, bounds }.into()
        }));
    }
    rules
}

#[test]
fn every_rule_leaves_the_targets_distribution_with_either_drafter() {
    for (vocab_size, max_new_tokens, eos) in [(2, 5, None), (3, 4, Some(1))] {
        for head in HEADS {
            let case = Case::new(vocab_size, max_new_tokens, eos, 700).with_head(head);
            let (expected, draft) = (case.target_distribution(), Drafting::from(&case.draft));
            for config in rules_with(head, 3) {
                let rule = || config.init().expect("a valid rule");
                assert_same_distribution(
                    &case.output_distribution(&case.target, &draft, &rule),
                    &expected,
                );
                assert_same_distribution(&case.self_speculative_distribution(&rule), &expected);
            }
        }
    }
}

#[test]
fn a_small_draft_vocabulary_leaves_the_targets_distribution() {
    for (num_drawn, eos) in [(1, None), (2, Some(1)), (2, Some(2))] {
        let mut case = Case::new(3, 4, eos, 900);
        case.draft.num_drawn = num_drawn;
        let (expected, draft) = (case.target_distribution(), Drafting::from(&case.draft));
        for config in rules_with(HEADS[0], 3) {
            let rule = || config.init().expect("a valid rule");
            let found = case.output_distribution(&case.target, &draft, &rule);
            assert_same_distribution(&found, &expected);
            assert_same_distribution(&case.self_speculative_distribution(&rule), &expected);
        }
        // The output also contains tokens that are never drafted.
        assert!(expected.keys().flatten().any(|id| *id >= num_drawn));
    }
}

#[test]
fn the_oracle_discards_nothing_and_runs_the_target_once_for_each_mismatch_and_once_at_the_end() {
    let mut draws = SeededDraws::new(0, &["unused"]);
    let limits = Limits::new(40, Vec::new());
    for seed in 0..20 {
        let case = Case::new(2, 40, None, 900 + seed);
        let (mut target, mut draft) = (case.target.clone(), Drafting::from(&case.draft));
        let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
        let greedy = Decoding::GREEDY;
        let plain = decode_plain(&mut target, &greedy, &[0], &limits, &mut draws, observe)
            .expect("tables do not fail");
        let mut tokens = vec![0];
        let is_mismatch: Vec<bool> = plain
            .token_ids
            .iter()
            .map(|id| {
                let differs = argmax(&case.draft.row(&tokens)) != *id;
                tokens.push(*id);
                differs
            })
            .collect();
        // The last token needs no candidate, because it is always the target's own.
        let num_mismatches = is_mismatch[..39].iter().filter(|differs| **differs).count();
        let num_accepted = (0..40)
            .map(|start| is_mismatch[start..].iter().take_while(|differs| !**differs).count());
        let mut rule = Oracle::new(num_accepted.collect());
        let oracle = decode_speculative(
            &mut target,
            &mut draft,
            Request {
                prompt: &[0],
                decoding: greedy,
                limits: &limits,
                rule: Some(&mut rule),
                draws: &mut draws,
            },
            observe,
        )
        .expect("tables do not fail");
        assert_eq!(oracle.token_ids, plain.token_ids);
        let counts = oracle.trace.counts();
        assert_eq!(counts.num_discarded, 0);
        assert_eq!(counts.num_target_forwards, num_mismatches + 1);
        counts.check_forward_identity().expect("one draft forward for each candidate");
    }
}

#[test]
fn every_stop_map_leaves_the_targets_distribution_at_a_vocabulary_of_four() {
    let (vocab_size, depth) = (4_usize, 3);
    let case = Case::new(vocab_size, 4, Some(2), 7);
    let expected = case.target_distribution();
    for first in 0..vocab_size {
        for branch_map in 0..1_u64 << (1 + vocab_size) {
            let mut rule = StopMap::new(vocab_size, depth, 0);
            let first = first as u32;
            let mut prefixes = vec![vec![first]];
            prefixes.extend((0..vocab_size as u32).map(|second| vec![first, second]));
            for (bit, prefix) in prefixes.iter().enumerate() {
                rule.bits |= ((branch_map >> bit) & 1) << rule.index(prefix);
            }
            assert_same_distribution(&case.speculative_distribution(&rule), &expected);
        }
    }
}

#[test]
fn a_drafter_that_advances_the_target_leaves_the_targets_distribution() {
    for (vocab_size, depth, max_new_tokens) in [(2, 3, 5), (3, 2, 4)] {
        for seed in 0..2 {
            for eos in [None, Some(1)] {
                let case = Case::new(vocab_size, max_new_tokens, eos, 300 + seed);
                let expected = case.target_distribution();
                for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                    let rule =
                        || -> Box<dyn StopRule> { Box::new(StopMap::new(vocab_size, depth, bits)) };
                    assert_same_distribution(&case.self_speculative_distribution(&rule), &expected);
                }
            }
        }
    }
}

/// Returns ways of decoding with warpers, with a repetition penalty, and with both.
fn warped() -> [Decoding; 6] {
    let sampled = |temperature, top_p, top_k, min_p| {
        Decoding::sampled(Sampling { temperature, top_p, top_k, min_p })
    };
    let penalised = penalised();
    [
        sampled(0.7, 0.8, None, None),
        sampled(1.3, 1.0, Some(2), None),
        sampled(0.9, 1.0, None, Some(0.4)),
        sampled(0.8, 0.9, None, None).penalising(1.4),
        penalised[0],
        penalised[1],
    ]
}

/// Returns ways of decoding under penalties that change the probabilities and often the most probable token.
fn penalised() -> [Decoding; 2] {
    [1.7, 0.6].map(|penalty| Decoding::sampled(Sampling::default()).penalising(penalty))
}

#[test]
fn warped_distributions_stay_exact() {
    for decoding in warped() {
        for seed in 0..4 {
            let case = Case { decoding, ..Case::new(3, 4, Some(1), 100 + seed) };
            for bits in [0, 1, 0b1010, 0b111] {
                let rule = StopMap::new(3, 3, bits);
                assert_same_distribution(
                    &case.speculative_distribution(&rule),
                    &case.target_distribution(),
                );
            }
        }
    }
}

#[test]
fn every_rule_leaves_the_targets_distribution_under_a_repetition_penalty() {
    for head in HEADS {
        for decoding in penalised() {
            let case = Case { decoding, ..Case::new(3, 3, Some(1), 720).with_head(head) };
            let (expected, draft) = (case.target_distribution(), Drafting::from(&case.draft));
            for config in rules_with(head, 3) {
                let rule = || config.init().expect("a valid rule");
                let found = case.output_distribution(&case.target, &draft, &rule);
                assert_same_distribution(&found, &expected);
                assert_same_distribution(&case.self_speculative_distribution(&rule), &expected);
            }
        }
    }
}

/// Stop strings: one token, two that may begin in the prompt, and one that overlaps itself.
const STOPS: [&[u32]; 3] = [&[0], &[0, 1], &[1, 0, 1]];

#[test]
fn stop_strings_end_every_round_where_they_end_plain_decoding() {
    for stop in STOPS {
        for eos in [None, Some(1)] {
            let case = Case::new(2, 5, eos, 730).stopping(stop);
            let expected = case.target_distribution();
            assert!(expected.keys().any(|tokens| tokens.len() < 5));
            for bits in 0..1_u64 << StopMap::num_prefixes(2, 3) {
                for asked in [Asked::AfterDraw, Asked::BeforeDraw] {
                    let rule = StopMap { asked, ..StopMap::new(2, 3, bits) };
                    assert_same_distribution(&case.speculative_distribution(&rule), &expected);
                    let found = case.self_speculative_distribution(&|| Box::new(rule.clone()));
                    assert_same_distribution(&found, &expected);
                }
            }
        }
    }
}

#[test]
fn plain_decoding_has_the_targets_distribution() {
    let plain = [Decoding::sampled(Sampling::default())];
    let decodings = plain.into_iter().chain(penalised());
    for (eos, decoding) in decodings.flat_map(|one| [(None, one), (Some(1), one)]) {
        let case = Case { decoding, ..Case::new(3, 4, eos, 11) };
        let found = distribution_of(enumerate(|draws| {
            decode_plain(
                &mut case.target.clone(),
                &case.decoding,
                &[0],
                &case.limits,
                draws,
                &mut |_| ControlFlow::Continue(()),
            )
            .expect("tables do not fail")
            .token_ids
        }));
        assert_same_distribution(&found, &case.target_distribution());
    }
}

#[test]
fn greedy_output_is_plain_greedy_output_for_every_stop_map_limit_and_context() {
    let mut draws = SeededDraws::new(0, &["unused"]);
    for seed in 0..40 {
        for max_new_tokens in [0, 1, 2, 5, 9] {
            for context in [1 + 4, 64] {
                let mut case = Case::new(3, max_new_tokens, Some(2), 200 + seed);
                case.target.context = context;
                let decoding = Decoding::GREEDY.penalising([1.0, 1.7, 0.6][seed as usize % 3]);
                let plain = decode_plain(
                    &mut case.target.clone(),
                    &decoding,
                    &[0],
                    &case.limits,
                    &mut draws,
                    &mut |_| ControlFlow::Continue(()),
                )
                .expect("tables do not fail");
                for bits in (0..1 << 12).step_by(97) {
                    let speculative = decode_speculative(
                        &mut case.target.clone(),
                        &mut Drafting::from(&case.draft),
                        Request {
                            prompt: &[0],
                            decoding,
                            limits: &case.limits,
                            rule: Some(&mut StopMap::new(3, 3, bits)),
                            draws: &mut draws,
                        },
                        &mut |_| ControlFlow::Continue(()),
                    )
                    .expect("tables do not fail");
                    assert_eq!(speculative.token_ids, plain.token_ids);
                    assert_eq!(speculative.finish, plain.finish);
                }
            }
        }
    }
}
