//! The heads of a block drafter as servers read them: the form of a DSpark, and a confidence head
//! that was trained on its own.

use std::sync::Arc;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, Tensor, TensorData};

use super::{BlockDrafter, BlockDrafterConfig, ConfidenceHead};
use crate::frozen::PackableLinear;
use crate::rows::Rows;
use crate::spec::LinearSpec;

/// The weights of a confidence head, which gives the logit
/// w · [h; w1\[x\]] + f\[x\] + b for a row h after the token x.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfidenceWeights {
    /// The weights w, first those of the row, then those of the Markov head's vector.
    pub row: Vec<f32>,
    /// The part f of the token before the candidate, for each token of the vocabulary; `None` for a
    /// head without one.
    pub of_token: Option<Vec<f32>>,
    /// The bias b.
    pub bias: f32,
}

impl BlockDrafter {
    /// Returns the drafter in the form that all servers read as a DSpark. A drafter without a Markov
    /// head gets one of zeros and rank 1, since llama.cpp reads a drafter without one as fill-in.
    /// The confidence head reads the vectors of the Markov head, with weights of zero if it did not
    /// before.
    #[must_use]
    pub fn as_dspark(self, config: &BlockDrafterConfig) -> (Self, BlockDrafterConfig) {
        let mut config = config.clone();
        let device = self.stack.device();
        let mut markov = self.markov;
        if config.markov_rank == 0 {
            config.markov_rank = 1;
            markov = config.markov().map(|both| both.map(|linear| zeros(&linear, &device)));
        }
        let mut confidence = self.confidence;
        if let (ConfidenceHead::OfRow, Some(head)) = (config.confidence, &mut confidence) {
            config.confidence = ConfidenceHead::OfRowAndToken;
            let weight = head.weight.val();
            let more = Tensor::zeros([config.markov_rank, 1], &device);
            head.tensors.weight = Param::from_tensor(Tensor::cat(vec![weight, more], 0));
        }
        let own = Self { markov, confidence, config: Arc::new(config.clone()), ..self };
        (own.to_tensors(), config)
    }

    /// Replaces the confidence head. The part of a token becomes one more number of its Markov
    /// vector, which adds nothing to the logits of candidates. A drafter without a Markov head gets
    /// one of rank 1.
    ///
    /// # Panics
    /// If the weights do not fit the drafter's width, rank and vocabulary.
    #[must_use]
    pub fn with_confidence(
        self,
        config: &BlockDrafterConfig,
        weights: &ConfidenceWeights,
    ) -> (Self, BlockDrafterConfig) {
        let (width, device) = (config.model.shape.hidden_size, self.stack.device());
        let (mut config, rank) = (config.clone(), config.markov_rank);
        assert_eq!(weights.row.len(), width + rank, "a weight for each number that the head reads");
        let (mut markov, mut row) = (self.markov, weights.row.clone());
        if let Some(of_token) = &weights.of_token {
            config.markov_rank += 1;
            row.push(1.0);
            let both = config.markov().expect("the rank is at least 1");
            let own = TensorData::new(of_token.clone(), [1, both[0].outputs]);
            let own = Tensor::from_data(own, &device);
            let none = Tensor::zeros([1, both[1].outputs], &device);
            let widened = match markov {
                Some(before) => {
                    let [vectors, out] = before.map(|linear| linear.weight.val());
                    [Tensor::cat(vec![vectors, own], 0), Tensor::cat(vec![out, none], 0)]
                }
                None => [own, none],
            };
            markov = Some(widened.map(|weight| linear(weight, None)));
        }
        config.confidence = match config.markov_rank {
            0 => ConfidenceHead::OfRow,
            _ => ConfidenceHead::OfRowAndToken,
        };
        let num_inputs = row.len();
        let weight = Tensor::from_data(TensorData::new(row, [num_inputs, 1]), &device);
        let bias = Tensor::<1>::from_floats([weights.bias], &device);
        let confidence = Some(linear(weight, Some(bias)));
        let own = Self { markov, confidence, config: Arc::new(config.clone()), ..self };
        (own.to_tensors(), config)
    }

    /// Returns what a confidence head reads for candidates, given the token before each: the rows,
    /// and the vectors of the Markov head, if there is one.
    ///
    /// # Shapes
    /// - normed: `[rows, hidden]`
    /// - output: `[rows, hidden]`, then `[rows, rank]`
    ///
    /// # Panics
    /// If a token is not in the vocabulary.
    pub fn confidence_inputs(&self, normed: &Rows, tokens: &[u32]) -> Vec<Rows> {
        [normed.clone()].into_iter().chain(self.vectors_of(normed, tokens)).collect()
    }
}

fn zeros(spec: &LinearSpec, device: &Device) -> PackableLinear {
    linear(Tensor::zeros([spec.inputs, spec.outputs], device), None)
}

fn linear(weight: Tensor<2>, bias: Option<Tensor<1>>) -> PackableLinear {
    Linear { weight: Param::from_tensor(weight), bias: bias.map(Param::from_tensor) }.into()
}
