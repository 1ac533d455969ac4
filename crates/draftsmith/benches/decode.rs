//! What a forward of the embedded models costs, by the number of rows, and what decoding makes of
//! it: `cargo bench -p draftsmith --bench decode`.

#[path = "../src/allocator.rs"]
mod allocator;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::LazyLock;

use burn::tensor::Device;
use divan::Bencher;
use divan::counter::ItemsCount;
use draftsmith_decode::{
    Limits, ModelSession, SeparateDraft, Target, decode_plain, decode_speculative,
};
use draftsmith_model::CausalLm;
use draftsmith_theory::{Decoding, FixedLength, SeededDraws};

const NEW_TOKENS: usize = 64;
const LIMITS: Limits = Limits { max_new_tokens: NEW_TOKENS, eos_token_ids: Vec::new() };

static TARGET: LazyLock<CausalLm> = LazyLock::new(|| load("target"));
static DRAFT: LazyLock<CausalLm> = LazyLock::new(|| load("draft"));

fn main() {
    allocator::keep_freed_pages();
    divan::main();
}

fn load(name: &str) -> CausalLm {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checkpoints/tiny").join(name);
    CausalLm::from_model_dir(&dir, &Device::flex()).expect("the embedded model loads")
}

/// A prompt of some length; the ids of ordinary tokens.
fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 270 + i * 37 % 300).collect()
}

/// One target forward over so many rows, after a prompt of 60 tokens: 1 is plain decoding, K + 1
/// the verification of K candidates, 17 the first that goes to the general matrix product.
#[divan::bench(args = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 40, 64, 128])]
fn target_forward(bencher: Bencher, rows: usize) {
    let tokens = prompt(60 + rows);
    let mut session = ModelSession::new(&TARGET, 256, "target");
    session.begin(&tokens[..61]).expect("the prompt fits");
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        session.roll_back(60);
        session.logits(&tokens, rows).expect("finite")
    });
}

/// One draft forward over one row.
#[divan::bench]
fn draft_forward(bencher: Bencher) {
    let tokens = prompt(61);
    let mut session = ModelSession::new(&DRAFT, 256, "draft");
    session.begin(&tokens).expect("the prompt fits");
    bencher.bench_local(|| {
        session.roll_back(60);
        session.logits(&tokens, 1).expect("finite")
    });
}

/// Greedy decoding with the target alone, tokens a second.
#[divan::bench]
fn plain(bencher: Bencher) {
    let prompt = prompt(40);
    let mut target = ModelSession::new(&TARGET, 256, "target");
    let mut draws = SeededDraws::new(0, &["greedy"]);
    bencher.counter(ItemsCount::new(NEW_TOKENS)).bench_local(|| {
        decode_plain(&mut target, &Decoding::Greedy, &prompt, &LIMITS, &mut draws, &mut |_| {
            ControlFlow::Continue(())
        })
        .expect("decodes")
    });
}

/// Greedy decoding with a draft and so many candidates a round, tokens a second.
#[divan::bench(args = [2, 4, 8])]
fn speculative(bencher: Bencher, candidate_length: usize) {
    let prompt = prompt(40);
    let mut target = ModelSession::new(&TARGET, 256, "target");
    let mut draft = SeparateDraft::new(&DRAFT, None, TARGET.config().vocab_size, 256);
    let mut rule = FixedLength::new(candidate_length).expect("at least one");
    let mut draws = SeededDraws::new(0, &["greedy"]);
    bencher.counter(ItemsCount::new(NEW_TOKENS)).bench_local(|| {
        decode_speculative(
            &mut target,
            &mut draft,
            &mut rule,
            &Decoding::Greedy,
            &prompt,
            &LIMITS,
            &mut draws,
            &mut |_| ControlFlow::Continue(()),
        )
        .expect("decodes")
    });
}
