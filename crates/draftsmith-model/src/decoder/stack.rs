//! Consecutive decoder layers and the norm after them: the part that a model and its drafters share.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::attention::{Attention, Positions};
use super::layer::DecoderLayer;
use super::norm::Norm;
use super::source::{ShapeSource, WeightSource};
use crate::config::ModelConfig;
use crate::kv_cache::KvCache;
use crate::rope::Reach;
use crate::rows::{DeviceRows, Run};
use crate::spec::{LayerSpec, NamedLayer, NamedNorm};
use crate::weights::NamedTensor;

/// Decoder layers and the norm after them.
#[derive(Module, Debug)]
pub(crate) struct LayerStack {
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) norm: Norm,
    #[module(skip)]
    pub(crate) reaches: Vec<Reach>,
}

/// The specification of a stack.
pub(crate) struct StackSpec<'a> {
    pub(crate) model: &'a ModelConfig,
    /// Each layer with the prefix of its tensors in checkpoints.
    pub(crate) layers: Vec<(LayerSpec, String)>,
    /// The name of the norm.
    pub(crate) norm: &'static str,
}

impl ModelConfig {
    /// Counts the parameters; a tied LM head counts once.
    pub fn num_parameters(&self) -> usize {
        let Self { shape, spec, .. } = self;
        let [mut layer, mut norm] = [ShapeSource::default(), ShapeSource::default()];
        // Layers differ in their attention windows, not in their weights.
        let first = NamedLayer { spec: &spec.layer(0), shape, name: "" };
        let Ok(_) = DecoderLayer::build(first, &mut layer);
        let Ok(_) = norm.norm(NamedNorm::outside("norm", shape, &spec.norm));
        let num_tables = if spec.tie_word_embeddings { 1 } else { 2 };
        num_tables * shape.vocab_size * shape.hidden_size
            + norm.num_parameters()
            + shape.num_layers * layer.num_parameters()
    }
}

impl<'a> StackSpec<'a> {
    /// Lists the layers.
    pub(crate) fn layers(&self) -> impl Iterator<Item = NamedLayer<'_>> {
        let shape = &self.model.shape;
        self.layers.iter().map(move |(spec, name)| NamedLayer { spec, shape, name })
    }

    /// Specifies the norm after the layers.
    pub(crate) fn norm(&self) -> NamedNorm<'a> {
        NamedNorm::outside(self.norm, &self.model.shape, &self.model.spec.norm)
    }
}

impl LayerStack {
    /// Builds a stack with weights from `source`.
    pub(crate) fn build<S: WeightSource>(
        spec: &StackSpec<'_>,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let ModelConfig { shape, spec: decoder, .. } = spec.model;
        let layers = spec.layers().map(|layer| DecoderLayer::build(layer, source));
        let layers = layers.collect::<Result<_, _>>()?;
        let norm = source.norm(spec.norm())?;
        Ok(Self { layers, norm, reaches: Reach::all_of(decoder, shape) })
    }

    /// Lists the tensors in a checkpoint's layout.
    pub(crate) fn named(&self, spec: &StackSpec<'_>) -> Vec<NamedTensor> {
        let layers = self.layers.iter().zip(spec.layers());
        let layers = layers.flat_map(|(own, layer)| own.named(layer));
        layers.chain(self.norm.named(spec.norm())).collect()
    }

    /// Returns the device of the weights.
    pub(crate) fn device(&self) -> Device {
        self.norm.gamma().device()
    }

    /// Joins the products of each layer, if it decodes on a GPU.
    pub(crate) fn join(&mut self) {
        self.layers.iter_mut().for_each(DecoderLayer::join);
    }

    /// Registers new tokens, which follow the cached tokens of their sequences, in the caches of
    /// layers.
    pub(crate) fn positions(
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
