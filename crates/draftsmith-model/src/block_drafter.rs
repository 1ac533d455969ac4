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
//! Embeddings and LM head are the target's, with its scale of embeddings and its soft cap of U. A
//! drafter of a part of the vocabulary has an LM head of its own.

mod confidence;
mod form;
#[cfg(test)]
mod tests;

use burn::nn::Linear;

use crate::causal_lm::CausalLm;
use crate::kv_cache::KvCache;
use crate::rows::Rows;
use crate::self_draft::config::DraftConfig;
use crate::self_draft::{DraftNetwork, part};
use crate::state_network::CachedNetwork;

pub use confidence::ConfidenceWeights;
#[cfg(test)]
pub(crate) use form::BlockKeys;
pub use form::{BlockForm, ConfidenceHead, copy_distance};

/// A drafter's shape and provenance: `config.json` of its directory. Its model has the drafter's
/// layers, and the target's width and vocabulary.
pub type BlockDrafterConfig = DraftConfig<BlockForm>;

/// A block drafter.
pub type BlockDrafter = DraftNetwork<BlockForm>;

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

impl BlockDrafter {
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
        let fused = part(&self.fc).of_rows(Rows::side_by_side(states));
        part(&self.input_norm).form().of_rows(fused)
    }

    /// Writes the keys and values of contexts, which follow their sequences' contexts in the cache.
    ///
    /// # Shapes
    /// - contexts: `[rows, hidden]`
    ///
    /// # Panics
    /// If a slot is full, or its rows come in several runs.
    pub fn read_contexts(&self, contexts: Rows, cache: &mut KvCache) {
        self.stack.form().fill_each(contexts, cache);
    }

    /// Runs a block in each of some slots, whose caches hold the contexts of all tokens before the
    /// anchor, in one forward. Returns the rows of the candidates, slot by slot, after the last norm.
    /// The cache keeps nothing of a block.
    ///
    /// # Shapes
    /// - output: `[candidates of all blocks, hidden]`. A bidirectional drafter computes at least
    ///   [`Self::num_candidates`] for a block, because its rows depend on their number.
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
        let shift = self.faults().position_shift;
        for ((slot, tokens), len) in runs.iter().zip(&lens).filter(|_| shift != 0) {
            cache.shift(*slot, *len, tokens.len(), shift);
        }
        let normed = self.stack.form().forward_normed(target.embed_runs(&runs), cache);
        for (block, len) in blocks.iter().zip(lens) {
            cache.truncate(block.slot, len);
        }
        normed.last_of_each(nums.into_iter())
    }

    /// Counts the rows of a block's candidates.
    fn num_rows_of(&self, block: &BlockStart) -> usize {
        let all = self.num_candidates();
        if self.config.is_causal { block.num_candidates } else { all.max(block.num_candidates) }
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
        Some(head.of_rows(Rows::side_by_side([normed].into_iter().chain(&vectors))))
    }

    /// Looks up the Markov head's vectors of tokens, one for each row of `rows`; `None` without a
    /// Markov head.
    fn vectors_of(&self, rows: &Rows, tokens: &[u32]) -> Option<Rows> {
        let [table, _] = self.markov.as_ref()?;
        assert_eq!(rows.num_rows(), tokens.len(), "a token before each row");
        let of = |table: &Linear| table.weight.val().transpose();
        Some(rows.with_place(table.looked_up(of, tokens.iter())))
    }
}
