//! The keys and values of the tokens read so far: allocated once, one length per layer.
//!
//! Shallow layers may run ahead of deep ones (a self-draft), so each layer has its own length and
//! [`KvCache::truncate`] cuts every layer that is longer. Truncation moves a number; what lies
//! beyond it is overwritten by the next append.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use crate::config::LlamaConfig;
use crate::host::{HostLayerCache, Scratch, tensor, values};

/// Keys and values of every layer of one model for one sequence.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    capacity: usize,
    /// What the host path's forwards over this cache write to on their way.
    scratch: Scratch,
}

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct LayerCache {
    store: Store,
    len: usize,
    capacity: usize,
}

/// Where keys and values are.
#[derive(Debug)]
enum Store {
    /// Keys and values on the model's device, each `[1, kv_heads, capacity, head_dim]`. `Option`
    /// only so that the tensors can be moved out while they are written: a write is in place when
    /// nobody else holds the tensor.
    Device(Box<[Option<Tensor<4>>; 2]>),
    /// In host memory, for a model that runs few rows there.
    Host(HostLayerCache),
    /// Nowhere: the layer has no attention, and only counts its tokens.
    Nowhere,
}

impl KvCache {
    /// Allocates room for `capacity` tokens; `on_host` for a model that has a host path.
    pub(crate) fn new(
        config: &LlamaConfig,
        capacity: usize,
        device: &Device,
        on_host: bool,
    ) -> Self {
        let (heads, head_dim) = (config.num_key_value_heads, config.head_dim);
        let shape = [1, heads, capacity, head_dim];
        let store = || {
            if on_host {
                return Store::Host(HostLayerCache::new(heads, head_dim, capacity));
            }
            let zeros = || Some(Tensor::zeros(shape, device));
            Store::Device(Box::new([zeros(), zeros()]))
        };
        let layers = (0..config.num_hidden_layers)
            .map(|_| LayerCache { store: store(), len: 0, capacity })
            .collect();
        Self { layers, capacity, scratch: Scratch::default() }
    }

    /// The cache of a layer without attention, which counts up to `capacity` tokens.
    pub(crate) fn without_attention(capacity: usize) -> Self {
        let layers = vec![LayerCache { store: Store::Nowhere, len: 0, capacity }];
        Self { layers, capacity, scratch: Scratch::default() }
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

    /// Counts `new` more tokens as read by each layer of a range, before the host path writes them,
    /// and gives what it needs for that: each layer's memory, and its buffers.
    ///
    /// # Panics
    /// If the layers hold different numbers of tokens, there is no room left, or the cache is not
    /// in host memory.
    pub(crate) fn extend_on_host(
        &mut self,
        layers: Range<usize>,
        new: usize,
    ) -> (impl Iterator<Item = &mut HostLayerCache>, &mut Scratch) {
        let layers = &mut self.layers[layers];
        let start = layers[0].len;
        for layer in layers.iter_mut() {
            assert_eq!(layer.len, start, "layers of one range run in step");
            layer.extend(new);
        }
        let memory = layers.iter_mut().map(|layer| match &mut layer.store {
            Store::Host(store) => store,
            Store::Device(_) | Store::Nowhere => {
                panic!("a model with a host path has its cache there")
            }
        });
        (memory, &mut self.scratch)
    }

    /// The buffers of the host path's forwards, for what runs beside attention.
    pub(crate) fn scratch_mut(&mut self) -> &mut Scratch {
        &mut self.scratch
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
    /// - keys, values: `[1, kv_heads, new, head_dim]`
    /// - output: two of `[1, kv_heads, len + new, head_dim]`
    ///
    /// # Panics
    /// If there is no room left: the caller checks prompts and limits against the capacity.
    pub(crate) fn append(&mut self, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [_, heads, new, head_dim] = keys.dims();
        let start = self.len;
        let end = self.extend(new);
        match &mut self.store {
            Store::Device(slots) => {
                let write = [0..1, 0..heads, start..end, 0..head_dim];
                let read = [0..1, 0..heads, 0..end, 0..head_dim];
                let append = |slot: &mut Option<Tensor<4>>, new: Tensor<4>| {
                    let stored = slot.take().expect("put back after every write");
                    let stored = stored.slice_assign(write.clone(), new);
                    let all = stored.clone().slice(read.clone());
                    *slot = Some(stored);
                    all
                };
                let [all_keys, all_values] = &mut **slots;
                (append(all_keys, keys), append(all_values, values))
            }
            Store::Nowhere => panic!("a layer without attention has no keys"),
            Store::Host(store) => {
                store.write_all(start, &self::values(keys.clone()), &self::values(values.clone()));
                if start == 0 {
                    return (keys, values);
                }
                let device = keys.device();
                let (keys, values) = store.read_all(end);
                let shape = [1, heads, end, head_dim];
                (tensor(keys, shape, &device), tensor(values, shape, &device))
            }
        }
    }

    /// Counts new tokens as read by a layer without attention.
    ///
    /// # Panics
    /// If there is no room left.
    pub(crate) fn count(&mut self, new: usize) {
        self.extend(new);
    }

    fn extend(&mut self, new: usize) -> usize {
        let end = self.len + new;
        assert!(end <= self.capacity, "{end} tokens do not fit a cache of {}", self.capacity);
        self.len = end;
        end
    }
}
