//! Cascades preserve the target's distribution. The tests cover vertical, horizontal and mixed
//! cascades with lenient and exact review, with and without prompt lookup. Drafters are tables, or
//! advance the target as a self-draft does.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

use draftsmith_theory::{
    Counts, Decoding, DrafterId, Draws, FixedLengthConfig, Lenience, MaxGramConfig, SeededDraws,
    StopRule, StopRuleConfig, distribution_of, enumerate,
};

use super::many::{assert_each_as_alone, assert_independent, greedy_many, members};
use super::tables::{Advanced, Advancing, Anew, Asked, Drafting, StopMap, Table};
use super::{Case, STOPS, assert_same_distribution, penalised, rules, warped};
use crate::cascade::{Cascade, CascadeConfig};
use crate::decode::{decode_many, decode_plain, decode_speculative};
use crate::drafter::{DraftRound, DraftRow, DraftStep, Drafter, LookUp, StepDrafter};
use crate::error::{DecodeError, Result};
use crate::max_gram::MaxGramDraft;
use crate::sequence::{Generation, Request};
use crate::target::Target;

const ID: DrafterId = DrafterId::named("cascade");

/// Matrices K for two models and prompt lookup.
pub(super) const TWO_AND_LOOKUP: [[[usize; 3]; 3]; 5] = [
    // The first drafter reviews the second, which reviews looked-up tokens.
    [[2, 0, 0], [0, 1, 0], [0, 0, 2]],
    // The three drafters take turns.
    [[1, 1, 1], [0, 0, 0], [0, 0, 0]],
    // Drafters review each other and take turns, as in the paper.
    [[1, 1, 1], [0, 1, 1], [0, 0, 1]],
    // A step accepts more tokens than K asks for.
    [[1, 0, 0], [0, 2, 0], [0, 0, 0]],
    // The first drafter does not take part.
    [[0, 1, 1], [0, 0, 0], [0, 0, 1]],
];
pub(super) const ONE_AND_LOOKUP: [[[usize; 2]; 2]; 3] =
    [[[2, 0], [0, 2]], [[1, 2], [0, 1]], [[0, 2], [0, 0]]];

/// Returns a lenience for all candidates, including looked-up ones.
pub(super) fn lenient(lenience: f64) -> Lenience {
    Lenience::new(lenience).expect("1 or more").with_look_ups()
}

/// Returns three leniences: none, one that excludes look-ups, and one for all candidates.
pub(super) fn leniences(lenience: f64) -> [Lenience; 3] {
    [Lenience::NONE, Lenience::new(lenience).expect("1 or more"), lenient(lenience)]
}

pub(super) fn matrix<const N: usize>(rows: [[usize; N]; N]) -> Vec<Vec<usize>> {
    rows.iter().map(|row| row.to_vec()).collect()
}

/// Returns the case's draft, and another one for the smaller drafter of a cascade.
fn drafts(case: &Case) -> [Table; 2] {
    let small = Table { seed: case.draft.seed + 7000, ..case.draft.clone() };
    [case.draft.clone(), small]
}

fn boxed<T>(model: impl StepDrafter<T> + 'static) -> Box<dyn StepDrafter<T>> {
    Box::new(model)
}

fn cascade<T: Target>(
    models: Vec<Box<dyn StepDrafter<T>>>,
    lengths: Vec<Vec<usize>>,
    lenience: Lenience,
    rules: &[Option<StopRuleConfig>],
) -> Cascade<'static, T> {
    let lookup =
        MaxGramDraft::new(MaxGramConfig::default(), (None, None), super::tables::NUM_SLOTS);
    let lookup = (lengths.len() > models.len()).then(|| Box::new(lookup) as Box<dyn LookUp<_>>);
    let config = CascadeConfig { lenience, rules: rules.to_vec(), ..CascadeConfig::new(lengths) };
    Cascade::new(ID, config, models, lookup)
}

/// Builds a cascade of both drafts, or of the larger one if the matrix is too small for both and look-ups.
pub(super) fn of_drafts<T: Target>(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
) -> Cascade<'static, T> {
    of_drafts_by(case, lengths, lenience, &[])
}

/// Builds the cascade of `of_drafts` with stop rules for its chains.
pub(super) fn of_drafts_by<T: Target>(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
    rules: &[Option<StopRuleConfig>],
) -> Cascade<'static, T> {
    let models = drafts(case).into_iter().take((lengths.len() - 1).max(1));
    let models = models.map(|table| boxed(Drafting::from(&table)));
    cascade(models.collect(), lengths.to_vec(), lenience, rules)
}

/// Builds a cascade with a self-draft in place of the larger draft.
pub(super) fn of_self_draft(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
) -> Cascade<'static, Advanced> {
    of_self_draft_by(case, lengths, lenience, &[])
}

/// Builds the cascade of `of_self_draft` with stop rules for its chains.
pub(super) fn of_self_draft_by(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
    rules: &[Option<StopRuleConfig>],
) -> Cascade<'static, Advanced> {
    let [large, small] = drafts(case);
    let mut models = vec![boxed(Advancing::from(&large))];
    if lengths.len() > 2 {
        models.push(boxed(Drafting::from(&small)));
    }
    cascade(models, lengths.to_vec(), lenience, rules)
}

pub(super) fn run<T: Target>(
    case: &Case,
    target: &mut T,
    mut drafter: Cascade<'static, T>,
    rule: &mut dyn StopRule,
    decoding: Decoding,
    draws: &mut dyn Draws,
) -> Result<Generation> {
    let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
    decode_speculative(
        target,
        &mut drafter,
        Request { prompt: &[0], decoding, limits: &case.limits, rule: Some(rule), draws },
        observe,
    )
}

pub(super) fn distribution<T: Target + Clone>(
    case: &Case,
    target: &T,
    drafter: &dyn Fn() -> Cascade<'static, T>,
    rule: &dyn Fn() -> Box<dyn StopRule>,
) -> BTreeMap<Vec<u32>, f64> {
    distribution_of(enumerate(|draws| {
        let found = run(case, &mut target.clone(), drafter(), &mut *rule(), case.decoding, draws);
        found.expect("tables do not fail").token_ids
    }))
}

pub(super) fn fixed(candidate_length: usize) -> Box<dyn StopRule> {
    let rule = StopRuleConfig::from(FixedLengthConfig { candidate_length });
    rule.init().expect("a length")
}

/// Compares a cascade's distribution with the target's, for a table and for a target that its drafter
/// advances.
fn assert_exact(
    case: &Case,
    lengths: &[Vec<usize>],
    lenience: Lenience,
    rule: &dyn Fn() -> Box<dyn StopRule>,
) {
    let expected = case.target_distribution();
    let drafter = || of_drafts(case, lengths, lenience);
    assert_same_distribution(&distribution(case, &case.target, &drafter, rule), &expected);
    let (advanced, drafter) =
        (Advanced::from(&case.target), || of_self_draft(case, lengths, lenience));
    assert_same_distribution(&distribution(case, &advanced, &drafter, rule), &expected);
}

#[test]
fn every_cascade_leaves_the_targets_distribution_lenient_or_not() {
    for (vocab_size, max_new_tokens, eos) in [(2, 4, None), (2, 4, Some(1)), (3, 3, None)] {
        for lenience in leniences(4.0).into_iter().chain([lenient(1.5)]) {
            let case = Case::new(vocab_size, max_new_tokens, eos, 1700);
            for lengths in ONE_AND_LOOKUP.map(matrix) {
                assert_exact(&case, &lengths, lenience, &|| fixed(9));
            }
            let two_and_lookup = TWO_AND_LOOKUP.map(matrix);
            // The first matrix is the deepest and takes a minute with three new tokens out of three.
            for lengths in &two_and_lookup[usize::from(vocab_size == 3)..] {
                assert_exact(&case, lengths, lenience, &|| fixed(9));
            }
        }
    }
}

#[test]
fn warped_distributions_stay_exact() {
    for decoding in warped() {
        let case = Case { decoding, ..Case::new(3, 3, Some(1), 1710) };
        for lengths in ONE_AND_LOOKUP.map(matrix) {
            assert_exact(&case, &lengths, lenient(3.0), &|| fixed(9));
        }
    }
}

#[test]
fn stop_strings_end_every_round_where_they_end_plain_decoding() {
    for stop in STOPS {
        let case = Case::new(2, 4, None, 1718).stopping(stop);
        for lengths in ONE_AND_LOOKUP.map(matrix).iter().chain(&TWO_AND_LOOKUP.map(matrix)[1..]) {
            assert_exact(&case, lengths, lenient(2.0), &|| fixed(9));
        }
    }
}

#[test]
fn nested_cascades_stay_exact_under_a_repetition_penalty() {
    for decoding in penalised() {
        let case = Case { decoding, ..Case::new(2, 4, None, 1715) };
        for lengths in TWO_AND_LOOKUP.map(matrix) {
            for lenience in leniences(3.0) {
                assert_exact(&case, &lengths, lenience, &|| fixed(9));
            }
        }
    }
}

#[test]
fn stop_maps_and_bounds_leave_the_targets_distribution() {
    let case = Case::new(2, 4, None, 1720);
    for lengths in ONE_AND_LOOKUP.map(matrix) {
        for bits in 0..1 << StopMap::num_prefixes(2, 3) {
            for asked in [Asked::AfterDraw, Asked::EverySecondRound { skips: bits % 2 == 0 }] {
                let map = StopMap { asked, ..StopMap::new(2, 3, bits) };
                assert_exact(&case, &lengths, lenient(2.0), &|| Box::new(map.clone()));
            }
        }
        for length in 1..4 {
            assert_exact(&case, &lengths, lenient(2.0), &|| fixed(length));
        }
    }
}

/// Iterates over all pairs of a matrix and a lenience.
fn cascades() -> impl Iterator<Item = (Vec<Vec<usize>>, Lenience)> {
    let matrices = ONE_AND_LOOKUP.map(matrix).into_iter().chain(TWO_AND_LOOKUP.map(matrix));
    matrices.flat_map(|lengths| leniences(3.0).map(|lenience| (lengths.clone(), lenience)))
}

#[test]
fn greedy_output_is_plain_greedy_output() {
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let mut counted = Counts::default();
    for seed in 0..25 {
        for max_new_tokens in [1, 2, 5, 24] {
            let case = Case::new(3, max_new_tokens, Some(2), 1800 + seed);
            let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
            let greedy = Decoding::GREEDY.penalising([1.0, 1.7, 0.6][seed as usize % 3]);
            let target = &mut case.target.clone();
            let plain = decode_plain(target, &greedy, &[0], &case.limits, unused, observe)
                .expect("tables do not fail");
            for rule in rules(9).iter().filter(|rule| rule.needs().is_nothing()) {
                let mut check = |found: Result<Generation>| {
                    let found = found.expect("tables do not fail");
                    assert_eq!((&found.token_ids, found.finish), (&plain.token_ids, plain.finish));
                    counted = [counted, found.trace.counts()].into_iter().sum();
                };
                let unused = &mut SeededDraws::new(0, &["unused"]);
                for (lengths, lenience) in cascades() {
                    let drafter = of_drafts(&case, &lengths, lenience);
                    let own = &mut *rule.init().expect("valid");
                    let target = &mut case.target.clone();
                    check(run(&case, target, drafter, own, greedy, unused));
                    let drafter = of_self_draft(&case, &lengths, lenience);
                    let own = &mut *rule.init().expect("valid");
                    let target = &mut Advanced::from(&case.target);
                    check(run(&case, target, drafter, own, greedy, unused));
                }
            }
        }
    }
    let Counts { num_accepted, num_drafted, .. } = counted;
    assert!(num_accepted > 1000 && num_drafted > num_accepted, "{num_accepted} of {num_drafted}");
}

#[test]
fn a_lenient_drafter_reviews_look_ups_exactly_unless_they_are_included() {
    let mut differs = false;
    for seed in 0..20 {
        let case = Case::new(3, 24, Some(2), 1850 + seed);
        let (lengths, unused) = (matrix(ONE_AND_LOOKUP[0]), &mut SeededDraws::new(0, &["unused"]));
        let mut counts = leniences(9.0).into_iter().map(|lenience| {
            let drafter = of_drafts(&case, &lengths, lenience);
            let target = &mut case.target.clone();
            run(&case, target, drafter, &mut *fixed(9), Decoding::GREEDY, unused)
                .expect("tables do not fail")
                .trace
                .counts()
        });
        let [exact, of_models, of_all] = [(); 3].map(|()| counts.next());
        assert_eq!(of_models, exact);
        differs |= of_all != exact;
    }
    assert!(differs, "a lenient review accepts more look-ups");
}

#[test]
fn greedy_sequences_side_by_side_get_the_output_and_counts_that_they_get_alone() {
    let case = Case::new(3, 12, Some(2), 1900);
    let prompts: [&[u32]; 5] = [&[0], &[0, 1], &[1, 0, 1], &[0, 0], &[1]];
    let decode = |prompts: &[&[u32]], drafter: Cascade<'static, Table>| {
        let mut own: Vec<_> =
            prompts.iter().map(|_| (fixed(6), SeededDraws::new(0, &["unused"]))).collect();
        let requests = prompts.iter().zip(&mut own).map(|(prompt, (rule, draws))| Request {
            prompt,
            decoding: Decoding::GREEDY,
            limits: &case.limits,
            rule: Some(&mut **rule),
            draws,
        });
        let mut drafter = drafter;
        let observe = &mut |_: usize, _: crate::RoundTokens<'_>| ControlFlow::Continue(());
        let target = &mut case.target.clone();
        decode_many(target, &mut drafter, requests, observe).expect("tables do not fail")
    };
    let of = |lengths: &[Vec<usize>]| of_drafts(&case, lengths, lenient(2.0));
    for lengths in TWO_AND_LOOKUP.map(matrix) {
        let together = decode(&prompts, of(&lengths));
        for (found, prompt) in together.iter().zip(prompts) {
            let alone = decode(&[prompt], of(&lengths)).remove(0);
            assert_eq!(found.token_ids, alone.token_ids);
            assert_eq!(found.trace.counts(), alone.trace.counts());
        }
    }
}

#[test]
fn a_larger_drafter_reads_a_whole_chain_in_one_forward() {
    // Both models agree, so every candidate is accepted.
    let case = Case::new(3, 40, None, 2000);
    let models = || vec![boxed(Drafting::from(&case.draft)), boxed(Drafting::from(&case.draft))];
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let target = &mut Table { seed: case.draft.seed, ..case.target.clone() };
    let drafter = cascade(models(), vec![vec![4, 0], vec![0, 3]], Lenience::NONE, &[]);
    let found = run(&case, target, drafter, &mut *fixed(4), Decoding::GREEDY, unused);
    let trace = found.expect("tables do not fail").trace;
    let first = trace.rounds[0];
    // Three candidates and the reviewer's own are accepted, and the target's token follows.
    assert_eq!((first.num_drafted, first.num_accepted), (4, 4));
    assert_eq!(first.forwards.total(), 3 + 1);
    assert_eq!(trace.counts().num_target_forwards, 8);
}

#[test]
fn a_rule_that_reads_probabilities_is_refused() {
    let case = Case::new(2, 5, None, 0);
    let mut rules = rules(3).into_iter().filter(|rule| rule.needs().confidence);
    let mut rule = rules.next().expect("one reads confidences").init().expect("valid");
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let drafter = of_drafts(&case, &matrix(ONE_AND_LOOKUP[0]), Lenience::NONE);
    let refused =
        run(&case, &mut case.target.clone(), drafter, &mut *rule, Decoding::GREEDY, unused);
    assert_eq!(
        refused.expect_err("a cascade has no probabilities"),
        DecodeError::NoSignals { drafter: ID }
    );
}

/// The first drafter reviews the second, which reviews look-ups, and all take turns.
const DEEP: [[usize; 3]; 3] = TWO_AND_LOOKUP[2];

#[test]
fn cascades_side_by_side_give_what_each_gives_alone() {
    let case = Case::new(3, 9, Some(2), 1790);
    for bits in [0, 0b1001, 0b11_0110] {
        let members = members(bits, true);
        for init in [
            |case: &Case| of_drafts(case, &matrix(TWO_AND_LOOKUP[0]), lenient(2.0)),
            |case: &Case| of_drafts(case, &matrix(DEEP), Lenience::NONE),
            // This map ends the draft's chains and skips them in every second round.
            |case: &Case| {
                of_drafts(case, &matrix(DEEP), Lenience::NONE).ending_chains_by(|| {
                    let asked = Asked::EverySecondRound { skips: false };
                    let map = StopMap { asked, ..StopMap::new(3, 3, 0b10) };
                    vec![None, Some(Box::new(map) as Box<dyn StopRule>), None]
                })
            },
        ] {
            assert_each_as_alone(&case.target, &Anew::new(&case, init), &members);
        }
        let drafts = Anew::new(&case, |case| of_self_draft(case, &matrix(DEEP), lenient(2.0)));
        assert_each_as_alone(&Advanced::from(&case.target), &drafts, &members);
    }
}

#[test]
fn sampled_cascades_side_by_side_are_independent_and_exact() {
    let case = Case::new(2, 3, Some(1), 1795);
    let members: [(&[u32], u64); 2] = [(&[0], 1), (&[1, 0], 0)];
    let drafts = Anew::new(&case, |case| of_drafts(case, &matrix(ONE_AND_LOOKUP[1]), lenient(3.0)));
    assert_independent(&case, &case.target, &drafts, &members);
    let drafts =
        Anew::new(&case, |case| of_self_draft(case, &matrix(ONE_AND_LOOKUP[0]), Lenience::NONE));
    assert_independent(&case, &Advanced::from(&case.target), &drafts, &members);
}

thread_local! {
    /// The forwards of counted drafters, and the steps in them.
    static COUNTED: Cell<[usize; 2]> = const { Cell::new([0; 2]) };
}

/// A drafter whose forwards are counted.
struct Counted(Drafting);

impl<T> Drafter<T> for Counted {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        self.0.begin(target, slot, prompt)
    }

    fn propose(&mut self, _: &mut T, _: &mut [DraftRound<'_>]) -> Result<()> {
        panic!("a cascade only takes steps of its drafters")
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        Drafter::<T>::commit(&mut self.0, slot, num_standing, path);
    }

    fn context(&self) -> usize {
        Drafter::<T>::context(&self.0)
    }
}

impl<T> StepDrafter<T> for Counted {
    fn id(&self) -> DrafterId {
        StepDrafter::<T>::id(&self.0)
    }

    fn draft(&mut self, target: &mut T, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>> {
        COUNTED.set([COUNTED.get()[0] + 1, COUNTED.get()[1] + steps.len()]);
        self.0.draft(target, steps)
    }

    fn predict_acceptance(
        &mut self,
        at: (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>> {
        StepDrafter::<T>::predict_acceptance(&mut self.0, at, logits, candidate)
    }
}

#[test]
fn sequences_side_by_side_share_the_forwards_of_every_drafter() {
    let case = Case::new(3, 9, None, 1797);
    let init = |case: &Case| {
        let models = drafts(case).map(|table| boxed(Counted(Drafting::from(&table))));
        cascade(models.into_iter().collect(), matrix(DEEP), Lenience::NONE, &[])
    };
    let forwards_of = |members: &[(&[u32], u64)]| {
        COUNTED.set([0; 2]);
        greedy_many(&case, &case.target, &Anew::new(&case, init), members);
        COUNTED.get()
    };
    // Two equal sequences share every forward.
    let [alone, steps] = forwards_of(&[(&[0, 1], 0)]);
    assert_eq!(alone, steps);
    assert_eq!(forwards_of(&[(&[0, 1], 0), (&[0, 1], 0)]), [alone, 2 * steps]);
    // Two different sequences share some forwards.
    let [forwards, steps] = forwards_of(&[(&[0, 1], 0), (&[1], 0)]);
    assert!(5 * forwards < 4 * steps, "{forwards} for {steps}");
}
