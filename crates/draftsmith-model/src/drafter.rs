//! A frozen drafter: a draft model, a target's first layers with an adapter, or an EAGLE-3 drafter.
//!
//! Training runs it over whole sequences and decoding over a KV cache; acceptance heads read its
//! hidden states in both. It has two halves. The first turns tokens into *features*: a draft
//! model's embeddings, or the hidden states after the target's layers before the exit. The second
//! turns features into hidden states for the LM head: the draft model's layers, or the adapter, and
//! a final norm. While decoding, a self-draft leaves the first half to its target, which continues
//! from the same features in verification.
//!
//! An EAGLE-3 drafter does not have these halves: its hidden states depend on where a round began
//! ([`DrafterModel::round_states`]).

mod head_features;

use std::sync::OnceLock;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};

pub use self::head_features::CandidateRows;
use crate::adapter::Adapter;
use crate::buckets::Lengths;
use crate::causal_lm::CausalLm;
use crate::draft_vocabulary::NarrowHead;
use crate::eagle3::Eagle3;
use crate::kv_cache::KvCache;
use crate::rows::Rows;
use crate::state_network::{CachedNetwork, StepNetwork};
use crate::weights::WeightDtype;

/// A frozen drafter. Clones share weights.
#[derive(Module, Debug)]
pub struct DrafterModel {
    /// The draft model, or the target of a self-draft.
    model: CausalLm,
    exit: Option<Exit>,
    eagle3: Option<Eagle3Half>,
    /// The part of the LM head for the draft vocabulary; `None` if all tokens may be drafted.
    #[module(skip)]
    narrow_head: Option<NarrowHead>,
    #[module(skip)]
    embedding_gain: OnceLock<f32>,
}

/// The early exit of a self-draft: the number of the target's layers before it, and the adapter
/// that follows.
#[derive(Module, Debug)]
struct Exit {
    #[module(skip)]
    layer: usize,
    adapter: Adapter,
}

/// An EAGLE-3 drafter, and the hidden states of the target that it reads.
#[derive(Module, Debug)]
struct Eagle3Half {
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    #[module(skip)]
    layers: Vec<usize>,
    drafter: Eagle3,
}

impl From<&CausalLm> for DrafterModel {
    /// Uses a separate draft model as a drafter.
    fn from(draft: &CausalLm) -> Self {
        let (exit, eagle3, narrow_head) = (None, None, None);
        let embedding_gain = OnceLock::new();
        Self { model: draft.clone(), exit, eagle3, narrow_head, embedding_gain }
    }
}

impl DrafterModel {
    /// Builds a self-draft: `target`'s first `exit_layer` layers with an adapter. The adapter's
    /// output after its norm is the hidden state.
    pub fn self_draft(target: CausalLm, adapter: Adapter, exit_layer: usize) -> Self {
        let vocabulary = adapter.draft_vocabulary().cloned();
        let narrow_head = vocabulary.map(|vocabulary| NarrowHead::of(&target, vocabulary));
        let exit = Some(Exit { layer: exit_layer, adapter });
        Self { model: target, exit, eagle3: None, narrow_head, embedding_gain: OnceLock::new() }
    }

    /// Builds an EAGLE-3 drafter of the target's width. It reads the target's hidden states after
    /// each number of layers in `layers`.
    pub fn eagle3(target: CausalLm, drafter: Eagle3, layers: Vec<usize>) -> Self {
        Self { eagle3: Some(Eagle3Half { layers, drafter }), ..Self::from(&target) }
    }

    /// Returns whether the drafter needs the target's layers: it is a self-draft with an adapter,
    /// or an EAGLE-3 drafter.
    pub fn is_self_draft(&self) -> bool {
        self.exit.is_some() || self.drafts_by_round()
    }

    /// Returns whether hidden states depend on where a round began.
    pub fn drafts_by_round(&self) -> bool {
        self.eagle3.is_some()
    }

    /// Lists the layers of the target whose hidden states an EAGLE-3 drafter reads, each as the
    /// number of layers before the state; empty for other drafters.
    pub fn target_layers(&self) -> &[usize] {
        self.eagle3.as_ref().map_or(&[], |half| &half.layers)
    }

    /// Returns the number of logits.
    pub fn vocab_size(&self) -> usize {
        self.model.shape().vocab_size
    }

    /// Returns the width of hidden states and embeddings.
    pub fn hidden_size(&self) -> usize {
        self.model.shape().hidden_size
    }

    /// Returns the longest sequence that the drafter reads, in tokens.
    pub fn context(&self) -> usize {
        self.model.shape().context
    }

    /// Returns the device of the weights.
    pub fn device(&self) -> Device {
        self.model.device()
    }

    /// Returns the type in which the drafter computes.
    pub fn dtype(&self) -> WeightDtype {
        self.model.dtype()
    }

    /// Converts the drafter to compute in `dtype`.
    pub fn to_dtype(self, dtype: WeightDtype) -> Self {
        let of_exit = |exit: Exit| match dtype {
            WeightDtype::F32 => exit,
            other => Exit { adapter: exit.adapter.in_dtype(other.float_dtype()), ..exit },
        };
        let of_eagle3 = |half: Eagle3Half| match dtype {
            WeightDtype::F32 => half,
            other => Eagle3Half { drafter: half.drafter.in_dtype(other.float_dtype()), ..half },
        };
        let model = self.model.to_dtype(dtype);
        let narrow_head = self.narrow_head.map(|head| NarrowHead::of(&model, head.vocabulary));
        let (exit, eagle3) = (self.exit.map(of_exit), self.eagle3.map(of_eagle3));
        Self { model, exit, eagle3, narrow_head, ..self }
    }

    /// Returns the id if it has an embedding, or else another token's.
    fn readable(&self, id: u32) -> u32 {
        self.model.shape().readable(id)
    }

    /// Computes the hidden states for the LM head over whole sequences. Sequences are padded on the
    /// right to the longest one or to its bucket. The model is causal, so padding does not change
    /// earlier positions. A sequence may be empty.
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

    /// Looks up embeddings of tokens. These are a draft model's features, and the input of
    /// look-ahead heads. A self-draft uses its target's embeddings.
    pub fn embed_ids(&self, ids: &[u32]) -> Rows {
        let ids: Vec<u32> = ids.iter().map(|id| self.readable(*id)).collect();
        self.model.embed_ids(&ids)
    }

    /// Creates a cache for [`Self::features`], with `num_slots` sequences of up to `capacity`
    /// tokens each. `None` if the features are embeddings, which need no cache.
    pub fn new_feature_cache(&self, capacity: usize, num_slots: usize) -> Option<KvCache> {
        self.exit.as_ref().map(|_| self.model.new_cache(capacity, num_slots))
    }

    /// Computes the features of new tokens, which follow the tokens in `cache`.
    ///
    /// # Panics
    /// If a slot is full, or the cache belongs to another drafter.
    pub fn features(&self, ids: &[u32], cache: Option<&mut KvCache>) -> Rows {
        let embedded = self.embed_ids(ids);
        match (&self.exit, cache) {
            (None, None) => embedded,
            (Some(exit), Some(cache)) => self.model.forward_layers(0..exit.layer, embedded, cache),
            _ => panic!("a self-draft's features have a cache, and no others"),
        }
    }

    /// Creates a cache for the second half, for `num_slots` sequences of up to `capacity` tokens
    /// each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        match &self.exit {
            None => self.model.new_cache(capacity, num_slots),
            Some(exit) => exit.adapter.new_cache(capacity, num_slots),
        }
    }

    /// Runs the second half over the features of new tokens, which follow the tokens in `cache`.
    /// Returns hidden states for the LM head, for the last rows of each slot. `num_rows` gives the
    /// number of rows to return, slot by slot.
    ///
    /// # Panics
    /// If a slot is full.
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

    /// Writes the keys and values of new tokens, given their features, into the cache. Computes no
    /// hidden states.
    ///
    /// # Panics
    /// If a slot is full.
    pub fn fill_cache(&self, features: Rows, cache: &mut KvCache) {
        match &self.exit {
            None => self.model.fill_cache(0, features, cache),
            Some(exit) => exit.adapter.fill_cache(features, cache),
        }
    }

    /// Computes the hidden states for the LM head after each token of a text, then after each
    /// candidate of `rounds`. A round consists of the number of tokens before it and of its
    /// candidates. There is no hidden state after the first token; the result has zeros for it.
    /// `given` holds the target's hidden states at all tokens but the last one, if its layers do not
    /// run here: one vector for each of [`Self::target_layers`].
    ///
    /// # Panics
    /// If this is not an EAGLE-3 drafter, or a round begins before the first token, or neither the
    /// target's layers nor its states are here.
    pub fn round_states(
        &self,
        ids: &[u32],
        rounds: &[(usize, &[u32])],
        given: Option<Vec<Vec<f32>>>,
    ) -> Rows {
        let Eagle3Half { layers, drafter } = self.eagle3.as_ref().expect("an EAGLE-3 drafter");
        let ends = rounds.iter().map(|(start, candidates)| start + candidates.len());
        let capacity = ends.max().unwrap_or(0).max(ids.len());
        let states: Vec<Rows> = match given {
            Some(given) => {
                given.into_iter().map(|it| Rows::of_host(it, self.hidden_size())).collect()
            }
            None => {
                let mut cache = self.model.new_cache(capacity, 1);
                let (mut hidden, mut at) = (self.embed_ids(&ids[..ids.len() - 1]), 0);
                let layers = layers.iter().map(|layer| {
                    hidden = self.model.forward_layers(at..*layer, hidden.clone(), &mut cache);
                    at = *layer;
                    hidden.clone()
                });
                layers.collect()
            }
        };
        let mut cache = drafter.new_cache(capacity, 1);
        let embed = |ids: &[u32]| {
            let ids: Vec<u32> = ids.iter().map(|id| self.readable(*id)).collect();
            drafter.embed(&self.model, &[(0, &ids)])
        };
        let features = drafter.features(&self.model, &states);
        let along = drafter.forward_cached(embed(&ids[1..]), features, &mut cache);
        let nothing = || drafter.no_output(&self.model, 0);
        // Rounds go from the last to the first. A round overwrites only what follows its start in
        // the cache, so the prefixes of earlier rounds remain.
        let mut of_rounds: Vec<Rows> = Vec::new();
        for (start, candidates) in rounds.iter().rev() {
            cache.truncate(0, start - 1);
            let mut output = match start.checked_sub(2) {
                Some(before) => along.slice(before..before + 1),
                None => nothing(),
            };
            let states = candidates.iter().map(|id| {
                output = drafter.forward_cached(embed(&[*id]), output.clone(), &mut cache);
                output.clone()
            });
            of_rounds.push(Rows::cat(states.collect::<Vec<_>>()));
        }
        let all = [nothing(), along].into_iter().chain(of_rounds.into_iter().rev());
        drafter.normed(Rows::cat(all))
    }

    /// Computes logits, one row for each row of hidden states.
    pub fn logits(&self, normed: &Rows) -> Rows {
        if let Some(half) = &self.eagle3 {
            return half.drafter.logits(normed, &self.model);
        }
        match (&self.narrow_head, &self.exit) {
            (Some(head), _) => head.logits(normed),
            (None, None) => self.model.logits(normed),
            (None, Some(exit)) => exit.adapter.logits(normed, &self.model),
        }
    }
}

#[cfg(test)]
mod tests;
