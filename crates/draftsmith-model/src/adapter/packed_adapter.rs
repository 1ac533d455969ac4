//! An adapter with packed weights, as decoding on the CPU runs it.

use super::Adapter;
use crate::decoder::attention::Attention;
use crate::decoder::mlp::Mlp;
use crate::kv_cache::KvCache;
use crate::packed::{self, PackedAttention, PackedMlp, PackedNorm, PackedWeights, Threads};
use crate::rope::RopeTable;
use crate::rows::{HostRows, Run};

/// The weights once more, packed: the tensors are there to be written and trained further.
#[derive(Debug)]
pub(super) struct PackedAdapter {
    attention: Option<PackedAttention>,
    mlp: Option<PackedMlp>,
    norm: PackedNorm,
    lm_head: Option<PackedWeights>,
    rope: RopeTable,
}

impl PackedAdapter {
    pub(super) fn of(adapter: &Adapter, rope: RopeTable) -> Self {
        let layer = &adapter.layer;
        Self {
            attention: layer.attention().map(Attention::packed),
            mlp: layer.mlp().map(Mlp::packed),
            norm: PackedNorm::of(&adapter.norm),
            lm_head: adapter.lm_head.as_ref().map(|head| packed::pack(&[head])),
            rope,
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
        if let Some(attention) = &self.attention {
            let (rows, mut memory, scratch) = cache.extend_packed(0..1, runs);
            let slots = memory.next().expect("an adapter's cache has one layer");
            attention.forward(x, rows, slots, &self.rope, scratch);
        } else {
            cache.extend(0..1, runs);
        }
        if let Some(mlp) = &self.mlp {
            mlp.forward(x, cache.scratch_mut());
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
        let Some(attention) = &self.attention else {
            cache.extend(0..1, runs);
            return;
        };
        let (placed, mut memory, scratch) = cache.extend_packed(0..1, runs);
        let slots = memory.next().expect("an adapter's cache has one layer");
        attention.fill(&rows.values, placed, slots, &self.rope, scratch);
    }

    /// Logits by its own LM head; `None` where it has none.
    pub(super) fn logits(&self, normed: &HostRows) -> Option<HostRows> {
        let lm_head = self.lm_head.as_ref()?;
        let mut values = Vec::new();
        lm_head.multiply(&normed.values, &mut values, Threads::All);
        Some(HostRows { values, width: lm_head.num_outputs() })
    }
}
