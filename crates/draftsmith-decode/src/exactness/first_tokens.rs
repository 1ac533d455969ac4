//! Cascades that propose several first tokens preserve the target's distribution. The tests cover
//! lenient and exact review, and every stop map.

use draftsmith_theory::{
    Decoding, DrafterId, Lenience, MaxGramConfig, Proposal, SeededDraws, StopRule,
};

use super::cascade::{
    ONE_AND_LOOKUP, TWO_AND_LOOKUP, distribution, fixed, leniences, lenient, matrix, of_drafts,
    of_self_draft, run,
};
use super::many::{assert_each_as_alone, assert_independent, members};
use super::tables::{Advanced, Anew, Asked, StopMap};
use super::{Case, STOPS, assert_same_distribution, penalised, warped};
use crate::drafter::{DraftRound, Drafter, LookUp};
use crate::max_gram::MaxGramDraft;
use crate::session::tests::greedy_plain;

/// The paper's matrix: one candidate of the draft, which reviews one look-up, then three look-ups.
const PAPERS: [[usize; 2]; 2] = [[1, 3], [0, 1]];

/// Returns matrices of a draft and prompt lookup, with and without look-ups in the target's row.
fn of_one() -> Vec<Vec<Vec<usize>>> {
    [PAPERS, ONE_AND_LOOKUP[0], ONE_AND_LOOKUP[1]].map(matrix).to_vec()
}

/// Compares the distribution of a cascade with `num` first tokens with the target's, for a table and
/// for a target that its drafter advances.
fn assert_exact(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
    num: usize,
    rule: &dyn Fn() -> Box<dyn StopRule>,
) {
    let expected = case.target_distribution();
    let drafter = || of_drafts(case, lengths, lenience).with_first_tokens(num);
    assert_same_distribution(&distribution(case, &case.target, &drafter, rule), &expected);
    let drafter = || of_self_draft(case, lengths, lenience).with_first_tokens(num);
    let advanced = Advanced::from(&case.target);
    assert_same_distribution(&distribution(case, &advanced, &drafter, rule), &expected);
}

#[test]
fn any_number_of_first_tokens_leaves_the_targets_distribution_lenient_or_not() {
    for (vocab_size, max_new_tokens, eos) in [(2, 4, None), (2, 4, Some(1)), (3, 3, Some(2))] {
        let case = Case::new(vocab_size, max_new_tokens, eos, 3100);
        for lenience in leniences(3.0) {
            // The largest number exceeds the vocabulary.
            for num in 2..=vocab_size + 1 {
                for lengths in of_one() {
                    assert_exact(&case, &lengths, lenience, num, &|| fixed(9));
                }
                let expected = case.target_distribution();
                let bare = || {
                    let cascade = of_drafts(&case, &matrix(PAPERS), lenience);
                    cascade.with_first_tokens(num).with_bare_siblings()
                };
                let found = distribution(&case, &case.target, &bare, &|| fixed(9));
                assert_same_distribution(&found, &expected);
            }
            // The first matrix is the deepest.
            let two_and_lookup = TWO_AND_LOOKUP.map(matrix);
            for lengths in &two_and_lookup[usize::from(vocab_size == 3)..] {
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
fn each_sibling_comes_after_the_chain_with_what_is_looked_up_after_it_alone() {
    let (prompt, mut num_found) = ([0, 1, 2, 0, 2, 1, 1, 0], 0);
    for (seed, is_bare) in (0..20).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut case = Case::new(3, 9, None, 3600 + seed);
        case.draft.never = 0.0;
        let target = &mut case.target.clone();
        let mut cascade = of_drafts(&case, &matrix(PAPERS), Lenience::NONE).with_first_tokens(3);
        if is_bare {
            cascade = cascade.with_bare_siblings();
        }
        cascade.begin(target, 0, &prompt).expect("tables do not fail");
        let (mut tokens, mut proposal) = (prompt.to_vec(), Proposal::default());
        let round = DraftRound {
            slot: 0,
            tokens: &mut tokens,
            proposal: &mut proposal,
            rule: &mut *fixed(4),
            limits: case.limits.of_drafts(4),
            decoding: &Decoding::GREEDY,
            draws: &mut SeededDraws::new(0, &["unused"]),
        };
        cascade.propose(target, &mut [round]).expect("tables do not fail");
        let proposed = tokens.split_off(prompt.len());
        let nodes = proposal.nodes();
        assert!(proposed.iter().eq(nodes.iter().map(|node| &node.token_id)));
        let is_root = |at: &usize| nodes[*at].parent.is_none();
        let roots: Vec<usize> = (0..nodes.len()).filter(is_root).collect();
        assert_eq!(roots.len(), 3);
        for (nth, root) in roots.iter().enumerate() {
            let end = roots.get(nth + 1).map_or(nodes.len(), |next| *next);
            assert_eq!(nodes[*root].rank, nth);
            assert!((root + 1..end).all(|at| nodes[at].parent == Some(at - 1)));
            if nth > 0 {
                let mut alone = MaxGramDraft::new(MaxGramConfig::default(), (None, None), 1);
                Drafter::begin(&mut alone, &mut (), 0, &prompt).expect("it does not fail");
                let mut text = [&prompt[..], &[proposed[*root]]].concat();
                let most = if is_bare { 0 } else { 3 };
                let found = LookUp::<()>::look_up(&mut alone, 0, &mut text, most, &[]);
                assert_eq!(proposed[root + 1..end], found);
                num_found += found.len();
            }
        }
    }
    assert!(num_found > 50, "{num_found}");
}

#[test]
fn greedy_output_is_plain_and_siblings_save_rounds_but_take_no_draft_forward() {
    let mut num_rounds = [0; 3];
    for seed in 0..30 {
        for (max_new_tokens, context) in [(1, 64), (5, 64), (24, 64), (24, 7)] {
            let mut case = Case::new(3, max_new_tokens, Some(2), 3400 + seed);
            case.target.context = context;
            case.decoding = Decoding::GREEDY;
            let plain = greedy_plain(&mut case.target.clone(), &[0], &case.limits);
            for (num, lenience) in
                [1, 2, 3].into_iter().flat_map(|num| leniences(3.0).map(|of| (num, of)))
            {
                for lengths in of_one().into_iter().chain(TWO_AND_LOOKUP.map(matrix)) {
                    let drafter = of_self_draft(&case, &lengths, lenience).with_first_tokens(num);
                    let target = &mut Advanced::from(&case.target);
                    let unused = &mut SeededDraws::new(0, &["unused"]);
                    let found = run(&case, target, drafter, &mut *fixed(9), case.decoding, unused)
                        .expect("tables do not fail");
                    assert_eq!(
                        (&found.token_ids, found.finish),
                        (&plain.token_ids, plain.finish),
                        "{lengths:?}, {num}"
                    );
                    num_rounds[num - 1] += found.trace.rounds.len();
                    if lengths == matrix(PAPERS) {
                        for round in &found.trace.rounds {
                            let of_models = round.forwards.iter();
                            let of_models = of_models.filter(|(id, _)| *id != DrafterId::LOOK_UP);
                            assert!(of_models.map(|(_, count)| count).sum::<usize>() <= 1);
                            assert!(round.depth <= 4 && round.num_drafted <= 4 * num);
                        }
                    }
                }
            }
        }
    }
    // If all three tokens are proposed, the target accepts one of them in every round.
    let [one, two, three] = num_rounds;
    assert!(10 * two < 9 * one && 10 * three < 9 * two, "{num_rounds:?}");
}

#[test]
fn cascades_with_siblings_side_by_side_give_what_each_gives_alone() {
    let case = Case::new(3, 9, Some(2), 3500);
    for bits in [0, 0b1001, 0b11_0110] {
        let members = members(bits, true);
        let drafts = Anew::new(&case, |case| {
            of_drafts(case, &matrix(TWO_AND_LOOKUP[2]), lenient(2.0)).with_first_tokens(2)
        });
        assert_each_as_alone(&case.target, &drafts, &members);
        let drafts = Anew::new(&case, |case| {
            of_self_draft(case, &matrix(PAPERS), Lenience::NONE).with_first_tokens(3)
        });
        assert_each_as_alone(&Advanced::from(&case.target), &drafts, &members);
    }
    let case = Case::new(2, 3, Some(1), 3510);
    let members: [(&[u32], u64); 2] = [(&[0], 1), (&[1, 0], 0)];
    let drafts = Anew::new(&case, |case| {
        of_drafts(case, &matrix(PAPERS), lenient(3.0)).with_first_tokens(2)
    });
    assert_independent(&case, &case.target, &drafts, &members);
}
