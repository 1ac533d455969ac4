//! The frozen drafter that heads are trained for: a draft model, or a target's first layers with an
//! adapter.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use draftsmith_model::{Adapter, CausalLm, KvCache, LlamaConfig, Rows, WeightDtype};

/// What drafts, as heads see it: hidden states, and what an LM head makes of them.
#[derive(Module, Debug)]
pub struct FrozenDraft {
    /// The draft model, or the target of a self-draft.
    model: CausalLm,
    exit: Option<Exit>,
    #[module(skip)]
    embedding_gain: f32,
}

/// Where a self-draft leaves its target.
#[derive(Module, Debug)]
struct Exit {
    #[module(skip)]
    layer: usize,
    adapter: Adapter,
}

impl From<&CausalLm> for FrozenDraft {
    /// A draft model of its own.
    fn from(draft: &CausalLm) -> Self {
        Self::new(draft.clone(), None)
    }
}

impl FrozenDraft {
    /// A self-draft: `target`'s first `exit_layer` layers with an adapter, whose normed output is
    /// the hidden state.
    pub fn self_draft(target: CausalLm, adapter: Adapter, exit_layer: usize) -> Self {
        Self::new(target, Some(Exit { layer: exit_layer, adapter }))
    }

    fn new(model: CausalLm, exit: Option<Exit>) -> Self {
        // A power of two, by which all numbers are multiplied without rounding.
        let gain = (1.0 / model.embedding_size()).log2().round().exp2();
        Self { model, exit, embedding_gain: if gain.is_normal() { gain } else { 1.0 } }
    }

    /// The shape of the model: hidden size, vocabulary and context are the drafter's.
    pub(crate) fn config(&self) -> &LlamaConfig {
        self.model.config()
    }

    pub(crate) fn device(&self) -> Device {
        self.model.device()
    }

    /// The same in another type, in which it then computes.
    pub(crate) fn in_dtype(self, dtype: WeightDtype) -> Self {
        let of_exit = |exit: Exit| match dtype {
            WeightDtype::F32 => exit,
            other => Exit { adapter: exit.adapter.to_dtype(other.float_dtype()), ..exit },
        };
        Self { model: self.model.to_dtype(dtype), exit: self.exit.map(of_exit), ..self }
    }

    /// What the LM head reads, over whole sequences. Causal, so padding on the right changes
    /// nothing to its left.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub(crate) fn hidden_states(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        match &self.exit {
            None => self.model.hidden_states(ids),
            Some(Exit { layer, adapter }) => adapter.forward(self.model.exit_states(ids, *layer)),
        }
    }

    /// Logits of hidden states.
    ///
    /// # Shapes
    /// - hidden: `[batch, seq, hidden]`
    /// - output: `[batch, seq, vocab]`
    pub(crate) fn lm_head(&self, hidden: Tensor<3>) -> Tensor<3> {
        match self.exit.as_ref().and_then(|exit| exit.adapter.own_head()) {
            None => self.model.lm_head(hidden),
            Some(head) => {
                let [batch, seq, width] = hidden.dims();
                let logits = hidden.reshape([batch * seq, width]).matmul(head);
                logits.reshape([batch, seq, self.config().vocab_size])
            }
        }
    }

    /// What embeddings are multiplied with while a head is trained.
    ///
    /// Models keep them small, some hundredths a number, where hidden states are of the size of 1.
    /// AdamW's steps are as long for the weights that read the ones as for those that read the
    /// others, so that a head would learn of tokens last. This makes embeddings as large.
    pub(crate) fn embedding_gain(&self) -> f32 {
        self.embedding_gain
    }

    /// Looks up token embeddings, times [`Self::embedding_gain`]; a self-draft's are its target's.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    pub(crate) fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        self.model.embed(ids) * self.embedding_gain
    }

    /// Reads one sequence of up to `capacity` tokens.
    pub(crate) fn reader(&self, capacity: usize) -> Reader<'_> {
        let of_adapter = |exit: &Exit| exit.adapter.new_cache(capacity);
        let adapter_cache = self.exit.as_ref().map(of_adapter);
        Reader { draft: self, cache: self.model.new_cache(capacity), adapter_cache }
    }
}

/// One sequence, part of which is read again and again.
pub(crate) struct Reader<'a> {
    draft: &'a FrozenDraft,
    cache: KvCache,
    adapter_cache: Option<KvCache>,
}

impl Reader<'_> {
    /// Forgets all tokens from position `start` on, reads `ids` there, and returns their hidden
    /// states.
    ///
    /// # Panics
    /// If fewer than `start` tokens were read, or there is no room.
    pub(crate) fn read(&mut self, ids: &[u32], start: usize) -> Rows {
        let model = &self.draft.model;
        self.cache.truncate(start);
        let embedded = model.embed_ids(ids);
        let Some((exit, cache)) = self.draft.exit.as_ref().zip(self.adapter_cache.as_mut()) else {
            let num_layers = model.config().num_hidden_layers;
            return model.normed(model.forward_layers(0..num_layers, embedded, &mut self.cache));
        };
        cache.truncate(start);
        let features = model.forward_layers(0..exit.layer, embedded, &mut self.cache);
        exit.adapter.forward_cached(features, cache)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::tests::pair::{VOCAB_SIZE, tiny_drafters};

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // Sums of f32 in another order, of numbers near 1.
            assert!((found - expected).abs() < 1e-5 * (1.0 + expected.abs()));
        }
    }

    #[test]
    fn a_self_draft_is_its_targets_first_layers_its_adapter_and_the_adapters_head() {
        let [_, draft] = tiny_drafters(16, 64);
        let Exit { layer, adapter } = draft.exit.as_ref().unwrap();
        let ids: Vec<u32> = (0..12).map(|i| 3 + i * 7 % 40).collect();
        let tensor: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let tensor = Tensor::<2, Int>::from_data(TensorData::new(tensor, [1, 12]), &draft.device());
        let features = draft.model.all_hidden_states(tensor.clone()).swap_remove(*layer);
        let hidden = adapter.forward(features);
        let expected = values(hidden.clone());
        assert_close(&values(draft.hidden_states(tensor)), &expected);

        let [logits] =
            Rows::to_host([adapter.logits(&hidden.clone().into(), &draft.model)]).unwrap();
        assert_close(&values(draft.lm_head(hidden.clone())), &logits);
        assert_eq!(logits.len(), 12 * VOCAB_SIZE as usize);
        let of_target = values(draft.model.lm_head(hidden));
        assert!(logits.iter().zip(&of_target).any(|(own, target)| (own - target).abs() > 0.1));

        // In any pieces, read again from anywhere.
        let mut reader = draft.reader(12);
        let mut read = |start: usize, end: usize| {
            values(reader.read(&ids[start..end], start).into_tensor(&draft.device()))
        };
        for (start, end) in [(0, 9), (9, 12), (4, 5), (5, 12), (0, 12)] {
            assert_close(&read(start, end), &expected[start * 16..end * 16]);
        }
    }
}
