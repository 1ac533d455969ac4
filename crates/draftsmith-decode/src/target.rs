//! The target model's interface to the decoding loop. It reads proposals and returns rows of logits
//! in host memory.

use std::ops::Range;

use draftsmith_model::Rows;
use draftsmith_theory::Proposal;

use crate::error::Result;
use crate::features::WantedFeatures;

/// A matrix of logits in host memory, one row per position and one column per vocabulary token.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// Wraps row-major values with `vocab_size` logits per row.
    ///
    /// # Panics
    /// If the number of values is not a multiple of `vocab_size`.
    pub fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        assert!(values.len().is_multiple_of(vocab_size), "logits come in whole rows");
        Self { values, vocab_size }
    }

    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// Returns one row of `vocab_size` logits.
    pub fn row(&self, index: usize) -> &[f32] {
        self.of_rows(index..index + 1)
    }

    /// Returns a range of rows as one row-major slice.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> &[f32] {
        &self.values[rows.start * self.vocab_size..rows.end * self.vocab_size]
    }

    /// Iterates over all rows in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size)
    }
}

/// A target model, which verifies candidates. It holds one sequence in each of its slots.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Target {
    /// Returns the number of sequences that the target can hold concurrently.
    fn num_slots(&self) -> usize;

    /// Starts a sequence in a slot: forgets the previous sequence and reads the prompt except its
    /// last token.
    ///
    /// # Errors
    /// If the prompt does not fit or contains unknown tokens.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()>;

    /// Continues a slot's sequence with a longer prompt. The first `num_kept` tokens of the prompt
    /// are the slot's first tokens, and the target forgets what the slot has after them. It reads
    /// the prompt's other tokens but the last.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn resume(&mut self, slot: usize, prompt: &[u32], num_kept: usize) -> Result<()> {
        self.commit(slot, num_kept, &[]);
        Ok(())
    }

    /// Announces a round in a slot whose first `num_standing` tokens are final, that is, the prompt
    /// and accepted tokens. Loops over rounds call this, and drafters never do. A drafter that
    /// reads the target's hidden states asks the target for this number, because inside a composite
    /// drafter it cannot tell final tokens from candidates.
    fn begin_round(&mut self, slot: usize, num_standing: usize) {}

    /// Reads sequences with their proposals in one forward. Each sequence is in a different slot.
    /// Returns, sequence by sequence, one row of logits after the last token before the proposal
    /// and one after each proposed token.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits>;

    /// Starts a sequence whose tokens are all known in advance, and allows calls of
    /// [`Self::logits_along`]. `text` is the prompt of `prompt_len` tokens followed by the
    /// response. Otherwise it acts like [`Self::begin`].
    ///
    /// # Errors
    /// If the text does not fit or contains unknown tokens.
    fn begin_along(&mut self, slot: usize, text: &[u32], prompt_len: usize) -> Result<()> {
        self.begin(slot, &text[..prompt_len])
    }

    /// Computes the logits after the first `n` tokens of a slot's text, for each `n` in `lens`.
    /// Afterwards the slot holds at most the first `lens.start` tokens.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn logits_along(&mut self, slot: usize, text: &[u32], lens: Range<usize>) -> Result<Logits> {
        let tokens = &text[..lens.end - 1];
        let proposal = &Proposal::certain_chain(&tokens[lens.start..]);
        let logits = self.verify(&[Verification { slot, tokens, proposal }])?;
        self.commit(slot, lens.start, &[]);
        Ok(logits)
    }

    /// Keeps the first `num_standing` tokens of a slot and the proposal's nodes on `path` (their
    /// indices in the proposal), and forgets all other tokens.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// Returns the maximum length of a sequence in a slot, in tokens.
    fn context(&self) -> usize;
}

/// The target layers whose hidden states a drafter reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetLayers {
    /// The number of first layers that run ahead of the others, so that a self-draft can read their
    /// output before its candidates are verified; `None` if no layers run ahead.
    pub exit: Option<usize>,
    /// The hidden states to keep for all tokens. Each is given by the number of layers before it,
    /// and 0 means the embeddings. The list is in ascending order. A number occurs once for each
    /// drafter that reads it.
    pub kept: Vec<usize>,
}

impl TargetLayers {
    /// Selects only the output of the first `layer` layers, which run ahead of the others. `None`
    /// selects nothing.
    pub fn exit(layer: impl Into<Option<usize>>) -> Self {
        Self { exit: layer.into(), kept: Vec::new() }
    }

    /// Selects the hidden states after each number of layers, in any order, to keep for all tokens.
    pub fn kept(layers: &[usize]) -> Self {
        let mut kept = layers.to_vec();
        kept.sort_unstable();
        kept.dedup();
        Self { exit: None, kept }
    }

    /// Merges the layers that two drafters read. At most one of the two may have an exit.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.exit = self.exit.or(other.exit);
        self.kept.extend(other.kept);
        self.kept.sort_unstable();
        self
    }
}

/// A target whose first layers can run ahead of the others, as a self-draft requires.
pub(crate) trait FirstLayers {
    /// Computes the requested hidden states at the exit layer for all sequences in one forward. The
    /// target may drop states that it has returned.
    fn features(&mut self, wanted: &[WantedFeatures<'_>]) -> Rows;
}

/// A target that gives a drafter hidden states of the tokens that are final.
pub trait KeptStates {
    /// Returns the number of tokens in a slot that were final when its round began. All later
    /// tokens are candidates.
    fn num_standing(&self, slot: usize) -> usize;

    /// Returns a slot's hidden states after each number of layers in `layers`, for the final tokens
    /// from position `from` to the last but one.
    ///
    /// # Panics
    /// If there are no such tokens, their states were released, or the states of a layer are not
    /// kept.
    fn kept_states(
        &mut self,
        slot: usize,
        tokens: &[u32],
        from: usize,
        layers: &[usize],
    ) -> Vec<Rows>;
}

/// A sequence whose proposal the target verifies.
#[derive(Debug, Clone, Copy)]
pub struct Verification<'a> {
    /// The sequence's slot (batch index).
    pub slot: usize,
    /// All tokens of the sequence, with the proposal's tokens at its end in the order of its nodes.
    pub tokens: &'a [u32],
    /// The proposal to verify.
    pub proposal: &'a Proposal,
}
