//! An adapter with packed weights, for decoding on the CPU.

use super::{AdapterConfig, NORM};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::kv_cache::KvCache;
use crate::packed::{
    self, PackedAttention, PackedLayer, PackedMlp, PackedNorm, PackedWeights, Packing,
};
use crate::rope::Reach;
use crate::rows::{HostRows, Run};
use crate::spec::LayerSpec;
use crate::spec::ModelShape;
use crate::weights::WeightReader;

/// A packed copy of an adapter's weights. The tensors are kept besides, for writing and training.
#[derive(Debug)]
pub(super) struct PackedAdapter {
    layers: Vec<Parts>,
    norm: PackedNorm,
    lm_head: Option<PackedWeights>,
    logit_soft_cap: Option<f32>,
    reaches: Vec<Reach>,
}

/// The parts of an adapter's layer.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there are a few adapters")]
enum Parts {
    Attention(PackedAttention),
    Mlp(PackedMlp),
    Both(PackedLayer),
}

impl Parts {
    /// Reads the parts of the layer whose tensor names begin with `name`.
    fn read(
        spec: &LayerSpec,
        shape: &ModelShape,
        name: &str,
        packing: &mut Packing<'_>,
    ) -> Result<Self, ModelError> {
        Ok(match (&spec.attention, &spec.mlp) {
            (Some(_), Some(_)) => Self::Both(packing.layer(spec, shape, name)?),
            (Some(attention), None) => {
                Self::Attention(packing.attention(attention, spec, shape, name)?)
            }
            (None, Some(mlp)) => Self::Mlp(packing.mlp(mlp, spec, shape, name)?),
            (None, None) => unreachable!("an adapter has a part"),
        })
    }
}

impl PackedAdapter {
    /// Packs a checkpoint's tensors in their storage format.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(super) fn read(
        config: &AdapterConfig,
        reader: &mut WeightReader,
    ) -> Result<Self, ModelError> {
        let ModelConfig { shape, spec, .. } = &config.model;
        let mut packing = Packing { reader };
        let layer =
            |number| Parts::read(&config.layer(), shape, &config.layer_name(number), &mut packing);
        Ok(Self {
            layers: (0..shape.num_layers).map(layer).collect::<Result<_, _>>()?,
            norm: packing.norm("", NORM, shape.hidden_size, &spec.norm)?,
            lm_head: config.own_head().map(|head| packing.linears("", &[head])).transpose()?,
            logit_soft_cap: spec.logit_soft_cap,
            reaches: Reach::all_of(spec, shape),
        })
    }

    /// Computes hidden states for the LM head, for new tokens of the slots in `runs`.
    pub(super) fn forward(
        &self,
        mut rows: HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> HostRows {
        self.pass(&self.layers, &mut rows.values, runs, cache, None);
        self.norm.forward(&mut rows.values);
        rows
    }

    /// Writes the keys and values of new tokens into the cache, without computing outputs.
    pub(super) fn fill(
        &self,
        mut rows: HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (last, others) = self.layers.split_last().expect("an adapter has a layer");
        self.pass(others, &mut rows.values, runs, cache, Some(last));
    }

    /// Runs `layers` over new tokens, then writes the keys and values of the next layer, `filled`.
    fn pass(
        &self,
        layers: &[Parts],
        x: &mut [f32],
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
        filled: Option<&Parts>,
    ) {
        let (placed, mut memory, scratch) = cache.extend_packed(0..self.layers.len(), runs);
        const CACHED: &str = "an adapter's cache has all its layers";
        for layer in layers {
            let slots = memory.next().expect(CACHED);
            match layer {
                Parts::Attention(attention) => {
                    attention.forward(x, placed, slots, &self.reaches, scratch);
                }
                Parts::Both(layer) => {
                    let layers = std::slice::from_ref(layer);
                    let caches = std::iter::once(slots);
                    packed::forward_layers(layers, x, placed, caches, &self.reaches, scratch);
                }
                Parts::Mlp(mlp) => mlp.forward(x, scratch),
            }
        }
        if let Some(Parts::Attention(attention) | Parts::Both(PackedLayer { attention, .. })) =
            filled
        {
            attention.fill(x, placed, memory.next().expect(CACHED), &self.reaches, scratch);
        }
    }

    /// Computes logits with the adapter's LM head; `None` if it has none.
    pub(super) fn logits(&self, normed: &HostRows) -> Option<HostRows> {
        let lm_head = self.lm_head.as_ref()?;
        let values = packed::logits(lm_head, &normed.values, self.logit_soft_cap);
        Some(HostRows { values, width: lm_head.outputs })
    }
}
