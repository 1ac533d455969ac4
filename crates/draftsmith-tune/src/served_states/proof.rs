//! The proof that served hidden states are the target's.
//!
//! The state after all layers, normed and multiplied by the LM head, must give the log-probabilities
//! that the server itself reports. This proves the row, the positions, the norm and the head, for all
//! states of a token, since the server stores them together. It cannot tell which middle layers the
//! other states come from. The first of them is compared with local layers, if they are here.

use std::collections::HashMap;

use burn::tensor::{Int, Tensor, TensorData};
use draftsmith_files::hash_bytes;
use draftsmith_model::{CausalLm, vectors};
use draftsmith_served::{ServedStates, StatesAsk, StatesDtype};
use draftsmith_theory::log_softmax;

/// The number of first layers that the proof runs, if the first state comes from no later one.
pub(super) const NUM_LAYERS: usize = 2;
/// The largest relative difference between the first served state and the local one. States of
/// neighbouring layers differ by 17 % and more; quantised weights change them by a few percent.
const MOST_DIFFERENT: f64 = 0.1;
/// The largest mean error of log-probabilities in nats, for states in f32.
const MOST_ERROR: f64 = 1e-3;
/// The number of positions whose logits are computed at once.
const CHUNK: usize = 64;
/// Log-probabilities below this one stand for minus infinity.
const LEAST: f32 = -1000.0;

/// Compares the states of rows with what the target must give.
pub(super) struct Prover<'a> {
    ends: &'a CausalLm,
    first_layers: Option<&'a CausalLm>,
    /// The numbers of layers before the states.
    layers: &'a [usize],
    /// Which of the final norm's possible functions gives the log-probabilities; `None` before the
    /// first row.
    norm: Option<usize>,
    /// The rows, with the hash of their tokens, by the hash of their last states.
    seen: HashMap<String, (String, String)>,
    /// The largest difference from the local layers so far; `None` if they were not compared.
    most_different: Option<f64>,
}

/// The mean error of log-probabilities, and the largest error that the server's number format explains.
#[derive(Debug, Clone, Copy)]
struct Compared {
    error: f64,
    limit: f64,
}

impl<'a> Prover<'a> {
    pub(super) fn new(
        ends: &'a CausalLm,
        first_layers: Option<&'a CausalLm>,
        layers: &'a [usize],
    ) -> Self {
        Self { ends, first_layers, layers, norm: None, seen: HashMap::new(), most_different: None }
    }

    /// Describes what is known about the middle layers.
    pub(super) fn middle_text(&self) -> String {
        match self.most_different {
            Some(most) => format!(
                "the first states are those of the local layers (largest difference {:.2} %)",
                100.0 * most
            ),
            None => {
                "the other layers are distinct and finite; no local layers were here to compare"
                    .to_owned()
            }
        }
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
        // A single position has a larger error than the mean of many.
        let slack = if ask.is_proof { 1.0 } else { 2.0 };
        // An error that is not a number proves nothing either.
        let is_proved = |compared: &Compared| compared.error <= slack * compared.limit;
        let possible = self.normed(states);
        let num_proved = possible.iter().filter(|(.., compared)| is_proved(compared)).count();
        let best = possible.into_iter().min_by(|(.., a), (.., b)| a.error.total_cmp(&b.error));
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
        self.check_first(ask, states)?;
        Ok((compared.error, normed))
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
        for chunk in known.chunks(CHUNK) {
            let rows = chunk.iter().flat_map(|(used, _)| &normed[used * width..(used + 1) * width]);
            let (shape, device) = ([1, chunk.len(), width], self.ends.device());
            let rows = vectors::tensor(rows.copied().collect(), shape, &device);
            let rows = rows.cast(self.ends.dtype().float_dtype());
            let logits = vectors::values(self.ends.lm_head(rows));
            for (logits, (_, known)) in logits.chunks_exact(vocab_size).zip(chunk) {
                largest = logits.iter().fold(largest, |largest, x| largest.max(x.abs()));
                let log_probs = log_softmax(logits);
                for (id, served) in known.iter().filter(|(_, served)| *served > LEAST) {
                    sum += (log_probs[*id as usize] - f64::from(*served)).abs();
                    num += 1;
                }
            }
        }
        let error = if num == 0 { f64::NAN } else { sum / f64::from(num) };
        Compared { error, limit: limit(states.dtype, largest) }
    }

    /// Describes an error that is too large, with its likely cause.
    fn blame(
        &self,
        ask: &StatesAsk<'_>,
        states: &ServedStates,
        normed: &[f32],
        Compared { error, limit }: Compared,
    ) -> String {
        let last = states.layers.last().expect("there is a last state");
        let fits = |compared: Compared| compared.error <= 2.0 * compared.limit;
        let shifted = |by: isize| {
            fits(self.compare(normed, states, |position| position.checked_add_signed(by)))
        };
        let cause = if fits(self.compare(last, states, Some)) {
            "they are normed already; hint: the server must store the state before the final norm"
        } else if shifted(1) || shifted(-1) {
            "they are shifted by one token; hint: use vLLM 0.31 or newer, and let it add no token to the prompt"
        } else {
            "they are of another layer, prompt or model, or the ends here are of other weights; hint: start the server \
             as `draftsmith server states RECIPE` prints, with the same checkpoint"
        };
        let place = match ask.is_proof {
            true => format!("{} positions", states.known.len()),
            false => format!("token {}", ask.ids.len() - 1),
        };
        format!(
            "after layer {} give the served log-probabilities of {place} with a mean error of {error:.3} nats (at most \
             {limit:.3}): {cause}",
            self.layers.last().copied().unwrap_or(0)
        )
    }

    /// Compares the first state with that of the local layers, if they are here, for rows of the
    /// proof.
    fn check_first(&mut self, ask: &StatesAsk<'_>, states: &ServedStates) -> Result<(), String> {
        let Some((model, layer)) = self.first_layers.zip(self.layers.first().copied()) else {
            return Ok(());
        };
        if !ask.is_proof || layer > NUM_LAYERS || self.layers.len() < 2 {
            return Ok(());
        }
        let ids: Vec<i32> = ask.ids.iter().map(|id| *id as i32).collect();
        let ids = TensorData::new(ids, [1, ask.ids.len()]);
        let ids = Tensor::<2, Int>::from_data(ids, &model.device());
        let own = vectors::values(model.exit_states(ids, layer));
        let squares = |pairs: &mut dyn Iterator<Item = f64>| pairs.map(|x| x * x).sum::<f64>();
        let served = &states.layers[0];
        let difference =
            squares(&mut own.iter().zip(served).map(|(own, served)| f64::from(own - served)));
        let different = (difference / squares(&mut own.iter().map(|x| f64::from(*x)))).sqrt();
        self.most_different =
            Some(self.most_different.map_or(different, |most| most.max(different)));
        if different <= MOST_DIFFERENT {
            return Ok(());
        }
        Err(format!(
            "after layer {layer} differ from those of the local layers by {:.0} %: they are of another layer, or of other weights; \
             hint: start the server with the layers {:?}, and with the same checkpoint",
            100.0 * different,
            self.layers
        ))
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
