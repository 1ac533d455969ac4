//! What a linear read-out of a layer knows of the target's next token: its hidden states mapped to the
//! final ones by ridge regression, before the target's own LM head.
//!
//! The map is fitted to one half of the answers, with their prompts, and read on the other. What it
//! adds to is the logit lens, the final norm of the layer's own states: with little to learn from it
//! stays there. An adapter, which attends and computes, learns more from more data: this is a floor.

use std::borrow::Cow;

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, soft_capped, vectors};
use draftsmith_theory::{SeededDraws, TokenChoice, argmax, ridge};
use rayon::prelude::*;

use anyhow::{Context, Result};

use super::Surveyor;
use crate::console::Interrupted;
use crate::console::progress::Progress;

/// How far the map is held back, of the mean of its inputs' squares.
const STRENGTH: f64 = 0.01;
/// Rows that a map is fitted to, at most, beside those of answers: prompts' positions.
const MAX_ROWS: usize = 8192;
/// Rows whose logits are computed at once.
const CHUNK: usize = 256;
/// What a feature's spread is at least, so that one that never changes divides nothing.
const LEAST_SPREAD: f32 = 1e-6;

/// What the read-out of a layer would draft along each answer, one entry a token.
pub(super) struct ReadOut {
    pub(super) exit_layer: usize,
    /// Whether its most probable token is the target's.
    pub(super) agrees: Vec<Vec<bool>>,
    /// Whether the answer's token is drafted and accepted.
    pub(super) accepted: Vec<Vec<bool>>,
}

/// Hidden states of all answers' positions, in the order of answers.
struct States {
    /// After each of the exit layers, `[rows, hidden]`.
    exits: Vec<Tensor<2>>,
    /// The final ones, after the final norm.
    last: Tensor<2>,
    places: Vec<Places>,
}

/// Where the rows of an answer are.
struct Places {
    /// The row that the first token is drawn from; the others follow it.
    first: usize,
    /// All of its rows.
    all: std::ops::Range<usize>,
}

/// The target's side of a token.
struct Drawn {
    token_id: u32,
    /// The most probable one.
    top: u32,
    /// Its chance as served, where tokens are sampled.
    prob: f64,
    /// The luck of whether it is drafted.
    luck: f64,
}

/// A fitted map, from standardised states to what the final ones have over the lens.
struct Map {
    mean: Tensor<2>,
    spread: Tensor<2>,
    offset: Tensor<2>,
    weights: Tensor<2>,
}

/// The read-outs of layers, each half of the answers by the map of the other half.
pub(super) fn read_outs(
    surveyor: &Surveyor<'_>,
    exit_layers: &[usize],
    progress: &Progress,
) -> Result<Vec<ReadOut>> {
    let target = &surveyor.workspace.pair()?.target;
    progress.message("hidden states");
    let states = states(surveyor, target, exit_layers, progress)?;
    let head = target.lm_head_weight().cast(FloatDType::F32);
    let drawn = drawn(surveyor, target, &states, &head);
    let halves = surveyor.halves();
    progress.message("layers");
    let all = exit_layers.par_iter().zip(&states.exits).map(|(exit_layer, exit)| {
        let num_answers = surveyor.answers.len();
        let mut agrees = vec![Vec::new(); num_answers];
        let mut accepted = vec![Vec::new(); num_answers];
        for (half, other) in [(0, 1), (1, 0)] {
            if surveyor.console.is_interrupted() {
                return Err(Interrupted.into());
            }
            let rows = halves[other].iter().flat_map(|nth| states.places[*nth].all.clone());
            let rows: Vec<usize> = rows.collect();
            let map = Map::fit(target, &select(exit, &rows), &select(&states.last, &rows))
                .context("hidden states that are not finite")?;
            for nth in &halves[half] {
                let first = states.places[*nth].first;
                let drawn = &drawn[*nth];
                let rows: Vec<usize> = (first..first + drawn.len()).collect();
                let said = map.apply(target, select(exit, &rows));
                let said = logits(target, said, &head);
                for (at, (logits, drawn)) in said.iter().zip(drawn).enumerate() {
                    let logits = &penalised(surveyor, *nth, at, logits);
                    let top = argmax(logits);
                    agrees[*nth].push(top == drawn.top);
                    accepted[*nth].push(match surveyor.decoding.choice {
                        TokenChoice::Greedy => top == drawn.token_id,
                        TokenChoice::Sampled(sampling) => {
                            let prob = sampling.probs(logits)[drawn.token_id as usize];
                            drawn.luck * drawn.prob < prob
                        }
                    });
                }
            }
        }
        progress.advance(1);
        Ok(ReadOut { exit_layer: *exit_layer, agrees, accepted })
    });
    all.collect()
}

/// Runs the target along the answers.
fn states(
    surveyor: &Surveyor<'_>,
    target: &CausalLm,
    exit_layers: &[usize],
    progress: &Progress,
) -> Result<States> {
    let device = target.device();
    let answers = surveyor.answers;
    let num_of_answers: usize = answers.iter().map(|answer| answer.response_ids.len()).sum();
    let num_of_prompts: usize = answers.iter().map(|answer| answer.prompt_ids.len()).sum();
    // Every so many-th position of prompts.
    let step = num_of_prompts.div_ceil(MAX_ROWS.saturating_sub(num_of_answers).max(1)).max(1);
    let mut exits: Vec<Vec<Tensor<2>>> = vec![Vec::new(); exit_layers.len()];
    let mut last = Vec::new();
    let mut places = Vec::new();
    let mut num_rows = 0;
    for answer in answers {
        if surveyor.console.is_interrupted() {
            return Err(Interrupted.into());
        }
        let ids = [&answer.prompt_ids[..], &answer.response_ids].concat();
        let seq = ids.len() - 1;
        let values: Vec<i32> = ids[..seq].iter().map(|id| *id as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(values, [1, seq]), &device);
        let wanted = std::iter::once(0..seq).collect::<Vec<_>>();
        let (of_exits, of_last) = target.hidden_states_at(ids, exit_layers, &wanted);
        let first = answer.prompt_ids.len() - 1;
        // What the first token of a sequence makes of itself is like nothing else.
        let of_prompt: Vec<usize> = (1..first).step_by(step).collect();
        let rows: Vec<usize> = of_prompt.iter().copied().chain(first..seq).collect();
        let kept = |state: Tensor<3>| {
            let [_, seq, width] = state.dims();
            select(&state.cast(FloatDType::F32).reshape([seq, width]), &rows)
        };
        exits.iter_mut().zip(of_exits).for_each(|(all, state)| all.push(kept(state)));
        last.push(kept(of_last));
        let all = num_rows..num_rows + rows.len();
        num_rows = all.end;
        places.push(Places { first: all.start + of_prompt.len(), all });
        progress.advance(1);
    }
    let exits = exits.into_iter().map(|all| Tensor::cat(all, 0)).collect();
    Ok(States { exits, last: Tensor::cat(last, 0), places })
}

/// The target's side of every token.
fn drawn(
    surveyor: &Surveyor<'_>,
    target: &CausalLm,
    states: &States,
    head: &Tensor<2>,
) -> Vec<Vec<Drawn>> {
    let of_answer = |nth: usize| {
        let answer = &surveyor.answers[nth];
        let mut draws = SeededDraws::new(surveyor.seed, &[&answer.id, "read-out"]);
        let mut drawn =
            |token_id: u32, top, prob| Drawn { token_id, top, prob, luck: draws.uniform() };
        let ids = &answer.response_ids;
        let sampling = match surveyor.decoding.choice {
            // What was answered is the target's own choice.
            TokenChoice::Greedy => return ids.iter().map(|id| drawn(*id, *id, 1.0)).collect(),
            TokenChoice::Sampled(sampling) => sampling,
        };
        let first = states.places[nth].first;
        let rows: Vec<usize> = (first..first + ids.len()).collect();
        let logits = logits(target, select(&states.last, &rows), head);
        let all = ids.iter().zip(&logits).enumerate();
        let drawn = all.map(|(at, (id, logits))| {
            let logits = penalised(surveyor, nth, at, logits);
            drawn(*id, argmax(&logits), sampling.probs(&logits)[*id as usize])
        });
        drawn.collect()
    };
    (0..surveyor.answers.len()).map(of_answer).collect()
}

/// The logits that the token at a place of an answer is chosen by.
fn penalised<'l>(
    surveyor: &Surveyor<'_>,
    answer: usize,
    at: usize,
    logits: &'l [f32],
) -> Cow<'l, [f32]> {
    let answer = &surveyor.answers[answer];
    let before = answer.prompt_ids.iter().chain(&answer.response_ids[..at]);
    surveyor.decoding.penalised(logits, before.copied())
}

impl Map {
    /// Fits the map to rows of an exit's states and of final ones; None where some are not finite.
    fn fit(target: &CausalLm, exit: &Tensor<2>, last: &Tensor<2>) -> Option<Self> {
        let over_lens = last.clone() - lens(target, exit.clone());
        let (mean, offset) = (exit.clone().mean_dim(0), over_lens.clone().mean_dim(0));
        let centred = exit.clone() - mean.clone();
        let spread = centred.clone().powi_scalar(2).mean_dim(0).sqrt().clamp_min(LEAST_SPREAD);
        let inputs = centred / spread.clone();
        let wanted = over_lens - offset.clone();
        let [rows, size] = inputs.dims();
        let outputs = wanted.dims()[1];
        let doubles = |tensor: Tensor<2>| -> Vec<f64> {
            vectors::values(tensor).into_iter().map(f64::from).collect()
        };
        let device = exit.device();
        let tensor = |values: Vec<f64>, shape: [usize; 2]| {
            let values = values.into_iter().map(|value| value as f32).collect();
            vectors::tensor(values, shape, &device)
        };
        let across = inputs.clone().transpose();
        // By the smaller of the two systems that have the same solution.
        let weights = if rows >= size {
            let gram = doubles(across.clone().matmul(inputs));
            let cross = doubles(across.matmul(wanted));
            tensor(ridge(&gram, &cross, size, STRENGTH)?, [size, outputs])
        } else {
            let gram = doubles(inputs.matmul(across.clone()));
            let strength = STRENGTH * rows as f64 / size as f64;
            let dual = ridge(&gram, &doubles(wanted), rows, strength)?;
            across.matmul(tensor(dual, [rows, outputs]))
        };
        Some(Self { mean, spread, offset, weights })
    }

    /// The final states that it says.
    fn apply(&self, target: &CausalLm, exit: Tensor<2>) -> Tensor<2> {
        let inputs = (exit.clone() - self.mean.clone()) / self.spread.clone();
        lens(target, exit) + self.offset.clone() + inputs.matmul(self.weights.clone())
    }
}

/// The logit lens's: an exit's states under the final norm.
fn lens(target: &CausalLm, exit: Tensor<2>) -> Tensor<2> {
    let [rows, width] = exit.dims();
    let normed = target.final_norm(exit.reshape([1, rows, width]));
    normed.cast(FloatDType::F32).reshape([rows, width])
}

/// Rows of logits of normed states.
fn logits(target: &CausalLm, normed: Tensor<2>, head: &Tensor<2>) -> Vec<Vec<f32>> {
    let cap = target.config().spec.logit_soft_cap;
    let num_rows = normed.dims()[0];
    let mut all = Vec::with_capacity(num_rows);
    for start in (0..num_rows).step_by(CHUNK) {
        let some = normed.clone().narrow(0, start, CHUNK.min(num_rows - start));
        let logits = soft_capped(some.matmul(head.clone()), cap);
        let vocab_size = logits.dims()[1];
        all.extend(vectors::values(logits).chunks_exact(vocab_size).map(<[f32]>::to_vec));
    }
    all
}

fn select(states: &Tensor<2>, rows: &[usize]) -> Tensor<2> {
    let rows: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
    let shape = [rows.len()];
    let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, shape), &states.device());
    states.clone().select(0, rows)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::{ModelConfig, ModelShape};

    use super::*;

    #[test]
    fn a_map_says_what_is_linear_whichever_system_is_smaller() {
        let shape = ModelShape {
            vocab_size: 20,
            hidden_size: 24,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 12,
            context: 8,
            bos_token_id: None,
            eos_token_ids: vec![0],
        };
        let device = Device::flex();
        let target = ModelConfig::llama(shape, 16).init(&device);
        let mut draws = SeededDraws::new(5, &["read-out"]);
        let mut numbers = |rows: usize| {
            let values = (0..rows * 24).map(|_| (2.0 * draws.uniform() - 1.0) as f32).collect();
            vectors::tensor::<2>(values, [rows, 24], &device)
        };
        let (truth, unseen) = (numbers(24), numbers(50));
        let last = |exit: &Tensor<2>| {
            lens(&target, exit.clone()) + exit.clone().matmul(truth.clone()) + 0.5
        };
        let error = |rows: Tensor<2>| {
            let map = Map::fit(&target, &rows, &last(&rows)).expect("finite");
            let wrong = map.apply(&target, unseen.clone()) - last(&unseen);
            let size = |tensor: Tensor<2>| vectors::values(tensor.powi_scalar(2).mean())[0];
            size(wrong) / size(unseen.clone().matmul(truth.clone()))
        };
        // Held back as it is, it says nearly all; with fewer rows than features, a part.
        let (many, few) = (error(numbers(400)), error(numbers(16)));
        assert!(many < 0.01, "{many}");
        assert!(few > many && few < 1.0, "{few}");
    }
}
