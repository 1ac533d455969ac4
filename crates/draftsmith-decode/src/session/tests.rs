//! The memory that a step in host memory allocates after few and many tokens, and its results compared
//! with those of tensors.

use std::ops::ControlFlow;

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, CausalLm, DrawnCandidate,
    HeadFeatures, HeadReads, ModelConfig, ModelShape, Rows, WeightDtype,
};
use draftsmith_theory::{
    Decoding, DrawnFrom, HeadEstimate, Node, Proposal, SeededDraws, SignalNeeds, StopRule,
    entropy_of_log_probs, log_softmax,
};

use super::ModelSession;
use super::counting::{bytes, counted_pool};
use crate::decode::{decode_plain, decode_speculative};
use crate::drafter::{DraftRow, DraftStep, Drafter, StepDrafter};
use crate::self_draft::SelfDraft;
use crate::self_draft::tests::assert_close;
use crate::separate_draft::SeparateDraft;
use crate::sequence::{Generation, Limits, Request, RoundTokens};
use crate::target::{KeptStates, Target, TargetLayers, Verification};

const CONTEXTS: [usize; 4] = [20, 100, 333, 500];
const CAPACITY: usize = 512;

/// A model with a head and an adapter.
pub(crate) struct Models {
    pub(crate) target: CausalLm,
    pub(crate) head: AcceptanceHead,
    pub(crate) adapter: Adapter,
}

impl Models {
    /// Builds the models twice: as they are initialised, computed with tensors, and as they are read from files,
    /// computed in host memory. `name` must be unique to the test.
    pub(crate) fn both(name: &str, seed: u64, reads: &HeadReads) -> [Self; 2] {
        let device = Device::flex();
        let config = ModelConfig::llama(
            ModelShape {
                vocab_size: 100,
                hidden_size: 32,
                num_layers: 3,
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 8,
                context: CAPACITY,
                bos_token_id: None,
                eos_token_ids: vec![1],
            },
            64,
        )
        .with_tied_embeddings(true);
        let dir =
            std::env::temp_dir().join(format!("draftsmith-session-{name}-{}", std::process::id()));
        let [target, head, adapter] = ["target", "head", "adapter"].map(|name| dir.join(name));
        for dir in [&target, &head, &adapter] {
            std::fs::create_dir_all(dir).expect("a temporary directory");
        }
        device.seed(seed);
        let of_head = AcceptanceHeadConfig::new(32, 3, true).with_reads(reads.clone());
        let of_adapter = AdapterConfig::new(&config, 1).expect("a valid exit layer");
        let initialised = Self {
            target: config.init(&device),
            head: of_head.init(&device),
            adapter: of_adapter.init(&device),
        };
        initialised.target.write_model_dir(&target, WeightDtype::F32).expect("written");
        initialised.head.write_dir(&head, &of_head).expect("written");
        initialised.adapter.write_dir(&adapter, &of_adapter).expect("written");
        let read = Self {
            target: CausalLm::from_model_dir(&target, &device).expect("reads"),
            head: AcceptanceHead::from_dir(&head, 32, &device).expect("reads").1,
            adapter: Adapter::from_dir(&adapter, &config.shape, WeightDtype::F32, &device)
                .expect("reads")
                .1,
        };
        std::fs::remove_dir_all(&dir).expect("removed");
        [initialised, read]
    }
}

fn tokens() -> Vec<u32> {
    (0..CAPACITY as u32).map(|i| 2 + i * 37 % 90).collect()
}

/// Asserts that a step allocates the same number of bytes after every context length. The first sequence is
/// the longest, so that buffers reach their final size. One or two threads may run a step, depending on
/// the load, and each has its buffers: the least of three runs counts.
fn assert_equal_at_every_length(mut bytes_after: impl FnMut(usize) -> usize, what: &str) {
    let mut least_after = |len| (0..3).map(|_| bytes_after(len)).min().expect("three");
    least_after(CONTEXTS[CONTEXTS.len() - 1]);
    let found = CONTEXTS.map(&mut least_after);
    assert!(found.iter().all(|bytes| *bytes == found[0]), "{what}: {found:?} after {CONTEXTS:?}");
    // Rows of logits and hidden states, and little else.
    assert!(found[0] < 10_000, "{what}: {} bytes", found[0]);
}

#[test]
fn no_step_allocates_more_after_more_tokens() {
    // In the pool two threads share long verifications, as in commands that decode.
    counted_pool().install(assert_no_step_allocates_more_after_more_tokens);
}

fn assert_no_step_allocates_more_after_more_tokens() {
    let [_, Models { target: model, head, adapter }] =
        &Models::both("allocations", 1, &HeadReads::default());
    let tokens = tokens();

    for num_rows in [1, 4, 8] {
        let mut target = ModelSession::new(model, CAPACITY, "target");
        let verification = |len: usize| {
            target.begin(0, &tokens[..len]).expect("fits");
            let tokens = &tokens[..len + num_rows - 1];
            let proposal = &Proposal::certain_chain(&tokens[len..]);
            let one = Verification { slot: 0, tokens, proposal };
            bytes(|| target.verify(&[one]).expect("finite"))
        };
        assert_equal_at_every_length(verification, &format!("a verification of {num_rows} rows"));
    }

    let needs = SignalNeeds { acceptance_prob: true, confidence: true, ..SignalNeeds::default() };
    let mut draft = SeparateDraft::new(model, Some(head), 100, CAPACITY, 1);
    let draft_step = |len: usize| {
        draft.begin(&mut (), 0, &tokens[..len]).expect("fits");
        bytes(|| draft_one(&mut draft, &mut (), &tokens[..len], 1, needs))
    };
    assert_equal_at_every_length(draft_step, "a draft step with a head");

    let mut target = ModelSession::new(model, CAPACITY, "target");
    target.set_layers(&TargetLayers::exit(1));
    let mut self_draft = SelfDraft::new(model, adapter, 1, None, CAPACITY, 1);
    let self_draft_step = |len: usize| {
        target.begin(0, &tokens[..len]).expect("fits");
        self_draft.begin(&mut target, 0, &tokens[..len]).expect("fits");
        bytes(|| draft_one(&mut self_draft, &mut target, &tokens[..len], 0, needs))
    };
    assert_equal_at_every_length(self_draft_step, "a self-draft step");
}

#[test]
fn host_memory_and_tensors_give_the_same_logits_and_acceptance_probability() {
    let needs = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
    let tokens = tokens();
    let both = Models::both("draft-step", 1, &HeadReads::default());
    let [on_tensors, on_host] = both.each_ref().map(|models| {
        let mut draft = SeparateDraft::new(&models.target, Some(&models.head), 100, CAPACITY, 1);
        draft.begin(&mut (), 0, &tokens[..30]).expect("fits");
        [30, 31, 33].map(|len| draft_one(&mut draft, &mut (), &tokens[..len], 1, needs))
    });
    for (found, expected) in on_host.iter().zip(&on_tensors) {
        let acceptance_prob = |drafted: &DraftRow| match drafted.signals.acceptance_prob {
            Some(HeadEstimate::OfRead(prob)) => prob,
            other => panic!("{other:?}"),
        };
        // Sums of f32 in another order, of numbers near 1.
        assert!((acceptance_prob(found) - acceptance_prob(expected)).abs() < 1e-6);
        for (a, b) in found.own_logits.iter().zip(&expected.own_logits) {
            assert!((a - b).abs() < 1e-5, "{a} for {b}");
        }
    }
}

/// Takes one draft step in slot 0.
pub(crate) fn draft_one<T>(
    drafter: &mut impl StepDrafter<T>,
    target: &mut T,
    tokens: &[u32],
    num_candidates: usize,
    needs: SignalNeeds,
) -> DraftRow {
    let step = DraftStep::in_chain(0, tokens, num_candidates, needs, &Decoding::GREEDY);
    drafter.draft(target, &[step]).expect("finite").remove(0)
}

/// Converts token ids to a tensor, `[1, tokens]`.
pub(crate) fn tensor_of(ids: &[u32], model: &CausalLm) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    Tensor::from_data(TensorData::new(ids.clone(), [1, ids.len()]), &model.device())
}

/// Computes the head's predictions for the tokens of `ids` after the first `num_before`, as candidates of one round,
/// from the drafter's hidden states `[1, tokens, hidden]` and logits of the whole sequence. `model` has the
/// embeddings.
pub(crate) fn predicted_for_candidates(
    head: &AcceptanceHead,
    model: &CausalLm,
    ids: &[u32],
    num_before: usize,
    hidden: Tensor<3>,
    logits: &[f32],
) -> Vec<f64> {
    let vocab_size = logits.len() / ids.len();
    let (reads, num) = (head.reads(), ids.len() - num_before);
    let first = if reads.looks_ahead() { num_before - 1 } else { num_before };
    let hidden = hidden.squeeze_dim::<2>(0).slice(first..first + num);
    let scalars: Vec<f32> = (num_before..ids.len())
        .flat_map(|at| {
            let log_probs = log_softmax(&logits[(at - 1) * vocab_size..at * vocab_size]);
            let candidate = DrawnCandidate {
                entropy: entropy_of_log_probs(&log_probs),
                top_prob: log_probs.iter().copied().fold(f64::NEG_INFINITY, f64::max).exp(),
                log_prob: Some(log_probs[ids[at] as usize]),
            };
            reads.scalars(&candidate, vocab_size).collect::<Vec<_>>()
        })
        .collect();
    let mut extra = Vec::new();
    if reads.looks_ahead() {
        extra.push(model.embed(tensor_of(&ids[num_before..], model)).squeeze_dim::<2>(0));
    }
    if reads.num_scalars() > 0 {
        let data = TensorData::new(scalars, [num, reads.num_scalars()]);
        extra.push(Tensor::from_data(data, &model.device()));
    }
    let extra = (!extra.is_empty()).then(|| Tensor::cat(extra, 1));
    let logits = head.acceptance_logit(HeadFeatures { hidden, extra }).into_data();
    let logits: Vec<f32> = logits.try_into_vec().expect("f32");
    logits.into_iter().map(|logit| 1.0 / (1.0 + (-f64::from(logit)).exp())).collect()
}

/// Lets every generation continue, as its observer.
pub(crate) fn go_on(_: RoundTokens<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Decodes greedily without a drafter.
pub(crate) fn greedy_plain(
    target: &mut impl Target,
    prompt: &[u32],
    limits: &Limits,
) -> Generation {
    let draws = &mut SeededDraws::new(0, &["unused"]);
    decode_plain(target, &Decoding::GREEDY, prompt, limits, draws, &mut go_on).expect("decodes")
}

/// Decodes greedily with a drafter.
pub(crate) fn greedy<T: Target>(
    target: &mut T,
    drafter: &mut impl Drafter<T>,
    rule: &mut dyn StopRule,
    prompt: &[u32],
    limits: &Limits,
) -> Generation {
    let draws = &mut SeededDraws::new(0, &["unused"]);
    decode_speculative(
        target,
        drafter,
        Request { prompt, decoding: Decoding::GREEDY, limits, rule: Some(rule), draws },
        &mut go_on,
    )
    .expect("decodes")
}

#[test]
fn kept_states_are_those_of_whole_sequences_after_every_kind_of_round() {
    for Models { target: model, .. } in &Models::both("kept", 4, &HeadReads::default()) {
        for exit in [None, Some(0), Some(1)] {
            let layers = TargetLayers { exit, kept: vec![0, 1, 2, 3] };
            let mut target = ModelSession::new(model, CAPACITY, "target");
            target.set_layers(&layers);
            let mut tokens = tokens()[..9].to_vec();
            target.begin(0, &tokens).expect("fits");
            // Whole, partly accepted and empty chains, and a tree whose second branch is accepted.
            let chain = |tokens: &[u32]| Proposal::certain_chain(tokens);
            let mut tree = chain(&[5, 6]);
            for (parent, token_id) in [(None, 7), (Some(2), 8)] {
                tree.push(Node { parent, token_id, drawn_from: DrawnFrom::OneHot, rank: 1 });
            }
            let (mut from, mut seen) = (0, vec![Vec::new(); layers.kept.len()]);
            for (proposal, path) in [
                (chain(&[11, 12, 13]), vec![0, 1, 2]),
                (chain(&[14, 15]), vec![0]),
                (chain(&[]), vec![]),
                (tree, vec![2, 3]),
                (chain(&[16]), vec![]),
            ] {
                let num_standing = tokens.len();
                let proposed: Vec<u32> = proposal.nodes().iter().map(|it| it.token_id).collect();
                let all = [&tokens[..], &proposed].concat();
                target
                    .verify(&[Verification { slot: 0, tokens: &all, proposal: &proposal }])
                    .expect("finite");
                target.commit(0, num_standing, &path);
                tokens.extend(path.iter().map(|node| proposed[*node]));
                tokens.push(9);
                target.begin_round(0, tokens.len());
                let states = target.kept_states(0, &tokens, from, &[0, 1, 2, 3]);
                for (seen, states) in seen.iter_mut().zip(states) {
                    let [states] = Rows::to_host([states]).expect("finite");
                    seen.extend(states);
                }
                from = tokens.len() - 1;
            }
            let read = &tokens[..tokens.len() - 1];
            let ids = read.iter().map(|id| *id as i32).collect();
            let ids = TensorData::new::<i32, _>(ids, [1, read.len()]);
            for (layer, seen) in layers.kept.iter().zip(&seen) {
                let ids = Tensor::<2, Int>::from_data(ids.clone(), &model.device());
                let [whole] =
                    Rows::to_host([model.exit_states(ids, *layer).into()]).expect("finite");
                assert_close(seen, &whole);
            }
        }
    }
}

#[test]
#[should_panic(expected = "has read a token that is to be verified")]
fn a_target_that_has_read_a_candidate_for_good_is_refused() {
    let [_, Models { target: model, .. }] = &Models::both("read", 5, &HeadReads::default());
    let (mut target, tokens) = (ModelSession::new(model, CAPACITY, "target"), &tokens()[..9]);
    target.begin(0, tokens).expect("fits");
    let proposal = &Proposal::certain_chain(&tokens[7..]);
    target.verify(&[Verification { slot: 0, tokens, proposal }]).expect("finite");
}

#[test]
#[should_panic(expected = "no candidate was read as if it stood")]
fn states_are_refused_if_the_target_has_read_a_candidate_for_good() {
    let [_, Models { target: model, .. }] = &Models::both("known", 5, &HeadReads::default());
    let (mut target, tokens) = (ModelSession::new(model, CAPACITY, "target"), &tokens()[..9]);
    target.set_layers(&TargetLayers { exit: None, kept: vec![1] });
    target.begin(0, tokens).expect("fits");
    target.begin_round(0, 7);
    target.kept_states(0, tokens, 0, &[1]);
}
