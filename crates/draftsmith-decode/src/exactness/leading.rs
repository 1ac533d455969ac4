//! Children of the leading node beside a cascade's chain leave the target's output what it is, whatever
//! ends rounds and chains, lenient or not.

use draftsmith_theory::{Decoding, DrafterId, Lenience, SeededDraws, StopRule};

use super::cascade::{
    ONE_AND_LOOKUP, TWO_AND_LOOKUP, distribution, fixed, leniences, lenient, matrix, of_drafts,
    of_self_draft, run,
};
use super::many::{assert_each_as_alone, members};
use super::tables::{Advanced, Anew, Asked, StopMap};
use super::{Case, STOPS, assert_same_distribution, penalised, warped};
use crate::session::tests::greedy_plain;

/// The paper's: a candidate of the draft, which reviews a look-up, then look-ups.
const PAPERS: [[usize; 2]; 2] = [[1, 3], [0, 1]];

/// Cascades of a draft: the paper's, and others with and without look-ups behind the chain.
fn of_one() -> Vec<Vec<Vec<usize>>> {
    [PAPERS, ONE_AND_LOOKUP[0], ONE_AND_LOOKUP[1]].map(matrix).to_vec()
}

fn assert_exact(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
    leading: usize,
    rule: &dyn Fn() -> Box<dyn StopRule>,
) {
    let expected = case.target_distribution();
    let drafter = || of_drafts(case, lengths, lenience).branching(leading);
    assert_same_distribution(&distribution(case, &case.target, &drafter, rule), &expected);
    let drafter = || of_self_draft(case, lengths, lenience).branching(leading);
    let advanced = Advanced::from(&case.target);
    assert_same_distribution(&distribution(case, &advanced, &drafter, rule), &expected);
}

#[test]
fn any_number_of_children_leaves_the_targets_distribution_lenient_or_not() {
    for (vocab_size, max_new_tokens, eos) in [(2, 4, None), (2, 4, Some(1)), (3, 3, Some(2))] {
        let case = Case::new(vocab_size, max_new_tokens, eos, 3100);
        for lenience in leniences(3.0) {
            // More than there are tokens, too.
            for leading in 2..=vocab_size + 1 {
                for lengths in of_one() {
                    assert_exact(&case, &lengths, lenience, leading, &|| fixed(9));
                }
            }
            // The first is the deepest.
            let of_two = TWO_AND_LOOKUP.map(matrix);
            for lengths in &of_two[usize::from(vocab_size == 3)..] {
                assert_exact(&case, lengths, lenience, 2, &|| fixed(9));
            }
        }
    }
}

#[test]
fn stop_maps_and_bounds_leave_the_targets_distribution() {
    for (vocab_size, depth, max_new_tokens) in [(2, 3, 4), (3, 2, 3)] {
        let case = Case::new(vocab_size, max_new_tokens, None, 3200);
        for lengths in of_one() {
            for bits in 0..1_u64 << StopMap::num_prefixes(vocab_size, depth) {
                for asked in [Asked::AfterDraw, Asked::EverySecondRound { skips: bits % 2 == 0 }] {
                    let map = StopMap { asked, ..StopMap::new(vocab_size, depth, bits) };
                    assert_exact(&case, &lengths, lenient(2.0), 2, &|| Box::new(map.clone()));
                }
            }
            for length in 1..4 {
                assert_exact(&case, &lengths, lenient(2.0), 2, &|| fixed(length));
            }
        }
    }
}

#[test]
fn warped_distributions_and_stop_strings_stay_exact() {
    let stopping = STOPS.map(|stop| Case::new(2, 4, None, 3310).stopping(stop));
    let warped = warped().map(|decoding| Case { decoding, ..Case::new(3, 3, Some(1), 3300) });
    for case in warped.into_iter().chain(stopping) {
        for lengths in of_one() {
            for lenience in leniences(3.0) {
                assert_exact(&case, &lengths, lenience, 2, &|| fixed(9));
            }
        }
    }
}

#[test]
fn nested_cascades_stay_exact_under_a_repetition_penalty() {
    for decoding in penalised() {
        let case = Case { decoding, ..Case::new(2, 4, None, 3350) };
        for lengths in &TWO_AND_LOOKUP.map(matrix)[1..] {
            assert_exact(&case, lengths, lenient(3.0), 2, &|| fixed(9));
        }
    }
}

#[test]
fn a_small_draft_vocabulary_leaves_the_targets_distribution() {
    for num_drawn in [1, 2] {
        let mut case = Case::new(3, 3, Some(1), 3360);
        case.draft.num_drawn = num_drawn;
        for lengths in of_one() {
            assert_exact(&case, &lengths, Lenience::NONE, 3, &|| fixed(9));
        }
    }
}

#[test]
fn greedy_output_is_plain_and_children_find_more_at_no_draft_forward() {
    let mut num_rounds = [0; 3];
    for seed in 0..30 {
        for (max_new_tokens, context) in [(1, 64), (5, 64), (24, 64), (24, 7)] {
            let mut case = Case::new(3, max_new_tokens, Some(2), 3400 + seed);
            case.target.context = context;
            case.decoding = Decoding::GREEDY;
            let plain = greedy_plain(&mut case.target.clone(), &[0], &case.limits);
            for (leading, lenience) in
                [1, 2, 3].into_iter().flat_map(|it| leniences(3.0).map(|of| (it, of)))
            {
                for lengths in of_one().into_iter().chain(TWO_AND_LOOKUP.map(matrix)) {
                    let drafter = of_self_draft(&case, &lengths, lenience).branching(leading);
                    let target = &mut Advanced::from(&case.target);
                    let unused = &mut SeededDraws::new(0, &["unused"]);
                    let found = run(&case, target, drafter, &mut *fixed(9), case.decoding, unused)
                        .expect("tables do not fail");
                    assert_eq!(
                        (&found.token_ids, found.finish),
                        (&plain.token_ids, plain.finish),
                        "{lengths:?}, {leading}"
                    );
                    num_rounds[leading - 1] += found.trace.rounds.len();
                    if lengths == matrix(PAPERS) {
                        for round in &found.trace.rounds {
                            let of_model =
                                round.forwards.iter().filter(|(id, _)| *id != DrafterId::MaxGram);
                            assert!(of_model.map(|(_, count)| count).sum::<usize>() <= 1);
                            assert!(round.depth <= 4 && round.num_drafted <= 4 * leading);
                        }
                    }
                }
            }
        }
    }
    // With all three tokens beside each other, the first one always stands.
    let [one, two, three] = num_rounds;
    assert!(10 * two < 9 * one && 10 * three < 9 * two, "{num_rounds:?}");
}

#[test]
fn branching_cascades_side_by_side_are_each_what_they_are_alone() {
    let case = Case::new(3, 9, Some(2), 3500);
    for bits in [0, 0b1001, 0b11_0110] {
        let members = members(bits, true);
        let drafts = Anew::new(&case, |case| {
            of_drafts(case, &matrix(TWO_AND_LOOKUP[2]), lenient(2.0)).branching(2)
        });
        assert_each_as_alone(&case.target, &drafts, &members);
        let drafts = Anew::new(&case, |case| {
            of_self_draft(case, &matrix(PAPERS), Lenience::NONE).branching(3)
        });
        assert_each_as_alone(&Advanced::from(&case.target), &drafts, &members);
    }
}
