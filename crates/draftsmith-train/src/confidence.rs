//! Confidence heads of finished block drafters, from rows and two frozen networks.
//!
//! Every token of a response begins a round, with a block of all candidates. A place is *observed*
//! if the candidates before it are the response's tokens; then its head reads what it reads in
//! serving. Its label is the chance that its candidate is accepted: whether it is the response's
//! token if decoding is greedy, and otherwise 1 − TV(p, q) = Σ min(p, q). A place's weight is the
//! product of min(1, q(x)/p(x)) over the response's tokens x before it in the block. The target drew
//! these tokens, so with these weights places occur as often as serving reaches them.
//!
//! The head is a logistic regression on the candidate's row and the Markov vector of the token
//! before it, plus a number for each such token (DSpark's form, in which the number is one more
//! element of the vector). Its logits are then calibrated on other rows. Its rivals need no training
//! of a head: the place in the block, and the logit of the largest probability with an intercept for
//! each place (vLLM's online estimator).

use burn::tensor::{Device, Tensor};
use draftsmith_data::ResponseRow;
use draftsmith_model::{
    BlockDrafter, BlockStart, CachedNetwork, CausalLm, ConfidenceWeights, Rows, vectors,
};
use draftsmith_theory::{SoftmaxSummary, TokenChoice, argmax, confidence_logit, least_by};

use crate::data::split::in_part;
use crate::error::{Result, TrainError};

/// The weight below which a place is not used.
const LEAST_WEIGHT: f64 = 1e-3;
/// The memory for what heads read, in numbers.
const MOST_NUMBERS: usize = 1 << 28;
/// The steps of a fit, and Adam's rate and decays.
const NUM_STEPS: usize = 400;
const RATE: f64 = 0.03;
const DECAYS: [f64; 2] = [0.9, 0.99];
/// The ridge penalties of standardised weights and of tokens' numbers to try, in labels.
const RIDGES: [f64; 4] = [2.0, 20.0, 200.0, 2000.0];
/// The share of rows that judge the heads, and that of the others that calibrate them.
const HELD_OUT: f64 = 0.2;

/// A block drafter with the target and the layers that it reads.
#[derive(Debug, Clone, Copy)]
pub struct FrozenBlock<'a> {
    /// The target.
    pub target: &'a CausalLm,
    /// The drafter, loaded for decoding.
    pub drafter: &'a BlockDrafter,
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    pub layers: &'a [usize],
}

/// The settings of [`train_confidence`].
#[derive(Debug, Clone, Copy)]
pub struct ConfidenceTraining {
    /// How candidates are chosen in serving.
    pub choice: TokenChoice,
    /// The weight of rejections in the loss; 1 for a calibrated head.
    pub rejection_weight: f64,
    /// Whether the head has a number for each token before the candidate.
    pub reads_token: bool,
}

/// A trained head and what it is worth.
#[derive(Debug, Clone)]
pub struct TrainedConfidence {
    /// The head's weights.
    pub weights: ConfidenceWeights,
    /// The number of places that trained the head.
    pub num_places: usize,
    /// The held-out places by response, with the predictions of the head and its rivals.
    pub held_out: Vec<Vec<JudgedPlace>>,
    /// For each place of a block, the temperature with which its predictions are calibrated best.
    /// Divides logits, as SGLang does.
    pub temperatures: Vec<f64>,
    /// The calibration error before and after, averaged over places.
    pub calibration_errors: [f64; 2],
}

/// A held-out place.
#[derive(Debug, Clone, Copy)]
pub struct JudgedPlace {
    /// The chance that the place is reached.
    pub weight: f64,
    /// The chance that the candidate is accepted if the place is reached.
    pub label: f64,
    /// The probabilities that are predicted by the new head, by the largest probability, and by the
    /// place.
    pub predicted: [f64; 3],
}

impl JudgedPlace {
    /// Returns the log-loss of one of the predictions, in nats.
    pub fn log_loss(&self, which: usize) -> f64 {
        let prob = self.predicted[which].clamp(1e-6, 1.0 - 1e-6);
        -(self.label * prob.ln() + (1.0 - self.label) * (1.0 - prob).ln())
    }
}

/// Places with what heads read, in the order of the rows.
#[derive(Default)]
struct Places {
    /// The rows and Markov vectors, one after the other.
    inputs: Vec<f32>,
    tokens: Vec<u32>,
    at: Vec<At>,
}

#[derive(Clone, Copy)]
struct At {
    row: usize,
    place: usize,
    weight: f64,
    label: f64,
    /// The logit of the largest draft probability.
    logit: f64,
}

/// The three parts of the rows.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Training,
    Calibration,
    HeldOut,
}

impl Part {
    fn of(row: &ResponseRow) -> Self {
        match [0, 1].map(|salt| in_part(row, HELD_OUT, salt)) {
            [true, _] => Self::HeldOut,
            [false, true] => Self::Calibration,
            [false, false] => Self::Training,
        }
    }
}

/// Trains a confidence head for a block drafter on the target's responses. The weights of both
/// networks stay as they are.
///
/// # Errors
/// If a part of the rows has no place with a label, or the device fails.
///
/// # Panics
/// If a row has a token outside the vocabulary.
pub fn train_confidence(
    frozen: FrozenBlock<'_>,
    rows: &[ResponseRow],
    training: ConfidenceTraining,
    mut is_interrupted: impl FnMut() -> bool,
) -> Result<Option<TrainedConfidence>> {
    let parts: Vec<Part> = rows.iter().map(Part::of).collect();
    let mut places = Places::default();
    let num_candidates = frozen.drafter.num_candidates();
    for (nth, row) in rows.iter().enumerate() {
        if is_interrupted() {
            return Ok(None);
        }
        if places.inputs.len() > MOST_NUMBERS {
            break;
        }
        frozen.collect(nth, row, training.choice, &mut places)?;
    }
    let of = |part: Part| -> Vec<usize> {
        (0..places.at.len()).filter(|at| parts[places.at[*at].row] == part).collect()
    };
    let [train, calibrate, judge] = [Part::Training, Part::Calibration, Part::HeldOut].map(of);
    if train.is_empty() || calibrate.is_empty() || judge.is_empty() {
        return Err(TrainError::Invalid(format!(
            "{} places train the confidence head, {} calibrate and {} judge it, of {} rows: at least one of each is \
             necessary; hint: build more data",
            train.len(),
            calibrate.len(),
            judge.len(),
            rows.len()
        )));
    }
    let vocab_size = frozen.target.shape().vocab_size;
    let width = places.inputs.len() / places.at.len();
    let of_rows = Inputs {
        width,
        values: &places.inputs,
        tokens: training.reads_token.then_some((&places.tokens, vocab_size)),
    };
    let CalibratedHead { head, slope, shift, logits: calibrated, .. } =
        CalibratedHead::best(of_rows, &places.at, [&train, &calibrate], training.rejection_weight);
    let [by_largest, by_place] =
        [true, false].map(|with_logit| free_logits(&places.at, &train, num_candidates, with_logit));
    let held_out = judged(&places.at, &judge, [&calibrated, &by_largest, &by_place]);
    let (temperatures, calibration_errors) =
        temperatures(&places.at, &calibrate, &calibrated, num_candidates);
    let scaled = |all: Vec<f32>| all.into_iter().map(|weight| slope * weight).collect();
    let weights = ConfidenceWeights {
        row: scaled(head.weights),
        of_token: training.reads_token.then(|| scaled(head.of_token)),
        bias: slope * head.bias + shift,
    };
    let num_places = train.len();
    Ok(Some(TrainedConfidence { weights, num_places, held_out, temperatures, calibration_errors }))
}

/// A head whose logits are scaled by `slope` and shifted by `shift`, with the logits at all places.
struct CalibratedHead {
    head: Logistic,
    slope: f32,
    shift: f32,
    logits: Vec<f32>,
    /// The loss on the places that calibrate it.
    loss: f64,
}

impl CalibratedHead {
    /// Fits one head for each ridge penalty on the first places, and calibrates it on the second.
    /// Returns the head with the smallest loss there.
    fn best(inputs: Inputs<'_>, at: &[At], some: [&[usize]; 2], rejection_weight: f64) -> Self {
        let [train, calibrate] = some;
        let train = Standardised::new(inputs, at, train);
        let heads = RIDGES.into_iter().map(|ridge| {
            let head = train.fit(rejection_weight, ridge);
            let logits = head.logits(inputs);
            let calibration = Standardised::new(Inputs::one(&logits), at, calibrate);
            let calibration = calibration.fit(rejection_weight, RIDGES[0]);
            let (slope, shift) = (calibration.weights[0], calibration.bias);
            let logits: Vec<f32> = logits.iter().map(|logit| slope * logit + shift).collect();
            let loss = |nth: &usize| {
                let (At { weight, label, .. }, prob) = (at[*nth], sigmoid(logits[*nth]));
                let rejected = rejection_weight * (1.0 - label) * (1.0 - prob).max(1e-9).ln();
                -weight * (label * prob.max(1e-9).ln() + rejected)
            };
            let loss = calibrate.iter().map(loss).sum();
            Self { head, slope, shift, logits, loss }
        });
        least_by(heads, |head| head.loss).expect("there are penalties to try")
    }
}

/// Fits a rival that reads the place in the block, with the logit of the largest probability or
/// without. Returns its logits at all places.
fn free_logits(at: &[At], train: &[usize], num_candidates: usize, with_logit: bool) -> Vec<f32> {
    let values = at.iter().flat_map(|at| {
        let here = (0..num_candidates).map(|place| f32::from(u8::from(place == at.place)));
        [if with_logit { at.logit as f32 } else { 0.0 }].into_iter().chain(here)
    });
    let values: Vec<f32> = values.collect();
    let inputs = Inputs { width: num_candidates + 1, values: &values, tokens: None };
    Standardised::new(inputs, at, train).fit(1.0, RIDGES[0]).logits(inputs)
}

/// Collects the held-out places by response, with each prediction.
fn judged(at: &[At], judge: &[usize], predictions: [&Vec<f32>; 3]) -> Vec<Vec<JudgedPlace>> {
    let mut held_out: Vec<Vec<JudgedPlace>> = Vec::new();
    let mut last = usize::MAX;
    for nth in judge {
        let At { row, weight, label, .. } = at[*nth];
        if row != last {
            held_out.push(Vec::new());
            last = row;
        }
        let predicted = predictions.map(|all| sigmoid(all[*nth]));
        let place = JudgedPlace { weight, label, predicted };
        held_out.last_mut().expect("the row has begun").push(place);
    }
    held_out
}

impl FrozenBlock<'_> {
    /// Adds the observed places of a row.
    fn collect(
        self,
        nth: usize,
        row: &ResponseRow,
        choice: TokenChoice,
        places: &mut Places,
    ) -> Result<()> {
        let Self { target, drafter, layers } = self;
        let ids = [row.prompt_ids.as_slice(), &row.response_ids].concat();
        let (start, most) = (row.prompt_ids.len(), drafter.num_candidates());
        let context = drafter.context().min(target.shape().context);
        let ids = &ids[..ids.len().min(context)];
        if start + 2 > ids.len() {
            return Ok(());
        }
        let (states, target_logits) = states(target, layers, ids, start, choice)?;
        let contexts = drafter.contexts(&states);
        let mut cache = drafter.new_cache(ids.len(), 1);
        let vocab_size = target.shape().vocab_size;
        // The round after the response's first token has that token as its anchor.
        for anchor in start..ids.len() - 1 {
            let from = cache.len(0, 0);
            drafter.read_contexts(contexts.slice(from..anchor).in_slot(0), &mut cache);
            let block = BlockStart { slot: 0, anchor: ids[anchor], num_candidates: most };
            let normed = drafter.forward_blocks(target, &[block], &mut cache);
            let num = most.min(ids.len() - 1 - anchor);
            let (normed, before) = (normed.slice(0..num), &ids[anchor..anchor + num]);
            let logits = drafter.after_tokens(drafter.logits(&normed, target), before);
            let inputs = drafter.confidence_inputs(&normed, before);
            let [logits] = Rows::to_host([logits])?;
            let inputs = inputs.into_iter().map(|part| Rows::to_host([part]).map(|[part]| part));
            let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
            let mut weight = 1.0;
            for (place, logits) in logits.chunks_exact(vocab_size).enumerate() {
                if weight < LEAST_WEIGHT {
                    break;
                }
                let token = ids[anchor + 1 + place] as usize;
                let largest = SoftmaxSummary::of(logits).largest_prob;
                let (label, kept) = match choice {
                    TokenChoice::Greedy => {
                        let is_same = f64::from(u8::from(argmax(logits) as usize == token));
                        (is_same, is_same)
                    }
                    TokenChoice::Sampled(sampling) => {
                        let own = sampling.probs(logits);
                        let at = (anchor + place + 1 - start) * vocab_size;
                        let of_target = sampling.probs(&target_logits[at..at + vocab_size]);
                        let both = own.iter().zip(&of_target);
                        let overlap = both.map(|(q, p)| q.min(*p)).sum::<f64>();
                        (overlap, (own[token] / of_target[token]).min(1.0))
                    }
                };
                for part in &inputs {
                    let width = part.len() / num;
                    places.inputs.extend_from_slice(&part[place * width..(place + 1) * width]);
                }
                places.tokens.push(before[place]);
                let logit = confidence_logit(largest);
                places.at.push(At { row: nth, place, weight, label, logit });
                weight *= if kept.is_nan() { 0.0 } else { kept };
            }
        }
        Ok(())
    }
}

/// Computes the target's states after each number of layers at all tokens, and, if decoding is
/// sampled, its logits from the one after the prompt's last token on.
fn states(
    target: &CausalLm,
    layers: &[usize],
    ids: &[u32],
    start: usize,
    choice: TokenChoice,
) -> Result<(Vec<Rows>, Vec<f32>)> {
    let mut cache = target.new_cache(ids.len(), 1);
    let (mut rows, mut done) = (target.embed_ids(ids), 0);
    let mut rising: Vec<usize> = layers.to_vec();
    rising.sort_unstable();
    let mut found = vec![None; layers.len()];
    for layer in rising {
        rows = target.forward_layers(done..layer, rows, &mut cache);
        done = layer;
        let same = layers.iter().zip(&mut found).filter(|(own, _)| **own == layer);
        same.for_each(|(_, found)| *found = Some(rows.clone()));
    }
    let states = found.into_iter().map(|rows| rows.expect("each layer was reached")).collect();
    if choice == TokenChoice::Greedy {
        return Ok((states, Vec::new()));
    }
    let rows = target.forward_layers(done..target.shape().num_layers, rows, &mut cache);
    let normed = target.normed(rows.slice(start - 1..ids.len()));
    let [logits] = Rows::to_host([target.logits(&normed)])?;
    Ok((states, logits))
}

/// What a logistic regression reads of each place.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    width: usize,
    values: &'a [f32],
    /// The token of each place, and the size of the vocabulary.
    tokens: Option<(&'a [u32], usize)>,
}

impl<'a> Inputs<'a> {
    fn one(values: &'a [f32]) -> Self {
        Self { width: 1, values, tokens: None }
    }
}

/// The inputs of some places, with numbers of mean 0 and variance 1.
struct Standardised {
    /// `[places, width]`
    x: Tensor<2>,
    /// The mean of each number, and the factor that it was multiplied by.
    scales: Vec<[f32; 2]>,
    /// The token of each place; empty if tokens are not read.
    ids: Vec<usize>,
    vocab_size: usize,
    /// The weight and label of each place.
    labels: Vec<(f64, f64)>,
}

/// A logistic regression on numbers and on a token.
struct Logistic {
    weights: Vec<f32>,
    of_token: Vec<f32>,
    bias: f32,
}

impl Standardised {
    fn new(inputs: Inputs<'_>, at: &[At], some: &[usize]) -> Self {
        let Inputs { width, values, tokens } = inputs;
        let num = some.len() as f64;
        let row = |at: usize| &values[at * width..(at + 1) * width];
        let mut moments = vec![[0.0_f64; 2]; width];
        for at in some {
            for (moment, value) in moments.iter_mut().zip(row(*at)) {
                let value = f64::from(*value);
                *moment = [moment[0] + value, moment[1] + value * value];
            }
        }
        let scale = |[sum, squares]: [f64; 2]| {
            let mean = sum / num;
            let spread = (squares / num - mean * mean).max(0.0).sqrt();
            [mean as f32, if spread > 1e-6 { (1.0 / spread) as f32 } else { 0.0 }]
        };
        let scales: Vec<[f32; 2]> = moments.into_iter().map(scale).collect();
        let standard = some.iter().flat_map(|at| {
            row(*at).iter().zip(&scales).map(|(value, [mean, scale])| (value - mean) * scale)
        });
        let x = vectors::tensor(standard.collect(), [some.len(), width], &Device::default());
        let ids = tokens.iter().flat_map(|(all, _)| some.iter().map(|at| all[*at] as usize));
        let labels = some.iter().map(|nth| (at[*nth].weight, at[*nth].label)).collect();
        Self {
            x,
            ids: ids.collect(),
            vocab_size: tokens.map_or(0, |(_, size)| size),
            labels,
            scales,
        }
    }

    /// Fits a regression with Adam, all places at each step.
    fn fit(&self, rejection_weight: f64, penalty: f64) -> Logistic {
        let (width, vocab_size) = (self.scales.len(), self.vocab_size);
        // The weights, the numbers of tokens and the bias, one after the other.
        let at_bias = width + vocab_size;
        let mut fitted = vec![0.0_f64; at_bias + 1];
        let mut averages = vec![[0.0_f64; 2]; fitted.len()];
        let total: f64 = self.labels.iter().map(|(weight, _)| weight).sum();
        let [first, second] = DECAYS;
        for step in 1..=NUM_STEPS {
            let gradient = self.gradient(&fitted, rejection_weight, total);
            let rate = RATE * (1.0 - (step - 1) as f64 / NUM_STEPS as f64);
            let unbiased = |average: f64, decay: f64| average / (1.0 - decay.powi(step as i32));
            for (nth, (own, averages)) in fitted.iter_mut().zip(&mut averages).enumerate() {
                let ridge = if nth < at_bias { penalty * *own / total } else { 0.0 };
                let slope = gradient[nth] + ridge;
                averages[0] = first * averages[0] + (1.0 - first) * slope;
                averages[1] = second * averages[1] + (1.0 - second) * slope * slope;
                *own -= rate * unbiased(averages[0], first)
                    / (unbiased(averages[1], second).sqrt() + 1e-10);
            }
        }
        let mut bias = fitted[at_bias];
        let weights = fitted[..width].iter().zip(&self.scales).map(|(weight, [mean, scale])| {
            let weight = weight * f64::from(*scale);
            bias -= weight * f64::from(*mean);
            weight as f32
        });
        let weights = weights.collect();
        let of_token = fitted[width..at_bias].iter().map(|it| *it as f32).collect();
        Logistic { weights, of_token, bias: bias as f32 }
    }

    /// Computes the gradient of the mean weighted loss −y ln p − r(1 − y) ln(1 − p).
    fn gradient(&self, fitted: &[f64], rejection_weight: f64, total: f64) -> Vec<f64> {
        let (width, num) = (self.scales.len(), self.labels.len());
        let (at_bias, weights) = (fitted.len() - 1, fitted[..width].iter().map(|it| *it as f32));
        let device = self.x.device();
        let weights = vectors::tensor(weights.collect(), [width, 1], &device);
        let logits = vectors::values(self.x.clone().matmul(weights));
        let mut gradient = vec![0.0_f64; fitted.len()];
        let mut errors = Vec::with_capacity(num);
        for (nth, (logit, (weight, label))) in logits.iter().zip(&self.labels).enumerate() {
            let id = self.ids.get(nth).map(|id| width + id);
            let of_token = id.map_or(0.0, |id| fitted[id]);
            let prob = sigmoid((f64::from(*logit) + of_token + fitted[at_bias]) as f32);
            let slope = rejection_weight * (1.0 - label) * prob - label * (1.0 - prob);
            let error = slope * weight / total;
            errors.push(error as f32);
            gradient[at_bias] += error;
            if let Some(id) = id {
                gradient[id] += error;
            }
        }
        let errors = vectors::tensor(errors, [1, num], &device);
        let of_weights = vectors::values(errors.matmul(self.x.clone()));
        gradient.iter_mut().zip(of_weights).for_each(|(sum, own)| *sum += f64::from(own));
        gradient
    }
}

impl Logistic {
    /// Computes the logits of all places.
    fn logits(&self, inputs: Inputs<'_>) -> Vec<f32> {
        let rows = inputs.values.chunks_exact(inputs.width).enumerate();
        let logit = |(nth, row): (usize, &[f32])| {
            let own: f32 =
                row.iter().zip(&self.weights).map(|(value, weight)| value * weight).sum();
            let of_token = inputs.tokens.map_or(0.0, |(all, _)| self.of_token[all[nth] as usize]);
            own + of_token + self.bias
        };
        rows.map(logit).collect()
    }
}

/// Finds for each place of a block the temperature with which its predictions are calibrated best,
/// over the places that are reached. The grid and the bins are those of SGLang's tool, which judges
/// the product of the predictions up to a place; that product is calibrated if each factor is.
/// Returns the temperatures, and the mean error before and after.
fn temperatures(
    at: &[At],
    some: &[usize],
    logits: &[f32],
    num_candidates: usize,
) -> (Vec<f64>, [f64; 2]) {
    const GRID: i32 = 40;
    let grid =
        || (0..=GRID).map(|step| 10.0_f64.powf(f64::from(step) / f64::from(GRID) * 2.0 - 1.0));
    let (mut chosen, mut errors) = (Vec::new(), [0.0; 2]);
    for place in 0..num_candidates {
        let error = |temperature: f64| {
            let here = some.iter().filter(|nth| at[**nth].place == place);
            calibration_error(here.map(|nth| {
                let prob = sigmoid((f64::from(logits[*nth]) / temperature) as f32);
                (prob, at[*nth].label, at[*nth].weight)
            }))
        };
        let best = least_by(grid(), |it| error(*it)).unwrap_or(1.0);
        errors = [errors[0] + error(1.0), errors[1] + error(best)];
        chosen.push(best);
    }
    (chosen, errors.map(|sum| sum / num_candidates as f64))
}

/// Computes the expected calibration error of predictions beside labels with weights, over 15 bins
/// of equal width.
fn calibration_error(predicted: impl Iterator<Item = (f64, f64, f64)>) -> f64 {
    const NUM_BINS: usize = 15;
    let (mut bins, mut num) = ([[0.0_f64; 2]; NUM_BINS], 0.0_f64);
    for (prob, label, weight) in predicted {
        let bin = ((prob * NUM_BINS as f64) as usize).min(NUM_BINS - 1);
        bins[bin] = [bins[bin][0] + weight * prob, bins[bin][1] + weight * label];
        num += weight;
    }
    bins.iter().map(|[prob, label]| (prob - label).abs()).sum::<f64>() / num.max(f64::MIN_POSITIVE)
}

fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(logit)).exp())
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::{BlockDrafterConfig, WeightDtype};
    use draftsmith_theory::{Sampling, SeededDraws};

    use super::*;
    use crate::tests::pair::{VOCAB_SIZE, patterned, random_model};

    fn place(place: usize, label: f64) -> At {
        At { row: 0, place, weight: 1.0, label, logit: 0.0 }
    }

    fn logit(prob: f64) -> f64 {
        (prob / (1.0 - prob)).ln()
    }

    #[test]
    fn a_regression_finds_the_weights_that_made_its_labels() {
        let mut draws = SeededDraws::new(5, &["regression"]);
        let (mut values, mut tokens, mut at) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..6000 {
            let row = [draws.uniform() as f32 * 4.0 + 10.0, draws.uniform() as f32];
            let token = u32::from(draws.uniform() < 0.5);
            let own = 0.8 * (f64::from(row[0]) - 12.0) - 1.0 * f64::from(row[1]) + f64::from(token);
            values.extend(row);
            tokens.push(token);
            at.push(place(0, 1.0 / (1.0 + (-own).exp())));
        }
        let inputs = Inputs { width: 2, values: &values, tokens: Some((&tokens, 2)) };
        let some: Vec<usize> = (0..at.len()).collect();
        let data = Standardised::new(inputs, &at, &some);
        let fitted = data.fit(1.0, 2.0);
        let near = |found: f32, expected: f32| {
            assert!((found - expected).abs() < 0.05, "{found}, {expected}")
        };
        near(fitted.weights[0], 0.8);
        near(fitted.weights[1], -1.0);
        near(fitted.of_token[1] - fitted.of_token[0], 1.0);
        let errors = fitted.logits(inputs).into_iter().zip(&at);
        let worst = errors.map(|(found, at)| (sigmoid(found) - at.label).abs()).fold(0.0, f64::max);
        assert!(worst < 0.02, "{worst}");
        // Rejections that count twice halve the odds.
        let twice = data.fit(2.0, 2.0).logits(inputs);
        let shift = twice.iter().zip(&at).map(|(found, at)| logit(at.label) - f64::from(*found));
        let shift = shift.sum::<f64>() / at.len() as f64;
        assert!((shift - 2.0_f64.ln()).abs() < 0.03, "{shift}");
    }

    #[test]
    fn temperatures_undo_a_scale_and_lower_the_error() {
        let mut draws = SeededDraws::new(6, &["temperatures"]);
        let (mut at, mut logits) = (Vec::new(), Vec::new());
        for _ in 0..4000 {
            for number in 0..2 {
                let prob = 0.2 + 0.6 * draws.uniform();
                at.push(place(number, prob));
                logits.push((2.0 * logit(prob)) as f32);
            }
        }
        // The second place is reached if the first is accepted.
        for nth in 0..at.len() / 2 {
            at[2 * nth + 1].weight = at[2 * nth].label;
        }
        let some: Vec<usize> = (0..at.len()).collect();
        let (found, [before, after]) = temperatures(&at, &some, &logits, 2);
        for temperature in found {
            assert!((1.75..=2.25).contains(&temperature), "{temperature}");
        }
        assert!(after < 0.3 * before, "{before} {after}");
    }

    #[test]
    fn a_head_of_a_drafter_learns_what_its_place_does_not_tell() {
        let target = random_model(3, 16, 64);
        let config = BlockDrafterConfig::new(target.config(), 1, VOCAB_SIZE - 1).with(|it| {
            it.target_layers = vec![1, 3];
            it.block_size = 3;
        });
        let mut draws = SeededDraws::new(8, &["confidence"]);
        let drafter = config.init_for(&target, &Device::flex(), || draws.uniform());
        let dir = tempfile::tempdir().expect("a directory");
        drafter.write_dir(dir.path(), &config).expect("written");
        let (config, drafter) =
            BlockDrafter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex())
                .expect("read");
        let rows = patterned(60);
        let frozen =
            FrozenBlock { target: &target, drafter: &drafter, layers: &config.target_layers };
        for choice in [TokenChoice::Greedy, TokenChoice::Sampled(Sampling::default())] {
            let training = ConfidenceTraining { choice, rejection_weight: 1.0, reads_token: true };
            let trained = train_confidence(frozen, &rows, training, || false).expect("trained");
            let trained = trained.expect("nothing interrupts it");
            let judged: Vec<JudgedPlace> = trained.held_out.concat();
            assert!(trained.num_places > 100 && judged.len() > 20, "{}", judged.len());
            let mean = |which: usize| {
                let loss = judged.iter().map(|it| it.weight * it.log_loss(which)).sum::<f64>();
                loss / judged.iter().map(|it| it.weight).sum::<f64>()
            };
            assert!(judged.iter().all(|it| (0.0..=1.0).contains(&it.label) && it.weight <= 1.0));
            let is_greedy = choice == TokenChoice::Greedy;
            assert_eq!(judged.iter().all(|it| it.label == 0.0 || it.label == 1.0), is_greedy);
            assert!(mean(0) < mean(2) + 0.02, "{} {}", mean(0), mean(2));
            assert_eq!(trained.temperatures.len(), 3);
            assert_eq!(trained.weights.of_token.as_ref().map(Vec::len), Some(VOCAB_SIZE as usize));
        }
        let choice = TokenChoice::Greedy;
        let training = ConfidenceTraining { choice, rejection_weight: 1.0, reads_token: true };
        let stopped = train_confidence(frozen, &rows, training, || true).expect("no error");
        assert!(stopped.is_none());
        let few = train_confidence(frozen, &rows[..1], training, || false).expect_err("one row");
        assert!(few.to_string().contains("build more data"), "{few}");
    }
}
