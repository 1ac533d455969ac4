//! Sequences of small models side by side, compared with each alone.

use std::collections::BTreeSet;

use draftsmith_model::{CausalLm, HeadForm, HeadInput, HeadReads};
use draftsmith_theory::{
    Bounds, FixedLengthConfig, RejectionThresholdConfig, Sampling, SeededDraws, StopRule,
    StopRuleConfig,
};

use super::*;
use crate::self_draft::SelfDraft;
use crate::separate_draft::SeparateDraft;
use crate::sequence::Finish;
use crate::session::ModelSession;
use crate::session::tests::Models;
use crate::target::TargetLayers;

const CONTEXT: usize = 48;
const NUM_SLOTS: usize = 3;
const NUM_SEQUENCES: u32 = 8;

fn prompt(number: u32) -> Vec<u32> {
    (0..1 + number * 3 % 11).map(|at| 2 + (at * 37 + number * 13) % 90).collect()
}

/// Returns limits that end sequences after different numbers of rounds: one before the first round and one at the
/// context's end.
fn limits(number: u32) -> Limits {
    let max_new_tokens = [9, 1, 20, 0, 64, 5, 13, 30][number as usize];
    Limits::new(max_new_tokens, vec![1, 7, 30, 55])
}

fn draws(number: u32) -> SeededDraws {
    SeededDraws::new(u64::from(number), &["many"])
}

/// Decodes all sequences over three slots, and each alone over one.
fn assert_each_as_alone<D: for<'m> Drafter<ModelSession<'m>>>(
    model: &CausalLm,
    exit_layer: Option<usize>,
    drafter: impl Fn(usize) -> D,
    rule: Option<&StopRuleConfig>,
    decoding: Decoding,
) -> Vec<Generation> {
    let session = |num_slots| {
        let mut session = ModelSession::with_slots(model, CONTEXT, num_slots, "target");
        session.set_layers(&TargetLayers::exit(exit_layer));
        session
    };
    let init = || rule.map(|rule| rule.init().expect("valid"));
    let prompts: Vec<_> =
        (0..NUM_SEQUENCES).map(|number| (prompt(number), limits(number))).collect();
    let mut own: Vec<_> = (0..NUM_SEQUENCES).map(|number| (init(), draws(number))).collect();
    let requests = prompts.iter().zip(&mut own).map(|((prompt, limits), (rule, draws))| Request {
        prompt,
        decoding,
        limits,
        rule: rule.as_mut().map(|rule| &mut **rule as &mut dyn StopRule),
        draws,
    });
    let mut shown = vec![Vec::new(); prompts.len()];
    let together = decode_many(
        &mut session(NUM_SLOTS),
        &mut drafter(NUM_SLOTS),
        requests,
        &mut |number, round| {
            shown[number].extend_from_slice(round.kept);
            ControlFlow::Continue(())
        },
    )
    .expect("decodes");
    assert_eq!(together.len(), prompts.len());
    let (mut target, mut drafter) = (session(1), drafter(1));
    for (number, found) in together.iter().enumerate() {
        let (prompt, limits) = &prompts[number];
        let (draws, observe) =
            (&mut draws(number as u32), &mut |_: RoundTokens<'_>| ControlFlow::Continue(()));
        let rule = init();
        let alone = match rule {
            None => decode_plain(&mut target, &decoding, prompt, limits, draws, observe),
            Some(mut rule) => decode_speculative(
                &mut target,
                &mut drafter,
                Request { prompt, decoding, limits, rule: Some(&mut *rule), draws },
                observe,
            ),
        }
        .expect("decodes");
        assert_eq!((&found.token_ids, found.finish), (&alone.token_ids, alone.finish));
        assert_eq!(found.trace.counts(), alone.trace.counts());
        assert_eq!(shown[number], found.token_ids);
    }
    together
}

fn decodings() -> [Decoding; 2] {
    [
        Decoding::GREEDY,
        Decoding::sampled(Sampling { temperature: 0.7, top_p: 0.9, top_k: None, min_p: None }),
    ]
}

#[test]
fn sequences_side_by_side_get_the_tokens_that_they_get_alone() {
    let bounds = Bounds { min: 1, max: 5 };
    let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
        stop_threshold: 0.8,
        without_lag: false,
        bounds,
    });
    let reads = HeadReads::new(HeadForm::LookAhead, &[HeadInput::Entropy, HeadInput::TopProb]);
    let (mut finishes, mut lengths, mut num_accepted) = (BTreeSet::new(), BTreeSet::new(), 0);
    for reads in [HeadReads::default(), reads] {
        for models in &Models::both("many", 3, &reads) {
            for decoding in decodings() {
                let plain =
                    assert_each_as_alone(&models.target, None, |_| NoDrafter, None, decoding);
                let separate = assert_each_as_alone(
                    &models.target,
                    None,
                    |slots| {
                        let head = Some(&models.head);
                        SeparateDraft::new(&models.target, head, 100, CONTEXT, slots)
                    },
                    Some(&rule),
                    decoding,
                );
                let fixed = &StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: 3 });
                let self_drafts = [0, 1].map(|exit| {
                    let (target, adapter) = (&models.target, &models.adapter);
                    let new = |slots| SelfDraft::new(target, adapter, exit, None, CONTEXT, slots);
                    assert_each_as_alone(target, Some(exit), new, Some(fixed), decoding)
                });
                for found in plain.iter().chain(&separate).chain(self_drafts.iter().flatten()) {
                    finishes.insert(found.finish == Finish::Eos);
                    lengths.insert(found.trace.rounds.len());
                    num_accepted += found.trace.counts().num_accepted;
                }
            }
        }
    }
    // They end for different reasons and after different numbers of rounds, so slots are reused.
    assert!(finishes.len() == 2 && lengths.len() > 4, "{finishes:?}, {lengths:?}");
    assert!(num_accepted > 0);
}
