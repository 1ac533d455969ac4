//! The proof of the states that give no log-probabilities: those after middle layers.
//!
//! Where a layer is here, its states must be the local ones. Elsewhere, the next stored state of a token
//! must be one of those that are nearest to its state. Thus a fault in any state breaks the chain, whose
//! end the log-probabilities prove. The chain cannot tell which layers the states come from.
//!
//! The bounds were set on the embedded target, another model of its size, SmolLM2-135M and Gemma 3
//! 270M, with 14 texts each (`runtimes/states_bounds.py` among the benches).

use std::slice;

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, vectors};
use draftsmith_served::{ServedStates, StatesAsk};

/// The largest median difference between the states of a row's tokens and the local ones, as a share
/// of the local ones. Rounding the weights to four bits gives up to 0.52, to fp8 up to 0.08.
const MOST_DIFFERENT: f64 = 0.6;
/// The largest ratio between the sizes of states and local ones, or its inverse: their median in a row.
/// Four bits give up to 1.19.
const MOST_SIZE: f64 = 1.4;
/// The share of the difference from the own layer at which another layer counts as the origin. Four bits
/// give at least 0.74.
const OTHER_LAYER: f64 = 0.6;
/// One of this many tokens may be nearer to a state than its own next state.
const NEARER: usize = 50;
/// The smallest share of tokens whose own next state is that near. Right states have 0.63 to 1, shifted
/// ones up to 0.67 in a short text, and much less over all.
const LEAST_NEAREST: f64 = 0.6;
/// The negative logarithm of the probability at which a share of near tokens counts as too small. Right
/// states have up to 6.7.
const MOST_EVIDENCE: f64 = 10.0;
/// The largest ratio between the median sizes of a row's states and its next ones, or its inverse. Right
/// states have 0.17 to 1.
const MOST_RATIO: f64 = 100.0;
/// The largest factor between this ratio for one token and the median, or its inverse. The first token of
/// a text has up to 70, and more in large models.
const MOST_OF_TOKEN: f64 = 1e5;

/// The number of tokens of a row that are compared with each other, and the least.
const PART: usize = 1024;
const LEAST_TOKENS: usize = 8;

/// Compares the states of rows with local ones, and with each other.
pub(super) struct Middle<'a> {
    local: Option<&'a CausalLm>,
    /// The numbers of layers before the states.
    layers: &'a [usize],
    /// The number of states, from the first on, whose layers are here.
    num_local: usize,
    /// The largest median difference from local states so far.
    most_different: f64,
    /// For each state without local layers but the last: the number of tokens whose own next state was
    /// among the nearest, and the number of all compared tokens.
    nearest: Vec<(usize, usize)>,
}

impl<'a> Middle<'a> {
    pub(super) fn new(local: Option<&'a CausalLm>, layers: &'a [usize]) -> Self {
        let num_here = local.map_or(0, CausalLm::num_here);
        let num_local = layers.iter().filter(|layer| **layer <= num_here).count();
        let nearest = vec![(0, 0); (layers.len() - 1).saturating_sub(num_local)];
        Self { local, layers, num_local, most_different: 0.0, nearest }
    }

    /// Describes what was compared, and what the proof cannot see.
    pub(super) fn text(&self) -> String {
        let mut lines = Vec::new();
        if self.num_local > 0 {
            let (layers, most) = (&self.layers[..self.num_local], 100.0 * self.most_different);
            lines.push(format!(
                "  after layers {layers:?}: those of the local layers, at most {most:.2} % apart\n"
            ));
        }
        let compared = self.layers[self.num_local..].iter().zip(&self.nearest);
        for (layer, (num_nearest, num)) in compared {
            lines.push(format!(
                "  after layer {layer}: {num_nearest} of {num} tokens are near their next states\n"
            ));
        }
        lines.concat() + "  not proved: " + self.not_proved()
    }

    /// Describes what the proof cannot see.
    pub(super) fn not_proved(&self) -> &'static str {
        match self.nearest.is_empty() {
            true => "a fine-tune within rounding",
            false => "which middle layers these are, their exact size, a fine-tune",
        }
    }

    /// Checks the states of a row.
    ///
    /// # Errors
    /// If they are not the target's, with the layer and the likely cause.
    pub(super) fn check(
        &mut self,
        ask: &StatesAsk<'_>,
        states: &ServedStates,
    ) -> Result<(), String> {
        if let Some(local) = self.local.filter(|_| self.num_local > 0) {
            self.check_local(local, ask, states)?;
        }
        for nth in self.num_local..self.layers.len() - 1 {
            self.check_pair(nth, ask, states)?;
        }
        Ok(())
    }

    /// Compares the states of a row with those of the local layers.
    fn check_local(
        &mut self,
        local: &CausalLm,
        ask: &StatesAsk<'_>,
        states: &ServedStates,
    ) -> Result<(), String> {
        let own = &self.layers[..self.num_local];
        let beside = own.iter().flat_map(|layer| layer.saturating_sub(1)..=layer + 1);
        let mut layers: Vec<usize> = beside.filter(|layer| *layer <= local.num_here()).collect();
        layers.sort_unstable();
        layers.dedup();
        let ids = ask.ids.iter().map(|id| *id as i32).collect::<Vec<_>>();
        let ids = TensorData::new(ids, [1, ask.ids.len()]);
        let ids = Tensor::<2, Int>::from_data(ids, &local.device());
        let computed = local.exit_states_at(ids, &layers, slice::from_ref(&(0..ask.ids.len())));
        let computed: Vec<Vec<f32>> = computed.into_iter().map(vectors::values).collect();
        for (served, layer) in states.layers.iter().zip(own) {
            let of_tokens = |computed: &Vec<f32>| differences(served, computed, ask.width);
            let apart: Vec<f64> = computed.iter().map(|it| median(&of_tokens(it))).collect();
            let place = layers.binary_search(layer).expect("the own layer is among them");
            let (own, median) = (&computed[place], apart[place]);
            let is_far = |apart: &f64| *apart > MOST_DIFFERENT.max(4.0 * median);
            let num_far = of_tokens(own).into_iter().filter(is_far).count();
            let nearest = (0..apart.len()).min_by(|a, b| apart[*a].total_cmp(&apart[*b]));
            let nearest = nearest.filter(|nearest| apart[*nearest] < OTHER_LAYER * median);
            let hits = nearest_tokens((served, own), ask);
            let (ratio, worst) = ratios((served, own), ask.width);
            let cause = match nearest {
                Some(other) => format!("and are nearer to those after layer {}", layers[other]),
                None if !is_within(ratio, MOST_SIZE)
                    || !is_within(worst / ratio, MOST_OF_TOKEN) =>
                {
                    format!("in size, by factors of {ratio:.1e} and, at one token, {worst:.1e}")
                }
                None if most_evidence(&hits) > MOST_EVIDENCE || num_far > 1 + hits.len() / 20 => {
                    "and belong to other tokens".to_owned()
                }
                None if median > MOST_DIFFERENT || median.is_nan() => {
                    format!("by {:.0} %", 100.0 * median)
                }
                None => {
                    self.most_different = self.most_different.max(median);
                    continue;
                }
            };
            return Err(format!(
                "after layer {layer} differ from those of the local layers {cause}: they are of another layer, token or \
                 prompt, or of other weights; hint: start the server with the layers {:?}, and with the same checkpoint",
                self.layers
            ));
        }
        Ok(())
    }

    /// Compares a state of each token with its next state.
    fn check_pair(
        &mut self,
        nth: usize,
        ask: &StatesAsk<'_>,
        states: &ServedStates,
    ) -> Result<(), String> {
        let [layer, next] = [self.layers[nth], self.layers[nth + 1]];
        let (own, after) = (&states.layers[nth], &states.layers[nth + 1]);
        let (ratio, worst) = ratios((own, after), ask.width);
        if !is_within(ratio, MOST_RATIO) || !is_within(worst / ratio, MOST_OF_TOKEN) {
            return Err(format!(
                "after layer {layer} have {ratio:.1e} times the size of those after layer {next}, and at one token \
                 {worst:.1e}; hint: let the server store them as the layers give them"
            ));
        }
        let hits = nearest_tokens((own, after), ask);
        let tally = &mut self.nearest[nth - self.num_local];
        *tally = (tally.0 + hits.iter().filter(|hit| **hit).count(), tally.1 + hits.len());
        let worst = most_evidence(&hits).max(evidence(tally.0, tally.1));
        if worst > MOST_EVIDENCE {
            return Err(format!(
                "after layer {layer} do not belong to the same tokens as those after layer {next}: {} of {} are near their \
                 own; they are shifted, stale, or of another prompt; hint: let nobody else use the server, and turn \
                 prefix caching off (`--no-enable-prefix-caching`)",
                tally.0, tally.1
            ));
        }
        Ok(())
    }
}

/// Returns whether a ratio is at most `most`, and its inverse too.
fn is_within(ratio: f64, most: f64) -> bool {
    (1.0 / most..=most).contains(&ratio)
}

/// Returns the Euclidean length of a state.
fn size(state: &[f32]) -> f64 {
    state.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Returns how far each token's state is from another one, as a share of the other.
pub(super) fn differences(states: &[f32], others: &[f32], width: usize) -> Vec<f64> {
    let pairs = states.chunks_exact(width).zip(others.chunks_exact(width));
    let apart = pairs.map(|(state, other)| {
        let difference: Vec<f32> = state.iter().zip(other).map(|(a, b)| a - b).collect();
        size(&difference) / size(other)
    });
    apart.collect()
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Returns the median ratio between the sizes of two states of a token, and the ratio that is furthest
/// from it.
fn ratios((own, other): (&[f32], &[f32]), width: usize) -> (f64, f64) {
    let pairs = own.chunks_exact(width).zip(other.chunks_exact(width));
    let ratios: Vec<f64> = pairs.map(|(own, other)| size(own) / size(other)).collect();
    let median = median(&ratios);
    let factor = |ratio: &f64| (ratio / median).ln().abs();
    let worst = ratios.iter().copied().max_by(|a, b| factor(a).total_cmp(&factor(b)));
    (median, worst.unwrap_or(median))
}

/// Returns for each token of a row whether its other state is among those that are nearest to its state, in
/// the same part of the row.
fn nearest_tokens((own, other): (&[f32], &[f32]), ask: &StatesAsk<'_>) -> Vec<bool> {
    let parts = own.chunks(PART * ask.width).zip(other.chunks(PART * ask.width));
    let parts = parts.zip(ask.ids.chunks(PART)).filter(|(_, ids)| ids.len() >= LEAST_TOKENS);
    parts.flat_map(|(states, ids)| nearest_in(states, ids)).collect()
}

/// Returns what [`nearest_tokens`] does for a part of a row. The states are compared by direction, relative
/// to the mean and the spread of each dimension: without that, the few dimensions that are large for all
/// tokens decide.
fn nearest_in((own, other): (&[f32], &[f32]), ids: &[u32]) -> Vec<bool> {
    let unit = |rows: Tensor<2>| {
        let sizes = rows.clone().powi_scalar(2).sum_dim(1).sqrt();
        rows / sizes.clamp_min(f32::MIN_POSITIVE)
    };
    let directions = |states: &[f32]| {
        let scale = states.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let rows = states.iter().map(|x| x / scale).collect();
        let shape = [ids.len(), states.len() / ids.len()];
        let rows = unit(vectors::tensor(rows, shape, &Device::flex()));
        let rows = rows.clone() - rows.mean_dim(0);
        let spread = rows.clone().powi_scalar(2).mean_dim(0).sqrt();
        unit(rows / spread.clamp_min(f32::MIN_POSITIVE))
    };
    let cosines = vectors::values(directions(own).matmul(directions(other).transpose()));
    let is_nearest = |(nth, row): (usize, &[f32])| {
        let is_nearer = |(x, id): &(&f32, &u32)| **x > row[nth] && **id != ids[nth];
        let num_nearer = row.iter().zip(ids).filter(is_nearer).count();
        row[nth] > 0.0 && num_nearer <= ids.len() / NEARER
    };
    cosines.chunks_exact(ids.len()).enumerate().map(is_nearest).collect()
}

/// Returns the largest [`evidence`] of any stretch of tokens.
fn most_evidence(hits: &[bool]) -> f64 {
    let of_stretches = |part: &[bool]| {
        let from = |begin: usize| {
            let mut num_hits = 0;
            part[begin..].iter().zip(1..).fold(0.0_f64, |most, (hit, num)| {
                num_hits += usize::from(*hit);
                most.max(evidence(num_hits, num))
            })
        };
        (0..part.len()).map(from).fold(0.0, f64::max)
    };
    hits.chunks(PART).map(of_stretches).fold(0.0, f64::max)
}

/// Returns the negative logarithm of Chernoff's bound on the probability of at most `num_hits` hits among
/// `num` tokens, if a token is a hit with the probability [`LEAST_NEAREST`].
fn evidence(num_hits: usize, num: usize) -> f64 {
    let (share, least) = (num_hits as f64 / num.max(1) as f64, LEAST_NEAREST);
    if share >= least {
        return 0.0;
    }
    let part =
        |share: f64, least: f64| if share > 0.0 { share * (share / least).ln() } else { 0.0 };
    num as f64 * (part(share, least) + part(1.0 - share, 1.0 - least))
}
