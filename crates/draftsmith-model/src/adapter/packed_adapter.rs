//! An adapter with packed weights, as decoding on the CPU runs it.

use super::Adapter;
use crate::decoder::attention::Attention;
use crate::decoder::mlp::Mlp;
use crate::kv_cache::KvCache;
use crate::packed::{
    self, PackedAttention, PackedLayer, PackedMlp, PackedNorm, PackedWeights, Threads,
};
use crate::rope::Reach;
use crate::rows::{HostRows, Run};

/// The weights once more, packed: the tensors are there to be written and trained further.
#[derive(Debug)]
pub(super) struct PackedAdapter {
    parts: Parts,
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

impl PackedAdapter {
    pub(super) fn of(adapter: &Adapter) -> Self {
        let layer = &adapter.layer;
        let (attention, mlp) =
            (layer.attention().map(Attention::packed), layer.mlp().map(Mlp::packed));
        let is_parallel = layer.is_parallel();
        let parts = match (attention, mlp) {
            (Some(attention), None) => Parts::Attention(attention),
            (None, Some(mlp)) => Parts::Mlp(mlp),
            (Some(attention), Some(mlp)) => {
                Parts::Both(PackedLayer { attention, mlp, is_parallel })
            }
            (None, None) => unreachable!("an adapter has a part"),
        };
        Self {
            parts,
            norm: adapter.norm.packed(),
            lm_head: adapter.lm_head.as_ref().map(|head| packed::pack(&[head])),
            logit_soft_cap: adapter.logit_soft_cap,
            reaches: adapter.reaches.clone(),
        }
    }

    /// What the LM head reads of new tokens, which are those of the slots in `runs`.
    pub(super) fn forward(
        &self,
        mut rows: HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> HostRows {
        let x = &mut rows.values;
        if let Parts::Mlp(mlp) = &self.parts {
            cache.extend(0..1, runs, 0);
            mlp.forward(x, cache.scratch_mut());
        } else {
            let (rows, mut memory, scratch) = cache.extend_packed(0..1, runs);
            let slots = memory.next().expect("an adapter's cache has one layer");
            match &self.parts {
                Parts::Attention(attention) => {
                    attention.forward(x, rows, slots, &self.reaches, scratch);
                }
                Parts::Both(layer) => {
                    let layers = std::slice::from_ref(layer);
                    let caches = std::iter::once(slots);
                    packed::forward_layers(layers, x, rows, caches, &self.reaches, scratch);
                }
                Parts::Mlp(_) => unreachable!("handled above"),
            }
        }
        self.norm.forward(x);
        rows
    }

    /// Reads new tokens into the cache, for their keys and values alone.
    pub(super) fn fill(
        &self,
        rows: &HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (Parts::Attention(attention) | Parts::Both(PackedLayer { attention, .. })) =
            &self.parts
        else {
            cache.extend(0..1, runs, 0);
            return;
        };
        let (placed, mut memory, scratch) = cache.extend_packed(0..1, runs);
        let slots = memory.next().expect("an adapter's cache has one layer");
        attention.fill(&rows.values, placed, slots, &self.reaches, scratch);
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
