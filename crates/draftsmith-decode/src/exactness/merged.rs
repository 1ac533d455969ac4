//! Several drafters' chains in one tree leave the target's output what it is, whenever their rule
//! stops and whatever they agree on.

use draftsmith_theory::{Counts, LookupFirst, StopRule};

use super::many::{assert_each_as_alone, members};
use super::tables::{Advanced, Advancing, Asked, Drafting, NUM_SLOTS, StopMap, Table};
use super::{Case, STOPS, assert_same_distribution, rules, warped};
use crate::drafter::{DraftRound, Drafter, StepDrafter};
use crate::error::DecodeError;
use crate::merged::MergedDraft;
use crate::session::tests::{greedy, greedy_plain};
use crate::target::Target;

/// Drafters that are tables, made anew for each run.
struct Merged<'c, T>(&'c Case, fn(&Case) -> Vec<Box<dyn StepDrafter<T>>>, MergedDraft<'static, T>);

impl<'c, T: Target> Merged<'c, T> {
    fn new(case: &'c Case, models: fn(&Case) -> Vec<Box<dyn StepDrafter<T>>>) -> Self {
        let lookup = LookupFirst { min_match: 1, most: 2 };
        Self(case, models, MergedDraft::new(models(case), Some(lookup), NUM_SLOTS))
    }
}

impl<T: Target> Clone for Merged<'_, T> {
    fn clone(&self) -> Self {
        Self::new(self.0, self.1)
    }
}

impl<T: Target> Drafter<T> for Merged<'_, T> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        self.2.begin(target, slot, prompt)
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        self.2.propose(target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.2.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.2.context()
    }
}

fn small(case: &Case) -> Table {
    Table { seed: case.draft.seed + 7000, ..case.draft.clone() }
}

fn two_drafts<T: Target>(case: &Case) -> Vec<Box<dyn StepDrafter<T>>> {
    vec![Box::new(Drafting::from(&case.draft)), Box::new(Drafting::from(&small(case)))]
}

fn self_draft_and_draft(case: &Case) -> Vec<Box<dyn StepDrafter<Advanced>>> {
    vec![Box::new(Advancing::from(&case.draft)), Box::new(Drafting::from(&small(case)))]
}

fn case_of(vocab_size: usize, max_new_tokens: usize, eos: Option<u32>, seed: u64) -> Case {
    Case { branches: true, ..Case::new(vocab_size, max_new_tokens, eos, seed) }
}

fn assert_exact(case: &Case, rule: &dyn Fn() -> Box<dyn StopRule>) {
    let expected = case.target_distribution();
    let drafts = Merged::new(case, two_drafts);
    assert_same_distribution(&case.output_distribution(&case.target, &drafts, rule), &expected);
    let (advanced, drafts) =
        (Advanced::from(&case.target), Merged::new(case, self_draft_and_draft));
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
fn greedy_output_is_plain_and_agreement_is_proposed_once() {
    let mut counted = Counts::default();
    for seed in 0..30 {
        for (max_new_tokens, context) in [(1, 64), (5, 64), (24, 64), (24, 9)] {
            let mut case = case_of(3, max_new_tokens, Some(2), 2800 + seed);
            case.target.context = context;
            let plain = greedy_plain(&mut case.target.clone(), &[0, 1], &case.limits);
            for bits in (0..1 << 12).step_by(401) {
                let found = greedy(
                    &mut Advanced::from(&case.target),
                    &mut Merged::new(&case, self_draft_and_draft),
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
    // Each candidate took a forward, or a look-up, of each drafter that named it.
    assert!(counted.num_drafted < counted.num_draft_forwards, "{counted:?}");
    assert!(counted.num_accepted > 1000, "{counted:?}");
}

#[test]
fn trees_side_by_side_are_each_what_they_are_alone() {
    let case = case_of(3, 9, Some(2), 2900);
    for bits in [0, 0b1001, 0b11_0110] {
        let members = members(bits, true);
        assert_each_as_alone(&case.target, &Merged::new(&case, two_drafts), &members);
        let drafts = Merged::new(&case, self_draft_and_draft);
        assert_each_as_alone(&Advanced::from(&case.target), &drafts, &members);
    }
}
