//! The proof that served hidden states are the target's.
//!
//! The state after all layers, normed and multiplied by the LM head, must give the log-probabilities
//! that the server itself reports, on average and at each position. This proves the row, the
//! positions, the norm and the head. `middle.rs` compares the other states.

use std::collections::HashMap;

use draftsmith_files::hash_bytes;
use draftsmith_model::{CausalLm, vectors};
use draftsmith_served::{ServedStates, StatesAsk, StatesDtype};
use draftsmith_theory::log_softmax;

use super::middle::{Middle, differences};

/// The largest mean error of log-probabilities in nats, for states in f32.
const MOST_ERROR: f64 = 1e-3;
/// The number of positions whose logits are computed at once.
const CHUNK: usize = 64;
/// Log-probabilities below this one stand for minus infinity.
const LEAST: f32 = -1000.0;
/// The largest error of a single position, as a multiple of the largest mean error. Servers in bf16 give
/// up to 1.14, the state of another token mostly 20 and more.
const MOST_OF_POSITION: f64 = 4.0;
/// The error of a single position in nats that the rounding of the ends' weights explains.
const WEIGHTS_ERROR: f64 = 0.02;
/// The largest difference between a token's states of two requests, as a share of the state: of servers
/// in f32, and in 16 bits.
const MOST_BETWEEN: [f64; 2] = [0.01, 0.5];

/// Compares the states of rows with what the target must give.
pub(super) struct Prover<'a> {
    ends: &'a CausalLm,
    pub(super) middle: Middle<'a>,
    /// The numbers of layers before the states.
    layers: &'a [usize],
    /// The largest number that can be stored.
    largest: f32,
    /// Which of the final norm's possible functions gives the log-probabilities; `None` before the
    /// first row.
    norm: Option<usize>,
    /// The rows, with the hash of their tokens, by the hash of their last states.
    seen: HashMap<String, (String, String)>,
}

/// The errors of log-probabilities in nats, and the largest one that the server's number format explains.
#[derive(Debug, Clone, Copy)]
struct Compared {
    mean: f64,
    /// The position with the largest error, and this error.
    worst: (usize, f64),
    limit: f64,
}

impl Compared {
    fn limit_of_position(&self) -> f64 {
        MOST_OF_POSITION * self.limit + WEIGHTS_ERROR
    }

    /// Returns whether the number format explains the errors. Those that are not numbers prove nothing.
    fn is_proved(&self, num_positions: usize) -> bool {
        let mean = if num_positions > 1 { self.limit } else { self.limit_of_position() };
        self.mean <= mean && self.worst.1 <= self.limit_of_position()
    }
}

impl<'a> Prover<'a> {
    /// Prepares the proof with the target's ends and those of its layers that are here. `largest` is the
    /// largest number that can be stored.
    pub(super) fn new(
        ends: &'a CausalLm,
        local: Option<&'a CausalLm>,
        layers: &'a [usize],
        largest: f32,
    ) -> Self {
        let middle = Middle::new(local, layers);
        Self { ends, middle, layers, largest, norm: None, seen: HashMap::new() }
    }

    /// Applies the target's final norm to states, `[tokens, hidden]`, with each function that it may
    /// have, and compares what they give. Returns the number of the function too.
    fn normed(&self, states: &ServedStates) -> Vec<(usize, Vec<f32>, Compared)> {
        let width = self.ends.shape().hidden_size;
        let last = states.layers.last().expect("there is a last state");
        let shape = [1, last.len() / width, width];
        let last = vectors::tensor(last.clone(), shape, &self.ends.device());
        let possible = self.ends.possible_final_norms(last).into_iter().enumerate();
        let left = possible.filter(|(nth, _)| self.norm.is_none_or(|norm| norm == *nth));
        let compare = |(nth, normed)| {
            let normed = vectors::values(normed);
            let compared = self.compare(&normed, states, Some);
            (nth, normed, compared)
        };
        left.map(compare).collect()
    }

    /// Proves the states of a row. Returns the mean error of its log-probabilities, in nats, and its
    /// last states after the final norm.
    ///
    /// # Errors
    /// If they are not the target's, with the place and the likely cause.
    pub(super) fn prove(
        &mut self,
        ask: &StatesAsk<'_>,
        states: &ServedStates,
    ) -> Result<(f64, Vec<f32>), String> {
        self.check_values(ask, states)?;
        let num_known = states.known.len();
        if ask.is_proof && num_known == 1 && ask.ids.len() > 1 {
            return Err("cannot be proved: the server lists `prompt_logprobs` at no position; hint: let it return them, as \
                        vLLM does by default (`--max-logprobs 20`)"
                .to_owned());
        }
        let possible = self.normed(states);
        let num_proved = possible.iter().filter(|(.., it)| it.is_proved(num_known)).count();
        let best = possible.into_iter().min_by(|(.., a), (.., b)| a.mean.total_cmp(&b.mean));
        let (norm, normed, compared) = best.expect("the final norm has a function");
        match num_proved {
            0 => return Err(self.blame(ask, states, &normed, compared)),
            1 => self.norm = Some(norm),
            _ => {
                return Err(
                    "fit a final norm that multiplies by its weight, and one that multiplies by 1 + weight; hint: \
                     serve the target in f32 for one training, so that only one of them fits"
                        .to_owned(),
                );
            }
        }
        if ask.is_proof {
            self.middle.check(ask, states)?;
        }
        Ok((compared.mean, normed))
    }

    /// Checks that the states of a second request for a row, without log-probabilities of the prompt, are
    /// those of the first one. Only the second one can read a cached prefix.
    ///
    /// # Errors
    /// If they differ by more than the server's number format explains.
    pub(super) fn check_again(
        &self,
        ask: &StatesAsk<'_>,
        first: &ServedStates,
        second: &ServedStates,
    ) -> Result<(), String> {
        let most = MOST_BETWEEN[usize::from(first.dtype != StatesDtype::F32)];
        for ((layer, first), second) in self.layers.iter().zip(&first.layers).zip(&second.layers) {
            let apart = differences(second, first, ask.width).into_iter().enumerate();
            if let Some((position, apart)) = apart.into_iter().find(|(_, apart)| *apart > most) {
                return Err(format!(
                    "after layer {layer} differ by {:.0} % at token {position} from those of the same request with \
                     `prompt_logprobs`; hint: turn prefix caching off (`--no-enable-prefix-caching`)",
                    100.0 * apart
                ));
            }
        }
        Ok(())
    }

    /// Checks that states are numbers, that no token has a state of zeros, and that no two layers or
    /// rows have the same states.
    fn check_values(&mut self, ask: &StatesAsk<'_>, states: &ServedStates) -> Result<(), String> {
        for (layer, own) in self.layers.iter().zip(&states.layers) {
            for (position, state) in own.chunks_exact(ask.width).enumerate() {
                if state.iter().any(|x| !x.is_finite()) {
                    return Err(format!(
                        "after layer {layer} are not finite at token {position}; hint: serve the target in bf16 or \
                         f32, whose numbers have a larger range than f16's"
                    ));
                }
                let is_stored = layer != self.layers.last().unwrap_or(layer);
                if is_stored && state.iter().any(|x| x.abs() > self.largest) {
                    return Err(format!(
                        "after layer {layer} are too large for `features_format = \"f16\"` at token {position}; hint: store \
                         them with `features_format = \"bf16\"`"
                    ));
                }
                if state.iter().all(|x| *x == 0.0) {
                    return Err(format!(
                        "after layer {layer} are all zero at token {position}; hint: turn prefix caching off \
                         (`--no-enable-prefix-caching`); vLLM gives zeros for hybrid models before 0.26"
                    ));
                }
            }
        }
        for (nth, own) in states.layers.iter().enumerate() {
            if let Some(same) = states.layers[..nth].iter().position(|other| other == own) {
                let [one, other] = [self.layers[same], self.layers[nth]];
                return Err(format!(
                    "after layers {one} and {other} are equal; hint: start the server with the layers {:?}",
                    self.layers
                ));
            }
        }
        let last = states.layers.last().into_iter().flatten();
        let bytes: Vec<u8> = last.flat_map(|x| x.to_le_bytes()).collect();
        let ids: Vec<u8> = ask.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let ids = hash_bytes(&ids);
        match self.seen.insert(hash_bytes(&bytes), (ask.id.to_owned(), ids.clone())) {
            Some((other, others)) if others != ids => {
                Err(format!("are those of row `{other}` too; hint: let nobody else use the server"))
            }
            _ => Ok(()),
        }
    }

    /// Compares the log-probabilities of normed last states with the server's. `at` gives the
    /// position whose state is used for a position, if there is one.
    fn compare(
        &self,
        normed: &[f32],
        states: &ServedStates,
        at: impl Fn(usize) -> Option<usize>,
    ) -> Compared {
        let (width, vocab_size) = (self.ends.shape().hidden_size, self.ends.shape().vocab_size);
        let num_tokens = normed.len() / width;
        let known = states.known.iter().filter_map(|(position, known)| {
            let used = at(*position).filter(|used| *used < num_tokens)?;
            Some((used, known))
        });
        let known: Vec<(usize, &Vec<(u32, f32)>)> = known.collect();
        let (mut sum, mut num, mut largest) = (0.0, 0, 0.0_f32);
        let mut worst = (0, 0.0_f64);
        for chunk in known.chunks(CHUNK) {
            let rows = chunk.iter().flat_map(|(used, _)| &normed[used * width..(used + 1) * width]);
            let (shape, device) = ([1, chunk.len(), width], self.ends.device());
            let rows = vectors::tensor(rows.copied().collect(), shape, &device);
            let rows = rows.cast(self.ends.dtype().float_dtype());
            let logits = vectors::values(self.ends.lm_head(rows));
            for (logits, (used, known)) in logits.chunks_exact(vocab_size).zip(chunk) {
                largest = logits.iter().fold(largest, |largest, x| largest.max(x.abs()));
                let log_probs = log_softmax(logits);
                let served = known.iter().filter(|(_, served)| *served > LEAST);
                let errors =
                    served.map(|(id, it)| (log_probs[*id as usize] - f64::from(*it)).abs());
                let errors: Vec<f64> = errors.collect();
                let own: f64 = errors.iter().sum();
                (sum, num) = (sum + own, num + errors.len());
                let own = own / errors.len().max(1) as f64;
                worst = if own > worst.1 { (*used, own) } else { worst };
            }
        }
        let mean = if num == 0 { f64::NAN } else { sum / num as f64 };
        Compared { mean, worst, limit: limit(states.dtype, largest) }
    }

    /// Describes an error that is too large, with its likely cause.
    fn blame(
        &self,
        ask: &StatesAsk<'_>,
        states: &ServedStates,
        normed: &[f32],
        compared: Compared,
    ) -> String {
        let Compared { mean, worst, limit } = compared;
        let last = states.layers.last().expect("there is a last state");
        let fits = |compared: Compared| compared.mean <= 2.0 * compared.limit;
        let shifted = |by: isize| {
            fits(self.compare(normed, states, |position| position.checked_add_signed(by)))
        };
        let num = states.known.len();
        let cause = if num > 1 && mean <= limit {
            "this token's state is another one; hint: let nobody else use the server, and turn prefix caching off \
             (`--no-enable-prefix-caching`)"
        } else if fits(self.compare(last, states, Some)) {
            "they are normed already; hint: the server must store the state before the final norm"
        } else if shifted(1) || shifted(-1) {
            "they are shifted by one token; hint: use vLLM 0.31 or newer, and let it add no token to the prompt"
        } else {
            "they are of another layer, prompt or model, or the ends here are of other weights; hint: start the server \
             as `draftsmith server states RECIPE` prints, with the same checkpoint"
        };
        let (place, error, limit) = match ask.is_proof && mean > limit {
            true => (format!("{num} positions with a mean error"), mean, limit),
            false => {
                (format!("token {} with an error", worst.0), worst.1, compared.limit_of_position())
            }
        };
        format!(
            "after layer {} give the served log-probabilities of {place} of {error:.3} nats (at most {limit:.3}): {cause}",
            self.layers.last().copied().unwrap_or(0)
        )
    }
}

/// Returns the largest mean error of log-probabilities for a server's number format: half a unit in
/// the last place of the largest logit, and for f32 what rounding in another order explains.
fn limit(dtype: StatesDtype, largest: f32) -> f64 {
    let exponent = f64::from(largest.max(1.0)).log2().floor();
    match dtype {
        StatesDtype::F32 => MOST_ERROR,
        StatesDtype::F16 => MOST_ERROR + (exponent - 11.0).exp2(),
        StatesDtype::Bf16 => MOST_ERROR + (exponent - 8.0).exp2(),
    }
}
