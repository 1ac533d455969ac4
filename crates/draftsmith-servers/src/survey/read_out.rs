//! Estimates what self-drafts could predict. A linear map (read-out), fitted by ridge regression,
//! predicts the final hidden states from a self-draft's inputs. The target's LM head gives logits.
//!
//! An adapter reads the hidden states of one layer. Its map corrects the logit lens (the final norm
//! of these states), and stays close to it with little data. An EAGLE-3 drafter reads the token's
//! embedding and the hidden states of three layers at the token before.
//!
//! A map is fitted to one half of the answers and their prompts, and applied to the other half. A
//! real drafter has attention and more data, so the read-out's agreement is a lower bound. But an
//! EAGLE-3 drafter agrees less often at later steps of a round, where its own output replaces the
//! target's states.

use std::borrow::Cow;

use anyhow::{Context, Result};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, Eagle3Config, soft_capped, vectors};
use draftsmith_theory::{SeededDraws, TokenChoice, argmax, ridge};
use rayon::prelude::*;

use super::Surveyor;
use draftsmith_recipe::Bar;
use draftsmith_tune::answers::TargetAnswer;

/// The ridge penalty, relative to the mean of the squared inputs.
const STRENGTH: f64 = 0.01;
/// The maximum number of rows for a fit: all rows of answers, filled up with rows of prompts.
const MAX_ROWS: usize = 8192;
/// The number of rows whose logits are computed at once.
const CHUNK: usize = 256;
/// The minimum standard deviation of a feature, against division by zero.
const LEAST_SPREAD: f32 = 1e-6;

/// The predictions of a read-out along each answer, one entry per token.
pub(super) struct ReadOut {
    /// The number of layers before the adapter; `None` for an EAGLE-3 drafter.
    pub(super) exit_layer: Option<usize>,
    /// Whether the read-out's most probable token is the target's.
    pub(super) agrees: Vec<Vec<bool>>,
    /// Whether the read-out would draft the answer's token and the target would accept it.
    pub(super) accepted: Vec<Vec<bool>>,
}

/// Hidden states along all answers, in order.
struct States {
    /// The inputs of each self-draft.
    inputs: Vec<ReadOutInputs>,
    /// The target's states after the final norm, `[rows, hidden]`.
    last: Tensor<2>,
    /// The rows of each answer, including its prompt. The row before a token predicts it, so the
    /// last rows predict the answer's tokens.
    answers: Vec<std::ops::Range<usize>>,
}

/// The inputs of one self-draft.
struct ReadOutInputs {
    /// The number of layers before the adapter; `None` for an EAGLE-3 drafter.
    exit_layer: Option<usize>,
    /// The hidden states that the self-draft reads, `[rows, width]`.
    states: Tensor<2>,
    /// The states that the map corrects, `[rows, hidden]`.
    base: Tensor<2>,
}

/// A token of an answer, with the target's prediction.
struct AnswerToken {
    token_id: u32,
    /// The target's most probable token.
    top: u32,
    /// The probability of `token_id` under the sampling settings; 1 for greedy answers.
    prob: f64,
    /// A uniform random number that decides whether the token would be drafted.
    luck: f64,
}

/// A fitted map from standardised inputs to the difference between the final states and the base.
struct LinearMap {
    mean: Tensor<2>,
    spread: Tensor<2>,
    offset: Tensor<2>,
    weights: Tensor<2>,
}

/// Computes the read-outs of layers, and of an EAGLE-3 drafter if all layers that it reads are
/// among them. Each half of the answers is predicted with the map fitted to the other half.
pub(super) fn read_outs(
    surveyor: &Surveyor<'_>,
    exit_layers: &[usize],
    progress: &dyn Bar,
) -> Result<Vec<ReadOut>> {
    let target = &surveyor.workspace.pair()?.target;
    progress.message("hidden states");
    let states = states(surveyor, target, exit_layers, progress)?;
    let head = target.lm_head_weight().cast(FloatDType::F32);
    let tokens = answer_tokens(surveyor, target, &states, &head);
    let halves = surveyor.halves();
    progress.message("layers");
    let all = states.inputs.par_iter().map(|inputs| {
        let num_answers = surveyor.answers.len();
        let mut agrees = vec![Vec::new(); num_answers];
        let mut accepted = vec![Vec::new(); num_answers];
        for (half, other) in [(0, 1), (1, 0)] {
            surveyor.watch.check_interrupted()?;
            let rows = halves[other].iter().flat_map(|nth| states.answers[*nth].clone());
            let rows: Vec<usize> = rows.collect();
            let over_base = select(&states.last, &rows) - select(&inputs.base, &rows);
            let map = LinearMap::fit(&select(&inputs.states, &rows), over_base)
                .context("hidden states that are not finite")?;
            // All answers of a half are processed at once, because each product reads the whole LM
            // head.
            let places = halves[half].iter().flat_map(|nth| {
                let (end, len) = (states.answers[*nth].end, tokens[*nth].len());
                (0..len).map(move |at| (*nth, at, end - len + at))
            });
            let places: Vec<(usize, usize, usize)> = places.collect();
            let rows: Vec<usize> = places.iter().map(|(.., row)| *row).collect();
            let predicted = select(&inputs.base, &rows) + map.apply(select(&inputs.states, &rows));
            each_logits(target, predicted, &head, |row, logits| {
                let (nth, at, _) = places[row];
                let token = &tokens[nth][at];
                let logits = &penalised(surveyor, nth, at, logits);
                let top = argmax(logits);
                agrees[nth].push(top == token.top);
                accepted[nth].push(match surveyor.decoding.choice {
                    TokenChoice::Greedy => top == token.token_id,
                    TokenChoice::Sampled(sampling) => {
                        let prob = sampling.probs(logits)[token.token_id as usize];
                        token.luck * token.prob < prob
                    }
                });
            });
        }
        progress.advance(1.0);
        anyhow::Ok(ReadOut { exit_layer: inputs.exit_layer, agrees, accepted })
    });
    all.collect()
}

/// Runs the target along the answers. Collects the self-drafts' inputs and the final states.
fn states(
    surveyor: &Surveyor<'_>,
    target: &CausalLm,
    exit_layers: &[usize],
    progress: &dyn Bar,
) -> Result<States> {
    let device = target.device();
    let answers = &surveyor.answers;
    let num_of_answers: usize = answers.iter().map(|answer| answer.response_ids.len()).sum();
    let num_of_prompts: usize = answers.iter().map(|answer| answer.prompt_ids.len()).sum();
    // The step between the prompt positions that are used.
    let step = num_of_prompts.div_ceil(MAX_ROWS.saturating_sub(num_of_answers).max(1)).max(1);
    let mut exits: Vec<Vec<Tensor<2>>> = vec![Vec::new(); exit_layers.len()];
    let of_eagle3 = Eagle3Config::default_layers(target.shape().num_layers);
    let places = of_eagle3.map(|layer| exit_layers.binary_search(&layer).ok());
    let places: Option<Vec<usize>> = places.into_iter().collect();
    let mut of_eagle3 = Vec::new();
    let mut last = Vec::new();
    let mut rows_of_answers: Vec<std::ops::Range<usize>> = Vec::new();
    for answer in answers {
        surveyor.watch.check_interrupted()?;
        let ids = [&answer.prompt_ids[..], &answer.response_ids].concat();
        let seq = ids.len() - 1;
        let values: Vec<i32> = ids[..seq].iter().map(|id| *id as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(values, [1, seq]), &device);
        let embedded = target.embed(ids.clone());
        let wanted = 0..seq;
        let (of_exits, of_last) =
            target.hidden_states_at(ids, exit_layers, std::slice::from_ref(&wanted));
        let first = answer.prompt_ids.len() - 1;
        // The states at a sequence's first token differ from all others, so they are left out.
        let rows: Vec<usize> = (1..first).step_by(step).chain(first..seq).collect();
        let before: Vec<usize> = rows.iter().map(|row| row.saturating_sub(1)).collect();
        let kept = |state: &Tensor<3>, rows: &[usize]| {
            let [_, seq, width] = state.dims();
            select(&state.clone().cast(FloatDType::F32).reshape([seq, width]), rows)
        };
        if let Some(places) = &places {
            let states = places.iter().map(|place| kept(&of_exits[*place], &before));
            of_eagle3.push(Tensor::cat(states.chain([kept(&embedded, &rows)]).collect(), 1));
        }
        exits.iter_mut().zip(&of_exits).for_each(|(all, state)| all.push(kept(state, &rows)));
        last.push(kept(&of_last, &rows));
        let start = rows_of_answers.last().map_or(0, |rows| rows.end);
        rows_of_answers.push(start..start + rows.len());
        progress.advance(1.0);
    }
    let last = Tensor::cat(last, 0);
    let of_exits = exit_layers.iter().zip(exits).map(|(exit_layer, all)| {
        let states = Tensor::cat(all, 0);
        ReadOutInputs { exit_layer: Some(*exit_layer), base: lens(target, states.clone()), states }
    });
    let mut inputs: Vec<ReadOutInputs> = of_exits.collect();
    if places.is_some() {
        let states = Tensor::cat(of_eagle3, 0);
        inputs.push(ReadOutInputs { exit_layer: None, base: last.zeros_like(), states });
    }
    Ok(States { inputs, last, answers: rows_of_answers })
}

/// Returns the tokens of every answer, with the target's predictions.
fn answer_tokens(
    surveyor: &Surveyor<'_>,
    target: &CausalLm,
    states: &States,
    head: &Tensor<2>,
) -> Vec<Vec<AnswerToken>> {
    let of_answer = |(nth, answer): (usize, &TargetAnswer)| {
        let mut draws = SeededDraws::new(surveyor.seed, &[&answer.id, "read-out"]);
        let mut token =
            |token_id, top, prob| AnswerToken { token_id, top, prob, luck: draws.uniform() };
        let ids = &answer.response_ids;
        let sampling = match surveyor.decoding.choice {
            // A greedy answer consists of the target's most probable tokens.
            TokenChoice::Greedy => return ids.iter().map(|id| token(*id, *id, 1.0)).collect(),
            TokenChoice::Sampled(sampling) => sampling,
        };
        let end = states.answers[nth].end;
        let rows: Vec<usize> = (end - ids.len()..end).collect();
        let mut tokens = Vec::with_capacity(ids.len());
        each_logits(target, select(&states.last, &rows), head, |at, logits| {
            let logits = penalised(surveyor, nth, at, logits);
            let id = ids[at];
            tokens.push(token(id, argmax(&logits), sampling.probs(&logits)[id as usize]));
        });
        tokens
    };
    surveyor.answers.iter().enumerate().map(of_answer).collect()
}

/// Applies the repetition penalty to the logits for the token at position `at` of an answer.
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

impl LinearMap {
    /// Fits the map from rows of inputs to final states minus the base; `None` if not all are
    /// finite.
    fn fit(exit: &Tensor<2>, over_base: Tensor<2>) -> Option<Self> {
        let (mean, offset) = (exit.clone().mean_dim(0), over_base.clone().mean_dim(0));
        let centred = exit.clone() - mean.clone();
        let spread = centred.clone().powi_scalar(2).mean_dim(0).sqrt().clamp_min(LEAST_SPREAD);
        let inputs = centred / spread.clone();
        let wanted = over_base - offset.clone();
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
        // We solve the primal or the dual ridge problem, whichever is smaller.
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

    /// Predicts the final states minus the base.
    fn apply(&self, states: Tensor<2>) -> Tensor<2> {
        let inputs = (states - self.mean.clone()) / self.spread.clone();
        self.offset.clone() + inputs.matmul(self.weights.clone())
    }
}

/// Applies the logit lens, which is the final norm, to the states at an exit layer.
fn lens(target: &CausalLm, exit: Tensor<2>) -> Tensor<2> {
    let [rows, width] = exit.dims();
    let normed = target.final_norm(exit.reshape([1, rows, width]));
    normed.cast(FloatDType::F32).reshape([rows, width])
}

/// Calls `each` with the index and the logits of every row of normalised states.
fn each_logits(
    target: &CausalLm,
    normed: Tensor<2>,
    head: &Tensor<2>,
    mut each: impl FnMut(usize, &[f32]),
) {
    let cap = target.config().spec.logit_soft_cap;
    let num_rows = normed.dims()[0];
    for start in (0..num_rows).step_by(CHUNK) {
        let some = normed.clone().narrow(0, start, CHUNK.min(num_rows - start));
        let logits = soft_capped(some.matmul(head.clone()), cap);
        let vocab_size = logits.dims()[1];
        let values = vectors::values(logits);
        values.chunks_exact(vocab_size).enumerate().for_each(|(row, row_logits)| {
            each(start + row, row_logits);
        });
    }
}

fn select(states: &Tensor<2>, rows: &[usize]) -> Tensor<2> {
    let rows: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
    states.clone().select(0, Tensor::<1, Int>::from_ints(&rows[..], &states.device()))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::{ModelConfig, ModelShape};

    use super::*;

    #[test]
    fn a_map_learns_a_linear_function_in_primal_and_dual_form() {
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
            let over_lens = last(&rows) - lens(&target, rows.clone());
            let map = LinearMap::fit(&rows, over_lens).expect("finite");
            let wrong = lens(&target, unseen.clone()) + map.apply(unseen.clone()) - last(&unseen);
            let size = |tensor: Tensor<2>| vectors::values(tensor.powi_scalar(2).mean())[0];
            size(wrong) / size(unseen.clone().matmul(truth.clone()))
        };
        // A fit to many rows explains nearly everything, and one to few rows a part.
        let (many, few) = (error(numbers(400)), error(numbers(16)));
        assert!(many < 0.01, "{many}");
        assert!(few > many && few < 1.0, "{few}");
    }
}
