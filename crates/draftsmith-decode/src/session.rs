//! One model reading one sequence: token ids in, rows of logits out, with the cache between.

use burn::tensor::{Device, Int, Tensor, TensorData};
use draftsmith_model::{CausalLm, KvCache};

use crate::error::DecodeError;
use crate::round::Target;

/// Rows of logits over the vocabulary, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// Rows laid end to end, each `vocab_size` long.
    ///
    /// # Panics
    /// If the values do not make whole rows.
    pub fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        assert!(values.len().is_multiple_of(vocab_size), "logits come in whole rows");
        Self { values, vocab_size }
    }

    /// The number of rows.
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// One row.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// All rows in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size)
    }
}

/// A model with the cache of the one sequence it is reading.
#[derive(Debug)]
pub struct ModelSession<'m> {
    model: &'m CausalLm,
    device: Device,
    cache: KvCache,
    role: &'static str,
}

impl<'m> ModelSession<'m> {
    /// A session for sequences of up to `capacity` tokens; `role` is what errors call the model,
    /// `target` or `draft`. The model's own context bounds the capacity.
    pub fn new(model: &'m CausalLm, capacity: usize, role: &'static str) -> Self {
        let capacity = capacity.min(model.config().max_position_embeddings);
        Self { model, device: model.device(), cache: model.new_cache(capacity), role }
    }

    /// The model.
    pub fn model(&self) -> &'m CausalLm {
        self.model
    }

    /// What errors call the model.
    pub(crate) fn role(&self) -> &'static str {
        self.role
    }

    /// The number of tokens read and not truncated.
    pub fn num_read(&self) -> usize {
        self.cache.len(0)
    }

    /// The number of tokens there is room for.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets all tokens from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.cache.truncate(len);
    }

    /// Reads new tokens and returns the final hidden states of the last `num_rows` of them.
    ///
    /// # Shapes
    /// - output: `[1, num_rows, hidden]`, after the final norm
    pub(crate) fn read(&mut self, new: &[u32], num_rows: usize) -> Tensor<3> {
        debug_assert!(num_rows <= new.len());
        let hidden = self.model.embed(self.ids(new));
        let layers = 0..self.model.config().num_hidden_layers;
        let hidden = self.model.forward_layers(layers, hidden, &mut self.cache);
        let [_, seq, width] = hidden.dims();
        let last = hidden.slice([0..1, seq - num_rows..seq, 0..width]);
        self.model.final_norm(last)
    }

    /// Logits of normed hidden states, brought to the host: the one sync of a forward.
    pub(crate) fn logits_of(&self, hidden: Tensor<3>) -> Result<Logits, DecodeError> {
        let values = to_host(self.model.lm_head(hidden), self.role)?;
        if values.iter().any(|v| v.is_nan() || *v == f32::INFINITY) {
            return Err(DecodeError::NotFinite { role: self.role, num_tokens: self.num_read() });
        }
        Ok(Logits::new(values, self.model.config().vocab_size))
    }

    /// Checks that a prompt can be read with room for one more token.
    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<(), DecodeError> {
        let (prompt_len, context) = (prompt.len(), self.capacity());
        if prompt_len + 1 > context {
            return Err(DecodeError::PromptTooLong {
                prompt: prompt_len,
                context,
                role: self.role,
            });
        }
        let vocab_size = self.model.config().vocab_size;
        match prompt.iter().find(|id| **id as usize >= vocab_size) {
            Some(id) => Err(DecodeError::UnknownToken { id: *id, vocab_size, role: self.role }),
            None => Ok(()),
        }
    }

    /// The logits after each of `ids[from..]`, read from an empty cache in one forward: scoring
    /// of a text that is already there.
    ///
    /// # Errors
    /// If the text is longer than the context, has unknown tokens, or the model's logits are not
    /// finite.
    pub fn score(&mut self, ids: &[u32], from: usize) -> Result<Logits, DecodeError> {
        self.check_prompt(&ids[..ids.len().saturating_sub(1)])?;
        self.truncate(0);
        let hidden = self.read(ids, ids.len() - from);
        self.logits_of(hidden)
    }

    fn ids(&self, ids: &[u32]) -> Tensor<2, Int> {
        let values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        Tensor::from_data(TensorData::new(values, [1, ids.len()]), &self.device)
    }
}

/// Copies a tensor to the host as f32.
pub(crate) fn to_host<const D: usize>(
    tensor: Tensor<D>,
    role: &'static str,
) -> Result<Vec<f32>, DecodeError> {
    let device = |message: String| DecodeError::Device { role, message };
    let data = tensor.try_into_data().map_err(|e| device(e.to_string()))?;
    data.try_into_vec().map_err(|e| device(format!("{e:?}")))
}

impl Target for ModelSession<'_> {
    fn begin(&mut self, prompt: &[u32]) -> Result<(), DecodeError> {
        self.check_prompt(prompt)?;
        self.truncate(0);
        let prefix = &prompt[..prompt.len() - 1];
        if !prefix.is_empty() {
            self.model.fill_cache(self.model.embed(self.ids(prefix)), &mut self.cache);
        }
        Ok(())
    }

    fn logits(&mut self, tokens: &[u32], num_rows: usize) -> Result<Logits, DecodeError> {
        let new = &tokens[self.num_read()..];
        let hidden = self.read(new, num_rows);
        self.logits_of(hidden)
    }

    fn roll_back(&mut self, len: usize) {
        self.truncate(len);
    }

    fn context(&self) -> usize {
        self.capacity()
    }
}
