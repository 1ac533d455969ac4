//! What a head reads of a candidate besides a hidden state, and the one place where that becomes
//! numbers: training and decoding ask the same function.

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

/// The position in a round from which on all are alike to a head: the default greatest candidate
/// length.
pub const LAST_POSITION: usize = 20;

/// Which hidden state of the draft a head reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadForm {
    /// The one at the candidate's own position: SpecDec++'s. The draft must have read the
    /// candidate.
    #[default]
    Candidate,
    /// The one that the candidate was drawn from, together with the candidate's embedding and
    /// log-probability: known as soon as the candidate is drawn.
    LookAhead,
}

/// What a head may read of a candidate besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadInput {
    /// The entropy of the distribution that the candidate was drawn from, raw (T = 1).
    Entropy,
    /// The largest probability of that distribution.
    TopProb,
    /// The number of candidates before it in its round. Training has no rounds: there it is the
    /// length of the run of the draft's tokens right before it, since the last token that was the
    /// target's.
    Position,
    /// The target's final hidden state, after its norm, at the last position that it had read when
    /// the candidate's round began: the one whose logits the sequence's last token was drawn from.
    /// Verification leaves it behind.
    #[serde(rename = "target-hidden")]
    TargetHidden,
}

impl HeadInput {
    /// The name in configs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Entropy => "entropy",
            Self::TopProb => "top_prob",
            Self::Position => "position",
            Self::TargetHidden => "target-hidden",
        }
    }
}

/// A candidate where it was drawn: all that a head may read of it besides hidden state and
/// embedding. All is of the draft's raw distribution, T = 1, also where candidates are drawn from
/// another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawnCandidate {
    /// The entropy of the distribution, in nats.
    pub entropy: f64,
    /// Its largest probability.
    pub top_prob: f64,
    /// The candidate's log-probability, −∞ allowed; None where the head does not look ahead.
    pub log_prob: Option<f64>,
    /// [`HeadInput::Position`].
    pub position: usize,
}

/// What a head reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeadReads {
    form: HeadForm,
    /// In order, each once.
    inputs: Vec<HeadInput>,
}

impl HeadReads {
    /// A head of a form with inputs, whose order does not matter.
    pub fn new(form: HeadForm, inputs: &[HeadInput]) -> Self {
        let mut inputs = inputs.to_vec();
        inputs.sort_unstable();
        inputs.dedup();
        Self { form, inputs }
    }

    /// Which hidden state is read.
    pub fn form(&self) -> HeadForm {
        self.form
    }

    /// The optional inputs, in the order of their numbers.
    pub fn inputs(&self) -> &[HeadInput] {
        &self.inputs
    }

    /// Whether the head predicts of a candidate as soon as it is drawn.
    pub fn looks_ahead(&self) -> bool {
        self.form == HeadForm::LookAhead
    }

    /// Whether a hidden state of the draft is all that is read, as in SpecDec++.
    pub fn is_hidden_alone(&self) -> bool {
        self.is_of_draft_forward() && !self.has_target_hidden()
    }

    /// Whether nothing is read of the forward that a candidate is drawn from.
    pub fn is_of_draft_forward(&self) -> bool {
        self.num_extra(1) == 0
    }

    /// Whether a hidden state of the target is read.
    pub fn has_target_hidden(&self) -> bool {
        self.inputs.contains(&HeadInput::TargetHidden)
    }

    /// Whether the prediction for a candidate depends on where its round began.
    pub fn depends_on_round(&self) -> bool {
        self.has_target_hidden() || self.inputs.contains(&HeadInput::Position)
    }

    /// The numbers of [`Self::scalars`].
    pub fn num_scalars(&self) -> usize {
        let num_numbers = self.inputs.len() - usize::from(self.has_target_hidden());
        usize::from(self.looks_ahead()) + num_numbers
    }

    /// The numbers that are read besides hidden states, where the draft's has `hidden_size`.
    pub(crate) fn num_extra(&self, hidden_size: usize) -> usize {
        let embedding = if self.looks_ahead() { hidden_size } else { 0 };
        embedding + self.num_scalars()
    }

    /// What the head reads, as numbers, of a candidate of a draft with `vocab_size` tokens, each number of the
    /// size of 1: a look-ahead head its log-probability, as a share of log V, −2 at the least; then
    /// of the inputs the entropy as a share of log V, the log-odds of the top probability, a fifth
    /// of them and 2 either way at the most (as it is, 0.99 and 0.999 would look alike), the
    /// position s as log(1 + s) / log(1 + 20), 1 at the most.
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
        let inputs = self.inputs.iter().filter_map(move |input| {
            Some(match input {
                HeadInput::Entropy => candidate.entropy / largest_entropy,
                HeadInput::TopProb => {
                    // A probability of 1 has infinite ones, which are cut.
                    let log_odds = (candidate.top_prob / (1.0 - candidate.top_prob)).ln();
                    (log_odds / 5.0).clamp(-2.0, 2.0)
                }
                HeadInput::Position => {
                    let position = candidate.position.min(LAST_POSITION);
                    (position as f64).ln_1p() / (LAST_POSITION as f64).ln_1p()
                }
                HeadInput::TargetHidden => return None,
            })
        });
        log_prob.into_iter().chain(inputs).map(|number| number as f32)
    }
}

/// What a head reads of some candidates, as tensors.
#[derive(Debug, Clone)]
pub struct HeadFeatures {
    /// `[rows, hidden]`: the draft's hidden states after its final norm, at the position that the
    /// head's form names.
    pub hidden: Tensor<2>,
    /// `[rows, extra]`: for a look-ahead head the draft's embeddings of the candidates, then
    /// [`HeadReads::scalars`]. None where a hidden state is all that is read.
    pub extra: Option<Tensor<2>>,
    /// `[rows, target hidden]`: [`HeadInput::TargetHidden`], zeros where the target had read nothing.
    /// None where it is not read.
    pub target: Option<Tensor<2>>,
}

impl From<Tensor<2>> for HeadFeatures {
    fn from(hidden: Tensor<2>) -> Self {
        Self { hidden, extra: None, target: None }
    }
}

impl HeadFeatures {
    /// The features of several runs of candidates, one after the other.
    ///
    /// # Panics
    /// If there are none, or only some have something beside a hidden state.
    pub fn cat(parts: Vec<Self>) -> Self {
        let cat = |of: fn(&Self) -> Option<&Tensor<2>>| {
            let found: Vec<Tensor<2>> = parts.iter().filter_map(of).cloned().collect();
            assert!(found.is_empty() || found.len() == parts.len(), "one head's are alike");
            (!found.is_empty()).then(|| Tensor::cat(found, 0))
        };
        Self {
            hidden: cat(|part| Some(&part.hidden)).expect("there are candidates"),
            extra: cat(|part| part.extra.as_ref()),
            target: cat(|part| part.target.as_ref()),
        }
    }

    /// The features of some of the candidates, in the order given.
    pub fn select(&self, rows: &[usize]) -> Self {
        let indices: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        let indices = TensorData::new(indices, [rows.len()]);
        let indices = Tensor::<1, Int>::from_data(indices, &self.hidden.device());
        let select = |rows: &Tensor<2>| rows.clone().select(0, indices.clone());
        Self {
            hidden: select(&self.hidden),
            extra: self.extra.as_ref().map(select),
            target: self.target.as_ref().map(select),
        }
    }

    /// The same on a device.
    pub fn to_device(self, device: &Device) -> Self {
        let to = |rows: Tensor<2>| rows.to_device(device);
        Self { hidden: to(self.hidden), extra: self.extra.map(to), target: self.target.map(to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalars(form: HeadForm, inputs: &[HeadInput], candidate: DrawnCandidate) -> Vec<f32> {
        HeadReads::new(form, inputs).scalars(&candidate, 100).collect()
    }

    const CANDIDATE: DrawnCandidate =
        DrawnCandidate { entropy: 2.5, top_prob: 0.375, log_prob: Some(-3.0), position: 4 };

    #[test]
    fn numbers_come_in_one_order_and_are_of_the_size_of_one() {
        use HeadInput::{Entropy, Position, TopProb};
        assert_eq!(scalars(HeadForm::Candidate, &[], CANDIDATE), [0.0; 0]);
        let log_v = 100_f64.ln();
        let entropy = (2.5 / log_v) as f32;
        let position = (5_f64.ln() / 21_f64.ln()) as f32;
        let all = [Position, TopProb, Entropy, Position];
        let found = scalars(HeadForm::Candidate, &all, CANDIDATE);
        let log_odds = (0.6_f64.ln() / 5.0) as f32;
        assert_eq!(found, [entropy, log_odds, position]);
        let found = scalars(HeadForm::LookAhead, &[TopProb], CANDIDATE);
        assert_eq!(found, [(-3.0 / log_v) as f32, log_odds]);
        let far = DrawnCandidate { log_prob: Some(f64::NEG_INFINITY), position: 99, ..CANDIDATE };
        assert_eq!(scalars(HeadForm::LookAhead, &[Position], far), [-2.0, 1.0]);
        let certain = DrawnCandidate { top_prob: 1.0, ..CANDIDATE };
        assert_eq!(scalars(HeadForm::Candidate, &[TopProb], certain), [2.0]);
        let first = DrawnCandidate { position: 0, log_prob: None, ..CANDIDATE };
        assert_eq!(scalars(HeadForm::Candidate, &[Position], first), [0.0]);
    }

    #[test]
    fn a_head_asks_for_no_more_than_it_reads() {
        let reads = |form, inputs: &[HeadInput]| HeadReads::new(form, inputs);
        let own = |inputs: &[HeadInput]| reads(HeadForm::Candidate, inputs);
        assert!(own(&[]).is_hidden_alone() && HeadReads::default() == own(&[]));
        assert!(!own(&[HeadInput::Position]).is_hidden_alone());
        let ahead = reads(HeadForm::LookAhead, &[HeadInput::Entropy]);
        assert!(!ahead.is_hidden_alone() && !reads(HeadForm::LookAhead, &[]).is_hidden_alone());
        assert_eq!((ahead.num_scalars(), ahead.num_extra(8)), (2, 10));
        let anchored = own(&[HeadInput::TargetHidden]);
        assert!(anchored.is_of_draft_forward() && !anchored.is_hidden_alone());
        assert_eq!((anchored.num_scalars(), anchored.num_extra(8)), (0, 0));
        assert!(anchored.depends_on_round() && own(&[HeadInput::Position]).depends_on_round());
        assert!(!ahead.depends_on_round());
    }
}
