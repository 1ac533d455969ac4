//! Self-drafts of the fixture model with random adapters, compared with plain decoding and with forwards
//! over whole sequences without a cache.

mod cascades;
mod in_bf16;
mod lookup_first;
mod trees;
mod with_head;

use std::ops::ControlFlow;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::{
    AdapterArchitecture, AdapterConfig, CachedNetwork, CausalLm, DraftVocabulary, NamedTensor,
    Rows, WeightDtype, WeightReader, write_safetensors,
};
use draftsmith_theory::{
    Bounds, ConfidenceThresholdConfig, Counts, Decoding, FixedLengthConfig, Sampling, SeededDraws,
    StopRule, Trace,
};

use super::*;
use crate::decode::decode_speculative;
use crate::drafter::{DraftRow, DraftStep, Drafter, StepDrafter};
use crate::error::{DecodeError, Result};
use crate::separate_draft::SeparateDraft;
use crate::sequence::{Finish, Generation, Limits, Request};
use crate::session::ModelSession;
use crate::session::tests::{go_on, greedy, greedy_plain};
use crate::target::{Logits, Target, Verification};

const EXIT_LAYERS: [usize; 3] = [0, 1, 2];
/// Two architectures for each exit layer.
const ARCHITECTURES: [[AdapterArchitecture; 2]; 3] = [
    [AdapterArchitecture::Attention, AdapterArchitecture::DecoderLayer],
    [AdapterArchitecture::Attention, AdapterArchitecture::DecoderLayer],
    [AdapterArchitecture::AttentionWithHead, AdapterArchitecture::MlpOnly],
];

fn target() -> CausalLm {
    target_of("llama-v5-untied-f32")
}

pub(crate) fn target_of(name: &str) -> CausalLm {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name);
    CausalLm::from_model_dir(&dir, &Device::flex()).expect("the fixture loads")
}

fn config_of(
    target: &CausalLm,
    architecture: AdapterArchitecture,
    exit_layer: usize,
) -> AdapterConfig {
    let config = AdapterConfig::new(target.config(), exit_layer).expect("a valid exit layer");
    config.with(|it| it.architecture = architecture)
}

/// Writes an adapter with random weights and reads it from files like a trained one. With matrices near zero it
/// hardly changes the features and agrees with the target more often.
fn adapter(
    target: &CausalLm,
    architecture: AdapterArchitecture,
    exit_layer: usize,
    largest_weight: f64,
    name: &str,
) -> Adapter {
    let process = std::process::id();
    let dir = format!("draftsmith-adapter-{process}-{architecture}-{exit_layer}-{name}");
    let dir = std::env::temp_dir().join(dir);
    let device = Device::flex();
    let config = config_of(target, architecture, exit_layer);
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    config.init(&device).write_dir(&dir, &config).expect("written");
    let mut reader = WeightReader::open_dir(&dir).expect("opens");
    let mut draws = SeededDraws::new(5, &[name, &exit_layer.to_string()]);
    let tensors: Vec<NamedTensor> = reader
        .names()
        .map(|name| (name.to_owned(), reader.shape(name).expect("named").to_vec()))
        .collect::<Vec<_>>()
        .into_iter()
        .map(|(name, shape)| {
            let mut values = reader.take(&name, &shape).expect("of its own shape");
            let is_norm = shape.len() == 1;
            // Near the target's head, otherwise no candidate is ever accepted.
            let is_head = name == "lm_head.weight";
            if is_head {
                let head = target.lm_head_weight().transpose().into_data();
                values = head.try_into_vec().expect("f32");
            }
            for value in &mut values {
                let unit = draws.uniform() * 2.0 - 1.0;
                *value = match (is_norm, is_head) {
                    (true, _) => (1.0 + unit / 2.0) as f32,
                    (_, true) => *value + (0.1 * unit * largest_weight) as f32,
                    _ => (unit * largest_weight) as f32,
                };
            }
            NamedTensor { name, shape, values }
        })
        .collect();
    write_safetensors(&dir.join("model.safetensors"), &tensors, WeightDtype::F32, &[])
        .expect("written");
    // The weights no longer have the hash of the export.
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).expect("reads");
    std::fs::write(&path, text.replace("weights_hash", "_name_or_path")).expect("written");
    let (_, adapter) =
        Adapter::from_dir(&dir, target.shape(), WeightDtype::F32, &device).expect("reads");
    std::fs::remove_dir_all(&dir).expect("removed");
    adapter
}

fn prompts() -> Vec<Vec<u32>> {
    [1, 2, 7, 40].map(|len| (0..len).map(|i| (3 + i * 37 + len * 11) % 96).collect()).to_vec()
}

fn rules() -> Vec<Box<dyn StopRule>> {
    let fixed = (1..=6).map(|length| -> Box<dyn StopRule> {
        Box::new(FixedLengthConfig { candidate_length: length })
    });
    let bounds = Bounds { min: 1, max: 6 };
    let thresholds = [0.0, 0.03, 0.1, 0.3, 1.0].map(|threshold| -> Box<dyn StopRule> {
        Box::new(ConfidenceThresholdConfig {
            confidence_threshold: threshold,
            before_draw: false,
            bounds,
        })
    });
    fixed.chain(thresholds).collect()
}

fn session_with_exit(model: &CausalLm, exit_layer: usize, context: usize) -> ModelSession<'_> {
    let mut session = ModelSession::new(model, context, "target");
    session.set_layers(&TargetLayers::exit(exit_layer));
    session
}

/// Counts rounds that another round followed, by whether all their candidates were accepted. If they were,
/// the adapter has not read the last one's features.
fn tally(trace: &Trace, counts: &mut [usize; 2]) {
    let rounds = &trace.rounds;
    for round in &rounds[..rounds.len().saturating_sub(1)] {
        counts[usize::from(round.num_accepted == round.num_drafted)] += 1;
    }
}

/// Compares every rule with plain decoding, over limits, contexts and end tokens.
fn assert_greedy_is_plain(
    model: &CausalLm,
    adapter: &Adapter,
    exit: usize,
    counts: &mut [usize; 2],
) {
    for prompt in prompts() {
        for (max_new_tokens, context) in [(0, 64), (1, 64), (2, 64), (5, 64), (24, 64), (64, 50)] {
            let plain_session = &mut ModelSession::new(model, context, "target");
            let mut limits = Limits::new(max_new_tokens, vec![]);
            let unended = greedy_plain(plain_session, &prompt, &limits);
            // With and without an end token that occurs, at the latest as the last token.
            let ends = [None, unended.token_ids.get(max_new_tokens / 2).copied()];
            let mut session = session_with_exit(model, exit, context);
            let mut drafter = SelfDraft::new(model, adapter, exit, None, context, 1);
            for end in ends {
                limits.eos_token_ids = end.into_iter().collect();
                let plain = greedy_plain(plain_session, &prompt, &limits);
                assert_eq!(plain.finish == Finish::Eos, end.is_some());
                for mut rule in rules() {
                    let found = greedy(&mut session, &mut drafter, rule.as_mut(), &prompt, &limits);
                    assert_eq!(found.token_ids, plain.token_ids);
                    assert_eq!(found.finish, plain.finish);
                    let all = found.trace.counts();
                    all.check_forward_identity().expect("a draft forward each");
                    assert_eq!(all.num_draft_forwards, all.num_drafted);
                    tally(&found.trace, counts);
                }
            }
        }
    }
}

#[test]
fn greedy_output_is_plain_greedy_output_for_every_rule_limit_and_context() {
    let model = target();
    let mut counts = [0; 2];
    for (exit_layer, architectures) in EXIT_LAYERS.into_iter().zip(ARCHITECTURES) {
        for architecture in architectures {
            for (name, largest_weight) in [("near", 0.02), ("far", 0.5)] {
                let adapter = adapter(&model, architecture, exit_layer, largest_weight, name);
                assert_greedy_is_plain(&model, &adapter, exit_layer, &mut counts);
            }
        }
    }
    // Both cases occurred many times.
    assert!(counts.iter().all(|count| *count > 300), "{counts:?}");
}

/// A checkpoint of each family.
pub(crate) const FAMILIES: [&str; 9] = [
    "llama-v5-untied-f32",
    "mistral-window-f16",
    "qwen2-sharded-bf16",
    "qwen3-bf16",
    "gemma2-bf16",
    "gemma3-f16",
    "phi3-longrope-bf16",
    "gpt-neox-sharded-bin-f16",
    "gpt-neox-serial-bf16",
];

/// Covers families with windows shorter than the sequences, where tokens that are rolled back evict no keys.
#[test]
fn greedy_output_is_plain_greedy_output_in_every_family() {
    let mut counts = [0; 2];
    for name in FAMILIES {
        let model = target_of(name);
        let exit_layer = exit_layer_of(&model);
        // With packed weights from files, and with random tensors.
        let near = adapter(&model, AdapterArchitecture::Attention, exit_layer, 0.02, name);
        assert_a_few_rules_are_plain(&model, &near, &mut counts);
        let far = adapter(&model, AdapterArchitecture::DecoderLayer, exit_layer, 0.5, name);
        assert_a_few_rules_are_plain(&model, &far, &mut counts);
        let device = Device::flex();
        device.seed(3);
        let drawn = model.config().init(&device);
        let config = config_of(&drawn, AdapterArchitecture::Attention, exit_layer);
        assert_a_few_rules_are_plain(&drawn, &config.init(&device), &mut counts);
        // A draft vocabulary of every second token.
        let ids: Vec<u32> = (0..model.shape().vocab_size as u32).step_by(2).collect();
        let config = config_of(&model, AdapterArchitecture::DecoderLayer, exit_layer);
        let config = AdapterConfig { draft_vocabulary: Some(DraftVocabulary::new(ids)), ..config };
        let narrow = config.with_layers(2).init(&device).with_layers_of(&model, exit_layer);
        assert_a_few_rules_are_plain(&model, &narrow, &mut counts);
    }
    assert!(counts.iter().all(|count| *count > 50), "{counts:?}");
}

/// Returns the exit after two layers, or after one if the model has two.
fn exit_layer_of(model: &CausalLm) -> usize {
    2.min(model.shape().num_layers - 1)
}

fn assert_a_few_rules_are_plain(model: &CausalLm, adapter: &Adapter, counts: &mut [usize; 2]) {
    let limits = Limits::new(40, vec![]);
    let exit_layer = exit_layer_of(model);
    for prompt in prompts().iter().skip(2) {
        let plain = greedy_plain(&mut ModelSession::new(model, 96, "target"), prompt, &limits);
        let mut session = session_with_exit(model, exit_layer, 96);
        let mut self_draft = SelfDraft::new(model, adapter, exit_layer, None, 96, 1);
        // The target drafts for itself.
        let mut separate = SeparateDraft::new(model, None, 96, 96, 1);
        for mut rule in rules().into_iter().step_by(3) {
            let found = greedy(&mut session, &mut self_draft, rule.as_mut(), prompt, &limits);
            assert_eq!(found.token_ids, plain.token_ids);
            tally(&found.trace, counts);
            let found = greedy(&mut session, &mut separate, rule.as_mut(), prompt, &limits);
            assert_eq!(found.token_ids, plain.token_ids);
        }
    }
}

#[test]
fn greedy_output_of_tensors_is_plain_greedy_output() {
    // A model that was not loaded from files computes with tensors.
    let device = Device::flex();
    device.seed(3);
    let model = target().config().init(&device);
    let mut counts = [0; 2];
    for architecture in AdapterArchitecture::ALL {
        let adapter = config_of(&model, architecture, 2).init(&device);
        assert_greedy_is_plain(&model, &adapter, 2, &mut counts);
    }
    assert!(counts[0] + counts[1] > 100, "{counts:?}");
}

#[test]
fn a_session_with_an_exit_serves_any_drafter_and_none() {
    let model = target();
    let adapter = adapter(&model, AdapterArchitecture::Attention, 1, 0.02, "near");
    let limits = Limits::new(12, vec![]);
    let mut session = session_with_exit(&model, 1, 64);
    let mut self_draft = SelfDraft::new(&model, &adapter, 1, None, 64, 1);
    // The target drafts for itself, so all candidates are accepted.
    let mut separate = SeparateDraft::new(&model, None, 96, 64, 1);
    let mut rule = FixedLengthConfig { candidate_length: 3 };
    for prompt in prompts() {
        let plain = greedy_plain(&mut ModelSession::new(&model, 64, "target"), &prompt, &limits);
        for _ in 0..2 {
            let alone = greedy_plain(&mut session, &prompt, &limits);
            let with_self = greedy(&mut session, &mut self_draft, &mut rule, &prompt, &limits);
            let with_separate = greedy(&mut session, &mut separate, &mut rule, &prompt, &limits);
            for found in [&alone, &with_self, &with_separate] {
                assert_eq!(found.token_ids, plain.token_ids);
            }
            assert_eq!(with_separate.trace.counts().acceptance_rate(), 1.0);
            let scored = session.score(&prompt, 0).expect("finite");
            assert_eq!(
                scored,
                ModelSession::new(&model, 64, "target").score(&prompt, 0).expect("finite")
            );
        }
    }
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    let model = target();
    let adapter = adapter(&model, AdapterArchitecture::Attention, 1, 0.02, "near");
    let limits = Limits::new(4, vec![]);
    for (context, adapters_context, role) in [(7, 64, "target"), (64, 7, "adapter")] {
        let refused = decode_speculative(
            &mut session_with_exit(&model, 1, context),
            &mut SelfDraft::new(&model, &adapter, 1, None, adapters_context, 1),
            Request {
                prompt: &[5; 7],
                decoding: Decoding::GREEDY,
                limits: &limits,
                rule: Some(&mut FixedLengthConfig { candidate_length: 2 }),
                draws: &mut SeededDraws::new(0, &["unused"]),
            },
            &mut go_on,
        );
        let expected = DecodeError::PromptTooLong { prompt: 7, context: 7, role };
        assert_eq!(refused.expect_err("refused"), expected);
    }
}

/// A self-draft's target that compares every verification with a session that reads the whole sequence
/// again.
struct Watched<'m> {
    session: ModelSession<'m>,
    plain: ModelSession<'m>,
    /// The number of positions that the shallow and the deep layers were run on.
    num_run: [usize; 2],
    num_verifications: usize,
}

impl<'m> Watched<'m> {
    fn new(model: &'m CausalLm, exit_layer: usize) -> Self {
        Self {
            session: session_with_exit(model, exit_layer, 64),
            plain: ModelSession::new(model, 64, "target"),
            num_run: [0; 2],
            num_verifications: 0,
        }
    }

    /// Runs the session and counts the positions by which its caches grow.
    fn counting<R>(&mut self, run: impl FnOnce(&mut ModelSession<'m>) -> R) -> R {
        let lens = |session: &ModelSession<'_>| [session.num_read(0), session.num_read_by_all(0)];
        let before = lens(&self.session);
        let result = run(&mut self.session);
        for (count, (after, before)) in
            self.num_run.iter_mut().zip(lens(&self.session).into_iter().zip(before))
        {
            *count += after - before;
        }
        result
    }
}

/// Asserts that rows of logits are equal up to rounding, since sums are in another order. A logit near 0 is
/// a sum of terms as large as the row's other logits, so the tolerance is relative to the largest.
pub(crate) fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 1e-5 * largest, "{a} for {b}, with logits up to {largest}");
    }
}

impl Target for Watched<'_> {
    fn num_slots(&self) -> usize {
        1
    }

    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        self.session.commit(slot, 0, &[]);
        self.counting(|session| session.begin(slot, prompt))
    }

    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        self.num_verifications += 1;
        let found = self.counting(|session| session.verify(batch))?;
        let [Verification { tokens, proposal, .. }] = batch else { panic!("one sequence") };
        let expected = self.plain.score(tokens, tokens.len() - proposal.num_rows())?;
        assert_eq!(found.num_rows(), proposal.num_rows());
        for (found, expected) in found.rows().zip(expected.rows()) {
            assert_close(found, expected);
        }
        Ok(found)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.session.commit(slot, num_standing, path);
        // All layers have read the sequence except its last token.
        let len = num_standing + path.len();
        assert_eq!([self.session.num_read(0), self.session.num_read_by_all(0)], [len, len]);
    }

    fn context(&self) -> usize {
        self.session.context()
    }
}

/// A self-draft that compares every step with a forward over the whole sequence without a cache.
struct WatchedDraft<'a>(SelfDraft<'a>, &'a Adapter, usize);

impl<'m> Drafter<Watched<'m>> for WatchedDraft<'_> {
    fn begin(&mut self, target: &mut Watched<'m>, slot: usize, prompt: &[u32]) -> Result<()> {
        target.counting(|session| self.0.begin(session, slot, prompt))
    }

    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<Watched<'m>>> {
        Some(self)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        Drafter::<ModelSession<'_>>::commit(&mut self.0, slot, num_standing, path);
    }

    fn context(&self) -> usize {
        Drafter::<ModelSession<'_>>::context(&self.0)
    }
}

impl<'m> StepDrafter<Watched<'m>> for WatchedDraft<'_> {
    fn id(&self) -> DrafterId {
        StepDrafter::<ModelSession<'_>>::id(&self.0)
    }

    fn draft(
        &mut self,
        target: &mut Watched<'m>,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>> {
        let drafted = target.counting(|session| self.0.draft(session, steps))?;
        let [DraftStep { tokens, .. }] = steps else { panic!("one sequence is watched") };
        let model = target.session.model();
        let ids = tokens.iter().map(|id| *id as i32).collect();
        let ids = TensorData::new::<i32, _>(ids, [1, tokens.len()]);
        let ids = Tensor::<2, Int>::from_data(ids, &model.device());
        let Self(_, adapter, exit_layer) = *self;
        let features = model.exit_states(ids, exit_layer);
        let normed: Rows = adapter.forward(features).into();
        let [expected] = Rows::to_host([adapter.logits(&normed.last(1), model)]).expect("finite");
        assert_close(&drafted[0].own_logits, &expected);
        // The features of every token, including the newest.
        assert_eq!(self.0.num_read(0), tokens.len());
        Ok(drafted)
    }
}

#[test]
fn every_step_and_row_equals_that_of_the_whole_sequence_and_no_layer_reads_a_token_twice() {
    let model = target();
    let limits = Limits::new(20, vec![]);
    let decodings = [
        Decoding::GREEDY,
        Decoding::sampled(Sampling::default()),
        Decoding::sampled(Sampling { temperature: 0.3, top_p: 0.9, top_k: None, min_p: None }),
    ];
    let mut counts = [0; 2];
    for (exit_layer, architecture) in EXIT_LAYERS.into_iter().cycle().zip(AdapterArchitecture::ALL)
    {
        let adapter = adapter(&model, architecture, exit_layer, 0.1, "between");
        let mut target = Watched::new(&model, exit_layer);
        let mut drafter = WatchedDraft(
            SelfDraft::new(&model, &adapter, exit_layer, None, 64, 1),
            &adapter,
            exit_layer,
        );
        for (number, decoding) in decodings.iter().enumerate() {
            for prompt in prompts() {
                // Every third rule.
                for mut rule in rules().into_iter().step_by(3) {
                    (target.num_run, target.num_verifications) = ([0; 2], 0);
                    let found = decode_speculative(
                        &mut target,
                        &mut drafter,
                        Request {
                            prompt: &prompt,
                            decoding: *decoding,
                            limits: &limits,
                            rule: Some(rule.as_mut()),
                            draws: &mut SeededDraws::new(number as u64, &["watched"]),
                        },
                        &mut go_on,
                    )
                    .expect("decodes");
                    let Counts { num_drafted, num_target_forwards, .. } = found.trace.counts();
                    assert_eq!(found.token_ids.len(), limits.max_new_tokens);
                    assert_eq!(num_target_forwards, target.num_verifications);
                    // The prompt, and in each round its first token and its candidates, once.
                    let num_run = prompt.len() - 1 + num_target_forwards + num_drafted;
                    assert_eq!(target.num_run, [num_run; 2]);
                    tally(&found.trace, &mut counts);
                }
            }
        }
    }
    assert!(counts.iter().all(|count| *count > 250), "{counts:?}");
}
