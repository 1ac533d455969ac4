//! The time of the paper's sweep of 20 acceptance heads in one pass, compared with 20 trainings:
//! `cargo bench -p xtask --bench sweep`.
//!
//! Depths 0 to 4 and rejection weights 1, 3, 6 and 12 (SpecDec++, §4.1) over a draft of two
//! layers and hidden size 128 with 4,096 tokens, on made-up rows. Both ways use the same function, and the
//! resulting heads are compared number for number.

#[path = "../../draftsmith-cli/src/allocator.rs"]
mod allocator;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use draftsmith_data::{DraftColumns, FinishReason, ResponseRow};
use draftsmith_model::{CausalLm, ModelConfig, ModelShape, WeightDtype};
use draftsmith_theory::SeededDraws;
use draftsmith_train::{HeadTraining, TrainedHead, TrainingRun, train_heads};

const VOCAB_SIZE: usize = 4096;
const NUM_ROWS: usize = 256;
const PROMPT_LEN: usize = 40;
const RESPONSE_LEN: usize = 100;

fn main() -> Result<()> {
    allocator::keep_freed_pages();
    let draft = random_draft()?;
    let rows = rows();
    let mut base = HeadTraining::default();
    base.optimizer.num_epochs = 1;
    let mut heads = Vec::new();
    for num_layers in 0..=4 {
        for rejection_weight in [1.0, 3.0, 6.0, 12.0] {
            heads.push(HeadTraining { num_layers, rejection_weight, ..base.clone() });
        }
    }
    let labels = NUM_ROWS * RESPONSE_LEN;
    println!(
        "{} heads, {} rows, {labels} tokens, an epoch; draft 2 x 128",
        heads.len(),
        rows.len()
    );

    // Warms up memory pages, threads and the thread pool.
    timed(&draft, &rows[..32], &heads[19..])?;
    let (together, one_pass) = timed(&draft, &rows, &heads)?;
    println!("one pass: {one_pass:.2} s");
    let mut separate = 0.0;
    for (head, swept) in heads.iter().zip(together) {
        let (alone, seconds) = timed(&draft, &rows, std::slice::from_ref(head))?;
        separate += seconds;
        ensure!(alone[0].scores == swept.scores, "{} differs in the sweep", head.name());
        println!("{}: {seconds:.2} s", head.name());
    }
    println!("20 trainings: {separate:.2} s, {:.2} times one pass", separate / one_pass);
    Ok(())
}

/// Trains heads side by side. Returns them and the seconds.
fn timed(
    draft: &CausalLm,
    rows: &[ResponseRow],
    heads: &[HeadTraining],
) -> Result<(Vec<TrainedHead>, f64)> {
    let dir = tempfile::tempdir()?;
    let begun = Instant::now();
    let trained = train_heads(draft, rows, heads, 7, TrainingRun::new(dir.path(), "bench"))?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok((trained.best().context("nothing was trained")?, seconds))
}

/// Writes a model and reads it back, because a model from files is laid out for the CPU.
fn random_draft() -> Result<CausalLm> {
    let config = ModelConfig::llama(
        ModelShape {
            vocab_size: VOCAB_SIZE,
            hidden_size: 128,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 4,
            head_dim: 32,
            context: 256,
            bos_token_id: None,
            eos_token_ids: vec![],
        },
        344,
    )
    .with_tied_embeddings(true);
    let dir = tempfile::tempdir()?;
    let dir: &Path = dir.path();
    config.init(&Device::flex()).write_model_dir(dir, WeightDtype::F32)?;
    Ok(CausalLm::from_model_dir(dir, &Device::flex())?)
}

/// Rows of random tokens and labels.
fn rows() -> Vec<ResponseRow> {
    let mut draws = SeededDraws::new(7, &["bench"]);
    let mut tokens = move |len: usize| -> Vec<u32> {
        (0..len).map(|_| (draws.uniform() * VOCAB_SIZE as f64) as u32).collect()
    };
    let row = |n: usize| {
        let (response_ids, draft_ids) = (tokens(RESPONSE_LEN), tokens(RESPONSE_LEN));
        let numbers = |x: f32| vec![x; RESPONSE_LEN];
        ResponseRow {
            id: format!("bench#{n}"),
            source: "bench".to_owned(),
            prompt_ids: tokens(PROMPT_LEN),
            response_target_log_prob: numbers(-1.0),
            target_outside_mass: None,
            draft: Some(DraftColumns {
                response_draft_log_prob: numbers(-1.0),
                draft_log_prob: numbers(-1.0),
                target_log_prob: draft_ids.iter().map(|id| -1.0 - (*id % 7) as f32 / 4.0).collect(),
                overlap: numbers(0.5),
                draft_entropy: numbers(1.0),
                draft_target_cross_entropy: Some(numbers(1.5)),
                draft_top_ids: draft_ids.clone(),
                target_top_ids: response_ids.clone(),
                draft_top_log_prob: numbers(-1.0),
                draft_ids,
            }),
            response_ids,
            finish_reason: FinishReason::Length,
        }
    };
    (0..NUM_ROWS).map(row).collect()
}
