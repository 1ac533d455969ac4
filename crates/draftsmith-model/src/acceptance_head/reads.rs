//! The inputs that a head reads besides a hidden state, and the function that turns them into
//! numbers. Training and decoding share it.

use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

/// The choice of the draft's hidden state that a head reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadForm {
    /// The hidden state at the candidate's position, as in SpecDec++. The draft must have read the
    /// candidate.
    #[default]
    Candidate,
    /// The hidden state that the candidate was drawn from, together with the candidate's embedding
    /// and log-probability. These are known as soon as the candidate is drawn.
    LookAhead,
}

/// An optional input of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadInput {
    /// The entropy of the draft's distribution at temperature 1 that the candidate was drawn from.
    Entropy,
    /// The largest probability of the same distribution.
    TopProb,
}

impl HeadInput {
    /// Returns the input's name in configs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Entropy => "entropy",
            Self::TopProb => "top_prob",
        }
    }
}

/// Numbers about a candidate that a head may read besides hidden state and embedding. They describe
/// the draft's distribution at temperature 1, even if the candidate was drawn at another
/// temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawnCandidate {
    /// The entropy of the distribution, in nats.
    pub entropy: f64,
    /// The largest probability of the distribution.
    pub top_prob: f64,
    /// The candidate's log-probability, possibly −∞; `None` if the head does not look ahead.
    pub log_prob: Option<f64>,
}

/// The inputs that a head reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeadReads {
    form: HeadForm,
    /// The optional inputs, sorted and without duplicates.
    inputs: Vec<HeadInput>,
}

impl HeadReads {
    /// Describes the inputs of a head of the given form with optional inputs. They may be in any
    /// order; duplicates are dropped.
    pub fn new(form: HeadForm, inputs: &[HeadInput]) -> Self {
        let mut inputs = inputs.to_vec();
        inputs.sort_unstable();
        inputs.dedup();
        Self { form, inputs }
    }

    /// Returns the choice of hidden state.
    pub fn form(&self) -> HeadForm {
        self.form
    }

    /// Lists the optional inputs, in the order of their numbers in [`Self::scalars`].
    pub fn inputs(&self) -> &[HeadInput] {
        &self.inputs
    }

    /// Returns whether the head predicts as soon as a candidate is drawn, before the draft reads
    /// it.
    pub fn looks_ahead(&self) -> bool {
        self.form == HeadForm::LookAhead
    }

    /// Returns whether the head reads only the hidden state of the candidate, as in SpecDec++.
    pub fn is_hidden_only(&self) -> bool {
        self.num_scalars() == 0
    }

    /// Counts the values of [`Self::scalars`].
    pub fn num_scalars(&self) -> usize {
        usize::from(self.looks_ahead()) + self.inputs.len()
    }

    /// Counts the numbers that the head reads besides a hidden state of width `hidden_size`.
    pub(crate) fn num_extra(&self, hidden_size: usize) -> usize {
        let embedding = if self.looks_ahead() { hidden_size } else { 0 };
        embedding + self.num_scalars()
    }

    /// Expresses a candidate as numbers around 1. V is the draft's `vocab_size`.
    ///
    /// For a look-ahead head, the first number is the candidate's log-probability / log V, at least
    /// −2. Then come the optional inputs: entropy / log V, and a fifth of the top probability's
    /// log-odds, limited to ±2 (log-odds, because the probabilities 0.99 and 0.999 would look
    /// alike).
    ///
    /// # Panics
    /// If the head looks ahead and the log-probability is missing.
    pub fn scalars(
        &self,
        candidate: &DrawnCandidate,
        vocab_size: usize,
    ) -> impl Iterator<Item = f32> {
        let largest_entropy = (vocab_size.max(2) as f64).ln();
        let log_prob = self.looks_ahead().then(|| {
            let log_prob = candidate.log_prob.expect("a look-ahead head reads the log-prob");
            (log_prob / largest_entropy).max(-2.0)
        });
        let inputs = self.inputs.iter().map(move |input| match input {
            HeadInput::Entropy => candidate.entropy / largest_entropy,
            HeadInput::TopProb => {
                // A probability of 1 has infinite log-odds, which are limited too.
                let log_odds = (candidate.top_prob / (1.0 - candidate.top_prob)).ln();
                (log_odds / 5.0).clamp(-2.0, 2.0)
            }
        });
        log_prob.into_iter().chain(inputs).map(|number| number as f32)
    }
}

/// The inputs of a head for some candidates, as tensors.
#[derive(Debug, Clone)]
pub struct HeadFeatures {
    /// The draft's hidden states after its final norm, `[rows, hidden]`, at the positions that the
    /// head's form asks for.
    pub hidden: Tensor<2>,
    /// The further inputs, `[rows, extra]`: for a look-ahead head the draft's embeddings of the
    /// candidates, then [`HeadReads::scalars`]. `None` if the head reads only a hidden state.
    pub extra: Option<Tensor<2>>,
}

impl From<Tensor<2>> for HeadFeatures {
    fn from(hidden: Tensor<2>) -> Self {
        Self { hidden, extra: None }
    }
}

impl HeadFeatures {
    /// Concatenates features.
    ///
    /// # Panics
    /// If `parts` is empty, or only some have extra inputs.
    pub fn cat(parts: Vec<Self>) -> Self {
        let cat = |of: fn(&Self) -> Option<&Tensor<2>>| {
            let found: Vec<Tensor<2>> = parts.iter().filter_map(of).cloned().collect();
            assert!(
                found.is_empty() || found.len() == parts.len(),
                "all parts have the same inputs"
            );
            (!found.is_empty()).then(|| Tensor::cat(found, 0))
        };
        Self {
            hidden: cat(|part| Some(&part.hidden)).expect("at least one part"),
            extra: cat(|part| part.extra.as_ref()),
        }
    }

    /// Selects the features of some candidates, in the order given.
    pub fn select(&self, rows: &[usize]) -> Self {
        let indices: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        let indices = Tensor::<1, Int>::from_ints(&indices[..], &self.hidden.device());
        let select = |rows: &Tensor<2>| rows.clone().select(0, indices.clone());
        Self { hidden: select(&self.hidden), extra: self.extra.as_ref().map(select) }
    }

    /// Moves the features to a device.
    pub fn to_device(self, device: &Device) -> Self {
        let to = |rows: Tensor<2>| rows.to_device(device);
        Self { hidden: to(self.hidden), extra: self.extra.map(to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalars(form: HeadForm, inputs: &[HeadInput], candidate: DrawnCandidate) -> Vec<f32> {
        HeadReads::new(form, inputs).scalars(&candidate, 100).collect()
    }

    const CANDIDATE: DrawnCandidate =
        DrawnCandidate { entropy: 2.5, top_prob: 0.375, log_prob: Some(-3.0) };

    #[test]
    fn numbers_come_in_one_order_and_are_of_the_size_of_one() {
        use HeadInput::{Entropy, TopProb};
        assert_eq!(scalars(HeadForm::Candidate, &[], CANDIDATE), [0.0; 0]);
        let log_v = 100_f64.ln();
        let entropy = (2.5 / log_v) as f32;
        let all = [TopProb, Entropy, TopProb];
        let found = scalars(HeadForm::Candidate, &all, CANDIDATE);
        let log_odds = (0.6_f64.ln() / 5.0) as f32;
        assert_eq!(found, [entropy, log_odds]);
        let found = scalars(HeadForm::LookAhead, &[TopProb], CANDIDATE);
        assert_eq!(found, [(-3.0 / log_v) as f32, log_odds]);
        let impossible = DrawnCandidate { log_prob: Some(f64::NEG_INFINITY), ..CANDIDATE };
        assert_eq!(scalars(HeadForm::LookAhead, &[], impossible), [-2.0]);
        let certain = DrawnCandidate { top_prob: 1.0, ..CANDIDATE };
        assert_eq!(scalars(HeadForm::Candidate, &[TopProb], certain), [2.0]);
        let read = DrawnCandidate { log_prob: None, ..CANDIDATE };
        assert_eq!(scalars(HeadForm::Candidate, &[Entropy], read), [entropy]);
    }

    #[test]
    fn a_head_asks_for_no_more_than_it_reads() {
        let reads = |form, inputs: &[HeadInput]| HeadReads::new(form, inputs);
        let own = |inputs: &[HeadInput]| reads(HeadForm::Candidate, inputs);
        assert!(own(&[]).is_hidden_only() && HeadReads::default() == own(&[]));
        assert!(!own(&[HeadInput::TopProb]).is_hidden_only());
        let ahead = reads(HeadForm::LookAhead, &[HeadInput::Entropy]);
        assert!(!ahead.is_hidden_only() && !reads(HeadForm::LookAhead, &[]).is_hidden_only());
        assert_eq!((ahead.num_scalars(), ahead.num_extra(8)), (2, 10));
        assert_eq!((own(&[]).num_scalars(), own(&[]).num_extra(8)), (0, 0));
    }
}
