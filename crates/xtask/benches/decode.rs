//! Times of the embedded models: a forward by number of rows, decoding, an acceptance head's addition to a
//! draft step, and the binary from its start to its first token.
//! `cargo bench -p xtask --bench decode`

#[path = "../../draftsmith-cli/src/allocator.rs"]
mod allocator;
mod binary;

use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use burn::tensor::Device;
use divan::Bencher;
use divan::counter::ItemsCount;
use draftsmith_decode::{
    DraftStep, Drafter, Limits, Logits, ModelSession, Request, SeparateDraft, StepDrafter, Target,
    Verification, decode_plain, decode_speculative,
};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, CausalLm, HeadForm, HeadInput, HeadReads, ModelConfig,
    ModelShape, WeightDtype,
};
use draftsmith_theory::{Decoding, FixedLengthConfig, Proposal, SeededDraws, SignalNeeds, argmax};

use self::binary::binary;

const NEW_TOKENS: usize = 64;
const LIMITS: Limits = Limits::new(NEW_TOKENS, Vec::new());

static TARGET: LazyLock<CausalLm> = LazyLock::new(|| load("target"));
static DRAFT: LazyLock<CausalLm> = LazyLock::new(|| load("draft"));

fn main() {
    allocator::keep_freed_pages();
    // As in the program: called from outside the pool, a forward's second thread starts too late.
    rayon::scope(|_| divan::main());
}

fn dir_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name)
}

fn load(name: &str) -> CausalLm {
    CausalLm::from_model_dir(&dir_of(name), &Device::flex()).expect("the embedded model loads")
}

/// A prompt of ordinary tokens.
fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 270 + i * 37 % 300).collect()
}

/// One target forward after a prompt of 60 tokens. One row is plain decoding, K + 1 rows verify K
/// candidates. Two threads share six rows or more.
#[divan::bench(args = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 40, 64, 128])]
fn target_forward(bencher: Bencher, rows: usize) {
    let tokens = prompt(60 + rows);
    let mut session = ModelSession::new(&TARGET, 256, "target");
    session.begin(0, &tokens[..61]).expect("the prompt fits");
    let proposal = Proposal::certain_chain(&tokens[61..]);
    bencher
        .counter(ItemsCount::new(rows))
        .bench_local(|| read_behind_60(&mut session, &tokens, &proposal));
}

/// Reads the tokens after the first 60.
fn read_behind_60(session: &mut ModelSession<'_>, tokens: &[u32], proposal: &Proposal) -> Logits {
    session.commit(0, 60, &[]);
    session.verify(&[Verification { slot: 0, tokens, proposal }]).expect("finite")
}

/// Two models with the width of SmolLM2-135M, four layers and random weights in f32: one read from files,
/// so its weights are packed, and one initialised, so its weights are tensors.
static WIDE: LazyLock<[CausalLm; 2]> = LazyLock::new(|| {
    let (device, dir) = (Device::flex(), tempfile::tempdir().expect("a temporary directory"));
    let mut config = TARGET.config().clone();
    config.spec.mlp.width = 1536;
    config.shape = ModelShape {
        hidden_size: 576,
        num_layers: 4,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        context: 2049,
        ..config.shape
    };
    let initialised = config.init(&device);
    initialised.write_model_dir(dir.path(), WeightDtype::F32).expect("written");
    [CausalLm::from_model_dir(dir.path(), &device).expect("reads"), initialised]
});

/// Reading a prompt with packed weights.
#[divan::bench(args = [512, 1024, 2048], sample_count = 5, sample_size = 1)]
fn prefill(bencher: Bencher, tokens: usize) {
    prefill_of(&WIDE[0], bencher, tokens);
}

/// Reading a prompt with tensors.
#[divan::bench(args = [512, 1024, 2048], sample_count = 5, sample_size = 1)]
fn prefill_on_tensors(bencher: Bencher, tokens: usize) {
    prefill_of(&WIDE[1], bencher, tokens);
}

fn prefill_of(model: &CausalLm, bencher: Bencher, tokens: usize) {
    let tokens = prompt(tokens);
    let mut session = ModelSession::new(model, 2049, "target");
    bencher
        .counter(ItemsCount::new(tokens.len()))
        .bench_local(|| session.begin(0, &tokens).expect("the prompt fits"));
}

/// One draft forward over one row.
#[divan::bench]
fn draft_forward(bencher: Bencher) {
    let tokens = prompt(61);
    let mut session = ModelSession::new(&DRAFT, 256, "draft");
    session.begin(0, &tokens).expect("the prompt fits");
    bencher.bench_local(|| read_behind_60(&mut session, &tokens, &Proposal::default()));
}

/// A draft of 2 layers and hidden size 128, with 4,096 tokens, and heads of 0 to 4 blocks, each
/// with random weights. They are read from files, because initialised models are laid out for training.
static DRAFT_AND_HEADS: LazyLock<(CausalLm, Vec<AcceptanceHead>)> = LazyLock::new(|| {
    let (device, dir) = (Device::flex(), tempfile::tempdir().expect("a temporary directory"));
    let shape = ModelShape {
        vocab_size: 4096,
        hidden_size: 128,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 32,
        ..DRAFT.shape().clone()
    };
    let config = ModelConfig::llama(shape, 344).with_tied_embeddings(true);
    config.init(&device).write_model_dir(dir.path(), WeightDtype::Bf16).expect("written");
    let draft = CausalLm::from_model_dir(dir.path(), &device).expect("reads");
    let head = |num_layers| {
        let config = AcceptanceHeadConfig::new(128, num_layers, true);
        config.init(&device).write_dir(dir.path(), &config).expect("written");
        AcceptanceHead::from_dir(dir.path(), 128, &device).expect("reads").1
    };
    (draft, (0..=4).map(head).collect())
});

/// One draft step, by the number of blocks of its head.
#[divan::bench(args = ["no head", "1 block", "2 blocks", "3 blocks", "4 blocks"])]
fn draft_step(bencher: Bencher, head: &str) {
    let (draft, heads) = &*DRAFT_AND_HEADS;
    let num_blocks = head.split(' ').next().and_then(|number| number.parse::<usize>().ok());
    let mut drafter = SeparateDraft::new(draft, num_blocks.map(|i| &heads[i]), 4096, 256, 1);
    let needs = SignalNeeds { acceptance_prob: true, ..SignalNeeds::default() };
    let tokens = prompt(61);
    drafter.begin(&mut (), 0, &tokens).expect("the prompt fits");
    bencher.bench_local(|| {
        Drafter::<()>::commit(&mut drafter, 0, 60, &[]);
        drafter
            .draft(&mut (), &[DraftStep::in_chain(0, &tokens, 1, needs, &Decoding::GREEDY)])
            .expect("finite")
            .remove(0)
    });
}

/// A head of three tied blocks for the embedded draft, with random weights.
fn head_of_embedded(reads: HeadReads) -> AcceptanceHead {
    let (device, dir) = (Device::flex(), tempfile::tempdir().expect("a temporary directory"));
    let hidden_size = DRAFT.shape().hidden_size;
    let config = AcceptanceHeadConfig::new(hidden_size, 3, true).with_reads(reads);
    config.init(&device).write_dir(dir.path(), &config).expect("written");
    AcceptanceHead::from_dir(dir.path(), hidden_size, &device).expect("reads").1
}

/// One greedy step of the embedded draft, from the tokens to a candidate and its signals.
#[divan::bench(args = ["nothing", "confidence", "entropy", "head", "head ahead", "head ahead, inputs"])]
fn signals(bencher: Bencher, signal: &str) {
    let reads = match signal {
        "head" => Some(HeadReads::default()),
        "head ahead" => Some(HeadReads::new(HeadForm::LookAhead, &[])),
        "head ahead, inputs" => {
            Some(HeadReads::new(HeadForm::LookAhead, &[HeadInput::Entropy, HeadInput::TopProb]))
        }
        _ => None,
    };
    let head = reads.map(head_of_embedded);
    let mut drafter = SeparateDraft::new(&*DRAFT, head.as_ref(), 1024, 256, 1);
    let needs = SignalNeeds {
        acceptance_prob: head.is_some(),
        confidence: signal == "confidence",
        entropy: signal == "entropy",
        ..SignalNeeds::default()
    };
    let tokens = prompt(61);
    drafter.begin(&mut (), 0, &tokens).expect("the prompt fits");
    bencher.bench_local(|| {
        Drafter::<()>::commit(&mut drafter, 0, 60, &[]);
        let drafted = drafter
            .draft(&mut (), &[DraftStep::in_chain(0, &tokens, 1, needs, &Decoding::GREEDY)])
            .expect("finite")
            .remove(0);
        let candidate = argmax(drafted.logits());
        let said = match needs.acceptance_prob {
            true => {
                let logits = &drafted.own_logits;
                StepDrafter::<()>::predict_acceptance(&mut drafter, (0, 0), logits, candidate)
                    .expect("finite")
            }
            false => None,
        };
        (drafted, said)
    });
}

/// `generate` with the embedded pair, from the start of its process to its first token.
#[divan::bench(sample_count = 20, sample_size = 1)]
fn cold_start(bencher: Bencher) {
    bencher.bench_local(|| {
        let mut process = Command::new(binary())
            .args(["generate", "--greedy", "--quiet", "--prompt", "Add 3, 4 and 5."])
            .args(["--max-new-tokens", "1", "--rule", "fixed=1"])
            .args([
                Path::new("--target"),
                &dir_of("target"),
                Path::new("--draft"),
                &dir_of("draft"),
            ])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut first = [0];
        let stdout = process.stdout.as_mut().expect("piped");
        stdout.read_exact(&mut first).expect("it writes a token");
        Ended(process)
    });
}

/// A process whose end is awaited on drop, outside the timing.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.wait().expect("it ends");
    }
}

/// Plain greedy decoding, tokens per second.
#[divan::bench]
fn plain(bencher: Bencher) {
    let prompt = prompt(40);
    let mut target = ModelSession::new(&TARGET, 256, "target");
    let mut draws = SeededDraws::new(0, &["greedy"]);
    bencher.counter(ItemsCount::new(NEW_TOKENS)).bench_local(|| {
        decode_plain(&mut target, &Decoding::GREEDY, &prompt, &LIMITS, &mut draws, &mut |_| {
            ControlFlow::Continue(())
        })
        .expect("decodes")
    });
}

/// Greedy decoding with a draft, tokens per second, by the number of candidates a round.
#[divan::bench(args = [2, 4, 8])]
fn speculative(bencher: Bencher, candidate_length: usize) {
    let prompt = prompt(40);
    let mut target = ModelSession::new(&TARGET, 256, "target");
    let mut draft = SeparateDraft::new(&*DRAFT, None, TARGET.shape().vocab_size, 256, 1);
    let mut rule = FixedLengthConfig { candidate_length };
    let mut draws = SeededDraws::new(0, &["greedy"]);
    bencher.counter(ItemsCount::new(NEW_TOKENS)).bench_local(|| {
        decode_speculative(
            &mut target,
            &mut draft,
            Request {
                prompt: &prompt,
                decoding: Decoding::GREEDY,
                limits: &LIMITS,
                rule: Some(&mut rule),
                draws: &mut draws,
            },
            &mut |_| ControlFlow::Continue(()),
        )
        .expect("decodes")
    });
}
