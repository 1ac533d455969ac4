//! The proof that batching does not change outputs: each sequence gets the tokens that it gets
//! alone. Greedy tokens are compared under every stop map, and sampled tokens by their joint
//! distribution. There are more sequences than slots.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

use draftsmith_theory::{Decoding, Draws, SeededDraws, StopRule, distribution_of, enumerate};

use super::tables::{Advanced, Advancing, Drafting, NUM_SLOTS, StopMap};
use super::{Case, TOLERANCE, penalised};
use crate::decode::{decode_many, decode_plain, decode_speculative};
use crate::drafter::{Drafter, NoDrafter};
use crate::sequence::{Finish, Generation, Limits, Request};
use crate::target::Target;

/// Draws that several sequences share.
struct Shared<'r, 'd>(&'r RefCell<&'d mut dyn Draws>);

impl Draws for Shared<'_, '_> {
    fn bernoulli(&mut self, prob: f64) -> bool {
        self.0.borrow_mut().bernoulli(prob)
    }

    fn categorical(&mut self, weights: &[f64]) -> usize {
        self.0.borrow_mut().categorical(weights)
    }
}

/// A sequence of a batch: its prompt, its limits and its stop map.
pub(super) struct Member {
    prompt: Vec<u32>,
    limits: Limits,
    rule: Option<StopMap>,
}

/// Decodes all members over the slots of one target.
fn many<T: Target, D: Drafter<T>>(
    mut target: T,
    mut drafter: D,
    members: &[Member],
    decoding: Decoding,
    draws: &mut dyn Draws,
) -> Vec<Generation> {
    let shared = RefCell::new(draws);
    let mut own: Vec<_> =
        members.iter().map(|member| (member.rule.clone(), Shared(&shared))).collect();
    let requests = members.iter().zip(&mut own).map(|(member, (rule, draws))| Request {
        prompt: &member.prompt,
        decoding,
        limits: &member.limits,
        rule: rule.as_mut().map(|rule| rule as &mut dyn StopRule),
        draws,
    });
    let observe = &mut |_: usize, _: crate::RoundTokens<'_>| ControlFlow::Continue(());
    decode_many(&mut target, &mut drafter, requests, observe).expect("tables do not fail")
}

/// Decodes one member alone.
fn alone<T: Target, D: Drafter<T>>(
    mut target: T,
    mut drafter: D,
    member: &Member,
    decoding: Decoding,
) -> Generation {
    let draws = &mut SeededDraws::new(0, &["unused"]);
    let observe = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
    let Member { prompt, limits, rule } = member;
    match rule.clone() {
        Some(mut rule) => decode_speculative(
            &mut target,
            &mut drafter,
            Request { prompt, decoding, limits, rule: Some(&mut rule), draws },
            observe,
        ),
        None => decode_plain(&mut target, &decoding, prompt, limits, draws, observe),
    }
    .expect("tables do not fail")
}

/// Returns members with different prompts, limits and rules, more than there are slots. Without rules they decode
/// plainly.
pub(super) fn members(bits: u64, with_rules: bool) -> Vec<Member> {
    let limits = |max_new_tokens| Limits::new(max_new_tokens, vec![2]);
    (0..2 * NUM_SLOTS as u32 + 1)
        .map(|number| Member {
            prompt: (0..=number).map(|at| at % 2).collect(),
            limits: limits([7, 1, 12, 0, 9][number as usize % 5]),
            rule: with_rules
                .then(|| StopMap::new(3, 3, bits.rotate_left(7 * number) & ((1 << 12) - 1))),
        })
        .collect()
}

pub(super) fn assert_each_as_alone<T: Target + Clone, D: Drafter<T> + Clone>(
    target: &T,
    drafter: &D,
    members: &[Member],
) -> Vec<Generation> {
    let unused = &mut SeededDraws::new(0, &["unused"]);
    let decoding = Decoding::GREEDY.penalising(1.2);
    let found = many(target.clone(), drafter.clone(), members, decoding, unused);
    assert_eq!(found.len(), members.len());
    for (found, member) in found.iter().zip(members) {
        let alone = alone(target.clone(), drafter.clone(), member, decoding);
        assert_eq!((&found.token_ids, found.finish), (&alone.token_ids, alone.finish));
        assert_eq!(found.trace.counts(), alone.trace.counts());
    }
    found
}

#[test]
fn greedy_sequences_side_by_side_get_what_they_get_alone_for_every_stop_map() {
    let (mut ends, mut lengths) = (BTreeMap::new(), BTreeMap::new());
    for seed in 0..6 {
        let case = Case::new(3, 1, None, 1300 + seed);
        let (advanced, advancing) = (Advanced::from(&case.target), Advancing::from(&case.draft));
        for bits in (0..1 << 12).step_by(61) {
            let members = members(bits, true);
            assert_each_as_alone(&case.target, &Drafting::from(&case.draft), &members);
            for found in assert_each_as_alone(&advanced, &advancing, &members) {
                *ends.entry(found.finish == Finish::Eos).or_insert(0) += 1;
                *lengths.entry(found.trace.rounds.len()).or_insert(0) += 1;
            }
        }
        assert_each_as_alone(&case.target, &NoDrafter, &members(0, false));
    }
    // The sequences end for different reasons and after different numbers of rounds.
    assert!(ends.len() == 2 && lengths.len() > 4, "{ends:?}, {lengths:?}");
}

/// Decodes prompts greedily, each under a stop map of depth 2.
pub(super) fn greedy_many<T: Target + Clone, D: Drafter<T> + Clone>(
    case: &Case,
    target: &T,
    drafter: &D,
    members: &[(&[u32], u64)],
) -> Vec<Generation> {
    let members = members_of(case, members);
    let unused = &mut SeededDraws::new(0, &["unused"]);
    many(target.clone(), drafter.clone(), &members, Decoding::GREEDY, unused)
}

fn members_of(case: &Case, members: &[(&[u32], u64)]) -> Vec<Member> {
    let member = |(prompt, bits): &(&[u32], u64)| Member {
        prompt: prompt.to_vec(),
        limits: case.limits.clone(),
        rule: Some(StopMap::new(2, 2, *bits)),
    };
    members.iter().map(member).collect()
}

/// Compares the joint distribution of sequences side by side, each with a prompt and a stop map of depth 2,
/// with the product of the target's distributions.
pub(super) fn assert_independent<T: Target + Clone, D: Drafter<T> + Clone>(
    case: &Case,
    target: &T,
    drafter: &D,
    members: &[(&[u32], u64)],
) {
    let members = members_of(case, members);
    let mut expected = BTreeMap::from([(Vec::new(), 1.0)]);
    for member in &members {
        let own = case.target_distribution_after(&member.prompt);
        expected = expected
            .iter()
            .flat_map(|(before, prob): (&Vec<Vec<u32>>, &f64)| {
                own.iter().map(move |(tokens, own)| {
                    ([before.as_slice(), std::slice::from_ref(tokens)].concat(), prob * own)
                })
            })
            .collect();
    }
    let found = distribution_of(enumerate(|draws| {
        let generations = many(target.clone(), drafter.clone(), &members, case.decoding, draws);
        generations.into_iter().map(|one| one.token_ids).collect::<Vec<_>>()
    }));
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (tokens, prob) in &expected {
        assert!((found[tokens] - prob).abs() <= TOLERANCE, "{tokens:?}");
    }
}

#[test]
fn sampled_sequences_side_by_side_are_independent_and_have_the_targets_distribution() {
    let case = Case { decoding: penalised()[0], ..Case::new(2, 2, Some(1), 1400) };
    let (advanced, advancing) = (Advanced::from(&case.target), Advancing::from(&case.draft));
    let members: [(&[u32], u64); 3] = [(&[0], 0), (&[1], 3), (&[0, 0], 1)];
    assert_independent(&case, &advanced, &advancing, &members);
}
