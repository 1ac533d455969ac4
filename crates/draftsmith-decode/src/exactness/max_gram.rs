//! Max-Gram, whose candidates have draft probability 1, preserves the target's distribution.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_theory::{
    Bigrams, Decoding, MaxGramConfig, SearchedText, SeededDraws, StopRule, StopRuleConfig,
    StoredAnswers, SuffixSettings,
};

use super::tables::{Asked, StopMap};
use super::{Case, STOPS, assert_same_distribution, rules, warped};
use crate::decode::{decode_plain, decode_speculative};
use crate::max_gram::MaxGramDraft;
use crate::sequence::Request;

fn configs() -> [MaxGramConfig; 5] {
    [
        (SearchedText::Sequence, 1, false),
        (SearchedText::Sequence, 2, false),
        (SearchedText::Prompt, 1, false),
        (SearchedText::Answers, 1, false),
        (SearchedText::Answers, 1, true),
    ]
    .map(|(searched, min_match, tree)| {
        let suffix = SuffixSettings { factor: 3.0, tree, ..SuffixSettings::default() };
        MaxGramConfig { searched, min_match, suffix }
    })
}

/// Returns stored answers over two tokens, after which several others follow.
pub(super) fn stored() -> Arc<StoredAnswers> {
    let answers: [&[u32]; 3] = [&[0, 0, 1, 1, 0], &[1, 0, 1, 0, 0, 1], &[0, 1, 1, 1]];
    Arc::new(StoredAnswers::build(answers, |_| Ok::<_, Infallible>(())).expect("it is small"))
}

/// Returns a table of bigrams for a vocabulary of two or three tokens.
fn bigrams(vocab_size: usize) -> Bigrams {
    Bigrams::new([Some(1), None, Some(0)][..vocab_size].to_vec()).expect("of the vocabulary")
}

#[test]
fn every_stop_map_leaves_the_targets_distribution() {
    for (vocab_size, max_new_tokens) in [(2, 5), (3, 4)] {
        let bigrams = bigrams(vocab_size);
        for (config, eos) in configs().into_iter().zip([None, Some(1), None, Some(1), None]) {
            for table in [None, Some(&bigrams)] {
                let case = Case::new(vocab_size, max_new_tokens, eos, 1500);
                let (expected, depth) =
                    (case.target_distribution(), 2 + usize::from(vocab_size == 2));
                let drafter = MaxGramDraft::new(config, (table, Some(stored())), 1);
                for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                    for asked in [
                        Asked::AfterDraw,
                        Asked::BeforeDraw,
                        Asked::EverySecondRound { skips: bits % 2 == 0 },
                    ] {
                        let map = StopMap { asked, ..StopMap::new(vocab_size, depth, bits) };
                        let rule = || -> Box<dyn StopRule> { Box::new(map.clone()) };
                        let found = case.output_distribution(&case.target, &drafter, &rule);
                        assert_same_distribution(&found, &expected);
                    }
                }
            }
        }
    }
}

#[test]
fn warped_distributions_and_stop_strings_stay_exact() {
    let stopping = STOPS.map(|stop| Case::new(3, 4, None, 1520).stopping(stop));
    let warped = warped().map(|decoding| Case { decoding, ..Case::new(3, 4, Some(1), 1510) });
    for case in warped.into_iter().chain(stopping) {
        let expected = case.target_distribution();
        for config in configs() {
            let drafter = MaxGramDraft::new(config, (None, Some(stored())), 1);
            let rule = || -> Box<dyn StopRule> { Box::new(StopMap::new(3, 3, 0)) };
            let found = case.output_distribution(&case.target, &drafter, &rule);
            assert_same_distribution(&found, &expected);
        }
    }
}

/// Decodes greedily, checks that the tokens are those of plain decoding, and returns them with the numbers of drafted
/// and accepted candidates.
fn greedy(
    case: &Case,
    prompt: &[u32],
    drafter: &MaxGramDraft<'_>,
    rule: &StopRuleConfig,
) -> [Vec<u32>; 2] {
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
    let target = &mut case.target.clone();
    let plain = decode_plain(target, &Decoding::GREEDY, prompt, &case.limits, unused, observe)
        .expect("tables do not fail");
    let found = decode_speculative(
        target,
        &mut drafter.clone(),
        Request {
            prompt,
            decoding: Decoding::GREEDY,
            limits: &case.limits,
            rule: Some(&mut *rule.init().expect("valid")),
            draws: unused,
        },
        observe,
    )
    .expect("tables do not fail");
    assert_eq!((&found.token_ids, found.finish), (&plain.token_ids, plain.finish), "{rule:?}");
    let counts = found.trace.counts();
    assert_eq!(counts.num_draft_forwards, counts.num_drafted);
    [found.token_ids, vec![counts.num_drafted as u32, counts.num_accepted as u32]]
}

#[test]
fn greedy_output_is_plain_greedy_output_and_some_candidates_are_accepted() {
    let (mut num_drafted, mut num_accepted) = (0, 0);
    for seed in 0..40 {
        for max_new_tokens in [1, 2, 40] {
            let case = Case::new(3, max_new_tokens, Some(2), 1600 + seed);
            for rule in rules(4).iter().filter(|rule| rule.needs().is_nothing()) {
                for config in configs() {
                    for table in [None, Some(&bigrams(3))] {
                        let drafter = MaxGramDraft::new(config, (table, Some(stored())), 1);
                        let [_, counts] = greedy(&case, &[0, 1, 0, 1], &drafter, rule);
                        num_drafted += counts[0];
                        num_accepted += counts[1];
                    }
                }
            }
        }
    }
    assert!(num_drafted > 1000 && num_accepted > 100, "{num_accepted} of {num_drafted}");
}

#[test]
fn a_rule_that_reads_probabilities_is_refused() {
    let case = Case::new(2, 5, None, 0);
    let rule =
        rules(3).into_iter().find(|rule| matches!(rule, StopRuleConfig::ConfidenceThreshold(_)));
    let mut rule = rule.expect("it is among them").init().expect("valid");
    let refused = decode_speculative(
        &mut case.target.clone(),
        &mut MaxGramDraft::new(MaxGramConfig::default(), (None, None), 1),
        Request {
            prompt: &[0],
            decoding: Decoding::GREEDY,
            limits: &case.limits,
            rule: Some(&mut *rule),
            draws: &mut SeededDraws::new(0, &["unused"]),
        },
        &mut |_| ControlFlow::Continue(()),
    );
    let message = refused.expect_err("Max-Gram has no probabilities").to_string();
    assert!(message.contains("`look-up`") && message.contains("fixed length"), "{message}");
}
