//! Networks that draft from their target's hidden states: what training asks of them, and what decoding asks of those
//! that draft step by step.

use std::fmt::Debug;
use std::ops::Range;

use burn::module::{Module, ModuleDisplay, Param};
use burn::nn::Linear;
use burn::tensor::{Device, FloatDType, Int, Tensor};

use crate::buckets::Lengths;
use crate::causal_lm::CausalLm;
use crate::decoder::stack::LayerStack;
use crate::draft_vocabulary::{DraftVocabulary, narrowed};
use crate::frozen::PackableLinear;
use crate::kv_cache::KvCache;
use crate::precision::copied;
use crate::rows::Rows;
use crate::spec::SessionFaults;

/// Initialises a drafter's layers with trainable copies of the target's last layers, and its norm
/// with the target's, where they were loaded and fit.
pub(crate) fn begun_from(stack: LayerStack, target: &CausalLm) -> LayerStack {
    let device = stack.device();
    let first = target.shape().num_layers.saturating_sub(stack.layers.len());
    let layers = stack.layers.into_iter().zip(first..);
    let layers = layers.map(|(layer, number)| match target.layer(number) {
        Some(theirs) => layer.begun_from(theirs, &device),
        None => layer,
    });
    let last_norm = target.last_norm();
    let norm = match last_norm.beta() {
        None => copied(last_norm, &device),
        Some(_) => stack.norm,
    };
    LayerStack { layers: layers.collect(), norm, reaches: stack.reaches }
}

/// Copies the target's LM head, for the tokens that a drafter may draft.
pub(crate) fn copied_head(
    target: &CausalLm,
    vocabulary: Option<&DraftVocabulary>,
    device: &Device,
) -> PackableLinear {
    let all = target.lm_head_weight();
    let weight = match vocabulary {
        Some(vocabulary) => narrowed(all, vocabulary),
        None => all,
    };
    copied(Linear { weight: Param::from_tensor(weight), bias: None }, device).into()
}

/// A network that drafts from its target's hidden states and can be trained.
pub trait StateNetwork: Module + ModuleDisplay + Sync + 'static {
    /// The name of its kind, for messages.
    const KIND: &'static str;

    /// Returns a copy that computes in `dtype`, for one training forward over whole sequences. On an autodiff device
    /// gradients reach this network's parameters, in the parameters' type.
    fn to_dtype(&self, dtype: FloatDType) -> Self;

    /// Looks up embeddings of whole sequences in the network's own table; `None` if it uses the target's.
    ///
    /// # Shapes
    /// - ids: `[batch, seq]`
    /// - output: `[batch, seq, hidden]`
    fn own_embedding(&self, ids: Tensor<2, Int>) -> Option<Tensor<3>> {
        let _ = ids;
        None
    }

    /// Returns the weights of the network's own LM head, over the tokens that it may draft; `None` if it uses the
    /// target's.
    ///
    /// # Shapes
    /// - output: `[hidden, draft tokens]`, or `[steps · hidden, draft tokens]` for an LM head of each step, one below
    ///   another
    fn own_head(&self) -> Option<Tensor<2>> {
        None
    }

    /// Returns further rows of the LM head, its own or the target's, for inputs that follow the hidden states in
    /// [`Self::unrolled`]; `None` if there are no such inputs.
    ///
    /// # Shapes
    /// - output: `[more, draft tokens]`
    fn more_head(&self) -> Option<Tensor<2>> {
        None
    }

    /// Computes the LM head's inputs in the steps of drafts that begin at some positions of whole sequences, as
    /// decoding does (training-time test; EAGLE-3, section 3.2).
    ///
    /// The output's rows are the positions at which drafts begin, one sequence after another, then padding if the
    /// lengths ask for it. Step k at a position belongs to the draft that began k positions before, so the first k rows
    /// of each sequence belong to no draft.
    ///
    /// # Shapes
    /// - output: `[rows, hidden + more]` for each step, normed
    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>>;
}

/// The inputs of the drafts of a batch of whole sequences.
#[derive(Debug, Clone)]
pub struct UnrolledInputs<'a> {
    /// The target's hidden states for each layer that the network reads: `[batch, seq, target_hidden]`.
    pub states: Vec<Tensor<3>>,
    /// The token after each position: `[batch, seq]`.
    pub next_ids: Tensor<2, Int>,
    /// The embeddings of these tokens, `[batch, seq, hidden]`, if the network reads them.
    pub embedded: Option<Tensor<3>>,
    /// The positions at which drafts begin, one range for each sequence.
    pub begun: &'a [Range<usize>],
    /// The number of steps of each draft.
    pub num_steps: usize,
    /// The kind of padding that the batch's tensors have.
    pub lengths: Lengths,
}

impl UnrolledInputs<'_> {
    /// Lists the rows of the sequences, laid end to end, that lie `step` positions before those at which
    /// drafts begin. Padding repeats the last row.
    ///
    /// # Shapes
    /// - output: `[rows]`
    pub fn begun_rows(&self, step: usize) -> Tensor<1, Int> {
        let [_, seq] = self.next_ids.dims();
        let rows = self.begun.iter().enumerate().flat_map(|(nth, positions)| {
            positions.clone().map(move |at| (nth * seq + at.saturating_sub(step)) as i32)
        });
        let mut rows: Vec<i32> = rows.collect();
        let last = rows.last().copied().unwrap_or(0);
        rows.resize(self.lengths.padded(rows.len()), last);
        Tensor::from_ints(rows.as_slice(), &self.next_ids.device())
    }
}

/// A network that drafts from its target's hidden states, with a KV cache of its own.
pub trait CachedNetwork: Debug + Sync {
    /// Returns the longest sequence, in tokens.
    fn context(&self) -> usize;

    /// Creates a cache for `num_slots` sequences of up to `capacity` tokens each, with room for a block after
    /// them if the network has blocks.
    fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache;

    /// Returns an output of zeros for the first position of a slot, which no position comes before.
    fn no_output(&self, target: &CausalLm, slot: usize) -> Rows;

    /// Returns what sessions do otherwise than trained.
    fn faults(&self) -> SessionFaults {
        SessionFaults::default()
    }

    /// Computes logits of normed rows over the target's vocabulary, by the network's own LM head or the target's. A block
    /// drafter's Markov head is not added.
    fn logits(&self, normed: &Rows, target: &CausalLm) -> Rows {
        target.logits(normed)
    }
}

/// A network that drafts from its target's hidden states step by step.
///
/// At each position it reads the embedding of the next token and a row of features. Where the target has been, the
/// features are made of its states; after that they are the network's own output at the position before. The output
/// gives the logits of the token after the next one.
pub trait StepNetwork: CachedNetwork {
    /// Looks up embeddings of the next tokens of sequences, each with its slot, in the network's own table or the
    /// target's.
    fn embed(&self, target: &CausalLm, runs: &[(usize, &[u32])]) -> Rows {
        target.embed_runs(runs)
    }

    /// Computes the features of some positions from the target's states there, in the order of the layers that the
    /// network reads.
    ///
    /// # Panics
    /// If the number of states is not the number of layers, or the states differ in rows.
    fn features(&self, target: &CausalLm, states: &[Rows]) -> Rows;

    /// Runs one step over new positions, which follow their sequences' positions in the cache, and returns their
    /// outputs. `embedded` are the embeddings of the tokens after them. `features` are made of the target's states, or
    /// are the outputs of the step before.
    ///
    /// # Panics
    /// If a slot is full, or its rows come in several runs.
    fn forward_cached(&self, embedded: Rows, features: Rows, cache: &mut KvCache) -> Rows;

    /// Norms outputs, which gives the LM head's inputs.
    fn normed(&self, outputs: Rows) -> Rows;
}
