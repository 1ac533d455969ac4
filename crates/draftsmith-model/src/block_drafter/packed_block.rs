//! A block drafter with packed weights, for decoding on the CPU.

use std::sync::Arc;

use super::BlockDrafterConfig;
use super::config::{CONTEXT_NORM, NORM, layer_name};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::kv_cache::KvCache;
use crate::packed::{self, PackedLayer, PackedNorm, PackedWeights, Packing, Threads};
use crate::rope::Reach;
use crate::rows::{HostRows, Rows, Run};
use crate::spec::LinearSpec;
use crate::weights::WeightReader;

/// A packed copy of a drafter's weights. The tensors are kept besides, for writing and training.
#[derive(Debug)]
pub(super) struct PackedBlock {
    fc: PackedWeights,
    context_norm: PackedNorm,
    layers: Vec<PackedLayer>,
    norm: PackedNorm,
    pub(super) lm_head: Option<Arc<PackedWeights>>,
    /// The Markov head's vectors, packed as a matrix whose outputs are tokens.
    markov_in: Option<PackedWeights>,
    pub(super) markov_out: Option<Arc<PackedWeights>>,
    confidence: Option<PackedWeights>,
    reaches: Vec<Reach>,
}

impl PackedBlock {
    /// Packs a checkpoint's tensors in their storage format.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(super) fn read(
        config: &BlockDrafterConfig,
        reader: &mut WeightReader,
    ) -> Result<Self, ModelError> {
        let ModelConfig { shape, spec, .. } = &config.model;
        let mut packing = Packing { reader };
        let mut linear = |spec: LinearSpec| packing.linears("", &[spec]);
        let fc = linear(config.fc())?;
        let lm_head = config.own_head().map(&mut linear).transpose()?;
        let (markov_in, markov_out) = match config.markov() {
            Some([token_in, out]) => (Some(linear(token_in)?), Some(linear(out)?)),
            None => (None, None),
        };
        let confidence = config.confidence().map(&mut linear).transpose()?;
        let layers = (0..shape.num_layers)
            .map(|number| packing.layer(&spec.layer(number), shape, &layer_name(number)));
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            fc,
            context_norm: packing.norm("", CONTEXT_NORM, shape.hidden_size, &spec.norm)?,
            norm: packing.norm("", NORM, shape.hidden_size, &spec.norm)?,
            lm_head: lm_head.map(Arc::new),
            markov_in,
            markov_out: markov_out.map(Arc::new),
            confidence,
            reaches: Reach::all_of(spec, shape),
        })
    }

    /// Computes the contexts of some positions from the target's hidden states there.
    pub(super) fn contexts(&self, states: &[Rows]) -> HostRows {
        let states: Vec<_> = states.iter().map(|rows| rows.place.host()).collect();
        let parts: Vec<&HostRows> = states.iter().map(|rows| &**rows).collect();
        let mut values = Vec::new();
        self.fc.multiply(&HostRows::side_by_side(&parts), &mut values, &Threads::All);
        self.context_norm.forward(&mut values);
        HostRows { values, width: self.norm.width() }
    }

    /// Writes the keys and values of contexts into the cache of every layer.
    pub(super) fn read_contexts(
        &self,
        contexts: &HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) {
        let (placed, memory, scratch) = cache.extend_packed(0..self.layers.len(), runs);
        for (layer, slots) in self.layers.iter().zip(memory) {
            let values = &contexts.values;
            layer.attention.fill_read(values, placed, slots, &self.reaches, scratch);
        }
    }

    /// Runs blocks and returns their rows after the last norm.
    pub(super) fn forward(
        &self,
        mut rows: HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> HostRows {
        let (placed, memory, scratch) = cache.extend_packed(0..self.layers.len(), runs);
        let (layers, reaches) = (&self.layers, &self.reaches);
        packed::forward_layers(layers, &mut rows.values, placed, memory, reaches, scratch);
        self.norm.forward(&mut rows.values);
        rows
    }

    /// Looks up the Markov head's vectors of tokens.
    pub(super) fn vectors_of(&self, tokens: &[u32]) -> HostRows {
        let table = self.markov_in.as_ref().expect("it has a Markov head");
        let mut values = Vec::with_capacity(tokens.len() * table.inputs);
        tokens.iter().for_each(|id| table.read_output(*id as usize, &mut values));
        HostRows { values, width: table.inputs }
    }

    /// Computes the confidence head's logits from rows and the vectors of the tokens before them.
    pub(super) fn confidence_logits(&self, normed: &Rows, vectors: Option<&Rows>) -> HostRows {
        let head = self.confidence.as_ref().expect("it has a confidence head");
        let rows = normed.place.host();
        let vectors = vectors.map(|rows| rows.place.host());
        let parts: Vec<&HostRows> = [&*rows].into_iter().chain(vectors.as_deref()).collect();
        let mut values = Vec::new();
        head.multiply(&HostRows::side_by_side(&parts), &mut values, &Threads::All);
        HostRows { values, width: 1 }
    }
}
