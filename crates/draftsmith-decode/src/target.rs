//! The verified model, as the decoding loop sees it.

use std::ops::Range;

use draftsmith_model::Rows;
use draftsmith_theory::Proposal;

use crate::error::DecodeError;
use crate::features::WantedFeatures;
use crate::logits::Logits;

/// The verified model, reading one sequence in each of its slots.
pub trait Target {
    /// The number of sequences it can read side by side.
    fn num_slots(&self) -> usize;

    /// Starts a sequence in a slot: forgets the last one there and reads `prompt[..-1]`.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError>;

    /// Reads what it has not read of sequences with their proposals, each in another slot, in one
    /// forward. Returns the logits after the last token that stands and after each proposed one, a
    /// sequence's rows behind the other's.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError>;

    /// Starts a sequence in a slot of which all is known: `text`, whose first `prompt_len` tokens are the
    /// prompt. Like [`Self::begin`], but [`Self::logits_along`] may be asked for then.
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

    /// The logits after the first `n` tokens of a slot's text, for each `n` of `lens`. What has been
    /// read of the slot's sequence afterwards is, at most, its first `lens.start` tokens.
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

    /// Keeps of what it has read in a slot the first `num_standing` tokens and the proposed ones on
    /// `path`, and forgets the rest.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// The longest sequence a slot can hold.
    fn context(&self) -> usize;
}

/// A target whose first layers run ahead, for a self-draft behind them.
pub(crate) trait FirstLayers {
    /// The hidden states at the exit that are wanted of sequences, in one forward; once the drafter has
    /// them it may not ask for them again.
    fn features(&mut self, wanted: &[WantedFeatures<'_>]) -> Rows;
}

/// A sequence to verify.
#[derive(Debug, Clone, Copy)]
pub struct Verification<'a> {
    /// The slot it is read in.
    pub slot: usize,
    /// The whole sequence, with the proposal's tokens at its end in the order of its nodes.
    pub tokens: &'a [u32],
    /// What is proposed.
    pub proposal: &'a Proposal,
}
