//! An EAGLE-3 drafter with packed weights, for decoding on the CPU.

use std::sync::Arc;

use super::{EMBEDDING, EMBEDDING_NORM, Eagle3Config, LAYER, NORM};
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
pub(super) struct PackedEagle3 {
    fc: PackedWeights,
    embedding_norm: PackedNorm,
    layer: PackedLayer,
    norm: PackedNorm,
    pub(super) lm_head: Option<Arc<PackedWeights>>,
    /// The token embeddings, packed as a matrix whose outputs are tokens. `None` to use the
    /// target's.
    embedding: Option<PackedWeights>,
    norm_before_residual: bool,
    reaches: Vec<Reach>,
}

impl PackedEagle3 {
    /// Packs a checkpoint's tensors in their storage format.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(super) fn read(
        config: &Eagle3Config,
        reader: &mut WeightReader,
    ) -> Result<Self, ModelError> {
        let ModelConfig { shape, spec, .. } = &config.model;
        let mut packing = Packing { reader };
        let head = config.own_head().map(|head| packing.linears("", &[head])).transpose()?;
        let table = LinearSpec::lm_head(EMBEDDING, shape);
        let embedding = config.has_embedding.then(|| packing.linears("", &[table])).transpose()?;
        Ok(Self {
            fc: packing.linears("", &[config.fc()])?,
            embedding_norm: packing.norm("", EMBEDDING_NORM, shape.hidden_size, &spec.norm)?,
            layer: packing.layer(&config.layer(), shape, LAYER)?,
            norm: packing.norm("", NORM, shape.hidden_size, &spec.norm)?,
            lm_head: head.map(Arc::new),
            embedding,
            norm_before_residual: config.norm_before_residual,
            reaches: Reach::all_of(spec, shape),
        })
    }

    /// Looks up embeddings of tokens; `None` if the drafter has no table of its own.
    pub(super) fn embed<'a>(&self, ids: impl Iterator<Item = &'a u32>) -> Option<HostRows> {
        let (table, width) = (self.embedding.as_ref()?, self.norm.width());
        let mut values = Vec::new();
        ids.for_each(|id| table.read_output(*id as usize, &mut values));
        Some(HostRows { values, width })
    }

    /// Computes g of some positions from the target's hidden states there.
    pub(super) fn features(&self, states: &[Rows]) -> HostRows {
        let states: Vec<_> = states.iter().map(|rows| rows.place.host()).collect();
        let parts: Vec<&HostRows> = states.iter().map(|rows| &**rows).collect();
        let mut values = Vec::new();
        self.fc.multiply(&HostRows::side_by_side(&parts), &mut values, &Threads::All);
        HostRows { values, width: self.norm.width() }
    }

    /// Runs one step over new positions of the slots in `runs`, and returns the outputs o.
    pub(super) fn forward(
        &self,
        mut embedded: HostRows,
        features: HostRows,
        runs: impl Iterator<Item = Run>,
        cache: &mut KvCache,
    ) -> HostRows {
        let width = self.norm.width();
        self.embedding_norm.forward(&mut embedded.values);
        let mut normed = features.clone();
        self.layer.attention.norm.forward(&mut normed.values);
        let read = HostRows::side_by_side(&[&embedded, &normed]);
        let mut x = if self.norm_before_residual { normed.values } else { features.values };
        let (placed, mut memory, scratch) = cache.extend_packed(0..1, runs);
        let slots = memory.next().expect("its cache has a layer");
        packed::forward_reading(
            &self.layer,
            (&read, &mut x),
            placed,
            slots,
            &self.reaches,
            scratch,
        );
        HostRows { values: x, width }
    }

    pub(super) fn normed(&self, mut outputs: HostRows) -> HostRows {
        self.norm.forward(&mut outputs.values);
        outputs
    }
}
