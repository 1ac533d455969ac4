//! Heads of every form predict the same while drafting as for whole sequences, and replay gives the counts
//! of decoding.

use std::ops::ControlFlow;

use draftsmith_model::{HeadForm, HeadInput, HeadReads};
use draftsmith_theory::{
    Bounds, Decoding, DrafterId, HeadEstimate, HeadTiming, Recordings, RejectionThresholdConfig,
    SeededDraws, SignalNeeds, StopRuleConfig,
};

use super::*;
use crate::drafter::{Drafter, StepDrafter};
use crate::error::Result;
use crate::record::{RecordOptions, RecordRequest, record};
use crate::sequence::Limits;
use crate::session::ModelSession;
use crate::session::tests::{
    Models, draft_one, greedy, greedy_plain, predicted_for_candidates, tensor_of,
};
use crate::target::{Logits, Target, Verification};

const VOCAB_SIZE: usize = 100;

fn all_reads() -> Vec<HeadReads> {
    use HeadInput::{Entropy, TopProb};
    let inputs: [&[HeadInput]; 3] = [&[], &[TopProb], &[Entropy, TopProb]];
    let forms = [HeadForm::Candidate, HeadForm::LookAhead];
    forms.into_iter().flat_map(|form| inputs.map(|inputs| HeadReads::new(form, inputs))).collect()
}

/// Computes the head's predictions for the tokens of `ids` after the first `num_before`, as candidates of one round,
/// in one pass over the whole sequence.
fn of_whole_sequence(models: &Models, ids: &[u32], num_before: usize) -> Vec<f64> {
    let Models { target: draft, head, .. } = models;
    let hidden = draft.hidden_states(tensor_of(ids, draft));
    let logits = draft.lm_head(hidden.clone()).into_data().try_into_vec::<f32>().expect("f32");
    predicted_for_candidates(head, draft, ids, num_before, hidden, &logits)
}

#[test]
fn a_head_predicts_the_same_while_drafting_as_for_the_whole_sequence() {
    let ids: Vec<u32> = (0..20_u32).map(|i| 2 + i * 37 % 90).collect();
    let needs = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
    for (nth, reads) in all_reads().iter().enumerate() {
        for models in &Models::both(&format!("whole-{nth}"), 1, reads) {
            let mut draft =
                SeparateDraft::new(&models.target, Some(&models.head), VOCAB_SIZE, 64, 1);
            draft.begin(&mut (), 0, &ids[..8]).expect("fits");
            // Two rounds with the next tokens as candidates; the first round is partly rolled back.
            for (start, end) in [(8, 13), (10, 20)] {
                Drafter::<()>::commit(&mut draft, 0, start - 1, &[]);
                let expected = of_whole_sequence(models, &ids[..end], start);
                let mut found = Vec::new();
                for at in start..end {
                    let drafted = draft_one(&mut draft, &mut (), &ids[..at], at - start, needs);
                    let read = drafted.signals.acceptance_prob;
                    found.extend(read.map(|estimate| match estimate {
                        HeadEstimate::OfRead(prob) => prob,
                        HeadEstimate::OfDrawn(_) => panic!("nothing is drawn yet"),
                    }));
                    let drawn = StepDrafter::<()>::predict_acceptance(
                        &mut draft,
                        (0, 0),
                        &drafted.own_logits,
                        ids[at],
                    );
                    found.extend(drawn.expect("finite"));
                }
                // A head that does not look ahead has yet to read the last candidate.
                assert_eq!(found.len() + usize::from(!reads.looks_ahead()), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    // Sums of f32 in another order, of numbers near 1.
                    assert!((found - expected).abs() < 1e-5, "{reads:?}: {found} for {expected}");
                }
            }
        }
    }
}

/// A target that agrees with the draft's model after three prefixes out of four.
struct Whimsical<'m>(ModelSession<'m>);

impl Target for Whimsical<'_> {
    fn num_slots(&self) -> usize {
        self.0.num_slots()
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        self.0.begin(slot, prompt)
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        let logits = self.0.verify(batch)?;
        let mut rows = logits.rows().flatten().copied().collect::<Vec<f32>>();
        let prefixes = batch.iter().flat_map(|one| {
            let num_standing = one.tokens.len() - one.proposal.len();
            (num_standing..=one.tokens.len()).map(|end| &one.tokens[..end])
        });
        for (row, prefix) in rows.chunks_exact_mut(VOCAB_SIZE).zip(prefixes) {
            let mix = |mixed: u64, token: &u32| {
                (mixed ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
            };
            let mixed = prefix.iter().fold(7, mix);
            if mixed % 4 == 0 {
                row[2 + (mixed / 4 % 97) as usize] = 50.0;
            }
        }
        Ok(Logits::new(rows, VOCAB_SIZE))
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.0.commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.0.context()
    }
}

/// Returns rules that read a head, with settings that sometimes stop.
fn rules(bounds: Bounds) -> Vec<StopRuleConfig> {
    let threshold = |stop_threshold, without_lag| {
        StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold,
            without_lag,
            bounds,
        })
    };
    [0.3, 0.6, 0.8].into_iter().flat_map(|h| [threshold(h, false), threshold(h, true)]).collect()
}

#[test]
fn replay_has_the_counts_of_decoding_with_a_head_of_any_form() {
    let bounds = Bounds { min: 1, max: 5 };
    let limits = Limits::new(24, vec![1]);
    let prompt = [5, 17, 42];
    for (nth, reads) in all_reads().into_iter().enumerate() {
        let [_, models] = &Models::both(&format!("replay-{nth}"), 1, &reads);
        let mut target = Whimsical(ModelSession::new(&models.target, 64, "target"));
        let mut draft = SeparateDraft::new(&models.target, Some(&models.head), VOCAB_SIZE, 64, 1);
        let draws = &mut SeededDraws::new(0, &["unused"]);
        let plain = greedy_plain(&mut target, &prompt, &limits).token_ids;
        let options = RecordOptions {
            decoding: Decoding::GREEDY,
            limits: limits.clone(),
            max_length: bounds.max,
            has_head: true,
            labels: true,
            is_target_here: true,
        };
        let request = RecordRequest { prompt: &prompt, response: &plain, draws };
        let recording =
            record(
                &mut target,
                &mut draft,
                &options,
                [request],
                &mut |_| ControlFlow::Continue(()),
            )
            .expect("finite")
            .remove(0);
        let timing = if reads.looks_ahead() { HeadTiming::AtDraw } else { HeadTiming::AfterRead };
        let recordings = Recordings {
            drafter: DrafterId::DRAFT,
            max_length: bounds.max,
            eos_token_ids: limits.eos_token_ids.clone(),
            head: Some(timing),
            responses: vec![recording],
            answers: None,
        };
        let places = &recordings.responses[0].places;
        let num_rejected = places.iter().filter(|place| place.rollout.is_some()).count();
        assert!((3..places.len() - 3).contains(&num_rejected), "{num_rejected}");
        for config in rules(bounds) {
            let rule = &mut *config.init().expect("valid");
            let decoded = greedy(&mut target, &mut draft, rule, &prompt, &limits);
            let replayed = recordings.replay_counts(&config).expect("recorded").remove(0);
            assert_eq!(decoded.token_ids, plain, "{reads:?}, {config:?}");
            assert_eq!(decoded.trace.counts(), replayed, "{reads:?}, {config:?}");
        }
    }
}
