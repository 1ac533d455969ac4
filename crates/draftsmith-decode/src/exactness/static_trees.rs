//! The proof that replay of greedy static trees gives the counts of decoding, under every rule.

use draftsmith_theory::{
    Counts, Decoding, RoundCosts, SeededDraws, StopRuleConfig, TheoryError, TreeShape,
};

use super::replay::{MAX_LENGTH, Models, self_draft, separate};
use super::trees::Trees;
use super::{Case, HEADS, STOPS, rules_with};
use crate::drafter::StepDrafter;
use crate::target::Target;

/// Shapes with one sibling, with chains and with whole trees; some whose chain is longer than the shape,
/// and some whose branches are deeper than the chain.
const SHAPES: [&str; 9] =
    ["1", "3", "1-1-1", "2-1", "2-2.1", "1-2-0.1", "3-2.0.1-1", "2-0.2-1.2", "3-3.3.3-1"];

fn shapes() -> impl Iterator<Item = TreeShape> {
    SHAPES.into_iter().map(|text| text.parse().expect("a shape"))
}

impl<T: Target + Clone, D: StepDrafter<T> + Clone + 'static> Models<'_, T, D> {
    /// Every shape under every rule along one greedy response, decoded and replayed.
    fn assert_trees(&self, mut check: impl FnMut(Counts, Counts, &str)) {
        let unused = &mut SeededDraws::new(0, &["unused"]);
        let (tokens, recordings) = self.record(unused);
        let free = RoundCosts::new([].into(), vec![0.0]).expect("times");
        for shape in shapes() {
            for config in rules_with(self.head, MAX_LENGTH) {
                let drafter = &mut Trees(self.drafter.clone(), shape);
                let rule = &mut *config.init().expect("valid");
                let (found, decoded) = self.decode_with(drafter, rule, unused);
                assert_eq!(found, tokens);
                let spent = recordings.replay_tree(shape, &config, |_| 0.0, &free);
                let replayed = spent.expect("recorded")[0].counts;
                check(decoded, replayed, &format!("{shape}, {config:?}"));
            }
        }
    }

    fn assert_same_trees(&self) {
        self.assert_trees(|decoded, replayed, setting| assert_eq!(decoded, replayed, "{setting}"));
    }
}

/// A case in which every token is possible, so that each node has as many children as its shape says.
fn full(case: Case) -> Case {
    let mut case = Case { branches: true, ..case };
    case.draft.never = 0.0;
    case
}

#[test]
fn greedy_static_trees_replay_with_the_counts_of_decoding() {
    for seed in 0..18 {
        for (max_new_tokens, eos) in [(1, None), (2, Some(2)), (14, Some(2)), (20, None)] {
            for head in HEADS {
                let mut case = full(Case::new(3, max_new_tokens, eos, 1300 + seed)).with_head(head);
                match seed % 6 {
                    4 => (case.target.context, case.draft.context) = (9, 9),
                    5 => case.draft.num_drawn = 2,
                    _ => (),
                }
                let decoding = Decoding::GREEDY.penalising([1.0, 1.7, 0.6][seed as usize % 3]);
                separate(&case, head, decoding).assert_same_trees();
                self_draft(&case, head, decoding).assert_same_trees();
            }
        }
    }
}

#[test]
fn static_trees_replay_up_to_the_stop_string() {
    for stop in STOPS {
        for seed in 0..10 {
            let case = full(Case::new(3, 14, Some(2), 1320 + seed)).stopping(stop);
            separate(&case, HEADS[0], Decoding::GREEDY).assert_same_trees();
            self_draft(&case, HEADS[0], Decoding::GREEDY).assert_same_trees();
        }
    }
}

#[test]
fn replay_counts_more_nodes_only_where_a_drafter_has_too_few_tokens() {
    let mut num_fewer = 0;
    for seed in 0..20 {
        let case = Case { branches: true, ..Case::new(3, 14, Some(2), 1340 + seed) };
        separate(&case, HEADS[0], Decoding::GREEDY).assert_trees(|decoded, replayed, setting| {
            num_fewer += replayed.num_drafted - decoded.num_drafted;
            let but_nodes = |counts| Counts { num_drafted: 0, num_discarded: 0, ..counts };
            assert_eq!(but_nodes(decoded), but_nodes(replayed), "{setting}");
        });
    }
    assert!(num_fewer > 0);
}

#[test]
fn trees_that_are_not_static_and_sampled_responses_are_refused() {
    let case = full(Case::new(3, 14, None, 1360));
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let free = RoundCosts::new([].into(), vec![0.0]).expect("times");
    let replay = |decoding, shape: &str, draws: &mut SeededDraws| {
        let (_, recordings) = separate(&case, HEADS[0], decoding).record(draws);
        let length = draftsmith_theory::FixedLengthConfig { candidate_length: 2 };
        let (shape, rule) = (shape.parse().expect("a shape"), StopRuleConfig::from(length));
        recordings.replay_tree(shape, &rule, |_| 0.0, &free).map(drop)
    };
    let by_width = replay(Decoding::GREEDY, "2x2x4", unused);
    assert_eq!(by_width, Err(TheoryError::NoStaticTree("2x2x4".to_owned())));
    assert_eq!(replay(case.decoding, "2-1", unused), Err(TheoryError::NoRanksRecorded));
    assert_eq!(replay(Decoding::GREEDY, "2-1", unused), Ok(()));
}
