//! Real networks, small and random: every row equals that of a fresh pass, the output is the target's, and a round
//! takes one forward.

use std::ops::ControlFlow;

use burn::tensor::Device;
use draftsmith_model::{
    BlockDrafterConfig, CausalLm, ConfidenceHead, DraftVocabulary, ModelConfig, ModelShape,
    WeightDtype,
};
use draftsmith_theory::{
    Bounds, ConfidenceHeadConfig, ConfidenceThresholdConfig, Decoding, DrafterId,
    FixedLengthConfig, HeadEstimate, HeuristicConfig, Recordings, RejectionThresholdConfig,
    SeededDraws, SignalNeeds, StopRuleConfig,
};

use super::*;
use crate::decode::decode_many;
use crate::drafter::{DraftRow, Drafter, StepDrafter};
use crate::error::Result;
use crate::lookup_first::LookupFirstDraft;
use crate::record::{RecordOptions, RecordRequest, record};
use crate::registry::DrafterParts;
use crate::self_draft::tests::assert_close;
use crate::sequence::{Limits, Request};
use crate::session::ModelSession;
use crate::session::tests::{greedy, greedy_plain};
use crate::target::{KeptStates, Target};
use crate::tree_draft::TreeDraft;

const CAPACITY: usize = 64;
const BLOCK_SIZE: usize = 4;

/// How a drafter differs from ours.
#[derive(Debug, Clone, Copy)]
struct Form {
    is_anchor_first: bool,
    is_causal: bool,
    markov_rank: usize,
    draft_vocabulary: Option<[u32; 7]>,
    window: Option<usize>,
}

const OURS: Form = Form {
    is_anchor_first: true,
    is_causal: true,
    markov_rank: 4,
    draft_vocabulary: None,
    window: None,
};

const FORMS: [Form; 6] = [
    OURS,
    Form { is_anchor_first: false, is_causal: false, markov_rank: 0, ..OURS },
    Form { is_causal: false, ..OURS },
    Form { draft_vocabulary: Some([1, 2, 3, 7, 8, 11, 12]), ..OURS },
    Form { window: Some(6), ..OURS },
    Form { is_causal: false, window: Some(5), ..OURS },
];

/// A target and a drafter of it.
struct Models {
    target: CausalLm,
    parts: BlockDraftParts,
}

impl Models {
    /// Builds the models twice: computed with tensors, and packed in host memory.
    fn both(seed: u64, form: Form) -> [Self; 2] {
        let device = Device::flex();
        device.seed(seed);
        let shape = ModelShape {
            vocab_size: 13,
            hidden_size: 32,
            num_layers: 5,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 8,
            context: CAPACITY,
            bos_token_id: None,
            eos_token_ids: vec![1],
        };
        let config = ModelConfig::llama(shape, 64);
        let drafter = BlockDrafterConfig::new(&config, 2, 0).with(|it| {
            it.target_layers = vec![5, 0, 2];
            it.block_size = BLOCK_SIZE;
            it.is_anchor_first = form.is_anchor_first;
            it.is_causal = form.is_causal;
            it.markov_rank = form.markov_rank;
            it.confidence = ConfidenceHead::OfRowAndToken;
            it.draft_vocabulary = form.draft_vocabulary.map(DraftVocabulary::new);
            it.set_window(form.window);
            // Bidirectional drafters of this form have one layer without a window, as z-lab's.
            if let Some(window) = &mut it.model.spec.window {
                window.layers[1] = form.is_causal;
            }
        });
        let dir = format!("draftsmith-block-{seed}-{}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        std::fs::create_dir_all(&dir).expect("created");
        let on_tensors = config.init(&device);
        on_tensors.write_model_dir(&dir, WeightDtype::F32).expect("written");
        let target = CausalLm::from_model_dir(&dir, &device).expect("reads");
        drafter.init(&device).write_dir(&dir, &drafter).expect("written");
        let read = BlockDrafter::from_dir(&dir, &config.shape, WeightDtype::F32, &device);
        let (_, packed) = read.expect("reads");
        std::fs::remove_dir_all(&dir).expect("removed");
        let parts = |network| BlockDraftParts { network, layers: vec![5, 0, 2] };
        let tensors = Self { target: on_tensors, parts: parts(packed.to_tensors()) };
        [tensors, Self { target, parts: parts(packed) }]
    }

    fn session(&self, num_slots: usize) -> (ModelSession<'_>, BlockDraft<'_>) {
        let mut target = ModelSession::with_slots(&self.target, CAPACITY, num_slots, "target");
        target.set_layers(&self.parts.target_layers());
        let models = (&self.target, &self.parts.network);
        (target, BlockDraft::new(models, &self.parts.layers, CAPACITY, num_slots))
    }

    /// Drafts from scratch after a text. Returns the logits after `tokens`, whose last `num_candidates` are the
    /// candidates, and the confidence head's prediction.
    fn fresh(&self, tokens: &[u32], num_candidates: usize) -> (Vec<f32>, f64) {
        let (mut target, mut drafter) = self.session(1);
        let standing = &tokens[..tokens.len() - num_candidates];
        target.begin(0, standing).expect("fits");
        drafter.begin(&mut target, 0, standing).expect("fits");
        target.begin_round(0, standing.len());
        let needs = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
        let step = DraftStep::in_chain(0, tokens, num_candidates, needs, &Decoding::GREEDY);
        let row = drafter.draft(&mut target, &[step]).expect("finite").remove(0);
        let predicted = row.signals.acceptance_prob.and_then(HeadEstimate::of_drawn);
        (row.own_logits, predicted.expect("there is a head that predicts before the draw"))
    }
}

/// A drafter whose every row and prediction is compared with a fresh pass.
struct Compared<'m> {
    models: &'m Models,
    drafter: BlockDraft<'m>,
    num_compared: usize,
}

impl<'m> Drafter<ModelSession<'m>> for Compared<'m> {
    fn begin(&mut self, target: &mut ModelSession<'m>, slot: usize, prompt: &[u32]) -> Result<()> {
        self.drafter.begin(target, slot, prompt)
    }

    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<ModelSession<'m>>> {
        Some(self)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        Drafter::<ModelSession<'m>>::commit(&mut self.drafter, slot, num_standing, path);
    }

    fn context(&self) -> usize {
        Drafter::<ModelSession<'m>>::context(&self.drafter)
    }
}

impl<'m> StepDrafter<ModelSession<'m>> for Compared<'m> {
    fn id(&self) -> DrafterId {
        StepDrafter::<ModelSession<'m>>::id(&self.drafter)
    }

    fn max_candidates(&self) -> usize {
        StepDrafter::<ModelSession<'m>>::max_candidates(&self.drafter)
    }

    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>> {
        let rows = self.drafter.draft(target, steps)?;
        let each = steps.iter().flat_map(DraftStep::rows);
        for ((step, row), found) in each.zip(&rows) {
            let text = step.text_before(row);
            let num_candidates = text.len() - target.num_standing(step.slot);
            let (fresh, expected) = self.models.fresh(&text, num_candidates);
            assert_close(&found.own_logits, &fresh);
            let predicted = found.signals.acceptance_prob.and_then(HeadEstimate::of_drawn);
            assert_eq!(predicted.is_some(), step.needs.acceptance_prob);
            assert!(predicted.is_none_or(|predicted| (predicted - expected).abs() < 1e-5));
            self.num_compared += 1;
        }
        Ok(rows)
    }
}

fn prompt() -> Vec<u32> {
    (0..9).map(|at| 2 + at * 5 % 11).collect()
}

fn fixed(candidate_length: usize) -> StopRuleConfig {
    FixedLengthConfig { candidate_length }.into()
}

fn by_head() -> StopRuleConfig {
    let bounds = Bounds { min: 1, max: 9 };
    RejectionThresholdConfig { stop_threshold: 0.7, without_lag: false, bounds }.into()
}

/// Rules that end rounds by their length, by what happened before, by the confidence before and after a draw, and by
/// the confidence head.
fn rules() -> Vec<StopRuleConfig> {
    let bounds = Bounds { min: 1, max: 9 };
    let confident = |before_draw| {
        StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
            confidence_threshold: 0.11,
            before_draw,
            bounds: Bounds { min: usize::from(!before_draw), ..bounds },
        })
    };
    let heuristic = HeuristicConfig { initial_length: 2, bounds };
    let cut =
        ConfidenceHeadConfig { acceptance_threshold: 0.5, bounds: Bounds { min: 0, ..bounds } };
    let others = [StopRuleConfig::Heuristic(heuristic), by_head(), cut.into()];
    [fixed(1), fixed(3), fixed(9), confident(false), confident(true)]
        .into_iter()
        .chain(others)
        .collect()
}

#[test]
fn every_row_equals_a_fresh_pass_and_greedy_output_is_the_targets() {
    let limits = &Limits::new(14, vec![1]);
    for (nth, form) in FORMS.into_iter().enumerate() {
        for models in &Models::both(120 + nth as u64, form) {
            let mut plain = ModelSession::new(&models.target, CAPACITY, "target");
            for prompt in [prompt(), vec![5]] {
                let expected = greedy_plain(&mut plain, &prompt, limits).token_ids;
                for (shape, rules) in [
                    (None, rules()),
                    (Some("2x2x4"), vec![fixed(9), by_head()]),
                    (Some("3-1x9x99"), vec![fixed(3)]),
                ] {
                    for config in rules {
                        let (mut target, drafter) = models.session(1);
                        let mut compared = Compared { models, drafter, num_compared: 0 };
                        let rule = &mut *config.init().expect("valid");
                        let found = match shape {
                            None => greedy(&mut target, &mut compared, rule, &prompt, limits),
                            Some(shape) => {
                                let shape = shape.parse().expect("a shape");
                                let mut trees = TreeDraft::new(&mut compared, shape);
                                greedy(&mut target, &mut trees, rule, &prompt, limits)
                            }
                        };
                        assert_eq!(found.token_ids, expected);
                        assert!(compared.num_compared > 0);
                    }
                }
            }
        }
    }
}

#[test]
fn a_round_takes_one_forward_of_no_more_rows_than_it_may_have_candidates() {
    for form in FORMS {
        let [_, models] = &Models::both(130, form);
        let most = models.parts.network.num_candidates();
        for (length, limit) in [(1, 30), (2, 30), (9, 30), (9, 2)] {
            let (mut target, mut drafter) = models.session(1);
            let rule = &mut *fixed(length).init().expect("valid");
            let limits = &Limits::new(limit, Vec::new());
            let found = greedy(&mut target, &mut drafter, rule, &prompt(), limits);
            let rounds = &found.trace.rounds;
            for round in rounds {
                assert_eq!(round.num_draft_forwards(), usize::from(round.num_drafted > 0));
                assert!(round.num_drafted <= length.min(most));
            }
            assert_eq!(rounds[0].num_drafted, length.min(most).min(limit - 1), "{form:?}");
        }
        // What a stop rule that is told nothing beforehand may need is computed at once.
        let (mut target, mut drafter) = models.session(1);
        target.begin(0, &prompt()).expect("fits");
        drafter.begin(&mut target, 0, &prompt()).expect("fits");
        target.begin_round(0, 9);
        for (upto, num_rows) in [(1, 1), (3, 3), (2, 3), (usize::MAX, 3)] {
            let text = prompt();
            let step = DraftStep::in_chain(0, &text, 0, SignalNeeds::default(), &Decoding::GREEDY);
            let step = DraftStep { most: upto, ..step };
            drafter.slots[0].take_if(|_| upto == 3);
            drafter.draft(&mut target, &[step]).expect("finite");
            let (_, block) = drafter.slots[0].as_ref().expect("it was run");
            assert_eq!(block.normed.num_rows(), if form.is_causal { num_rows } else { most });
        }
    }
}

#[test]
fn sequences_side_by_side_and_look_ups_before_it_change_no_token() {
    let limits = &Limits::new(20, vec![1]);
    for (nth, form) in FORMS.into_iter().enumerate() {
        let [_, models] = &Models::both(140 + nth as u64, form);
        let prompts: Vec<Vec<u32>> = (0..5).map(|nth| prompt()[nth..].repeat(2)).collect();
        let mut plain = ModelSession::new(&models.target, CAPACITY, "target");
        let expected: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| greedy_plain(&mut plain, prompt, limits).token_ids)
            .collect();
        for looks_up in [false, true] {
            let (mut target, drafter) = models.session(3);
            let mut own: Vec<_> = (0..5)
                .map(|_| (fixed(3).init().expect("valid"), SeededDraws::new(0, &["unused"])))
                .collect();
            let requests = prompts.iter().zip(&mut own).map(|(prompt, (rule, draws))| Request {
                prompt,
                decoding: Decoding::GREEDY,
                limits,
                rule: Some(&mut **rule),
                draws,
            });
            let observe = &mut |_: usize, _: crate::RoundTokens<'_>| ControlFlow::Continue(());
            let found = match looks_up {
                false => {
                    let mut drafter = drafter;
                    decode_many(&mut target, &mut drafter, requests, observe)
                }
                true => {
                    let first = "2x3".parse().expect("look-ups");
                    let mut drafter = LookupFirstDraft::new(drafter, (first, None), 3);
                    decode_many(&mut target, &mut drafter, requests, observe)
                }
            };
            let found = found.expect("decodes").into_iter().map(|one| one.token_ids);
            assert!(found.eq(expected.iter().cloned()), "looks up: {looks_up}");
        }
    }
}

#[test]
fn replay_has_the_counts_of_decoding_under_every_rule() {
    let (limits, max_length) = (Limits::new(24, vec![1]), 9);
    let mut num_accepted = 0;
    for (nth, form) in FORMS.into_iter().enumerate() {
        let [_, models] = &Models::both(150 + nth as u64, form);
        let options = RecordOptions {
            decoding: Decoding::GREEDY,
            limits: limits.clone(),
            max_length,
            has_head: true,
            labels: false,
            is_target_here: true,
        };
        let prompts: Vec<Vec<u32>> = (0..4).map(|nth| prompt()[nth..].to_vec()).collect();
        let mut plain = ModelSession::new(&models.target, CAPACITY, "target");
        let responses: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| greedy_plain(&mut plain, prompt, &limits).token_ids)
            .collect();
        let mut draws: Vec<_> = (0..4).map(|_| SeededDraws::new(0, &["unused"])).collect();
        let requests = prompts.iter().zip(&responses).zip(&mut draws);
        let requests =
            requests.map(|((prompt, response), draws)| RecordRequest { prompt, response, draws });
        let (mut target, mut drafter) = models.session(2);
        let observe = &mut |_| ControlFlow::Continue(());
        let responses =
            record(&mut target, &mut drafter, &options, requests, observe).expect("recorded");
        let recordings = Recordings {
            drafter: StepDrafter::<ModelSession<'_>>::id(&drafter),
            max_length,
            eos_token_ids: vec![1],
            head: Some(HeadTiming::BeforeDraw),
            responses,
            answers: None,
        };
        let longest = recordings.responses.iter().flat_map(|it| &*it.places);
        let longest = longest.filter_map(|place| place.rollout.as_ref().map(Vec::len)).max();
        assert_eq!(longest, Some(models.parts.network.num_candidates()));
        for config in rules() {
            let replayed = recordings.replay_counts(&config).expect("recorded");
            for (prompt, replayed) in prompts.iter().zip(replayed) {
                let (mut target, mut drafter) = models.session(1);
                let rule = &mut *config.init().expect("valid");
                let found = greedy(&mut target, &mut drafter, rule, prompt, &limits);
                assert_eq!(found.trace.counts(), replayed, "{form:?}, {config:?}");
                num_accepted += replayed.num_accepted;
            }
        }
    }
    assert!(num_accepted > 50, "{num_accepted}");
}
