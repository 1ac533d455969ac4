//! An adapter with packed weights, as decoding on the CPU runs it.

use super::{AdapterConfig, NORM};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::kv_cache::KvCache;
use crate::packed::{
    self, PackedAttention, PackedLayer, PackedMlp, PackedNorm, PackedWeights, Packing, Threads,
};
use crate::rope::Reach;
use crate::rows::{HostRows, Run};
use crate::shape::ModelShape;
use crate::spec::LayerSpec;
use crate::weights::WeightReader;

/// The weights once more, packed: the tensors are there to be written and trained further.
#[derive(Debug)]
pub(super) struct PackedAdapter {
    /// Of each layer.
    layers: Vec<Parts>,
    norm: PackedNorm,
    lm_head: Option<PackedWeights>,
    logit_soft_cap: Option<f32>,
    reaches: Vec<Reach>,
}

/// What of a layer it has.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there are a few adapters")]
enum Parts {
    Attention(PackedAttention),
    Mlp(PackedMlp),
    Both(PackedLayer),
}

impl Parts {
    /// A layer's, under `name`.
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
    /// Packs a checkpoint's tensors, in the format that it has them in.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(super) fn read(
        config: &AdapterConfig,
        reader: &mut WeightReader,
    ) -> Result<Self, ModelError> {
        let ModelConfig { shape, spec, .. } = &config.model;
        let mut packing = Packing { reader, storage: None };
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

    /// What the LM head reads of new tokens, which are those of the slots in `runs`.
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

    /// Reads new tokens into the cache, for their keys and values alone.
    pub(super) fn fill(
        &self,
        mut rows: HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (last, others) = self.layers.split_last().expect("an adapter has a layer");
        self.pass(others, &mut rows.values, runs, cache, Some(last));
    }

    /// Runs layers over new tokens, and has `filled`, the one behind them, read what comes out for its
    /// keys and values.
    fn pass(
        &self,
        layers: &[Parts],
        x: &mut [f32],
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
        filled: Option<&Parts>,
    ) {
        if let Parts::Mlp(_) = self.layers[0] {
            // A token looks at no other: there is nothing to be kept of it.
            cache.extend(0..1, runs, 0);
            for layer in layers.iter().filter(|_| filled.is_none()) {
                if let Parts::Mlp(mlp) = layer {
                    mlp.forward(x, cache.scratch_mut());
                }
            }
            return;
        }
        let (placed, mut memory, scratch) = cache.extend_packed(0..self.layers.len(), runs);
        const KEPT: &str = "an adapter's cache has its layers";
        for layer in layers {
            let slots = memory.next().expect(KEPT);
            match layer {
                Parts::Attention(attention) => {
                    attention.forward(x, placed, slots, &self.reaches, scratch);
                }
                Parts::Both(layer) => {
                    let layers = std::slice::from_ref(layer);
                    let caches = std::iter::once(slots);
                    packed::forward_layers(layers, x, placed, caches, &self.reaches, scratch);
                }
                Parts::Mlp(_) => unreachable!("all layers are alike"),
            }
        }
        if let Some(Parts::Attention(attention) | Parts::Both(PackedLayer { attention, .. })) =
            filled
        {
            attention.fill(x, placed, memory.next().expect(KEPT), &self.reaches, scratch);
        }
    }

    /// Logits by its own LM head; `None` where it has none.
    pub(super) fn logits(&self, normed: &HostRows) -> Option<HostRows> {
        let lm_head = self.lm_head.as_ref()?;
        let mut values = Vec::new();
        lm_head.multiply(&normed.values, &mut values, &Threads::All);
        if let Some(cap) = self.logit_soft_cap {
            packed::soft_cap(&mut values, cap);
        }
        Some(HostRows { values, width: lm_head.num_outputs() })
    }
}
