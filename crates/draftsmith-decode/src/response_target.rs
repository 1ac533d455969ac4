//! A target of which nothing is known but what it answered, and with what probabilities: where it is
//! served by others.
//!
//! It reads answers along, token by token, as recording does, and says what it drew each from. What
//! it would say behind other tokens nobody knows.

use std::ops::Range;

use draftsmith_theory::{Proposal, TopProbs};

use crate::error::DecodeError;
use crate::logits::Logits;
use crate::target::{Target, Verification};

/// An answer, as it is known.
#[derive(Debug, Clone, Copy)]
pub struct KnownResponse<'a> {
    /// Its tokens.
    pub response: &'a [u32],
    /// What each was drawn from; None where each was the most probable, for certain.
    pub probs: Option<&'a [TopProbs]>,
}

/// The target's side of answers that it gave elsewhere.
#[derive(Debug)]
pub struct ResponseTarget<'a> {
    vocab_size: usize,
    context: usize,
    /// The answers to sequences that are still to begin, the next one last.
    waiting: Vec<KnownResponse<'a>>,
    /// The length of the prompt and the answer of the sequence in each slot.
    slots: Vec<Option<(usize, KnownResponse<'a>)>>,
}

impl<'a> ResponseTarget<'a> {
    /// A target of `vocab_size` tokens, whose sequences begin in the order of `responses`.
    pub fn new(
        responses: impl IntoIterator<Item = KnownResponse<'a>>,
        vocab_size: usize,
        context: usize,
        num_slots: usize,
    ) -> Self {
        let mut waiting: Vec<KnownResponse<'a>> = responses.into_iter().collect();
        waiting.reverse();
        Self { vocab_size, context, waiting, slots: vec![None; num_slots] }
    }

    /// Appends the row after a sequence.
    fn push_row(&self, verification: &Verification<'_>, values: &mut Vec<f32>) {
        assert!(verification.proposal.is_empty(), "answers alone are known");
        let (num_prompt, known) = self.slots[verification.slot].expect("it began");
        let at = verification.tokens.len() - num_prompt;
        let KnownResponse { response, probs } = known;
        debug_assert_eq!(verification.tokens[num_prompt..], response[..at]);
        let certain = || TopProbs::certain(response[at]).logits(self.vocab_size);
        values.extend(probs.map_or_else(certain, |probs| probs[at].logits(self.vocab_size)));
    }
}

impl Target for ResponseTarget<'_> {
    fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// # Panics
    /// If more sequences begin than there are answers.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        let response = self.waiting.pop().expect("there is an answer to each sequence");
        self.slots[slot] = Some((prompt.len(), response));
        Ok(())
    }

    /// # Panics
    /// If anything is proposed, or a sequence is not its answer so far.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits, DecodeError> {
        let mut values = Vec::with_capacity(batch.len() * self.vocab_size);
        for verification in batch {
            self.push_row(verification, &mut values);
        }
        Ok(Logits::new(values, self.vocab_size))
    }

    fn logits_along(
        &mut self,
        slot: usize,
        text: &[u32],
        lens: Range<usize>,
    ) -> Result<Logits, DecodeError> {
        let nothing = &Proposal::default();
        let mut values = Vec::with_capacity(lens.len() * self.vocab_size);
        for len in lens {
            let one = Verification { slot, tokens: &text[..len], proposal: nothing };
            self.push_row(&one, &mut values);
        }
        Ok(Logits::new(values, self.vocab_size))
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        self.context
    }
}
