//! A model with packed weights: what rows on the CPU go through instead of tensors, from ids to
//! logits.

use std::ops::Range;

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::decoder::layer::DecoderLayer;
use crate::kv_cache::KvCache;
use crate::packed::{self, PackedLayer, PackedNorm, PackedWeights, RopeTable, Threads};
use crate::rows::{HostRows, Run};

/// The weights once more, packed.
#[derive(Debug)]
pub(super) struct PackedModel {
    /// `[vocab, hidden]`; `None` where the LM head has the same weights, which it then gives.
    embedding: Option<Vec<f32>>,
    layers: Vec<PackedLayer>,
    norm: PackedNorm,
    lm_head: PackedWeights,
    rope: RopeTable,
}

impl PackedModel {
    pub(super) fn of(decoder: &Decoder, config: &ModelConfig) -> Self {
        let layer = |layer: &DecoderLayer| {
            let both = layer.attention().zip(layer.mlp());
            let (attention, mlp) = both.expect("a model's layers have both parts");
            PackedLayer { attention: attention.packed(), mlp: mlp.packed() }
        };
        let head = decoder.lm_head().expect("a model that was read has its own LM head");
        let is_tied = config.spec.tie_word_embeddings;
        Self {
            embedding: (!is_tied).then(|| packed::values(decoder.embedding())),
            layers: decoder.layers().iter().map(layer).collect(),
            norm: PackedNorm::of(decoder.norm()),
            lm_head: packed::pack(&[head]),
            rope: decoder.rope().packed(),
        }
    }

    pub(super) fn embed(&self, ids: &[u32]) -> HostRows {
        let width = self.norm.width();
        let mut values = Vec::with_capacity(ids.len() * width);
        for id in ids {
            let id = *id as usize;
            match &self.embedding {
                Some(table) => values.extend_from_slice(&table[id * width..(id + 1) * width]),
                None => self.lm_head.read_output(id, &mut values),
            }
        }
        HostRows { values, width }
    }

    /// Runs layers on rows, which are those of the slots in `runs`.
    pub(super) fn forward_layers(
        &self,
        layers: Range<usize>,
        hidden: &mut HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (rows, caches, scratch) = cache.extend_packed(layers.clone(), runs);
        let layers = &self.layers[layers];
        packed::forward_layers(layers, &mut hidden.values, rows, caches, &self.rope, scratch);
    }

    /// Reads rows into the cache of the last layer alone, for their keys and values.
    pub(super) fn fill_last(
        &self,
        hidden: &HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let last = self.layers.len() - 1;
        let (rows, mut caches, scratch) = cache.extend_packed(last..last + 1, runs);
        let slots = caches.next().expect("the last layer has a cache");
        self.layers[last].attention.fill(&hidden.values, rows, slots, &self.rope, scratch);
    }

    pub(super) fn normed(&self, mut hidden: HostRows) -> HostRows {
        self.norm.forward(&mut hidden.values);
        hidden
    }

    pub(super) fn logits(&self, normed: &HostRows) -> HostRows {
        let mut values = Vec::new();
        self.lm_head.multiply(&normed.values, &mut values, Threads::All);
        HostRows { values, width: self.lm_head.num_outputs() }
    }

    /// Runs layers over whole sequences of one length, without a cache, in place. `wanted`: see
    /// [`CausalLm::hidden_states_at`](super::CausalLm::hidden_states_at).
    pub(super) fn run_sequences(
        &self,
        layers: Range<usize>,
        x: &mut [f32],
        wanted: &[Range<usize>],
    ) {
        let are_last = layers.end == self.layers.len();
        packed::forward_sequences(&self.layers[layers], x, wanted, are_last, &self.rope);
    }
}
