//! Responses that are recorded side by side.

use std::sync::Arc;

use draftsmith_model::{CausalLm, HeadForm, HeadInput, HeadReads};
use draftsmith_theory::{RecordedCandidate, Sampling, SeededDraws};

use super::*;
use crate::decode::decode_plain;
use crate::self_draft::SelfDraft;
use crate::separate_draft::SeparateDraft;
use crate::session::ModelSession;
use crate::session::tests::Models;
use crate::target::TargetLayers;

const CONTEXT: usize = 48;
const NUM_SLOTS: usize = 3;

fn prompt(number: u32) -> Vec<u32> {
    (0..1 + number * 3 % 11).map(|at| 2 + (at * 37 + number * 13) % 90).collect()
}

/// Records responses of the model over three slots, and each alone over one.
fn assert_each_as_alone<D: for<'m> StepDrafter<ModelSession<'m>>>(
    model: &CausalLm,
    exit_layer: Option<usize>,
    drafter: impl Fn(usize) -> D,
    options: &RecordOptions,
    is_exact: bool,
) -> Vec<Recording> {
    let session = |num_slots| {
        let mut session = ModelSession::with_slots(model, CONTEXT, num_slots, "target");
        session.set_layers(&TargetLayers::exit(exit_layer));
        session
    };
    let draws = |number: usize, purpose| SeededDraws::new(number as u64, &[purpose]);
    let responses: Vec<(Vec<u32>, Vec<u32>)> = (0..7)
        .map(|number| {
            let prompt = prompt(number as u32);
            // Responses of different lengths, one with a single token.
            let limits = Limits { max_new_tokens: 1 + number * 5 % 17, ..options.limits.clone() };
            let draws = &mut draws(number, "response");
            let go_on = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
            let decoding = &options.decoding;
            let response = decode_plain(&mut session(1), decoding, &prompt, &limits, draws, go_on);
            (prompt, response.expect("decodes").token_ids)
        })
        .collect();
    let mut all: Vec<SeededDraws> =
        (0..responses.len()).map(|number| draws(number, "rollouts")).collect();
    let requests = responses
        .iter()
        .zip(&mut all)
        .map(|((prompt, response), draws)| RecordRequest { prompt, response, draws });
    let mut observed = Vec::new();
    let observe = &mut |num_places| {
        observed.push(num_places);
        ControlFlow::Continue(())
    };
    let (target, drafting) = (&mut session(NUM_SLOTS), &mut drafter(NUM_SLOTS));
    let together = record(target, drafting, options, requests, observe).expect("finite");
    let num_tokens: usize = responses.iter().map(|(_, response)| response.len()).sum();
    assert!(observed.is_sorted() && observed.first() == Some(&0), "{observed:?}");
    assert!(observed.last().is_some_and(|last| num_tokens - last <= NUM_SLOTS), "{observed:?}");
    assert_eq!(together.len(), responses.len());
    let (mut target, mut drafter) = (session(1), drafter(1));
    for (number, (prompt, response)) in responses.iter().enumerate() {
        let request = RecordRequest { prompt, response, draws: &mut draws(number, "rollouts") };
        let go_on = &mut |_| ControlFlow::Continue(());
        let alone = record(&mut target, &mut drafter, options, [request], go_on).expect("finite");
        if is_exact {
            // Compared as text, in which NaN equals itself.
            assert_eq!(format!("{alone:?}"), format!("{:?}", &together[number..=number]));
        } else {
            assert_alike(&alone[0], &together[number]);
        }
        assert_eq!(together[number].places.len(), response.len());
    }
    together
}

/// Asserts that recordings are equal up to rounding.
pub(crate) fn assert_alike(found: &Recording, expected: &Recording) {
    let all = |recording: &Recording| -> Vec<RecordedCandidate> {
        let places = recording.places.iter();
        let candidates = places.flat_map(|place| {
            let rollout = place.rollout.iter().flatten();
            std::iter::once(&place.candidate).chain(rollout).cloned()
        });
        candidates.collect()
    };
    let (found, expected) = (all(found), all(expected));
    let ids = |all: &[RecordedCandidate]| -> Vec<u32> {
        all.iter().map(|candidate| candidate.token_id).collect()
    };
    assert_eq!(ids(&found), ids(&expected));
    for (found, expected) in found.iter().zip(&expected) {
        let numbers = |candidate: &RecordedCandidate| {
            [
                candidate.candidate_prob,
                candidate.confidence,
                candidate.confidence_of_ten,
                candidate.entropy,
                candidate.predicted_acceptance_prob.unwrap_or(-1.0),
                candidate.draft_log_prob,
                candidate.target_log_prob,
            ]
        };
        for (found, expected) in numbers(found).into_iter().zip(numbers(expected)) {
            let is_close = (found - expected).abs() < 1e-5 * (1.0 + expected.abs());
            let are_nan = found.is_nan() && expected.is_nan();
            assert!(is_close || are_nan || found == expected, "{found} for {expected}");
        }
    }
}

#[test]
fn responses_side_by_side_get_the_recordings_that_they_get_alone() {
    let reads = HeadReads::new(HeadForm::LookAhead, &[HeadInput::Entropy]);
    let sampling = Sampling { temperature: 0.7, top_p: 0.9, top_k: None, min_p: None };
    let (mut num_rollouts, mut num_predicted) = (0, 0);
    for reads in [HeadReads::default(), reads] {
        // The rounding of a row of a tensor product may depend on the rows beside it.
        for (models, is_exact) in Models::both("recorded", 3, &reads).iter().zip([false, true]) {
            for decoding in [Decoding::GREEDY, Decoding::sampled(sampling)] {
                let limits = Limits::new(17, vec![1, 7, 30, 55]);
                let options = |has_head| RecordOptions {
                    decoding,
                    limits: limits.clone(),
                    max_length: 4,
                    has_head,
                    labels: true,
                    is_target_here: true,
                };
                let head = Some(&models.head);
                let separate = assert_each_as_alone(
                    &models.target,
                    None,
                    |slots| SeparateDraft::new(&models.target, head, 100, CONTEXT, slots),
                    &options(true),
                    is_exact,
                );
                let self_draft = assert_each_as_alone(
                    &models.target,
                    Some(1),
                    |slots| {
                        let (target, adapter) = (&models.target, &models.adapter);
                        SelfDraft::new(target, adapter, 1, None, CONTEXT, slots)
                    },
                    &options(false),
                    is_exact,
                );
                for place in separate.iter().chain(&self_draft).flat_map(|one| &*one.places) {
                    num_rollouts += usize::from(place.rollout.is_some());
                    num_predicted +=
                        usize::from(place.candidate.predicted_acceptance_prob.is_some());
                }
            }
        }
    }
    assert!(num_rollouts > 50 && num_predicted > 50, "{num_rollouts}, {num_predicted}");
}

#[test]
fn without_labels_everything_else_is_recorded_alike() {
    let sampling = Sampling { temperature: 0.7, top_p: 0.9, top_k: None, min_p: None };
    for (models, is_exact) in
        Models::both("unlabelled", 3, &HeadReads::default()).iter().zip([false, true])
    {
        for decoding in [Decoding::GREEDY, Decoding::sampled(sampling)] {
            let options = |labels| RecordOptions {
                decoding,
                limits: Limits::new(17, vec![1, 7, 30, 55]),
                max_length: 4,
                has_head: false,
                labels,
                is_target_here: true,
            };
            let (target, adapter) = (&models.target, &models.adapter);
            let separate = |options: &RecordOptions| {
                let new = |slots| SeparateDraft::new(target, None, 100, CONTEXT, slots);
                assert_each_as_alone(target, None, new, options, is_exact)
            };
            let self_draft = |options: &RecordOptions, exit| {
                let new = |slots| SelfDraft::new(target, adapter, exit, None, CONTEXT, slots);
                assert_each_as_alone(target, Some(exit), new, options, is_exact)
            };
            let [recorded, labelled] = [false, true].map(|labels| {
                let options = &options(labels);
                [separate(options), self_draft(options, 1), self_draft(options, 0)].concat()
            });
            for (mut without, with) in recorded.into_iter().zip(&labelled) {
                for (place, with) in
                    Arc::make_mut(&mut without.places).iter_mut().zip(&*with.places)
                {
                    // If sampled, the end of a round depends on the target's probability.
                    let is_asked = decoding != Decoding::GREEDY;
                    assert_eq!(place.candidate.target_log_prob.is_nan(), !is_asked);
                    if !is_asked {
                        place.candidate.target_log_prob = with.candidate.target_log_prob;
                    }
                    let pairs =
                        place.rollout.iter_mut().flatten().zip(with.rollout.iter().flatten());
                    for (nth, (without, with)) in pairs.enumerate() {
                        let is_asked = is_asked && nth == 0;
                        assert_eq!(without.target_log_prob.is_nan(), !is_asked);
                        if !is_asked {
                            without.target_log_prob = with.target_log_prob;
                        }
                    }
                }
                assert_alike(&without, with);
            }
        }
    }
}

#[test]
fn a_stopped_recording_returns_the_responses_that_are_complete() {
    let models = &Models::both("broken off", 1, &HeadReads::default())[0];
    let mut target = ModelSession::with_slots(&models.target, CONTEXT, 2, "target");
    let mut draft = SeparateDraft::new(&models.target, None, 100, CONTEXT, 2);
    let options = RecordOptions {
        decoding: Decoding::GREEDY,
        limits: Limits::new(9, Vec::new()),
        max_length: 2,
        has_head: false,
        labels: true,
        is_target_here: true,
    };
    let mut draws = [0, 1].map(|number| SeededDraws::new(number, &["unused"]));
    let responses: [&[u32]; 2] = [&[4], &[5, 6, 7, 8]];
    let requests = responses.into_iter().zip(&mut draws).map(|(response, draws)| RecordRequest {
        prompt: &[3],
        response,
        draws,
    });
    // The first response has one token, so it is complete after the first position.
    let observe = &mut |num_places| match num_places {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let recorded = record(&mut target, &mut draft, &options, requests, observe).expect("finite");
    assert_eq!(recorded.len(), 1);
}
