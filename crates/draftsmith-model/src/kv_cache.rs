//! The keys and values of the tokens read so far: allocated once, one length per layer.
//!
//! Shallow layers may run ahead of deep ones (a self-draft), so each layer has its own length and
//! [`KvCache::truncate`] cuts every layer that is longer. Truncation moves a number; what lies
//! beyond it is overwritten by the next append.

use burn::tensor::{Device, Tensor};

use crate::config::LlamaConfig;

/// Keys and values of every layer of one model for one batch of equally long sequences.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    capacity: usize,
}

/// Keys and values of one layer, each `[batch, kv_heads, capacity, head_dim]`.
#[derive(Debug)]
pub(crate) struct LayerCache {
    // `Option` only so that the tensors can be moved out while they are written: a write is in
    // place when nobody else holds the tensor.
    keys: Option<Tensor<4>>,
    values: Option<Tensor<4>>,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// Allocates room for `capacity` tokens in each of `batch` sequences.
    pub fn new(config: &LlamaConfig, batch: usize, capacity: usize, device: &Device) -> Self {
        let shape = [batch, config.num_key_value_heads, capacity, config.head_dim];
        let layers = (0..config.num_hidden_layers)
            .map(|_| LayerCache {
                keys: Some(Tensor::zeros(shape, device)),
                values: Some(Tensor::zeros(shape, device)),
                len: 0,
                capacity,
            })
            .collect();
        Self { layers, capacity }
    }

    /// The number of tokens that layer `layer` has read.
    pub fn len(&self, layer: usize) -> usize {
        self.layers[layer].len
    }

    /// Whether no layer has read a token.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(|layer| layer.len == 0)
    }

    /// The number of tokens there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets every token from position `len` on, in every layer.
    pub fn truncate(&mut self, len: usize) {
        for layer in &mut self.layers {
            layer.len = layer.len.min(len);
        }
    }

    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut LayerCache {
        &mut self.layers[layer]
    }
}

impl LayerCache {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends the keys and values of new tokens, and returns those of all tokens.
    ///
    /// # Shapes
    /// - keys, values: `[batch, kv_heads, new, head_dim]`
    /// - output: two of `[batch, kv_heads, len + new, head_dim]`
    ///
    /// # Panics
    /// If there is no room left: the caller checks prompts and limits against the capacity.
    pub(crate) fn append(&mut self, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [batch, heads, new, head_dim] = keys.dims();
        let end = self.len + new;
        assert!(end <= self.capacity, "{end} tokens do not fit a cache of {}", self.capacity);
        let write = [0..batch, 0..heads, self.len..end, 0..head_dim];
        let read = [0..batch, 0..heads, 0..end, 0..head_dim];
        let append = |slot: &mut Option<Tensor<4>>, new: Tensor<4>| {
            let stored = slot.take().expect("put back after every write");
            let stored = stored.slice_assign(write.clone(), new);
            let all = stored.clone().slice(read.clone());
            *slot = Some(stored);
            all
        };
        let all = (append(&mut self.keys, keys), append(&mut self.values, values));
        self.len = end;
        all
    }
}
