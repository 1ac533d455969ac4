//! A tree merged from several drafters' chains preserves the target's distribution under every stop
//! rule.

use draftsmith_theory::{Counts, LookupFirst, StopRule};

use super::many::{assert_each_as_alone, members};
use super::tables::{Advanced, Advancing, Anew, Asked, Drafting, NUM_SLOTS, StopMap, Table};
use super::{Case, STOPS, assert_same_distribution, rules, warped};
use crate::drafter::StepDrafter;
use crate::merged::MergedDraft;
use crate::session::tests::{greedy, greedy_plain};
use crate::target::Target;

/// Builds a drafter that merges the chains of `models` and of look-ups into one tree.
fn merged<T: Target>(models: Vec<Box<dyn StepDrafter<T>>>) -> MergedDraft<'static, T> {
    MergedDraft::new(models, (Some(LookupFirst::new(1, 2)), None), NUM_SLOTS)
}

fn small(case: &Case) -> Table {
    Table { seed: case.draft.seed + 7000, ..case.draft.clone() }
}

fn two_drafts<T: Target>(case: &Case) -> MergedDraft<'static, T> {
    merged(vec![Box::new(Drafting::from(&case.draft)), Box::new(Drafting::from(&small(case)))])
}

fn self_draft_and_draft(case: &Case) -> MergedDraft<'static, Advanced> {
    merged(vec![Box::new(Advancing::from(&case.draft)), Box::new(Drafting::from(&small(case)))])
}

fn case_of(vocab_size: usize, max_new_tokens: usize, eos: Option<u32>, seed: u64) -> Case {
    Case { branches: true, ..Case::new(vocab_size, max_new_tokens, eos, seed) }
}

fn assert_exact(case: &Case, rule: &dyn Fn() -> Box<dyn StopRule>) {
    let expected = case.target_distribution();
    let drafts = Anew::new(case, two_drafts);
    assert_same_distribution(&case.output_distribution(&case.target, &drafts, rule), &expected);
    let (advanced, drafts) = (Advanced::from(&case.target), Anew::new(case, self_draft_and_draft));
    assert_same_distribution(&case.output_distribution(&advanced, &drafts, rule), &expected);
}

#[test]
fn every_stop_map_leaves_the_targets_distribution() {
    for (vocab_size, depth, max_new_tokens) in [(2, 2, 4), (3, 1, 3)] {
        for eos in [None, Some(1)] {
            let case = case_of(vocab_size, max_new_tokens, eos, 2600);
            for asked in
                [Asked::AfterDraw, Asked::BeforeDraw, Asked::EverySecondRound { skips: true }]
            {
                for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                    let map = StopMap { asked, ..StopMap::new(vocab_size, depth, bits) };
                    assert_exact(&case, &|| Box::new(map.clone()));
                }
            }
        }
    }
}

#[test]
fn every_rule_without_a_head_leaves_the_targets_distribution() {
    let case = case_of(2, 4, Some(1), 2700);
    for config in rules(3).iter().filter(|rule| !rule.needs().acceptance_prob) {
        assert_exact(&case, &|| config.init().expect("a valid rule"));
    }
}

#[test]
fn warped_distributions_and_stop_strings_stay_exact() {
    let stopping = STOPS.map(|stop| case_of(2, 4, None, 2760).stopping(stop));
    let warped = warped().map(|decoding| Case { decoding, ..case_of(2, 4, Some(1), 2750) });
    for case in warped.into_iter().chain(stopping) {
        assert_exact(&case, &|| Box::new(StopMap::new(2, 2, 0)));
    }
}

#[test]
fn greedy_output_is_plain_greedy_output_and_equal_candidates_are_proposed_once() {
    let mut counted = Counts::default();
    for seed in 0..30 {
        for (max_new_tokens, context) in [(1, 64), (5, 64), (24, 64), (24, 9)] {
            let mut case = case_of(3, max_new_tokens, Some(2), 2800 + seed);
            case.target.context = context;
            let plain = greedy_plain(&mut case.target.clone(), &[0, 1], &case.limits);
            for bits in (0..1 << 12).step_by(401) {
                let found = greedy(
                    &mut Advanced::from(&case.target),
                    &mut Anew::new(&case, self_draft_and_draft),
                    &mut StopMap::new(3, 3, bits),
                    &[0, 1],
                    &case.limits,
                );
                assert_eq!(
                    (found.token_ids, found.finish),
                    (plain.token_ids.clone(), plain.finish)
                );
                counted = [counted, found.trace.counts()].into_iter().sum();
            }
        }
    }
    // Each drafter that proposed a shared candidate is counted with a forward or a lookup.
    assert!(counted.num_drafted < counted.num_draft_forwards, "{counted:?}");
    assert!(counted.num_accepted > 1000, "{counted:?}");
}

#[test]
fn trees_side_by_side_give_what_each_gives_alone() {
    let case = case_of(3, 9, Some(2), 2900);
    for bits in [0, 0b1001, 0b11_0110] {
        let members = members(bits, true);
        assert_each_as_alone(&case.target, &Anew::new(&case, two_drafts), &members);
        let drafts = Anew::new(&case, self_draft_and_draft);
        assert_each_as_alone(&Advanced::from(&case.target), &drafts, &members);
    }
}
