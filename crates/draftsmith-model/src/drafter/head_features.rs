//! An acceptance head's inputs from a drafter: the scalars of one candidate in decoding, and the
//! features of many candidates in training.
//!
//! In training, heads get embeddings that are scaled to size 1, because AdamW learns slowly from
//! weights that read small numbers. Exported weights are for unscaled embeddings.

use burn::tensor::{FloatDType, Int, Tensor, TensorData, activation::log_softmax};

use super::DrafterModel;
use crate::acceptance_head::{DrawnCandidate, HeadFeatures, HeadReads};
use crate::rows::Rows;

/// The maximum number of logits in memory at a time: 32 MiB in f32.
const LOGITS_AT_A_TIME: usize = 8 << 20;

/// Candidate tokens, with the indices of their hidden states in a list of rows.
#[derive(Debug, Clone, Default)]
pub struct CandidateRows(Vec<CandidateRow>);

#[derive(Debug, Clone, Copy)]
struct CandidateRow {
    token: u32,
    own: usize,
    drawn_from: usize,
}

impl CandidateRows {
    /// Adds a candidate. `own` is the row of its hidden state, and `drawn_from` the row of the
    /// hidden state that it was drawn from.
    pub fn push(&mut self, token: u32, own: usize, drawn_from: usize) {
        self.0.push(CandidateRow { token, own, drawn_from });
    }

    /// Returns the number of candidates.
    pub fn num_candidates(&self) -> usize {
        self.0.len()
    }

    /// Repeats the last candidate until there are `num_candidates`.
    pub fn pad(&mut self, num_candidates: usize) {
        if let Some(last) = self.0.last().copied() {
            self.0.resize(num_candidates.max(self.0.len()), last);
        }
    }
}

impl DrafterModel {
    /// Computes [`HeadReads::scalars`] for one of this drafter's candidates.
    pub fn scalars(
        &self,
        reads: &HeadReads,
        candidate: &DrawnCandidate,
    ) -> impl Iterator<Item = f32> {
        reads.scalars(candidate, self.vocab_size())
    }

    /// Returns the factor by which embeddings are scaled while a head is trained.
    ///
    /// Embeddings have a size of a few hundredths, hidden states of about 1. AdamW takes equally
    /// long steps for the weights of both, so a head would learn from embeddings last. The factor
    /// scales them to about 1. It is a power of two, so that scaling is exact.
    pub fn embedding_gain(&self) -> f32 {
        *self.embedding_gain.get_or_init(|| {
            let gain = (1.0 / self.model.embedding_size()).log2().round().exp2();
            if gain.is_normal() { gain } else { 1.0 }
        })
    }

    /// Collects features of candidates for training a head, with embeddings times [`Self::embedding_gain`].
    ///
    /// # Shapes
    /// - hidden: `[rows, hidden]`, the LM head's input
    /// - output: `[candidates, hidden]` and `[candidates, extra]`
    pub fn head_features(
        &self,
        reads: &HeadReads,
        hidden: Tensor<2>,
        candidates: CandidateRows,
    ) -> HeadFeatures {
        let (device, num_candidates) = (self.device(), candidates.num_candidates());
        let list = |of: &dyn Fn(&CandidateRow) -> usize| {
            let values: Vec<i32> = candidates.0.iter().map(|one| of(one) as i32).collect();
            Tensor::<1, Int>::from_data(TensorData::new(values, [num_candidates]), &device)
        };
        let own = list(&|one| one.own);
        if reads.is_hidden_only() {
            return hidden.select(0, own).into();
        }
        let tokens = list(&|one| self.readable(one.token) as usize);
        let drawn_from = hidden.clone().select(0, list(&|one| one.drawn_from));
        let scalars: Vec<f32> = self
            .drawn(drawn_from.clone(), tokens.clone())
            .flat_map(|candidate| self.scalars(reads, &candidate).collect::<Vec<_>>())
            .collect();
        let scalars = TensorData::new(scalars, [num_candidates, reads.num_scalars()]);
        let scalars = Tensor::<2>::from_data(scalars, &device).cast(hidden.dtype());
        if !reads.looks_ahead() {
            return HeadFeatures { extra: Some(scalars), ..hidden.select(0, own).into() };
        }
        let embedding = self.model.embed(tokens.unsqueeze()) * self.embedding_gain();
        let embedding = embedding.reshape([num_candidates, self.hidden_size()]);
        let extra = Some(Tensor::cat(vec![embedding, scalars], 1));
        HeadFeatures { extra, ..drawn_from.into() }
    }

    /// Describes each token as a candidate drawn from the drafter's distribution after the hidden
    /// state of its row. Waits for the device once.
    ///
    /// # Shapes
    /// - hidden: `[candidates, hidden]`, the LM head's input
    /// - tokens: `[candidates]`
    fn drawn(
        &self,
        hidden: Tensor<2>,
        tokens: Tensor<1, Int>,
    ) -> impl Iterator<Item = DrawnCandidate> {
        let [num_candidates, width] = hidden.dims();
        let rows_at_a_time = (LOGITS_AT_A_TIME / self.vocab_size()).max(1);
        let mut parts = Vec::new();
        for start in (0..num_candidates).step_by(rows_at_a_time) {
            let rows = start..(start + rows_at_a_time).min(num_candidates);
            let hidden = hidden.clone().slice(rows.clone()).reshape([1, rows.len(), width]);
            let logits = self.logits(&Rows::from(hidden)).into_tensor(&self.device());
            let log_probs: Tensor<2> = log_softmax(logits.cast(FloatDType::F32), 2).squeeze_dim(0);
            let tokens = tokens.clone().slice(rows.clone()).reshape([rows.len(), 1]);
            let of_token = log_probs.clone().gather(1, tokens);
            let top = log_probs.clone().max_dim(1);
            // A token of probability 0 adds nothing; 0 · −∞ would be NaN.
            let weighted = log_probs.clone().exp() * log_probs.clamp_min(f32::MIN);
            parts.push(Tensor::cat(vec![weighted.sum_dim(1).neg(), top, of_token], 1));
        }
        let numbers = Tensor::cat(parts, 0).into_data().try_into_vec::<f32>();
        let numbers = numbers.expect("they were cast to f32");
        (0..num_candidates).map(move |row| {
            let [entropy, top_log_prob, log_prob] =
                [0, 1, 2].map(|i| f64::from(numbers[3 * row + i]));
            DrawnCandidate { entropy, top_prob: top_log_prob.exp(), log_prob: Some(log_prob) }
        })
    }
}
