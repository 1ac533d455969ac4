//! Real networks, small and random: rounds equal a fresh pass over the target's states, and output is the
//! target's.

use std::ops::ControlFlow;

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::vectors::values;
use draftsmith_model::{
    CausalLm, DraftVocabulary, Eagle3, Eagle3Config, EagleConfig, ModelConfig, ModelShape, Rows,
    StateNorms, WeightDtype,
};
use draftsmith_theory::{
    Bounds, ConfidenceThresholdConfig, Decoding, FixedLengthConfig, MaxGramConfig, Sampling,
    SeededDraws, StopRuleConfig, TopProbs, TreeShape, distribution_of, enumerate, log_softmax,
};

use super::*;
use crate::cascade::{Cascade, CascadeConfig};
use crate::decode::{decode_many, decode_plain, decode_speculative};
use crate::lookup_first::LookupFirstDraft;
use crate::max_gram::MaxGramDraft;
use crate::record::tests::assert_alike;
use crate::record::{RecordOptions, RecordRequest, record};
use crate::registry::AnsweringTarget;
use crate::response_target::{KnownResponse, KnownStates, ResponseTarget};
use crate::self_draft::tests::{FAMILIES, assert_close, target_of};
use crate::sequence::{Limits, Request};
use crate::session::ModelSession;
use crate::session::tests::{greedy, greedy_plain};
use crate::target::{Target, TargetLayers};
use crate::tree_draft::TreeDraft;

const CAPACITY: usize = 64;

/// A target and a drafter of it.
struct Models {
    target: CausalLm,
    drafter: Eagle3,
    layers: Vec<usize>,
}

/// How a drafter differs from the default.
#[derive(Clone, Copy, Default)]
struct Form {
    draft_vocabulary: Option<&'static [u32]>,
    has_other_width: bool,
    norm_before_residual: bool,
    norm_output: bool,
    state_norms: StateNorms,
    window: Option<usize>,
    has_head_norms: bool,
}

const USUAL: Form = Form {
    draft_vocabulary: None,
    has_other_width: false,
    norm_before_residual: false,
    norm_output: false,
    state_norms: StateNorms::Absent,
    window: None,
    has_head_norms: false,
};

const FORMS: [Form; 6] = [
    USUAL,
    Form { draft_vocabulary: Some(&[1, 2, 3, 7, 8, 11, 12]), has_other_width: true, ..USUAL },
    Form { norm_before_residual: true, ..USUAL },
    Form { norm_output: true, ..USUAL },
    Form { norm_output: true, state_norms: StateNorms::OfAll, window: Some(6), ..USUAL },
    Form { state_norms: StateNorms::OfEach, window: Some(3), has_head_norms: true, ..USUAL },
];

impl Models {
    /// Builds the models twice: as they are initialised, computed with tensors, and as they are read from files,
    /// computed in host memory.
    fn both(seed: u64, vocab_size: usize, form: Form) -> [Self; 2] {
        let device = Device::flex();
        let config = ModelConfig::llama(
            ModelShape {
                vocab_size,
                hidden_size: 32,
                num_layers: 5,
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 8,
                context: CAPACITY,
                bos_token_id: None,
                eos_token_ids: vec![1],
            },
            64,
        );
        let mut of_drafter = Eagle3Config::new(&config);
        of_drafter.target_layers = vec![0, 2, 5];
        of_drafter.draft_vocabulary = form.draft_vocabulary.map(DraftVocabulary::new);
        of_drafter.norm_before_residual = form.norm_before_residual;
        of_drafter.norm_output = form.norm_output;
        of_drafter.state_norms = form.state_norms;
        of_drafter.set_window(form.window);
        if form.has_head_norms {
            of_drafter.add_head_norms();
        }
        if form.has_other_width {
            let shape = &mut of_drafter.model.shape;
            (shape.hidden_size, shape.num_heads, shape.num_kv_heads) = (24, 2, 1);
            of_drafter.has_embedding = true;
        }
        let name = format!("draftsmith-eagle3-{seed}-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let [of_target, drafter] = ["target", "drafter"].map(|name| dir.join(name));
        for dir in [&of_target, &drafter] {
            std::fs::create_dir_all(dir).expect("created");
        }
        device.seed(seed);
        let target = config.init(&device);
        target.write_model_dir(&of_target, WeightDtype::F32).expect("written");
        let mut draws = SeededDraws::new(seed, &["drafter"]);
        let initialised = of_drafter.init_from(&device, || draws.uniform());
        initialised.write_dir(&drafter, &of_drafter).expect("written");
        let read =
            |dtype| Eagle3::from_dir(&drafter, &config.shape, dtype, &device).expect("reads back");
        let (found, packed) = read(WeightDtype::F32);
        assert_eq!(found.target_layers, of_drafter.target_layers);
        assert_eq!(found.num_parameters(), of_drafter.num_parameters());
        let layers = of_drafter.target_layers;
        let packed_target = CausalLm::from_model_dir(&of_target, &device).expect("reads");
        std::fs::remove_dir_all(&dir).expect("removed");
        [
            Self { target, drafter: packed.to_tensors(), layers: layers.clone() },
            Self { target: packed_target, drafter: packed, layers },
        ]
    }

    fn session(&self, num_slots: usize) -> (ModelSession<'_>, StateDraft<'_, Eagle3>) {
        let mut target = ModelSession::with_slots(&self.target, CAPACITY, num_slots, "target");
        let kept = TargetLayers { exit: None, kept: self.layers.to_vec() };
        target.set_layers(&TargetLayers::default().and(kept));
        let models = (&self.target, &self.drafter);
        (target, StateDraft::new(models, &self.layers, None, CAPACITY, num_slots))
    }

    /// Drafts from scratch after a text, and returns the drafter's logits after `tokens`, whose last `num_candidates`
    /// are the candidates.
    fn fresh(&self, tokens: &[u32], num_candidates: usize) -> Vec<f32> {
        let (mut target, mut drafter) = self.session(1);
        let standing = &tokens[..tokens.len() - num_candidates];
        target.begin(0, standing).expect("fits");
        drafter.begin(&mut target, 0, standing).expect("fits");
        target.begin_round(0, standing.len());
        let step = DraftStep::in_chain(0, tokens, num_candidates, NEEDS, &Decoding::GREEDY);
        drafter.draft(&mut target, &[step]).expect("finite").remove(0).own_logits
    }
}

const NEEDS: draftsmith_theory::SignalNeeds = draftsmith_theory::SignalNeeds {
    acceptance_prob: false,
    confidence: false,
    confidence_of_ten: false,
    candidate_prob: false,
    entropy: false,
};

fn fixed(candidate_length: usize) -> StopRuleConfig {
    FixedLengthConfig { candidate_length }.into()
}

fn confident() -> StopRuleConfig {
    StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
        confidence_threshold: 0.09,
        before_draw: false,
        bounds: Bounds { min: 1, max: 6 },
    })
}

/// A drafter whose every row is compared with a fresh pass.
struct Compared<'m> {
    models: &'m Models,
    drafter: StateDraft<'m, Eagle3>,
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

    fn draft(
        &mut self,
        target: &mut ModelSession<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>> {
        let rows = self.drafter.draft(target, steps)?;
        let of_steps = steps.iter().flat_map(|step| step.rows().map(move |(_, row)| (step, row)));
        for ((step, row), found) in of_steps.zip(&rows) {
            // The path to the node as a chain.
            let at = step.at(row);
            let num_standing = target.num_standing(step.slot);
            let mut path = Vec::new();
            if step.parents.is_empty() {
                path.extend_from_slice(&step.tokens[num_standing..=at]);
            } else {
                let mut next = (at >= num_standing).then_some(at);
                while let Some(position) = next {
                    path.push(step.tokens[position]);
                    next = step.parent_of(position).filter(|parent| *parent >= num_standing);
                }
                path.reverse();
            }
            let chain = [&step.tokens[..num_standing], &path].concat();
            let fresh = self.models.fresh(&chain, path.len());
            if num_standing == 1 && path.is_empty() {
                // Nothing is known before the first token, and logits are 0.
                assert_eq!(found.own_logits, fresh);
            } else {
                assert_close(&found.own_logits, &fresh);
            }
            self.num_compared += 1;
        }
        Ok(rows)
    }
}

fn prompt() -> Vec<u32> {
    (0..9).map(|at| 2 + at * 5 % 11).collect()
}

#[test]
fn every_step_equals_a_fresh_pass_and_greedy_output_is_the_targets() {
    for (nth, form) in FORMS.into_iter().enumerate() {
        for models in &Models::both(20 + nth as u64, 13, form) {
            let limits = Limits::new(30, vec![1]);
            let unused = &mut SeededDraws::new(0, &["unused"]);
            let mut target = ModelSession::new(&models.target, CAPACITY, "target");
            let go_on = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
            for prompt in [prompt(), vec![5]] {
                let plain =
                    decode_plain(&mut target, &Decoding::GREEDY, &prompt, &limits, unused, go_on)
                        .expect("decodes");
                for shape in [None, Some("2x2x4"), Some("3-1x9x99")] {
                    for rule in [fixed(1), fixed(4), confident()] {
                        let (mut target, drafter) = models.session(1);
                        let mut compared = Compared { models, drafter, num_compared: 0 };
                        let mut rule = rule.init().expect("valid");
                        let request = Request {
                            prompt: &prompt,
                            decoding: Decoding::GREEDY,
                            limits: &limits,
                            rule: Some(&mut *rule),
                            draws: unused,
                        };
                        let found = match shape.map(|text| text.parse::<TreeShape>()) {
                            None => decode_speculative(&mut target, &mut compared, request, go_on),
                            Some(shape) => {
                                let shape = shape.expect("a shape");
                                let mut trees = TreeDraft::new(&mut compared, shape);
                                decode_speculative(&mut target, &mut trees, request, go_on)
                            }
                        };
                        let found = found.expect("decodes");
                        assert_eq!(found.token_ids, plain.token_ids);
                        assert!(compared.num_compared > 0);
                    }
                }
            }
        }
    }
}

#[test]
fn every_step_inside_a_cascade_equals_a_fresh_pass_and_greedy_output_is_the_targets() {
    let limits = &Limits::new(24, vec![1]);
    for models in &Models::both(60, 13, Form::default()) {
        let prompt = prompt().repeat(2);
        let mut target = ModelSession::new(&models.target, CAPACITY, "target");
        let plain = greedy_plain(&mut target, &prompt, limits);
        // Alone in its chain, a reviewer of look-ups, and both before look-ups.
        for lengths in [[[3, 0], [0, 0]], [[4, 0], [0, 2]], [[1, 2], [0, 2]]] {
            let (mut target, drafter) = models.session(1);
            let compared = Compared { models, drafter, num_compared: 0 };
            let lengths = lengths.map(|row| row.to_vec()).to_vec();
            let lookup = MaxGramDraft::new(MaxGramConfig::default(), (None, None), 1);
            let id = DrafterId::named("cascade");
            let config = CascadeConfig::new(lengths);
            let mut cascade =
                Cascade::new(id, config, vec![Box::new(compared)], Some(Box::new(lookup)));
            let rule = &mut *fixed(6).init().expect("valid");
            let found = greedy(&mut target, &mut cascade, rule, &prompt, limits);
            assert_eq!(found.token_ids, plain.token_ids);
        }
    }
}

#[test]
fn tensors_and_host_memory_draft_alike() {
    for (nth, form) in FORMS.into_iter().enumerate() {
        let [tensors, host] = &Models::both(30 + nth as u64, 13, form);
        let tokens = [prompt(), vec![3, 8, 2, 7]].concat();
        for num_candidates in 0..4 {
            let tokens = &tokens[..9 + num_candidates];
            let [one, other] = [tensors, host].map(|models| models.fresh(tokens, num_candidates));
            if let Some(ids) = form.draft_vocabulary {
                let drawn = one.iter().enumerate().filter(|(_, logit)| **logit > -1e20);
                assert!(drawn.map(|(id, _)| id as u32).eq(ids.iter().copied()));
            }
            // A token that is never drawn has the same logit in both.
            let seen = |logits: &[f32]| -> Vec<f32> {
                logits.iter().copied().filter(|logit| *logit > -1e20).collect()
            };
            assert_close(&seen(&one), &seen(&other));
        }
    }
}

#[test]
fn sequences_side_by_side_and_look_ups_before_it_change_no_token() {
    let [_, models] = &Models::both(40, 13, Form::default());
    let limits = &Limits::new(20, vec![1]);
    let prompts: Vec<Vec<u32>> = (0..5).map(|nth| prompt()[nth..].repeat(2)).collect();
    let go_on = |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
    let expected: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let mut target = ModelSession::new(&models.target, CAPACITY, "target");
            let unused = &mut SeededDraws::new(0, &["unused"]);
            decode_plain(&mut target, &Decoding::GREEDY, prompt, limits, unused, &mut { go_on })
                .expect("decodes")
                .token_ids
        })
        .collect();
    for looks_up in [false, true] {
        let (mut target, drafter) = models.session(3);
        let mut rules: Vec<_> = (0..5).map(|_| fixed(3).init().expect("valid")).collect();
        let mut draws: Vec<_> = (0..5).map(|_| SeededDraws::new(0, &["unused"])).collect();
        let requests = prompts.iter().zip(&mut rules).zip(&mut draws);
        let requests = requests.map(|((prompt, rule), draws)| Request {
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
        let found: Vec<Vec<u32>> =
            found.expect("decodes").into_iter().map(|one| one.token_ids).collect();
        assert_eq!(found, expected, "looks up: {looks_up}");
    }
}

#[test]
fn sampled_output_has_the_targets_distribution() {
    let [_, models] = &Models::both(50, 4, Form::default());
    let decoding = Decoding::sampled(Sampling { temperature: 0.7, ..Sampling::default() });
    let limits = Limits::new(3, vec![1]);
    let go_on = |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
    let expected = distribution_of(enumerate(|draws| {
        let mut target = ModelSession::new(&models.target, CAPACITY, "target");
        decode_plain(&mut target, &decoding, &[0, 2], &limits, draws, &mut { go_on })
            .expect("decodes")
            .token_ids
    }));
    for shape in [None, Some("2x1x9"), Some("2x2x3-drawn")] {
        for rule in [fixed(1), fixed(2), confident()] {
            let found = distribution_of(enumerate(|draws| {
                let (mut target, mut drafter) = models.session(1);
                let mut rule = rule.init().expect("valid");
                let request = Request {
                    prompt: &[0, 2],
                    decoding,
                    limits: &limits,
                    rule: Some(&mut *rule),
                    draws,
                };
                let found = match shape.map(|text| text.parse::<TreeShape>()) {
                    None => decode_speculative(&mut target, &mut drafter, request, &mut { go_on }),
                    Some(shape) => {
                        let mut trees = TreeDraft::new(&mut drafter, shape.expect("a shape"));
                        decode_speculative(&mut target, &mut trees, request, &mut { go_on })
                    }
                };
                found.expect("decodes").token_ids
            }));
            assert_eq!(found.len(), expected.len());
            for ((tokens, found), (other, expected)) in found.iter().zip(&expected) {
                assert_eq!(tokens, other);
                // Sums of products of f64.
                assert!((found - expected).abs() < 1e-12, "{tokens:?}: {found} for {expected}");
            }
        }
    }
}

fn requests<'a>(
    responses: &'a [(Vec<u32>, Vec<u32>)],
    draws: &'a mut [SeededDraws],
) -> Vec<RecordRequest<'a>> {
    let pairs = responses.iter().zip(draws);
    pairs.map(|((prompt, response), draws)| RecordRequest { prompt, response, draws }).collect()
}

#[test]
fn a_recording_along_known_states_is_the_one_with_the_target() {
    let vocab_size = 13;
    let limits = Limits::new(12, vec![1]);
    let warm = Sampling { temperature: 0.8, ..Sampling::default() };
    for decoding in [Decoding::GREEDY, Decoding::sampled(warm)] {
        for models in &Models::both(70, vocab_size, Form::default()) {
            let answer = |number: u32| {
                let prompt: Vec<u32> =
                    (0..5 + number).map(|at| 2 + (at * 5 + number) % 11).collect();
                let (mut target, _) = models.session(1);
                let draws = &mut SeededDraws::new(number.into(), &["response"]);
                let go_on = &mut |_: crate::RoundTokens<'_>| ControlFlow::Continue(());
                let found = decode_plain(&mut target, &decoding, &prompt, &limits, draws, go_on);
                (prompt, found.expect("decodes").token_ids)
            };
            let responses: Vec<(Vec<u32>, Vec<u32>)> = (0..3).map(answer).collect();
            let options = |is_target_here| RecordOptions {
                decoding,
                limits: limits.clone(),
                max_length: 4,
                has_head: false,
                labels: false,
                is_target_here,
            };
            let draws = |number| SeededDraws::new(number, &["rollouts"]);
            let all = || -> Vec<SeededDraws> { (0..responses.len() as u64).map(draws).collect() };
            let go_on = &mut |_| ControlFlow::Continue(());
            let (mut target, mut drafter) = models.session(2);
            let here = record(
                &mut target,
                &mut drafter,
                &options(true),
                requests(&responses, &mut all()),
                go_on,
            );

            let texts = responses.iter().map(|(prompt, response)| [&prompt[..], response].concat());
            let texts: Vec<Vec<u32>> = texts.collect();
            let ids = |text: &[u32]| {
                let values: Vec<i32> = text.iter().map(|id| *id as i32).collect();
                let data = TensorData::new(values, [1, text.len()]);
                Tensor::<2, Int>::from_data(data, &models.target.device())
            };
            let states = texts.iter().map(|text| {
                let read = &text[..text.len() - 1];
                let width = models.target.shape().hidden_size;
                let after = |layer: &usize| {
                    let values = values(models.target.exit_states(ids(read), *layer));
                    (*layer, Rows::of_host(values, width))
                };
                KnownStates { ids: read, layers: models.layers.iter().map(after).collect() }
            });
            let probs = texts.iter().zip(&responses).map(|(text, (prompt, _))| {
                let states = models.target.hidden_states(ids(&text[..text.len() - 1]));
                let logits = values(models.target.lm_head(states));
                let rows = logits.chunks_exact(vocab_size).skip(prompt.len() - 1);
                let whole = |row: &[f32]| {
                    let log_probs = log_softmax(row).into_iter().map(|log_prob| log_prob as f32);
                    TopProbs::new((0..).zip(log_probs), vocab_size)
                };
                rows.map(whole).collect::<Vec<TopProbs>>()
            });
            let probs: Vec<Vec<TopProbs>> = probs.collect();
            let known = responses.iter().zip(&probs).map(|((_, response), probs)| KnownResponse {
                response,
                probs: (!decoding.is_greedy()).then_some(&probs[..]),
            });
            let answers = ResponseTarget::new(known, vocab_size, CAPACITY, 2);
            let answers = answers.with_states(states.collect());
            let ends = Some(&models.target);
            let target = AnsweringTarget { answers, layers: ends, vocab_size };
            let (network, layers) = (models.drafter.clone(), models.layers.to_vec());
            let parts = StateDraftParts { network, layers, head: None };
            let mut all = all();
            let requests = requests(&responses, &mut all).into_iter().collect();
            let task = RecordTask { options: &options(false), requests, observe: go_on };
            let elsewhere = parts.record_elsewhere(target, task);
            let (here, elsewhere) =
                (here.expect("finite"), elsewhere.expect("states").expect("finite"));
            assert_eq!(here.len(), elsewhere.len());
            here.iter().zip(&elsewhere).for_each(|(here, elsewhere)| assert_alike(elsewhere, here));
        }
    }
}

#[test]
fn greedy_output_with_eagle_1_in_chains_and_eagle_2s_trees_is_plain_in_every_family() {
    let device = Device::flex();
    let limits = &Limits::new(40, Vec::new());
    let mut accepted = [0; 2];
    for name in FAMILIES {
        let target = target_of(name);
        device.seed(5);
        let network = EagleConfig::new(target.config()).init(&device).passing_states();
        let layers = [target.shape().num_layers];
        for prompt in [&[3, 9, 27][..], &[5]] {
            let mut plain = ModelSession::new(&target, CAPACITY, "target");
            let plain = greedy_plain(&mut plain, prompt, limits);
            for (nth, shape) in [None, Some("10x10x50")].into_iter().enumerate() {
                let mut session = ModelSession::new(&target, CAPACITY, "target");
                session.set_layers(&TargetLayers::kept(&layers));
                let models = (&target, &network);
                let mut drafter = StateDraft::new(models, &layers, None, CAPACITY, 1);
                let rule: StopRuleConfig = FixedLengthConfig { candidate_length: 4 }.into();
                let rule = &mut *rule.init().expect("valid");
                let found = match shape {
                    None => greedy(&mut session, &mut drafter, rule, prompt, limits),
                    Some(shape) => {
                        let shape: TreeShape = shape.parse().expect("a shape");
                        let mut tree = TreeDraft::new(&mut drafter, shape);
                        greedy(&mut session, &mut tree, rule, prompt, limits)
                    }
                };
                assert_eq!(found.token_ids, plain.token_ids, "{name} {shape:?}");
                accepted[nth] += found.trace.counts().num_accepted;
            }
        }
    }
    assert!(accepted[0] > 10 && accepted[1] > 2 * accepted[0], "{accepted:?}");
}
