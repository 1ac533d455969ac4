//! Consecutive decoder layers and the norm after them: the part that a model and an adapter share.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::attention::{Attention, Positions};
use super::layer::DecoderLayer;
use super::norm::Norm;
use crate::kv_cache::KvCache;
use crate::rope::Reach;
use crate::rows::{DeviceRows, Run};

/// Decoder layers and the norm after them.
#[derive(Module, Debug)]
pub(crate) struct LayerStack {
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) norm: Norm,
    #[module(skip)]
    pub(crate) reaches: Vec<Reach>,
}

impl LayerStack {
    /// Joins the products of each layer, if it decodes on a GPU.
    pub(crate) fn join(&mut self) {
        self.layers.iter_mut().for_each(DecoderLayer::join);
    }

    /// Runs layers on new tokens, which follow the cached tokens of their sequences.
    pub(crate) fn forward_cached(
        &self,
        layers: Range<usize>,
        hidden: DeviceRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> DeviceRows {
        if layers.is_empty() {
            return hidden;
        }
        let positions = self.positions(layers.clone(), &hidden, runs, cache);
        let run = |hidden, number: usize| {
            self.layers[number].forward(hidden, &positions, Some(cache.layer_mut(number)))
        };
        hidden.map(|hidden| layers.fold(hidden, run))
    }

    /// Writes the keys and values of new tokens into the cache of the last layer, without computing
    /// its output.
    pub(crate) fn fill_last(
        &self,
        hidden: DeviceRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let last = self.layers.len() - 1;
        let positions = self.positions(last..last + 1, &hidden, runs, cache);
        self.layers[last].fill((*hidden.tensor, false), &positions, cache.layer_mut(last));
    }

    /// Writes the keys and values of new tokens into the cache of every layer. All layers read the
    /// same rows, which are after the norm.
    pub(crate) fn fill_each(
        &self,
        read: DeviceRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let positions = self.positions(0..self.layers.len(), &read, runs, cache);
        for (number, layer) in self.layers.iter().enumerate() {
            layer.fill((Tensor::clone(&read.tensor), true), &positions, cache.layer_mut(number));
        }
    }

    fn positions(
        &self,
        layers: Range<usize>,
        hidden: &DeviceRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> Positions {
        let num_kv_heads =
            self.layers[layers.start].attention.as_ref().map(Attention::num_kv_heads);
        let may_be_few = self.layers[layers.clone()].iter().all(DecoderLayer::is_joined);
        let about = (may_be_few, num_kv_heads);
        Positions::following(&self.reaches, about, hidden, layers, runs, cache)
    }

    /// Runs layers over whole sequences, without a cache. `device` is the device of the weights.
    ///
    /// # Shapes
    /// - hidden, output: `[batch, seq, hidden]`
    pub(crate) fn forward(
        &self,
        layers: Range<usize>,
        hidden: Tensor<3>,
        device: &Device,
    ) -> Tensor<3> {
        let layers = self.layers[layers].iter();
        let are_joined = layers.clone().all(DecoderLayer::is_joined);
        let positions = Positions::whole(&self.reaches, are_joined, &hidden, device);
        layers.fold(hidden, |hidden, layer| layer.forward(hidden, &positions, None))
    }
}
