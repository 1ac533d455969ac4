//! An adapter with packed weights: what few rows on the CPU go through instead of tensors.

use super::{Adapter, NormedAttention, NormedMlp};
use crate::kv_cache::KvCache;
use crate::packed::{
    self, PackedAttention, PackedMlp, PackedNorm, PackedWeights, RopeTable, Threads,
};
use crate::rows::{HostRows, Run};

/// The weights once more, packed.
#[derive(Debug)]
pub(super) struct PackedAdapter {
    attention: Option<PackedAttention>,
    mlp: Option<PackedMlp>,
    norm: PackedNorm,
    lm_head: Option<PackedWeights>,
    rope: RopeTable,
}

impl PackedAdapter {
    pub(super) fn of(adapter: &Adapter) -> Self {
        let attention = |NormedAttention { input_layernorm, self_attn }: &NormedAttention| {
            PackedAttention::new(&adapter.config, input_layernorm, self_attn.projections())
        };
        let mlp = |NormedMlp { post_attention_layernorm, mlp }: &NormedMlp| {
            let [gate, up, down] = mlp.projections();
            PackedMlp::new(post_attention_layernorm, gate, up, down)
        };
        Self {
            attention: adapter.attention.as_ref().map(attention),
            mlp: adapter.mlp.as_ref().map(mlp),
            norm: PackedNorm::of(&adapter.norm),
            lm_head: adapter.lm_head.as_ref().map(|head| packed::pack(&[head])),
            rope: adapter.rope.table(),
        }
    }

    /// What the LM head reads of new tokens, whose slots `runs` tells.
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
