//! A head on the adapter's hidden state predicts the same while drafting as for whole sequences, replay
//! gives the counts of decoding, and no rule that reads the head changes greedy output.

use draftsmith_model::{AcceptanceHeadConfig, HeadForm, HeadInput, HeadReads};
use draftsmith_theory::{
    HeadEstimate, HeadTiming, Proposal, Recordings, RejectionThresholdConfig, SignalNeeds,
    StopRuleConfig,
};

use super::*;
use crate::record::{RecordOptions, RecordRequest, record};
use crate::session::tests::{draft_one, predicted_for_candidates, tensor_of};

const EXIT_LAYER: usize = 2;

/// Returns every form of head, with and without additional inputs.
pub(super) fn all_reads() -> Vec<HeadReads> {
    use HeadInput::{Entropy, TopProb};
    let inputs: [&[HeadInput]; 3] = [&[], &[Entropy], &[Entropy, TopProb]];
    let forms = [HeadForm::Candidate, HeadForm::LookAhead];
    forms.into_iter().flat_map(|form| inputs.map(|inputs| HeadReads::new(form, inputs))).collect()
}

/// Writes a head with random weights and reads it from files like a trained one.
pub(super) fn head(model: &CausalLm, reads: &HeadReads, name: &str) -> AcceptanceHead {
    let dir = tempfile_dir(name);
    let device = Device::flex();
    device.seed(11);
    let width = model.shape().hidden_size;
    let config = AcceptanceHeadConfig::new(width, 2, true).with_reads(reads.clone());
    config.init(&device).write_dir(&dir, &config).expect("written");
    let (_, head) = AcceptanceHead::from_dir(&dir, width, &device).expect("reads");
    std::fs::remove_dir_all(&dir).expect("removed");
    head
}

fn tempfile_dir(name: &str) -> std::path::PathBuf {
    let dir =
        std::env::temp_dir().join(format!("draftsmith-adapter-head-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    dir
}

/// Computes the head's predictions for the tokens of `ids` after the first `num_before`, as candidates of one round,
/// in one pass over the whole sequence.
fn of_whole_sequence(
    model: &CausalLm,
    adapter: &Adapter,
    head: &AcceptanceHead,
    ids: &[u32],
    num_before: usize,
) -> Vec<f64> {
    let features = model.exit_states(tensor_of(ids, model), EXIT_LAYER);
    let hidden = adapter.forward(features);
    let [logits] = Rows::to_host([adapter.logits(&hidden.clone().into(), model)]).expect("brought");
    predicted_for_candidates(head, model, ids, num_before, hidden, &logits)
}

#[test]
fn a_head_predicts_the_same_while_drafting_as_for_the_whole_sequence() {
    let model = target();
    let adapter =
        adapter(&model, AdapterArchitecture::AttentionWithHead, EXIT_LAYER, 0.1, "head-whole");
    let ids: Vec<u32> = (0..20_u32).map(|i| 2 + i * 37 % 90).collect();
    let needs = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
    for (nth, reads) in all_reads().iter().enumerate() {
        let head = head(&model, reads, &format!("whole-{nth}"));
        let mut session = session_with_exit(&model, EXIT_LAYER, 64);
        let mut draft = SelfDraft::new(&model, &adapter, EXIT_LAYER, Some(&head), 64, 1);
        Target::begin(&mut session, 0, &ids[..8]).expect("fits");
        draft.begin(&mut session, 0, &ids[..8]).expect("fits");
        // Two rounds with the next tokens as candidates; the first round is partly rolled back.
        for (start, end) in [(8, 13), (10, 20)] {
            Drafter::<ModelSession<'_>>::commit(&mut draft, 0, start - 1, &[]);
            session.commit(0, start - 1, &[]);
            let expected = of_whole_sequence(&model, &adapter, &head, &ids[..end], start);
            let mut found = Vec::new();
            for at in start..end {
                let drafted = draft_one(&mut draft, &mut session, &ids[..at], at - start, needs);
                found.extend(drafted.signals.acceptance_prob.map(|estimate| match estimate {
                    HeadEstimate::OfRead(prob) => prob,
                    HeadEstimate::OfDrawn(_) => panic!("nothing is drawn yet"),
                }));
                let drawn = StepDrafter::<ModelSession<'_>>::predict_acceptance(
                    &mut draft,
                    (0, 0),
                    &drafted.own_logits,
                    ids[at],
                );
                found.extend(drawn.expect("finite"));
            }
            let proposal = &Proposal::certain_chain(&ids[start..end]);
            let one = Verification { slot: 0, tokens: &ids[..end], proposal };
            session.verify(&[one]).expect("finite");
            // A head that does not look ahead has yet to read the last candidate.
            assert_eq!(found.len() + usize::from(!reads.looks_ahead()), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                // Sums of f32 in another order, of numbers near 1.
                assert!((found - expected).abs() < 1e-5, "{reads:?}: {found} for {expected}");
            }
        }
    }
}

#[test]
fn replay_has_the_counts_of_decoding_and_greedy_output_is_plain_greedy_output() {
    let model = target();
    let adapter = adapter(&model, AdapterArchitecture::Attention, EXIT_LAYER, 0.02, "head-near");
    let bounds = Bounds { min: 1, max: 5 };
    let limits = Limits::new(32, vec![]);
    let greedy = Decoding::GREEDY;
    let mut session = session_with_exit(&model, EXIT_LAYER, 64);
    let (mut num_accepted, mut lengths) = (0, std::collections::BTreeSet::new());
    for (nth, reads) in all_reads().iter().enumerate() {
        let head = head(&model, reads, &format!("replay-{nth}"));
        let mut draft = SelfDraft::new(&model, &adapter, EXIT_LAYER, Some(&head), 64, 1);
        for prompt in &prompts()[1..3] {
            let plain = greedy_plain(&mut session, prompt, &limits).token_ids;
            let options = RecordOptions {
                decoding: greedy,
                limits: limits.clone(),
                max_length: bounds.max,
                has_head: true,
                labels: true,
                is_target_here: true,
            };
            let draws = &mut SeededDraws::new(0, &["unused"]);
            let request = RecordRequest { prompt, response: &plain, draws };
            let go_on = &mut |_| ControlFlow::Continue(());
            let recording = record(&mut session, &mut draft, &options, [request], go_on);
            let timing =
                if reads.looks_ahead() { HeadTiming::AtDraw } else { HeadTiming::AfterRead };
            let recordings = Recordings {
                drafter: StepDrafter::<ModelSession<'_>>::id(&draft),
                max_length: bounds.max,
                eos_token_ids: limits.eos_token_ids.clone(),
                head: Some(timing),
                responses: recording.expect("finite"),
                answers: None,
            };
            for (stop_threshold, without_lag) in
                [0.3, 0.6, 0.8].into_iter().flat_map(|h| [(h, false), (h, true)])
            {
                let config = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                    stop_threshold,
                    without_lag,
                    bounds,
                });
                let rule = &mut *config.init().expect("valid");
                let decoded = super::greedy(&mut session, &mut draft, rule, prompt, &limits);
                let counts = decoded.trace.counts();
                let replayed = recordings.replay_counts(&config).expect("recorded").remove(0);
                assert_eq!(decoded.token_ids, plain, "{reads:?}, {config:?}");
                assert_eq!(counts, replayed, "{reads:?}, {config:?}");
                num_accepted += counts.num_accepted;
                lengths.extend(decoded.trace.rounds.iter().map(|round| round.num_drafted));
            }
        }
    }
    assert!(num_accepted > 0 && lengths.len() > 2, "{num_accepted} accepted, {lengths:?}");
}
