//! The verified model as the decoding loop sees it: proposals in, rows of logits on the host out.

use std::ops::Range;

use draftsmith_model::Rows;
use draftsmith_theory::Proposal;

use crate::error::DecodeError;
use crate::features::WantedFeatures;

/// Rows of logits over the vocabulary, in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
}

impl Logits {
    /// Wraps rows of `vocab_size` logits that are laid end to end.
    ///
    /// # Panics
    /// If the values do not make whole rows.
    pub fn new(values: Vec<f32>, vocab_size: usize) -> Self {
        assert!(values.len().is_multiple_of(vocab_size), "logits come in whole rows");
        Self { values, vocab_size }
    }

    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// Returns one row, of the vocabulary's length.
    pub fn row(&self, index: usize) -> &[f32] {
        self.of_rows(index..index + 1)
    }

    /// Returns a range of rows, laid end to end.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> &[f32] {
        &self.values[rows.start * self.vocab_size..rows.end * self.vocab_size]
    }

    /// Iterates over all rows in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size)
    }
}

/// The verified model. It reads one sequence in each of its slots.
pub trait Target {
    /// Returns the number of sequences that the target can read side by side.
    fn num_slots(&self) -> usize;

    /// Starts a sequence in a slot: forgets the previous one and reads `prompt[..-1]`.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError>;

    /// Goes on with a slot whose first `num_kept` tokens are those of a longer prompt: forgets the tokens after them.
    /// The prompt's other tokens are read with the first round.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn resume(&mut self, slot: usize, prompt: &[u32], num_kept: usize) -> Result<(), DecodeError> {
        let _ = prompt;
        self.commit(slot, num_kept, &[]);
        Ok(())
    }

    /// Begins a round of a slot after `num_standing` tokens, none of which can be rejected any more. Only the
    /// loop over rounds calls this. A drafter that reads this target's states asks the target which tokens
    /// stand, since inside another drafter it cannot tell them from candidates.
    fn begin_round(&mut self, slot: usize, num_standing: usize) {
        let _ = (slot, num_standing);
    }

    /// Reads sequences with their proposals, each in another slot, in one forward. Returns the logits
    /// after the last token before each proposal and after each proposed token, sequence by sequence.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError>;

    /// Starts a sequence whose whole text is known: `text`, with a prompt of `prompt_len` tokens. Like
    /// [`Self::begin`], but allows calls of [`Self::logits_along`].
    ///
    /// # Errors
    /// If the text does not fit or has unknown tokens.
    fn begin_along(
        &mut self,
        slot: usize,
        text: &[u32],
        prompt_len: usize,
    ) -> Result<(), DecodeError> {
        self.begin(slot, &text[..prompt_len])
    }

    /// Computes the logits after the first `n` tokens of a slot's text, for each `n` of `lens`. Afterwards the slot
    /// has read at most the first `lens.start` tokens.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn logits_along(
        &mut self,
        slot: usize,
        text: &[u32],
        lens: Range<usize>,
    ) -> Result<Logits, DecodeError> {
        let tokens = &text[..lens.end - 1];
        let proposal = &Proposal::certain_chain(&tokens[lens.start..]);
        let logits = self.verify(&[Verification { slot, tokens, proposal }])?;
        self.commit(slot, lens.start, &[]);
        Ok(logits)
    }

    /// Keeps the first `num_standing` tokens of a slot and the proposed nodes on `path`, and forgets
    /// everything else that was read.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// Returns the length of the longest sequence that a slot can hold, in tokens.
    fn context(&self) -> usize;
}

/// The layers of a target whose hidden states a drafter reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetLayers {
    /// The number of first layers that run ahead of the others, so that the drafter reads what comes out of
    /// them before its candidates are verified.
    pub exit: Option<usize>,
    /// The numbers of layers after which the hidden states of all tokens that were read are kept, in
    /// ascending order; 0 are the embeddings. A layer that is read twice occurs twice.
    pub kept: Vec<usize>,
}

impl TargetLayers {
    /// Selects the output of the first `layer` layers, which run ahead of the others, and no other states. `None`
    /// selects nothing.
    pub fn exit(layer: impl Into<Option<usize>>) -> Self {
        Self { exit: layer.into(), kept: Vec::new() }
    }

    /// Merges the layers that two drafters read. At most one of the two has an exit.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.exit = self.exit.or(other.exit);
        self.kept.extend(other.kept);
        self.kept.sort_unstable();
        self
    }
}

/// A target whose first layers can run ahead of the others, for a self-draft.
pub(crate) trait FirstLayers {
    /// Computes the wanted hidden states at the exit for all sequences in one forward. The target may drop states
    /// that it has returned.
    fn features(&mut self, wanted: &[WantedFeatures<'_>]) -> Rows;
}

/// A sequence to verify.
#[derive(Debug, Clone, Copy)]
pub struct Verification<'a> {
    /// The sequence's slot.
    pub slot: usize,
    /// The whole sequence, with the proposal's tokens at its end in the order of its nodes.
    pub tokens: &'a [u32],
    /// The proposal to verify.
    pub proposal: &'a Proposal,
}
