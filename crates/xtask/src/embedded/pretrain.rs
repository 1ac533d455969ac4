//! Pre-trains the embedded models from scratch: loss on answer tokens, whole examples packed into rows, AdamW
//! with a linear warm-up and a cosine decay to a tenth.
//!
//! Some rows may repeat random tokens instead. A few hundred steps of them teach a small model to find
//! earlier occurrences of the last tokens and to continue from there, which copying, lists and tables need
//! and the corpus teaches late.

use std::time::Instant;

use anyhow::{Context, Result};
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::CausalLm;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokenizers::Tokenizer;

use super::corpus;
use super::tokenizer::{PAD_ID, render};

/// How one model is trained.
#[derive(Debug, Clone)]
pub(crate) struct Pretraining {
    /// Rows in a step.
    pub(crate) batch_size: usize,
    /// Tokens in a row.
    pub(crate) row_len: usize,
    /// Optimizer steps.
    pub(crate) num_steps: usize,
    /// Highest learning rate.
    pub(crate) learning_rate: f64,
    /// Seed of the corpus and of the initial weights.
    pub(crate) seed: u64,
    /// The first example.
    pub(crate) first_example: u64,
    /// Rows of each batch that repeat random tokens instead of holding examples.
    pub(crate) num_repetition_rows: usize,
}

/// A batch of packed rows: inputs, and for each labelled position its flat index and next token.
struct Batch {
    ids: Vec<i32>,
    labelled: Vec<i32>,
    next: Vec<i32>,
}

/// Packs examples, in order, into batches.
struct Packer<'a> {
    tokenizer: &'a Tokenizer,
    seed: u64,
    next_index: u64,
    /// An example that did not fit the last row: its ids, and how many of them belong to the prompt.
    pending: Option<(Vec<u32>, usize)>,
    /// Draws the repetitions.
    rng: ChaCha8Rng,
    /// The tokens of repetitions, which are whole words.
    words: Vec<i32>,
}

impl Packer<'_> {
    fn example(&mut self) -> Result<(Vec<u32>, usize)> {
        if let Some(pending) = self.pending.take() {
            return Ok(pending);
        }
        let example = corpus::example(self.seed, self.next_index);
        self.next_index += 1;
        let (prompt, answer) = render(&example);
        let encode = |text: String| {
            self.tokenizer.encode(text, false).map_err(|e| anyhow::anyhow!(e.to_string()))
        };
        let mut ids = encode(prompt)?.get_ids().to_vec();
        let num_prompt = ids.len();
        ids.extend(encode(answer)?.get_ids());
        Ok((ids, num_prompt))
    }

    /// A row that repeats a segment of random tokens, each time after a few other random tokens. Tokens that
    /// follow from the first occurrence are labelled.
    fn repetition_row(&mut self, start: usize, row_len: usize, batch: &mut Batch) {
        let (rng, words) = (&mut self.rng, &self.words);
        let num_words = rng.random_range(3..16);
        let mut token = || words[rng.random_range(0..words.len())];
        let segment: Vec<i32> = (0..num_words).map(|_| token()).collect();
        let mut row = Vec::with_capacity(row_len + 64);
        let mut is_first = true;
        while row.len() < row_len {
            let gap = token() % 3;
            row.extend((0..gap).map(|_| token()));
            for (i, &id) in segment.iter().enumerate() {
                if !is_first && i > 0 && row.len() < row_len {
                    batch.labelled.push((start + row.len() - 1) as i32);
                    batch.next.push(id);
                }
                row.push(id);
            }
            is_first = false;
        }
        row.truncate(row_len);
        batch.ids.extend(row);
    }

    fn batch(&mut self, plan: &Pretraining) -> Result<Batch> {
        let row_len = plan.row_len;
        let mut batch = Batch { ids: Vec::new(), labelled: Vec::new(), next: Vec::new() };
        for row in 0..plan.num_repetition_rows {
            self.repetition_row(row * row_len, row_len, &mut batch);
        }
        for row in plan.num_repetition_rows..plan.batch_size {
            let start = row * row_len;
            let mut used = 0;
            loop {
                let (ids, num_prompt) = self.example()?;
                if used + ids.len() > row_len {
                    anyhow::ensure!(used > 0, "an example of {} tokens fits no row", ids.len());
                    self.pending = Some((ids, num_prompt));
                    break;
                }
                for (i, id) in ids.iter().enumerate() {
                    batch.ids.push(*id as i32);
                    if i + 1 < ids.len() && i + 1 >= num_prompt {
                        batch.labelled.push((start + used + i) as i32);
                        batch.next.push(ids[i + 1] as i32);
                    }
                }
                used += ids.len();
            }
            batch.ids.resize(start + row_len, PAD_ID as i32);
        }
        Ok(batch)
    }
}

/// The ids of whole words of three letters or more, in order.
fn words(tokenizer: &Tokenizer) -> Vec<i32> {
    let is_word = |token: &str| {
        token.strip_prefix('Ġ').is_some_and(|word| {
            word.len() > 2 && word.chars().all(|letter| letter.is_ascii_lowercase())
        })
    };
    let vocabulary = tokenizer.get_vocab(false);
    let words = vocabulary.into_iter().filter(|(token, _)| is_word(token));
    let mut words: Vec<i32> = words.map(|(_, id)| id as i32).collect();
    words.sort_unstable();
    words
}

/// The training device.
pub(crate) fn training_device() -> Device {
    Device::flex().autodiff()
}

/// Trains a model and prints the loss on stderr from time to time. Calls `save` every `save_every` steps and
/// at the end.
pub(crate) fn pretrain(
    name: &str,
    mut model: CausalLm,
    tokenizer: &Tokenizer,
    plan: &Pretraining,
    save_every: usize,
    mut save: impl FnMut(&CausalLm) -> Result<()>,
) -> Result<CausalLm> {
    let device = training_device();
    let mut optimizer = AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.05)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    let mut packer = Packer {
        tokenizer,
        seed: plan.seed,
        next_index: plan.first_example,
        pending: None,
        rng: ChaCha8Rng::seed_from_u64(plan.seed),
        words: words(tokenizer),
    };
    let begun = Instant::now();
    let mut num_tokens = 0;
    let mut running: Option<f64> = None;
    for step in 0..plan.num_steps {
        let batch = packer.batch(plan)?;
        num_tokens += batch.ids.len();
        let loss = loss(&model, batch, plan.batch_size, plan.row_len, &device);
        let value = f64::from(loss.clone().into_scalar::<f32>());
        anyhow::ensure!(value.is_finite(), "{name}: the loss is {value} at step {step}");
        running = Some(running.map_or(value, |r| 0.98 * r + 0.02 * value));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(learning_rate(plan, step), model, gradients);
        let number = step + 1;
        if number % 20 == 0 || number == plan.num_steps {
            let seconds = begun.elapsed().as_secs_f64();
            eprintln!(
                "{name}: step {number}/{}, loss {:.4}, {:.0} tokens/s, {:.1} min, {} examples",
                plan.num_steps,
                running.context("set above")?,
                num_tokens as f64 / seconds,
                seconds / 60.0,
                packer.next_index,
            );
        }
        if number % save_every == 0 || number == plan.num_steps {
            save(&model.clone().valid())?;
        }
    }
    Ok(model.valid())
}

/// The learning rate: warm-up over the first 4 %, then a cosine decay to a tenth.
fn learning_rate(plan: &Pretraining, step: usize) -> f64 {
    let warm_up = (plan.num_steps / 25).max(1);
    if step < warm_up {
        return plan.learning_rate * (step + 1) as f64 / warm_up as f64;
    }
    let progress = (step - warm_up) as f64 / (plan.num_steps - warm_up).max(1) as f64;
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
    plan.learning_rate * (0.1 + 0.9 * cosine)
}

/// Mean cross-entropy, in nats, over the labelled positions.
fn loss(model: &CausalLm, batch: Batch, rows: usize, row_len: usize, device: &Device) -> Tensor<1> {
    let count = batch.labelled.len();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(batch.ids, [rows, row_len]), device);
    let labelled = Tensor::<1, Int>::from_data(TensorData::new(batch.labelled, [count]), device);
    let next = Tensor::<2, Int>::from_data(TensorData::new(batch.next, [count, 1]), device);
    let hidden = model.hidden_states(ids);
    let [_, _, width] = hidden.dims();
    let hidden = hidden.reshape([rows * row_len, width]).select(0, labelled);
    let logits = model.lm_head(hidden.reshape([1, count, width])).squeeze_dim::<2>(0);
    log_softmax(logits, 1).gather(1, next).mean().neg()
}
