//! Prompt lookup in front of a drafter preserves the target's distribution under every stop rule.

use draftsmith_theory::{Counts, DrafterId, LookupFirst, StopRule};

use super::many::{assert_each_as_alone, members};
use super::max_gram::stored;
use super::tables::{Advanced, Advancing, Asked, Drafting, NUM_SLOTS, StopMap};
use super::{Case, HEADS, STOPS, assert_same_distribution, rules_with, warped};
use crate::drafter::NoDrafter;
use crate::lookup_first::LookupFirstDraft;
use crate::session::tests::{greedy, greedy_plain};

/// Short and long matches, and look-ups of one candidate and of several.
const FIRSTS: [&str; 5] = ["1x1", "1x3", "2x2", "3x4", "answers:1x3"];

fn before<D>(drafter: D, first: &str) -> LookupFirstDraft<D> {
    let first = (first.parse().expect("one"), Some(&stored()));
    LookupFirstDraft::new(drafter, first, NUM_SLOTS)
}

/// Compares the distribution with the target's, for a table and for a target that its drafter advances.
fn assert_exact(case: &Case, first: &str, rule: &dyn Fn() -> Box<dyn StopRule>) {
    let expected = case.target_distribution();
    let draft = before(Drafting::from(&case.draft), first);
    assert_same_distribution(&case.output_distribution(&case.target, &draft, rule), &expected);
    let advancing = before(Advancing::from(&case.draft), first);
    let advanced = Advanced::from(&case.target);
    assert_same_distribution(&case.output_distribution(&advanced, &advancing, rule), &expected);
}

#[test]
fn look_ups_by_themselves_leave_the_targets_distribution() {
    let stopping = STOPS.map(|stop| Case::new(2, 6, None, 2060).stopping(stop));
    let warped = warped().map(|decoding| Case { decoding, ..Case::new(2, 6, Some(1), 2050) });
    let plain = [None, Some(1)].map(|eos| Case::new(3, 5, eos, 2000));
    for case in plain.into_iter().chain(warped).chain(stopping) {
        for first in FIRSTS {
            let alone = before(NoDrafter, first);
            let rule = || Box::new(StopMap::new(2, 2, 0)) as Box<dyn StopRule>;
            let found = case.output_distribution(&case.target, &alone, &rule);
            assert_same_distribution(&found, &case.target_distribution());
        }
    }
}

#[test]
fn every_stop_map_leaves_the_targets_distribution() {
    for (vocab_size, depth, max_new_tokens) in [(2, 2, 6), (3, 1, 5)] {
        for first in FIRSTS {
            for eos in [None, Some(1)] {
                for asked in
                    [Asked::AfterDraw, Asked::BeforeDraw, Asked::EverySecondRound { skips: true }]
                {
                    let case = Case::new(vocab_size, max_new_tokens, eos, 2100);
                    for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                        let rule = StopMap { asked, ..StopMap::new(vocab_size, depth, bits) };
                        assert_exact(&case, first, &|| Box::new(rule.clone()));
                    }
                }
            }
        }
    }
}

#[test]
fn every_rule_leaves_the_targets_distribution() {
    for head in HEADS {
        let case = Case::new(2, 5, Some(1), 2200).with_head(head);
        for config in rules_with(head, 3) {
            for first in FIRSTS {
                assert_exact(&case, first, &|| config.init().expect("a valid rule"));
            }
        }
    }
}

#[test]
fn warped_distributions_and_stop_strings_stay_exact() {
    let stopping = STOPS.map(|stop| Case::new(2, 6, None, 2260).stopping(stop));
    let warped = warped().map(|decoding| Case { decoding, ..Case::new(2, 6, Some(1), 2250) });
    for case in warped.into_iter().chain(stopping) {
        for first in FIRSTS {
            assert_exact(&case, first, &|| Box::new(StopMap::new(2, 2, 0)));
        }
    }
}

#[test]
fn greedy_output_is_plain_greedy_output_and_both_drafters_propose() {
    let mut counted = Counts::default();
    let mut rounds_of = [0; 2];
    for seed in 0..40 {
        for (max_new_tokens, context) in [(1, 64), (5, 64), (24, 64), (24, 9)] {
            let mut case = Case::new(3, max_new_tokens, Some(2), 2300 + seed);
            case.target.context = context;
            let plain = greedy_plain(&mut case.target.clone(), &[0, 1], &case.limits);
            for first in FIRSTS {
                for bits in (0..1 << 12).step_by(401) {
                    let found = greedy(
                        &mut Advanced::from(&case.target),
                        &mut before(Advancing::from(&case.draft), first),
                        &mut StopMap::new(3, 3, bits),
                        &[0, 1],
                        &case.limits,
                    );
                    assert_eq!(found.token_ids, plain.token_ids);
                    assert_eq!(found.finish, plain.finish);
                    counted = [counted, found.trace.counts()].into_iter().sum();
                    for round in &found.trace.rounds {
                        for (drafter, _) in round.forwards.iter() {
                            rounds_of[usize::from(drafter == DrafterId::LOOK_UP)] += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(rounds_of.iter().all(|count| *count > 1000), "{rounds_of:?}");
    assert!(counted.num_accepted > 1000, "{counted:?}");
}

#[test]
fn a_looked_up_round_has_one_drafter_and_ignores_the_stop_rule() {
    let case = Case::new(3, 3, None, 2400);
    let first: LookupFirst = "2x4".parse().expect("one");
    let draft = LookupFirstDraft::new(Drafting::from(&case.draft), (first, None), NUM_SLOTS);
    // The rule allows one candidate; the look-up proposes two.
    let rule = &mut StopMap::new(3, 1, 0b111);
    let found =
        greedy(&mut case.target.clone(), &mut draft.clone(), rule, &[0, 1, 2, 0, 1], &case.limits);
    let looked_up = found.trace.rounds[0];
    assert_eq!(looked_up.forwards.iter().collect::<Vec<_>>(), [(DrafterId::LOOK_UP, 2)]);
    let found =
        greedy(&mut case.target.clone(), &mut draft.clone(), rule, &[0, 1, 2, 2, 1], &case.limits);
    let drafted = found.trace.rounds[0];
    assert_eq!(drafted.forwards.iter().collect::<Vec<_>>(), [(DrafterId::DRAFT, 1)]);
}

#[test]
fn sequences_side_by_side_get_the_output_and_counts_that_they_get_alone() {
    let case = Case::new(3, 9, Some(2), 2500);
    for first in FIRSTS {
        for bits in [0, 0b1001, 0b11_0110] {
            let members = members(bits, true);
            let draft = before(Drafting::from(&case.draft), first);
            assert_each_as_alone(&case.target, &draft, &members);
            let advancing = before(Advancing::from(&case.draft), first);
            assert_each_as_alone(&Advanced::from(&case.target), &advancing, &members);
        }
    }
}
