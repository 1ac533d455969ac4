//! Trees of every shape preserve the target's distribution under every stop rule.

use draftsmith_theory::{StopRule, TreeShape};

use super::many::{assert_each_as_alone, members};
use super::tables::{Advanced, Advancing, Asked, Drafting, StopMap};
use super::{Case, HEADS, STOPS, assert_same_distribution, rules_with, warped};
use crate::drafter::{DraftRound, Drafter, StepDrafter};
use crate::error::Result;
use crate::session::tests::{greedy, greedy_plain};
use crate::tree_draft::TreeDraft;

/// Chains with siblings, trees whose drafter reads some nodes or all, and trees with much and little room.
const SHAPES: [&str; 10] = [
    "1x1x0",
    "2x1x9",
    "3-1x1x2",
    "2x2x2",
    "2x2x9",
    "3x2x4",
    "2-3x9x99",
    "2x1x9-drawn",
    "2x2x2-drawn",
    "3-2x9x99-drawn",
];

/// A table as a drafter that proposes trees.
#[derive(Clone)]
pub(super) struct Trees<D>(pub(super) D, pub(super) TreeShape);

impl<T, D: StepDrafter<T>> Drafter<T> for Trees<D> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        TreeDraft::<T>::new(&mut self.0, self.1).begin(target, slot, prompt)
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        TreeDraft::<T>::new(&mut self.0, self.1).propose(target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        TreeDraft::<T>::new(&mut self.0, self.1).commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.0.context()
    }
}

fn shape(text: &str) -> TreeShape {
    text.parse().expect("a shape")
}

fn tree_case(vocab_size: usize, max_new_tokens: usize, eos: Option<u32>, seed: u64) -> Case {
    Case { branches: true, ..Case::new(vocab_size, max_new_tokens, eos, seed) }
}

fn assert_exact(case: &Case, shape: TreeShape, rule: &dyn Fn() -> Box<dyn StopRule>) {
    let expected = case.target_distribution();
    let draft = Trees(Drafting::from(&case.draft), shape);
    assert_same_distribution(&case.output_distribution(&case.target, &draft, rule), &expected);
    let advancing = Trees(Advancing::from(&case.draft), shape);
    let advanced = Advanced::from(&case.target);
    assert_same_distribution(&case.output_distribution(&advanced, &advancing, rule), &expected);
}

#[test]
fn every_shape_leaves_the_targets_distribution_under_every_stop_map() {
    for (vocab_size, depth, max_new_tokens) in [(2, 1, 3), (2, 2, 4), (3, 1, 3)] {
        let num_maps = 1_u64 << StopMap::num_prefixes(vocab_size, depth);
        for shape in SHAPES.map(shape) {
            for eos in [None, Some(1)] {
                for asked in
                    [Asked::AfterDraw, Asked::BeforeDraw, Asked::EverySecondRound { skips: true }]
                {
                    let case = tree_case(vocab_size, max_new_tokens, eos, 40);
                    for bits in 0..num_maps {
                        let rule = StopMap { asked, ..StopMap::new(vocab_size, depth, bits) };
                        assert_exact(&case, shape, &|| Box::new(rule.clone()));
                    }
                }
            }
        }
    }
}

#[test]
fn every_rule_leaves_the_targets_distribution_along_a_trees_chain() {
    for head in HEADS {
        let case = tree_case(2, 4, Some(1), 800).with_head(head);
        for config in rules_with(head, 3) {
            for shape in ["2x2x3", "2x2x3-drawn"].map(shape) {
                assert_exact(&case, shape, &|| config.init().expect("a valid rule"));
            }
        }
    }
}

#[test]
fn warped_distributions_and_stop_strings_stay_exact_in_every_shape() {
    let stopping = STOPS.map(|stop| tree_case(2, 4, None, 46).stopping(stop));
    let warped = warped().map(|decoding| Case { decoding, ..tree_case(2, 4, Some(1), 45) });
    for case in warped.into_iter().chain(stopping) {
        for shape in SHAPES.map(shape) {
            assert_exact(&case, shape, &|| Box::new(StopMap::new(2, 2, 0)));
        }
    }
}

#[test]
fn larger_trees_leave_the_targets_distribution() {
    let shapes = ["3-2x2x4", "2x2x4-drawn", "3-2-1x9x99", "2-2-1x9x99-drawn"];
    for (seed, shape) in shapes.map(shape).into_iter().enumerate() {
        let case = tree_case(3, 3, Some(2), 60 + seed as u64);
        for bits in [0, 0b10, 0b101] {
            assert_exact(&case, shape, &|| Box::new(StopMap::new(3, 2, bits)));
        }
    }
}

#[test]
fn a_small_draft_vocabulary_leaves_the_targets_distribution_in_trees() {
    for num_drawn in [1, 2] {
        let mut case = tree_case(3, 3, Some(1), 910);
        case.draft.num_drawn = num_drawn;
        for shape in ["3x2x4", "3x2x4-drawn", "3-1x9x99", "3-1x9x99-drawn"].map(shape) {
            assert_exact(&case, shape, &|| Box::new(StopMap::new(3, 2, 0)));
        }
    }
}

#[test]
fn greedy_trees_give_plain_greedy_output_in_fewer_rounds() {
    let mut num_rounds = [0; 2];
    for seed in 0..40 {
        for (max_new_tokens, context) in [(1, 64), (5, 64), (9, 64), (9, 6)] {
            let mut case = tree_case(3, max_new_tokens, Some(2), 200 + seed);
            case.target.context = context;
            let plain = greedy_plain(&mut case.target.clone(), &[0], &case.limits);
            for (nth, shape) in SHAPES.map(shape).into_iter().enumerate() {
                for bits in (0..1 << 12).step_by(401) {
                    let generation = greedy(
                        &mut Advanced::from(&case.target),
                        &mut Trees(Advancing::from(&case.draft), shape),
                        &mut StopMap::new(3, 3, bits),
                        &[0],
                        &case.limits,
                    );
                    assert_eq!(generation.token_ids, plain.token_ids);
                    assert_eq!(generation.finish, plain.finish);
                    if let Some(of_shape) = [0, 6].iter().position(|shape| *shape == nth) {
                        num_rounds[of_shape] += generation.trace.rounds.len();
                    }
                }
            }
        }
    }
    // Draft and target are unrelated, so a whole tree of three tokens finds more than a chain.
    assert!(10 * num_rounds[1] < 9 * num_rounds[0], "{num_rounds:?}");
}

#[test]
fn trees_side_by_side_give_what_each_gives_alone() {
    let case = tree_case(3, 9, Some(2), 77);
    for shape in SHAPES.map(shape) {
        for bits in [0, 0b1001] {
            let members = members(bits, true);
            let draft = Trees(Drafting::from(&case.draft), shape);
            assert_each_as_alone(&case.target, &draft, &members);
            let advancing = Trees(Advancing::from(&case.draft), shape);
            assert_each_as_alone(&Advanced::from(&case.target), &advancing, &members);
        }
    }
}
