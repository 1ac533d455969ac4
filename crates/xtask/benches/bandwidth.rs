//! How close decoding comes to memory bandwidth, with your model: reading memory with one thread and with
//! all, decoding one sequence and many side by side, loading the model, reading prompts.
//! `cargo bench -p xtask --bench bandwidth -- --model DIR`
//!
//! A decoded token reads every weight once, so memory bandwidth bounds decoding. All measurements take
//! turns in each round, so that other load affects them alike; a share compares neighbouring measurements.

#[path = "../../draftsmith-cli/src/allocator.rs"]
mod allocator;
#[path = "peers/timed.rs"]
mod timed;

use std::hint::black_box;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use clap::Parser;
use draftsmith_decode::{
    Limits, ModelSession, NoDrafter, Request, RoundTokens, Target, Verification, decode_many,
};
use draftsmith_model::{CausalLm, weight_files};
use draftsmith_theory::{Decoding, DrawnFrom, Node, Proposal, SeededDraws};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use self::timed::{answer, prompt};

/// The size of the memory that is read: more than all caches hold.
const READ_BYTES: usize = 1 << 30;
/// The size of the chunks that a thread reads.
const CHUNK_BYTES: usize = 1 << 22;
/// The number of tokens decoded after a short prompt.
const NEW_TOKENS: usize = 64;
/// The number of sequences side by side.
const AT_ONCE: usize = 16;
/// The numbers of rows of verifications that are compared with one row.
const ROWS: [usize; 5] = [2, 3, 4, 5, 8];
/// The number of nodes of a tree that is compared with a chain of the same length.
const NUM_NODES: usize = 63;
/// The number of repetitions of verifications in a round.
const NUM_VERIFICATIONS: usize = 15;
/// The lengths of the prompts that are read.
const PROMPTS: [usize; 2] = [250, 1000];

/// Compares loading and decoding with memory bandwidth.
#[derive(Debug, Parser)]
struct Arguments {
    /// Directory of a model that is larger than the CPU's caches.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Number of rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of tokens before a verification.
    #[arg(long, default_value_t = 200)]
    before: usize,
    /// An argument that cargo adds.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    // `cargo test --benches` runs benches too, only to see that they start.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    allocator::keep_freed_pages();
    let arguments = Arguments::parse();
    let Some(dir) = &arguments.model else {
        eprintln!("bandwidth: skipped; hint: give a model with `-- --model DIR`");
        return Ok(());
    };
    if arguments.rounds == 0 {
        bail!("`--rounds` is 0, expected 1 or more");
    }
    // As in the program: called from outside the pool, a forward's second thread starts too late.
    rayon::scope(|_| measure(dir, arguments.rounds, arguments.before))
}

fn measure(dir: &Path, rounds: usize, num_before: usize) -> Result<()> {
    let load = || CausalLm::from_model_dir(dir, &Device::flex());
    let model = load()?;
    let file_bytes = match dir.is_file() {
        true => dir.metadata()?.len(),
        false => weight_files(dir)?
            .iter()
            .map(|name| Ok(std::fs::metadata(dir.join(name))?.len()))
            .sum::<Result<u64>>()?,
    } as f64;
    let token_bytes = file_bytes * share_read(&model);
    let memory = vec![1_u64; READ_BYTES / size_of::<u64>()];
    let one = || memory.chunks(CHUNK_BYTES / 8).map(sum).fold(0, u64::wrapping_add);
    let all = || memory.par_chunks(CHUNK_BYTES / 8).map(sum).reduce(|| 0, u64::wrapping_add);
    let read_bytes = READ_BYTES as f64;
    let num_threads = rayon::current_num_threads();
    let names = [
        "reading memory, one thread, GB/s".to_owned(),
        format!("reading memory, {num_threads} threads, GB/s"),
        "decoding, GB/s of weights".to_owned(),
        format!("decoding, share of what {num_threads} threads read"),
        "decoding, tokens/s".to_owned(),
        format!("decoding {AT_ONCE} at once, tokens/s"),
        format!("decoding {AT_ONCE} at once, over one"),
        "loading, MB/s".to_owned(),
    ];
    let names = names.into_iter();
    let names = names.chain(PROMPTS.map(|len| format!("a prompt of {len}, tokens/s")));
    let names = names.chain(["verifying one row, ms".to_owned()]);
    let names = names.chain(ROWS.map(|rows| format!("verifying {rows} rows, over one")));
    let names = names.chain([
        format!("verifying a chain of {}, over one", NUM_NODES + 1),
        format!("verifying a tree of {}, over that chain", NUM_NODES + 1),
    ]);
    let mut figures: Vec<Vec<f64>> = Vec::new();
    for _ in 0..rounds {
        let one = read_bytes / seconds(one) / 1e9;
        let before = read_bytes / seconds(all) / 1e9;
        let decoded = answer(&model, &prompt(16), NEW_TOKENS)?;
        let tokens = (decoded.token_ids.len() - 1) as f64 / decoded.to_last.as_secs_f64();
        // The neighbouring measurements, before and after.
        let all = (before + read_bytes / seconds(all) / 1e9) / 2.0;
        let weights = tokens * token_bytes / 1e9;
        let many = side_by_side(&model, &prompt(16), NEW_TOKENS, AT_ONCE)?;
        let mut round = vec![one, all, weights, weights / all, tokens, many, many / tokens];
        round.push(file_bytes / seconds(load) / 1e6);
        for len in PROMPTS {
            let read = answer(&model, &prompt(len), 1)?.to_first.as_secs_f64();
            round.push(len as f64 / read);
        }
        round.extend(verifications(&model, num_before)?);
        figures.push(round);
    }
    println!("{:<46}{:>9}{:>9}{:>9}", "", "least", "median", "most");
    for (number, name) in names.enumerate() {
        let mut values: Vec<f64> = figures.iter().map(|round| round[number]).collect();
        values.sort_by(f64::total_cmp);
        let (least, median) = (values[0], values[values.len() / 2]);
        println!("{name:<46}{least:>9.2}{median:>9.2}{:>9.2}", values[values.len() - 1]);
    }
    println!("\n{rounds} rounds; the weights are {:.0} MB.", file_bytes / 1e6);
    Ok(())
}

/// Median times, measured in turn: of one row in milliseconds, of several rows relative to one, and of a
/// tree relative to a chain of the same length.
fn verifications(model: &CausalLm, num_before: usize) -> Result<Vec<f64>> {
    let tokens = prompt(num_before + NUM_NODES);
    let capacity = tokens.len() + 1;
    let mut session = ModelSession::new(model, capacity, "model");
    session.begin(0, &tokens[..num_before])?;
    let chain = |rows: usize| Proposal::certain_chain(&tokens[num_before..][..rows - 1]);
    let chains = [1].into_iter().chain(ROWS).chain([NUM_NODES + 1]).map(chain);
    let proposals: Vec<Proposal> = chains.chain([tree(&tokens[num_before..])]).collect();
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); proposals.len()];
    for _ in 0..NUM_VERIFICATIONS {
        for (proposal, times) in proposals.iter().zip(&mut times) {
            let tokens = &tokens[..num_before + proposal.len()];
            let begun = Instant::now();
            black_box(session.verify(&[Verification { slot: 0, tokens, proposal }])?);
            times.push(begun.elapsed().as_secs_f64());
            session.commit(0, num_before - 1, &[]);
        }
    }
    let medians: Vec<f64> = times
        .into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect();
    let [of_chain, of_tree] = medians[medians.len() - 2..] else { bail!("a chain and a tree") };
    let several = medians[1..medians.len() - 1].iter().map(|several| several / medians[0]);
    Ok([medians[0] * 1e3].into_iter().chain(several).chain([of_tree / of_chain]).collect())
}

/// A tree of these tokens, each node with two children.
fn tree(tokens: &[u32]) -> Proposal {
    let mut proposal = Proposal::default();
    for (number, token_id) in tokens.iter().enumerate() {
        let (parent, rank) = (number.checked_sub(2).map(|at| at / 2), number % 2);
        proposal.push(Node { parent, token_id: *token_id, drawn_from: DrawnFrom::OneHot, rank });
    }
    proposal
}

/// The share of the weights that a token reads: all except an embedding that is not also the LM head.
fn share_read(model: &CausalLm) -> f64 {
    let (shape, spec) = (model.shape(), &model.config().spec);
    if spec.tie_word_embeddings {
        return 1.0;
    }
    let table = shape.vocab_size * shape.hidden_size;
    1.0 - table as f64 / model.config().num_parameters() as f64
}

fn seconds<T>(work: impl FnOnce() -> T) -> f64 {
    let begun = Instant::now();
    black_box(work());
    begun.elapsed().as_secs_f64()
}

/// Tokens per second of greedy answers side by side, without prefill: counted from the moment when all
/// have their first token.
fn side_by_side(
    model: &CausalLm,
    prompt: &[u32],
    max_new_tokens: usize,
    num_sequences: usize,
) -> Result<f64> {
    let limits = Limits::new(max_new_tokens, Vec::new());
    let room = prompt.len() + max_new_tokens;
    let mut session = ModelSession::with_slots(model, room, num_sequences, "model");
    let mut draws: Vec<SeededDraws> =
        (0..num_sequences).map(|number| SeededDraws::new(number as u64, &["many"])).collect();
    let requests = draws.iter_mut().map(|draws| Request {
        prompt,
        decoding: Decoding::GREEDY,
        limits: &limits,
        rule: None,
        draws,
    });
    let (mut num_tokens, mut first) = (0, None);
    let observe = &mut |_, round: RoundTokens<'_>| {
        num_tokens += round.kept.len();
        if num_tokens == num_sequences {
            first = Some(Instant::now());
        }
        ControlFlow::Continue(())
    };
    decode_many(&mut session, &mut NoDrafter, requests, observe)?;
    let seconds = first.context("nothing was decoded")?.elapsed().as_secs_f64();
    Ok((num_tokens - num_sequences) as f64 / seconds)
}

/// The sum of numbers, with the widest registers available.
fn sum(numbers: &[u64]) -> u64 {
    struct Sum<'a>(&'a [u64]);
    impl WithSimd for Sum<'_> {
        type Output = u64;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> u64 {
            let (registers, rest) = S::as_simd_u64s(self.0);
            let (fours, last) = registers.as_chunks::<4>();
            let mut sums = [simd.splat_u64s(0); 4];
            for four in fours {
                for (sum, register) in sums.iter_mut().zip(four) {
                    *sum = simd.add_u64s(*sum, *register);
                }
            }
            for register in last {
                sums[0] = simd.add_u64s(sums[0], *register);
            }
            let lanes = sums.map(|sum| pulp::bytemuck::cast_slice(&[sum]).iter().sum::<u64>());
            lanes.iter().chain(rest).sum()
        }
    }
    Arch::new().dispatch(Sum(numbers))
}
