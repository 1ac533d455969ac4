//! Training of block drafters: their first weights, and the blocks of all anchors of whole sequences
//! in one forward.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use super::{BlockDrafter, BlockDrafterConfig};
use crate::causal_lm::CausalLm;
use crate::decoder::BOTH_PARTS;
use crate::decoder::attention::{DraftPlan, Drafts};
use crate::decoder::source::RandomSource;
use crate::eagle3::passing_last;
use crate::precision::cast_parameters;
use crate::spec::LinearSpec;
use crate::state_network::{StateNetwork, UnrolledInputs, begun_from, copied_head};

impl BlockDrafterConfig {
    /// Initialises a drafter to train for a target, from numbers that `draw` gives, uniform from 0
    /// to 1. Linear layers are uniform within ±1/√inputs, and the Markov head adds nothing at first.
    pub fn init_from(
        &self,
        target: &CausalLm,
        device: &Device,
        mut draw: impl FnMut() -> f64,
    ) -> BlockDrafter {
        let matrix = |linear: &LinearSpec| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let num = linear.inputs * linear.outputs;
            let weights: Vec<f32> =
                (0..num).map(|_| ((2.0 * draw() - 1.0) * bound) as f32).collect();
            let data = TensorData::new(weights, [linear.inputs, linear.outputs]);
            Param::from_data(data, device)
        };
        let Ok(drafter) = self.build(&mut RandomSource { device, matrix });
        let markov = drafter.markov.map(|[vectors, out]| {
            let weight = Param::from_tensor(out.weight.val().zeros_like());
            [vectors, Linear { weight, ..out.tensors }.into()]
        });
        BlockDrafter { markov, ..drafter }.with_mask_of(target)
    }
}

impl BlockDrafter {
    /// Keeps the target's embedding of the mask token, which training needs.
    pub(super) fn with_mask_of(self, target: &CausalLm) -> Self {
        let (place, _) = target.embed_ids(&[self.config.mask_token_id]).into_parts();
        let mask = place.into_host().values[..self.config.model.shape.hidden_size].to_vec();
        Self { mask: Some(mask), ..self }
    }

    /// Replaces the weights of the draft layers by trainable copies of the target's last layers,
    /// where they were loaded and fit. `fc` passes on the deepest state, plus a tenth of its previous output. The
    /// norm and the LM head are the target's, the latter for the tokens that the drafter may draft.
    #[must_use]
    pub fn with_weights_of(self, target: &CausalLm) -> Self {
        let device = self.stack.device();
        let head = self.lm_head.zip(self.config.draft_vocabulary.as_ref());
        let lm_head = head.map(|(_, vocabulary)| copied_head(target, Some(vocabulary), &device));
        let stack = begun_from(self.stack.tensors, target).into();
        Self { fc: passing_last(&self.fc, &device).into(), stack, lm_head, ..self }
    }
}

impl StateNetwork for BlockDrafter {
    const KIND: &'static str = "block";

    fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(self.clone().unpacked(), dtype)
    }

    fn own_head(&self) -> Option<Tensor<2>> {
        self.lm_head.as_ref().map(|head| head.weight.val())
    }

    /// Returns the Markov head's projection, whose inputs are the vectors of the tokens before the
    /// candidates.
    fn more_head(&self) -> Option<Tensor<2>> {
        self.markov.as_ref().map(|[_, out]| out.weight.val())
    }

    /// Computes the rows of all blocks. The block of the draft that begins at position q has its
    /// anchor at token q + 1 and reads the contexts of the tokens up to q. Row k predicts token
    /// q + 2 + k, and its Markov vector is that of token q + 1 + k of the response.
    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let UnrolledInputs { states, next_ids, embedded, begun, num_steps, lengths } = inputs;
        let [batch, seq, hidden_size] = embedded.dims();
        let (dtype, device) = (embedded.dtype(), self.stack.device());
        let plan = DraftPlan { begun, seq, num_steps, rows_ahead: 1, lengths };
        let drafts = Drafts::new(plan, &self.stack.reaches[0], (dtype.into(), &device));
        let known = |x: Tensor<3>| {
            let [_, _, width] = x.dims();
            x.reshape([batch * seq, width]).select(0, drafts.known.clone())
        };
        let fused = self.fc.forward(Tensor::cat(states.into_iter().map(known).collect(), 1));
        let contexts = self.context_norm.forward(fused);
        let anchors = known(embedded).select(0, drafts.begun.clone());
        let [num_tokens, _] = anchors.dims();
        let mask = self.mask.as_ref().expect("the drafter was made for training");
        let mask = Tensor::<1>::from_floats(mask.as_slice(), &anchors.device()).cast(dtype);
        let mask = mask.unsqueeze::<2>().expand([(num_steps - 1) * num_tokens, hidden_size]);
        let mut rows = Tensor::cat(vec![anchors, mask], 0);
        for layer in &self.stack.layers {
            let (attention, mlp) =
                layer.attention.as_ref().zip(layer.mlp.as_ref()).expect(BOTH_PARTS);
            let normed = attention.normed_input(rows.clone());
            rows = rows + attention.of_blocks(normed, contexts.clone(), &drafts);
            let added = mlp.forward(rows.clone().unsqueeze()).squeeze_dim::<2>(0);
            rows = rows + added;
        }
        let normed = self.stack.norm.forward(rows);
        let vectors = self.markov.as_ref().map(|[vectors, _]| {
            let ids = next_ids.reshape([batch * seq]).select(0, drafts.known.clone());
            vectors.weight.val().transpose().select(0, ids.select(0, drafts.begun.clone()))
        });
        let steps = (0..num_steps).map(|step| {
            let rows = normed.clone().narrow(0, step * num_tokens, num_tokens);
            match &vectors {
                Some(vectors) => Tensor::cat(vec![rows, vectors.clone()], 1),
                None => rows,
            }
        });
        steps.collect()
    }
}
