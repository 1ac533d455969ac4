//! A frozen drafter: a draft model of its own, or a target's first layers with an adapter.
//!
//! Training runs it over whole sequences, decoding over a cache, and heads read what comes of it in
//! both. It has two halves. The first turns tokens into *features*: a draft model's embeddings, or
//! what leaves the target's layers before the exit. The second turns features into what the LM head
//! reads: the draft model's layers, or the adapter; either ends in a norm. A self-draft that decodes
//! leaves the first half to its target's own pass over the sequence, which goes on from there.

mod head_features;

use std::sync::OnceLock;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};

pub use self::head_features::CandidateRows;
use crate::adapter::Adapter;
use crate::buckets::Lengths;
use crate::causal_lm::CausalLm;
use crate::draft_vocabulary::NarrowHead;
use crate::kv_cache::KvCache;
use crate::rows::Rows;
use crate::weights::WeightDtype;

/// What drafts. A copy shares its weights.
#[derive(Module, Debug)]
pub struct DrafterModel {
    /// The draft model, or the target of a self-draft.
    model: CausalLm,
    exit: Option<Exit>,
    /// The rows of the LM head of a drafter with a draft vocabulary.
    #[module(skip)]
    narrow_head: Option<NarrowHead>,
    #[module(skip)]
    embedding_gain: OnceLock<f32>,
}

/// Where a self-draft leaves its target.
#[derive(Module, Debug)]
struct Exit {
    #[module(skip)]
    layer: usize,
    adapter: Adapter,
}

impl From<&CausalLm> for DrafterModel {
    /// A draft model of its own.
    fn from(draft: &CausalLm) -> Self {
        let embedding_gain = OnceLock::new();
        Self { model: draft.clone(), exit: None, narrow_head: None, embedding_gain }
    }
}

impl DrafterModel {
    /// A self-draft: `target`'s first `exit_layer` layers with an adapter, whose normed output is
    /// the hidden state.
    pub fn self_draft(target: CausalLm, adapter: Adapter, exit_layer: usize) -> Self {
        let vocabulary = adapter.draft_vocabulary().cloned();
        let narrow_head = vocabulary.map(|vocabulary| NarrowHead::of(&target, vocabulary));
        let exit = Some(Exit { layer: exit_layer, adapter });
        Self { model: target, exit, narrow_head, embedding_gain: OnceLock::new() }
    }

    /// Whether it is a target's first layers with an adapter.
    pub fn is_self_draft(&self) -> bool {
        self.exit.is_some()
    }

    /// The number of its logits.
    pub fn vocab_size(&self) -> usize {
        self.model.shape().vocab_size
    }

    /// The width of its hidden states and embeddings.
    pub fn hidden_size(&self) -> usize {
        self.model.shape().hidden_size
    }

    /// The longest sequence that it reads, in tokens.
    pub fn context(&self) -> usize {
        self.model.shape().context
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        self.model.device()
    }

    /// The type that it computes in.
    pub fn dtype(&self) -> WeightDtype {
        self.model.dtype()
    }

    /// The same in another type, in which it then computes.
    pub fn to_dtype(self, dtype: WeightDtype) -> Self {
        let of_exit = |exit: Exit| match dtype {
            WeightDtype::F32 => exit,
            other => Exit { adapter: exit.adapter.to_dtype(other.float_dtype()), ..exit },
        };
        let model = self.model.to_dtype(dtype);
        let narrow_head =
            self.narrow_head.map(|head| NarrowHead::of(&model, head.vocabulary().clone()));
        Self { model, exit: self.exit.map(of_exit), narrow_head, ..self }
    }

    /// A token as the drafter can read it: one that it has no embedding for becomes token 0, which
    /// costs agreement and nothing else.
    fn readable(&self, id: u32) -> u32 {
        if (id as usize) < self.vocab_size() { id } else { 0 }
    }

    /// What the LM head reads, over whole sequences, which are padded on the right to the longest,
    /// or to its bucket: the model is causal, so padding changes nothing to its left. An empty
    /// sequence is padding.
    ///
    /// # Shapes
    /// - output: `[sequences, longest, hidden]`
    ///
    /// # Panics
    /// If all sequences are empty.
    pub fn hidden_states(&self, sequences: &[&[u32]], lengths: Lengths) -> Tensor<3> {
        let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
        let longest = lengths.padded(longest);
        let mut ids: Vec<i32> = Vec::with_capacity(sequences.len() * longest);
        for (nth, sequence) in sequences.iter().enumerate() {
            ids.extend(sequence.iter().map(|id| self.readable(*id) as i32));
            ids.resize((nth + 1) * longest, 0);
        }
        let ids = TensorData::new(ids, [sequences.len(), longest]);
        let ids = Tensor::<2, Int>::from_data(ids, &self.device());
        match &self.exit {
            None => self.model.hidden_states(ids),
            Some(Exit { layer, adapter }) => adapter.forward(self.model.exit_states(ids, *layer)),
        }
    }

    /// Looks up the embeddings of tokens: a draft model's features, and what a head that looks ahead
    /// reads of candidates. A self-draft's are its target's.
    pub fn embed_ids(&self, ids: &[u32]) -> Rows {
        if ids.iter().all(|id| self.readable(*id) == *id) {
            return self.model.embed_ids(ids);
        }
        let ids: Vec<u32> = ids.iter().map(|id| self.readable(*id)).collect();
        self.model.embed_ids(&ids)
    }

    /// A cache of [`Self::features`] for `num_slots` sequences of up to `capacity` tokens each; none
    /// for a draft model, which needs none.
    pub fn new_feature_cache(&self, capacity: usize, num_slots: usize) -> Option<KvCache> {
        self.exit.as_ref().map(|_| self.model.new_cache(capacity, num_slots))
    }

    /// The first half over new tokens, which follow those that `cache` holds.
    ///
    /// # Panics
    /// If there is no room, or it is another drafter's cache.
    pub fn features(&self, ids: &[u32], cache: Option<&mut KvCache>) -> Rows {
        let embedded = self.embed_ids(ids);
        match (&self.exit, cache) {
            (None, None) => embedded,
            (Some(exit), Some(cache)) => self.model.forward_layers(0..exit.layer, embedded, cache),
            _ => panic!("a self-draft's features have a cache, and no others"),
        }
    }

    /// A cache of the second half for `num_slots` sequences of up to `capacity` tokens each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        match &self.exit {
            None => self.model.new_cache(capacity, num_slots),
            Some(exit) => exit.adapter.new_cache(capacity, num_slots),
        }
    }

    /// The second half over the features of new tokens, which follow those that `cache` holds: what
    /// the LM head reads of the last of them in each slot, so many as `num_rows` says of one after the
    /// other.
    ///
    /// # Panics
    /// If there is no room.
    pub fn forward_cached(
        &self,
        features: Rows,
        num_rows: impl Iterator<Item = usize> + Clone,
        cache: &mut KvCache,
    ) -> Rows {
        match &self.exit {
            None => {
                let num_layers = self.model.shape().num_layers;
                let hidden = self.model.forward_layers(0..num_layers, features, cache);
                self.model.normed(hidden.last_of_each(num_rows))
            }
            Some(exit) => exit.adapter.forward_cached(features, cache).last_of_each(num_rows),
        }
    }

    /// Reads the features of new tokens into the cache, for their keys and values alone.
    ///
    /// # Panics
    /// If there is no room.
    pub fn fill_cache(&self, features: Rows, cache: &mut KvCache) {
        match &self.exit {
            None => self.model.fill_cache(0, features, cache),
            Some(exit) => exit.adapter.fill_cache(features, cache),
        }
    }

    /// Logits of what the LM head reads, one row each.
    pub fn logits(&self, normed: &Rows) -> Rows {
        match (&self.narrow_head, &self.exit) {
            (Some(head), _) => head.logits(normed),
            (None, None) => self.model.logits(normed),
            (None, Some(exit)) => exit.adapter.logits(normed, &self.model),
        }
    }
}

#[cfg(test)]
mod tests;
