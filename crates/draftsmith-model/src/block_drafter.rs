//! Block drafters (DFlash, and DSpark with its Markov and confidence heads): a few layers that
//! propose all candidates of a round in one forward.
//!
//! The drafter reads the target's hidden states after some of its layers, fused to one *context*
//! for each token t:
//! ```text
//! c(t) = norm(fc · [h_1(t); …; h_F(t)])
//! ```
//! Contexts become keys and values of every draft layer. They pass through no layer themselves. The
//! rows of a *block* are tokens: the *anchor*, which is the newest token of the text, then mask
//! tokens, at the positions from the anchor's on. They attend to the contexts of all tokens before
//! the anchor and to the block. The LM head turns the rows into logits U. The logits of a candidate
//! also depend on the token before it:
//! ```text
//! logits_i = U_i + w2 · w1[x_{i-1}]        (Markov head, of any rank; x_0 is the anchor)
//! c_i = σ(w · [h_i; w1[x_{i-1}]] + b)      (confidence head: P(x_i is accepted))
//! ```
//! In the *anchor-first* layout, row i predicts the token after its position. In the *fill-in*
//! layout it predicts the token at its position, so the anchor's row predicts nothing.
//!
//! We write anchor-first drafters whose rows attend only to earlier rows of the block. Then the
//! candidates of a shorter block are a prefix of those of a longer one. Bidirectional drafters of
//! others always run a block of their whole size, so this holds for them too.
//!
//! Embeddings and LM head are the target's, except that a drafter of a part of the vocabulary has
//! an LM head of its own.

mod files;
mod packed_block;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::nn::{Initializer, Linear};
use burn::tensor::Device;
use serde_json::{Map, Value};

use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::layer::DecoderLayer;
use crate::decoder::norm::Norm;
use crate::decoder::source::{RandomSource, WeightSource};
use crate::decoder::stack::LayerStack;
use crate::draft_vocabulary::{DraftVocabulary, NarrowHead};
use crate::error::ModelError;
use crate::kv_cache::{CachePlace, KvCache};
use crate::rope::Reach;
use crate::rows::{DeviceRows, RowData, Rows};
use crate::spec::{LinearSpec, ModelShape};
use crate::weights::WeightDtype;
use packed_block::PackedBlock;

/// The names of the tensors in published drafters.
const FC: &str = "fc";
const CONTEXT_NORM: &str = "hidden_norm";
const NORM: &str = "norm";
const LAYERS: &str = "layers";
const LM_HEAD: &str = "lm_head";
const MARKOV_IN: &str = "markov_head.markov_w1";
const MARKOV_OUT: &str = "markov_head.markov_w2";
const CONFIDENCE: &str = "confidence_head.proj";

/// A drafter's shape and provenance: `config.json` of its directory.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockDrafterConfig {
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    /// The order is that of the inputs of `fc`.
    pub target_layers: Vec<usize>,
    /// The number of the target's layers, if known.
    pub num_target_layers: Option<usize>,
    /// A model with the drafter's layers, and the target's width and vocabulary.
    pub model: ModelConfig,
    /// The tokens that the drafter may draft; `None` for all.
    pub draft_vocabulary: Option<DraftVocabulary>,
    /// The greatest number of rows of a block.
    pub block_size: usize,
    /// The token in all rows but the anchor's.
    pub mask_token_id: u32,
    /// Whether row i predicts the token after its position, and not the token at its position.
    pub is_anchor_first: bool,
    /// Whether rows attend only to earlier rows of the block.
    pub is_causal: bool,
    /// The rank of the Markov head; 0 for none, as in DFlash.
    pub markov_rank: usize,
    /// The inputs of the confidence head.
    pub confidence: ConfidenceHead,
    /// The type of the weights in the drafter's file.
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the drafter was trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training, without the settings above.
    pub training: Map<String, Value>,
}

/// The confidence head of a block drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfidenceHead {
    /// No confidence head.
    Absent,
    /// A head that reads only the row of a candidate.
    OfRow,
    /// A head that reads the row of a candidate and the Markov head's vector of the token before it.
    OfRowAndToken,
}

/// The beginning of a block.
#[derive(Debug, Clone, Copy)]
pub struct BlockStart {
    /// The sequence's slot in the cache.
    pub slot: usize,
    /// The newest token of the text.
    pub anchor: u32,
    /// The number of candidates to compute, at least 1. A bidirectional drafter always computes all.
    pub num_candidates: usize,
}

/// A block drafter.
#[derive(Module, Debug)]
pub struct BlockDrafter {
    /// The projection of the target's hidden states, concatenated.
    fc: Linear,
    context_norm: Norm,
    /// The draft layers and the norm of their output.
    stack: LayerStack,
    /// The LM head, whose outputs are the tokens of the draft vocabulary. `None` to use the
    /// target's.
    lm_head: Option<Linear>,
    /// The Markov head: the vector of each token, `[rank, vocab]`, and the projection of vectors to
    /// logits of the draft vocabulary.
    markov: Option<[Linear; 2]>,
    confidence: Option<Linear>,
    /// The same weights in packed form, for decoding on the CPU.
    #[module(skip)]
    packed: Option<Arc<PackedBlock>>,
    /// The LM head together with the draft vocabulary. Set if the drafter has a head of its own and
    /// was loaded for decoding.
    #[module(skip)]
    narrow_head: Option<NarrowHead>,
    /// The Markov head's projection to logits. Set if the drafter was loaded for decoding.
    #[module(skip)]
    narrow_markov: Option<NarrowHead>,
    #[module(skip)]
    config: Arc<BlockDrafterConfig>,
}

impl BlockDrafterConfig {
    /// Returns the default of [`Self::target_layers`] for a draft of `num_layers` layers: the outputs
    /// of as many layers, spread evenly from the second to the last but two, as in DFlash.
    pub fn default_layers(num_layers: usize, num_target_layers: usize) -> Vec<usize> {
        let (first, last) = (1, num_target_layers.saturating_sub(3).max(1));
        if num_layers == 1 {
            return vec![(num_target_layers / 2 + 1).min(num_target_layers)];
        }
        let at = |nth: usize| (2 * nth * (last - first) + num_layers - 1) / (2 * (num_layers - 1));
        (0..num_layers).map(|nth| (first + at(nth) + 1).min(num_target_layers)).collect()
    }

    /// Configures an anchor-first, causal drafter of the target's width with `num_layers` Qwen 3
    /// layers, no Markov head and no confidence head.
    pub fn new(target: &ModelConfig, num_layers: usize, mask_token_id: u32) -> Self {
        let ModelConfig { shape, spec, .. } = target;
        let mut model =
            ModelConfig::qwen3(ModelShape { num_layers, ..shape.clone() }, spec.mlp.width);
        model.spec.norm.epsilon = spec.norm.epsilon;
        model.spec.rope.theta = spec.rope.theta;
        Self {
            target_layers: Self::default_layers(num_layers, shape.num_layers),
            num_target_layers: Some(shape.num_layers),
            model,
            draft_vocabulary: None,
            block_size: 7,
            mask_token_id,
            is_anchor_first: true,
            is_causal: true,
            markov_rank: 0,
            confidence: ConfidenceHead::Absent,
            dtype: WeightDtype::F32,
            target_hash: None,
            training: Map::new(),
        }
    }

    /// Returns the greatest number of candidates in a round.
    pub fn num_candidates(&self) -> usize {
        self.block_size - self.num_rows_before()
    }

    /// Counts the rows of a block that predict nothing.
    fn num_rows_before(&self) -> usize {
        usize::from(!self.is_anchor_first)
    }

    /// Counts the tokens that the drafter may draft.
    pub fn num_draft_tokens(&self) -> usize {
        let all = self.model.shape.vocab_size;
        self.draft_vocabulary.as_ref().map_or(all, |vocabulary| vocabulary.ids().len())
    }

    /// Counts the parameters of the drafter, with its own LM head if it has one.
    pub fn num_parameters(&self) -> usize {
        let ModelConfig { shape, spec, .. } = &self.model;
        let linears = [Some(self.fc()), self.own_head(), self.confidence()].into_iter().flatten();
        let linears = linears.chain(self.markov().into_iter().flatten());
        linears.map(|linear| linear.num_parameters()).sum::<usize>()
            + shape.num_layers * spec.layer(0).num_parameters(shape)
            + 2 * spec.norm.num_parameters(shape.hidden_size)
    }

    fn fc(&self) -> LinearSpec {
        let width = self.model.shape.hidden_size;
        LinearSpec::matrix(FC, self.target_layers.len() * width, width)
    }

    fn own_head(&self) -> Option<LinearSpec> {
        let (width, num_tokens) = (self.model.shape.hidden_size, self.num_draft_tokens());
        self.draft_vocabulary.as_ref().map(|_| LinearSpec::matrix(LM_HEAD, width, num_tokens))
    }

    fn markov(&self) -> Option<[LinearSpec; 2]> {
        let (rank, vocab_size) = (self.markov_rank, self.model.shape.vocab_size);
        let both = || {
            [
                LinearSpec::matrix(MARKOV_IN, rank, vocab_size),
                LinearSpec::matrix(MARKOV_OUT, rank, self.num_draft_tokens()),
            ]
        };
        (rank > 0).then(both)
    }

    fn confidence(&self) -> Option<LinearSpec> {
        let width = self.model.shape.hidden_size;
        let inputs = match self.confidence {
            ConfidenceHead::Absent => return None,
            ConfidenceHead::OfRow => width,
            ConfidenceHead::OfRowAndToken => width + self.markov_rank,
        };
        Some(LinearSpec { has_bias: true, ..LinearSpec::matrix(CONFIDENCE, inputs, 1) })
    }

    /// Checks that the drafter in `dir` fits a target.
    ///
    /// # Errors
    /// If the width or the vocabulary differs, the target lacks a layer that the drafter reads, or
    /// its context is longer.
    pub fn check_target(&self, dir: &Path, target: &ModelShape) -> Result<(), ModelError> {
        let own = &self.model.shape;
        let fail =
            |key, problem| Err(ModelError::Config { path: dir.join("config.json"), key, problem });
        for (key, found, expected) in [
            ("hidden_size", own.hidden_size, target.hidden_size),
            ("vocab_size", own.vocab_size, target.vocab_size),
        ] {
            if found != expected {
                let problem = format!(
                    "is {found}, but the target's is {expected}: the drafter was made for another target; hint: \
                     use a drafter that was trained for this target"
                );
                return fail(key, problem);
            }
        }
        if let Some(layer) = self.target_layers.iter().find(|layer| **layer > target.num_layers) {
            let problem = format!(
                "names the output of layer {}, counted from 0, but the target has {} layers",
                layer - 1,
                target.num_layers
            );
            return fail("target_layer_ids", problem);
        }
        if own.context < target.context {
            let problem = format!(
                "is {}, but the target reads {} tokens: raise it to that",
                own.context, target.context
            );
            return fail("max_position_embeddings", problem);
        }
        Ok(())
    }

    /// Initialises random weights with burn's random numbers: linear layers are uniform within
    /// ±1/√inputs (torch's default for `nn.Linear`), and norms are ones.
    pub fn init(&self, device: &Device) -> BlockDrafter {
        let matrix = |linear: &LinearSpec| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let uniform = Initializer::Uniform { min: -bound, max: bound };
            uniform.init([linear.inputs, linear.outputs], device)
        };
        let Ok(drafter) = self.build(&mut RandomSource { device, matrix });
        drafter
    }

    /// Builds the drafter with the weights of `source`.
    fn build<S: WeightSource>(&self, source: &mut S) -> Result<BlockDrafter, S::Error> {
        let ModelConfig { shape, spec, .. } = &self.model;
        let mut norm = |name| source.norm("", name, shape.hidden_size, &spec.norm);
        let (context_norm, last_norm) = (norm(CONTEXT_NORM)?, norm(NORM)?);
        let mut linear = |linear: LinearSpec| source.linear("", &linear);
        let fc = linear(self.fc())?;
        let lm_head = self.own_head().map(&mut linear).transpose()?;
        let markov = match self.markov() {
            Some([token_in, out]) => Some([linear(token_in)?, linear(out)?]),
            None => None,
        };
        let confidence = self.confidence().map(&mut linear).transpose()?;
        let layers = (0..shape.num_layers).map(|number| {
            DecoderLayer::build(&spec.layer(number), shape, &layer_name(number), source)
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let reaches = Reach::all_of(spec, shape);
        Ok(BlockDrafter {
            fc,
            context_norm,
            stack: LayerStack { layers, norm: last_norm, reaches },
            lm_head,
            markov,
            confidence,
            packed: None,
            narrow_head: None,
            narrow_markov: None,
            config: Arc::new(self.clone()),
        })
    }
}

/// Returns the prefix of a layer's tensors.
fn layer_name(number: usize) -> String {
    format!("{LAYERS}.{number}")
}

impl BlockDrafter {
    fn device(&self) -> Device {
        self.stack.norm.gamma().device()
    }

    /// Returns the longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.config.model.shape.context
    }

    /// Returns the greatest number of candidates in a round.
    pub fn num_candidates(&self) -> usize {
        self.config.num_candidates()
    }

    /// Returns the greatest number of rows of a block.
    pub fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Returns whether the drafter predicts the acceptance of its candidates.
    pub fn has_confidence(&self) -> bool {
        self.confidence.is_some()
    }

    /// Creates a cache for `num_slots` sequences, with room for contexts of up to `capacity` tokens
    /// each and for a block after them.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        let device = self.device();
        let place = match &self.packed {
            Some(_) => CachePlace::Host,
            None => CachePlace::Device(&device, self.fc.weight.val().dtype().into()),
        };
        KvCache::new(&self.config.model.shape, capacity + self.config.block_size, num_slots, place)
    }

    /// Computes the contexts of some positions from the target's states there, in the order of the
    /// layers that the drafter reads.
    ///
    /// # Shapes
    /// - states: `[rows, hidden]` for each layer
    /// - output: `[rows, hidden]`
    ///
    /// # Panics
    /// If the number of states is not the number of layers, or the states differ in rows.
    pub fn contexts(&self, states: &[Rows]) -> Rows {
        if let Some(packed) = &self.packed {
            return states[0].with_place(packed.contexts(states));
        }
        let read = DeviceRows::side_by_side(states, &self.device());
        states[0].with_place(read.map(|read| self.context_norm.forward(self.fc.forward(read))))
    }

    /// Writes the keys and values of contexts, which follow their sequences' contexts in the cache.
    ///
    /// # Panics
    /// If a slot is full, or its rows come in several runs.
    pub fn read_contexts(&self, contexts: Rows, cache: &mut KvCache) {
        let (place, slots) = contexts.into_parts();
        match &self.packed {
            Some(packed) => packed.read_contexts(&place.into_host(), slots.runs(), cache),
            None => {
                let rows = place.into_device(&self.device());
                self.stack.fill_each(rows, slots.runs(), cache);
            }
        }
    }

    /// Runs a block in each of some slots, whose caches hold the contexts of all tokens before the
    /// anchor, in one forward. Returns the rows of the candidates, slot by slot, after the last norm.
    /// The cache keeps nothing of a block.
    ///
    /// # Shapes
    /// - output: `[candidates of all blocks, hidden]`; [`Self::num_rows_of`] counts those of a block
    ///
    /// # Panics
    /// If a slot has two blocks, or more candidates than [`Self::num_candidates`] do not fit it.
    pub fn forward_blocks(
        &self,
        target: &CausalLm,
        blocks: &[BlockStart],
        cache: &mut KvCache,
    ) -> Rows {
        let num_before = self.config.num_rows_before();
        let nums: Vec<usize> = blocks.iter().map(|block| self.num_rows_of(block)).collect();
        let tokens: Vec<Vec<u32>> = blocks
            .iter()
            .zip(&nums)
            .map(|(block, num_rows)| {
                let mut tokens = vec![self.config.mask_token_id; num_before + num_rows];
                tokens[0] = block.anchor;
                tokens
            })
            .collect();
        let runs: Vec<(usize, &[u32])> =
            blocks.iter().zip(&tokens).map(|(block, tokens)| (block.slot, &**tokens)).collect();
        let lens = blocks.iter().map(|block| cache.len(block.slot, 0)).collect::<Vec<usize>>();
        if !self.config.is_causal {
            for ((slot, tokens), len) in runs.iter().zip(&lens) {
                cache.begin_block(*slot, *len, tokens.len());
            }
        }
        let (place, slots) = target.embed_runs(&runs).into_parts();
        let normed = match &self.packed {
            Some(packed) => RowData::from(packed.forward(place.into_host(), slots.runs(), cache)),
            None => {
                let rows = place.into_device(&self.device());
                let all = 0..self.stack.layers.len();
                let rows = self.stack.forward_cached(all, rows, slots.runs(), cache);
                rows.map(|rows| self.stack.norm.forward(rows)).into()
            }
        };
        for (block, len) in blocks.iter().zip(lens) {
            cache.truncate(block.slot, len);
        }
        slots.rows(normed).last_of_each(nums.into_iter())
    }

    /// Counts the rows of a block's candidates. A bidirectional drafter computes all, because its
    /// rows depend on their number.
    pub fn num_rows_of(&self, block: &BlockStart) -> usize {
        let all = self.num_candidates();
        if self.config.is_causal { block.num_candidates } else { all.max(block.num_candidates) }
    }

    /// Computes the logits U of candidates over the target's vocabulary, without the Markov head.
    ///
    /// # Shapes
    /// - normed: `[rows, hidden]`
    /// - output: `[rows, vocab]`
    pub fn logits(&self, normed: &Rows, target: &CausalLm) -> Rows {
        match &self.narrow_head {
            Some(head) => head.logits(normed),
            None => target.logits(normed),
        }
    }

    /// Adds the Markov head's part to the logits of candidates, given the token before each.
    ///
    /// # Shapes
    /// - logits, output: `[rows, vocab]`
    ///
    /// # Panics
    /// If a token is not in the vocabulary, or the drafter was not loaded for decoding.
    pub fn after_tokens(&self, logits: Rows, tokens: &[u32]) -> Rows {
        let Some(vectors) = self.vectors_of(&logits, tokens) else { return logits };
        let head = self.narrow_markov.as_ref().expect("it was loaded for decoding");
        logits.plus(&head.logits(&vectors))
    }

    /// Computes the logits of the probabilities that candidates will be accepted, before they are
    /// drawn, given the token before each; `None` without a confidence head.
    ///
    /// # Shapes
    /// - normed: `[rows, hidden]`
    /// - output: `[rows, 1]`
    pub fn confidence_logits(&self, normed: &Rows, tokens: &[u32]) -> Option<Rows> {
        let head = self.confidence.as_ref()?;
        let reads_token = self.config.confidence == ConfidenceHead::OfRowAndToken;
        let vectors = reads_token.then(|| self.vectors_of(normed, tokens)).flatten();
        if let Some(packed) = &self.packed {
            return Some(normed.with_place(packed.confidence_logits(normed, vectors.as_ref())));
        }
        let read = DeviceRows::side_by_side([normed].into_iter().chain(&vectors), &self.device());
        Some(normed.with_place(read.map(|read| head.forward(read))))
    }

    /// Looks up the Markov head's vectors of tokens, one for each row of `rows`; `None` without a
    /// Markov head.
    fn vectors_of(&self, rows: &Rows, tokens: &[u32]) -> Option<Rows> {
        let [table, _] = self.markov.as_ref()?;
        assert_eq!(rows.num_rows(), tokens.len(), "a token before each row");
        if let Some(packed) = &self.packed {
            return Some(rows.with_place(packed.vectors_of(tokens)));
        }
        let table = table.weight.val().transpose();
        Some(rows.with_place(DeviceRows::looked_up(table, tokens.iter())))
    }

    /// Combines the drafter's own matrices that give logits with the tokens that it may draft.
    fn with_narrow_heads(mut self) -> Self {
        let config = &self.config;
        let vocab_size = config.model.shape.vocab_size;
        let all = || DraftVocabulary::new((0..vocab_size as u32).collect::<Vec<u32>>());
        let vocabulary = config.draft_vocabulary.clone().unwrap_or_else(all);
        let of = |packed: Option<_>, linear: Option<&Linear>| match (packed, linear) {
            (Some(packed), _) => {
                Some(NarrowHead::of_packed(packed, vocabulary.clone(), vocab_size))
            }
            (None, Some(linear)) => {
                let weight = linear.weight.val();
                Some(NarrowHead::of_tensor(weight, vocabulary.clone(), vocab_size))
            }
            (None, None) => None,
        };
        let packed = self.packed.as_deref();
        let narrow_head =
            of(packed.and_then(|packed| packed.lm_head.clone()), self.lm_head.as_ref());
        let out = self.markov.as_ref().map(|[_, out]| out);
        let narrow_markov = of(packed.and_then(|packed| packed.markov_out.clone()), out);
        (self.narrow_head, self.narrow_markov) = (narrow_head, narrow_markov);
        self
    }
}
