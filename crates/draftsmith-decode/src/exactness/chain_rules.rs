//! Stop rules for a cascade's chains preserve the target's distribution. The tests cover every stop
//! map of every chain, and every rule with every kind of head.

use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_theory::{Decoding, Lenience, SeededDraws, StopRule, StopRuleConfig};

use super::cascade::{
    ONE_AND_LOOKUP, TWO_AND_LOOKUP, distribution, fixed, leniences, lenient, matrix, of_drafts,
    of_drafts_by, of_self_draft, of_self_draft_by, run,
};
use super::tables::{Advanced, Asked, Drafting, StopMap};
use super::{Case, HEADS, assert_same_distribution, penalised, rules_with};
use crate::decode::{decode_plain, decode_speculative};
use crate::sequence::Request;

/// Vertical cascades of two models. The larger model takes steps of one candidate or of more.
const VERTICAL: [[[usize; 3]; 3]; 2] =
    [[[3, 0, 0], [0, 2, 0], [0, 0, 0]], [[0, 3, 0], [0, 0, 0], [0, 0, 0]]];

/// Assigns the rule to the drafter's chain, to the target's chain, and to both.
fn for_chains(rule: &StopRuleConfig) -> [Vec<Option<StopRuleConfig>>; 3] {
    let rule = || Some(rule.clone());
    [vec![None, rule()], vec![rule()], vec![rule(), rule()]]
}

#[test]
fn chains_that_rules_end_leave_the_targets_distribution_lenient_or_not() {
    let penalised = (HEADS[1], penalised()[0]);
    let plain = Case::new(2, 4, None, 0).decoding;
    for (head, decoding) in HEADS.map(|head| (head, plain)).into_iter().chain([penalised]) {
        let case = Case { decoding, ..Case::new(2, 4, Some(1), 2100) }.with_head(head);
        let expected = case.target_distribution();
        for rule in rules_with(head, 2) {
            for (lengths, lenience) in [
                (VERTICAL[0], Lenience::NONE),
                (VERTICAL[0], lenient(3.0)),
                (VERTICAL[1], Lenience::NONE),
            ] {
                let lengths = matrix(lengths);
                for rules in for_chains(&rule) {
                    let drafter = || of_drafts_by(&case, &lengths, lenience, &rules);
                    let found = distribution(&case, &case.target, &drafter, &|| fixed(5));
                    assert_same_distribution(&found, &expected);
                    let advanced = Advanced::from(&case.target);
                    let drafter = || of_self_draft_by(&case, &lengths, lenience, &rules);
                    let found = distribution(&case, &advanced, &drafter, &|| fixed(5));
                    assert_same_distribution(&found, &expected);
                }
            }
        }
    }
}

/// Iterates over all stop maps of chains of up to `depth` tokens, each with every way of asking the rule.
fn maps(depth: usize) -> impl Iterator<Item = StopMap> {
    let all = 0..1 << StopMap::num_prefixes(2, depth);
    all.flat_map(move |bits| {
        let asked =
            [Asked::AfterDraw, Asked::BeforeDraw, Asked::EverySecondRound { skips: bits % 2 == 0 }];
        asked.map(|asked| StopMap { asked, ..StopMap::new(2, depth, bits) })
    })
}

#[test]
fn every_stop_map_of_every_chain_leaves_the_targets_distribution_lenient_or_not() {
    // A model reviews another model, look-ups, or both, and look-ups follow its candidates.
    let two = [VERTICAL[0], TWO_AND_LOOKUP[0], TWO_AND_LOOKUP[2], TWO_AND_LOOKUP[3]].map(matrix);
    let one = [ONE_AND_LOOKUP[0], ONE_AND_LOOKUP[1]].map(matrix);
    assert_every_stop_map_is_exact(&[&two[..], &one].concat(), 1);
}

#[test]
fn every_stop_map_of_every_chain_beside_siblings_leaves_the_targets_distribution() {
    // Look-ups follow the candidates of one model, and of two that review each other.
    let matrices = [matrix(ONE_AND_LOOKUP[1]), matrix(TWO_AND_LOOKUP[2])];
    assert_every_stop_map_is_exact(&matrices, 2);
}

/// Compares cascades with `num_first_tokens` under every stop map of one chain, and of two.
fn assert_every_stop_map_is_exact(matrices: &[Vec<Vec<usize>>], num_first_tokens: usize) {
    for (lengths, lenience) in
        matrices.iter().flat_map(|lengths| leniences(3.0).map(|lenience| (lengths, lenience)))
    {
        let case = Case::new(2, 4, [None, Some(1)][usize::from(lenience != Lenience::NONE)], 2400);
        let (expected, advanced) = (case.target_distribution(), Advanced::from(&case.target));
        let num_chains = lengths.len();
        let assert_with = |of_chains: &[(usize, StopMap)]| {
            let rules = Arc::new(of_chains.to_vec());
            let of_chains = || {
                let rules = rules.clone();
                move || -> Vec<Option<Box<dyn StopRule>>> {
                    let of = |row: usize| rules.iter().find(|(of, _)| *of == row);
                    let boxed =
                        |(_, map): &(usize, StopMap)| Box::new(map.clone()) as Box<dyn StopRule>;
                    (0..num_chains).map(|row| of(row).map(boxed)).collect()
                }
            };
            let drafts = || of_drafts(&case, lengths, lenience).with_first_tokens(num_first_tokens);
            let drafter = || drafts().ending_chains_by(of_chains());
            let found = distribution(&case, &case.target, &drafter, &|| fixed(5));
            assert_same_distribution(&found, &expected);
            let drafts =
                || of_self_draft(&case, lengths, lenience).with_first_tokens(num_first_tokens);
            let drafter = || drafts().ending_chains_by(of_chains());
            let found = distribution(&case, &advanced, &drafter, &|| fixed(5));
            assert_same_distribution(&found, &expected);
        };
        // The deepest maps of one chain at a time, and maps of two chains together.
        for row in 0..num_chains {
            maps(3).for_each(|map| assert_with(&[(row, map)]));
            for deeper in row + 1..num_chains {
                for map in maps(2) {
                    maps(2).for_each(|other| assert_with(&[(row, map.clone()), (deeper, other)]));
                }
            }
        }
    }
}

#[test]
fn a_rule_ends_a_chain_of_one_drafter_where_it_ends_rounds() {
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let mut lengths = std::collections::BTreeSet::new();
    for head in HEADS {
        for seed in 0..10 {
            let case = Case::new(3, 24, Some(2), 2200 + seed).with_head(head);
            for rule in rules_with(head, 4) {
                let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
                let alone = decode_speculative(
                    &mut case.target.clone(),
                    &mut Drafting::from(&case.draft),
                    Request {
                        prompt: &[0],
                        decoding: Decoding::GREEDY,
                        limits: &case.limits,
                        rule: Some(&mut *rule.init().expect("valid")),
                        draws: unused,
                    },
                    observe,
                )
                .expect("tables do not fail");
                let lone = matrix([[4, 0, 0], [0; 3], [0; 3]]);
                let drafter = of_drafts_by(&case, &lone, Lenience::NONE, &[Some(rule.clone())]);
                let target = &mut case.target.clone();
                let unused = &mut SeededDraws::new(0, &["unused"]);
                let found = run(&case, target, drafter, &mut *fixed(4), Decoding::GREEDY, unused)
                    .expect("tables do not fail");
                assert_eq!(found.token_ids, alone.token_ids, "{rule:?}");
                assert_eq!(found.trace.counts(), alone.trace.counts(), "{rule:?}");
                lengths.extend(found.trace.rounds.iter().map(|round| round.num_drafted));
            }
        }
    }
    assert!(lengths.len() > 3, "{lengths:?}");
}

#[test]
fn greedy_output_with_rules_is_plain_greedy_output() {
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let (mut found_forwards, mut fixed_forwards) = (0, 0);
    for head in HEADS {
        for seed in 0..6 {
            let case = Case::new(3, 24, Some(2), 2300 + seed).with_head(head);
            let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
            let target = &mut case.target.clone();
            let plain =
                decode_plain(target, &Decoding::GREEDY, &[0], &case.limits, unused, observe)
                    .expect("tables do not fail");
            for rule in rules_with(head, 3) {
                for rules in for_chains(&rule).iter().map(|rules| &rules[..]).chain([&[][..]]) {
                    let unused = &mut SeededDraws::new(0, &["unused"]);
                    let drafter = of_drafts_by(&case, &matrix(VERTICAL[0]), lenient(2.0), rules);
                    let target = &mut case.target.clone();
                    let own = &mut *fixed(9);
                    let found = run(&case, target, drafter, own, Decoding::GREEDY, unused)
                        .expect("tables do not fail");
                    assert_eq!(found.token_ids, plain.token_ids, "{rule:?}");
                    let counted =
                        if rules.is_empty() { &mut fixed_forwards } else { &mut found_forwards };
                    *counted += found.trace.counts().num_draft_forwards;
                }
            }
        }
    }
    assert!(found_forwards / 3 < fixed_forwards, "rules end chains: {found_forwards}");
}
