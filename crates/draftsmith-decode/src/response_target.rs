//! A target on a server, known only from its recorded responses and the token probabilities that it
//! returned with them.
//!
//! It replays a response token by token, as recording requires. Each token of a greedy response has
//! probability 1. The distribution of a sampled token consists of the most probable tokens that the
//! server returned, with the remaining mass spread evenly over the others. Nothing is known after a
//! rejected candidate, so log p is NaN there.
//!
//! If the server also gave its hidden states along the responses, drafters that read them can be
//! recorded.

use std::ops::Range;

use draftsmith_model::Rows;
use draftsmith_theory::TopProbs;

use crate::error::Result;
use crate::target::{KeptStates, Logits, Target, Verification};

/// A recorded response of the server.
#[derive(Debug, Clone, Copy)]
pub struct KnownResponse<'a> {
    /// The token ids of the response.
    pub response: &'a [u32],
    /// The distribution that each token was drawn from; `None` for a greedy response.
    pub probs: Option<&'a [TopProbs]>,
}

/// A target's hidden states along a prompt and its response.
#[derive(Debug, Clone)]
pub struct KnownStates<'s> {
    /// The tokens that have states.
    pub ids: &'s [u32],
    /// For each number of layers, a state of each token.
    pub layers: Vec<(usize, Rows)>,
}

/// A target that replays recorded responses of a remote model.
#[derive(Debug)]
pub struct ResponseTarget<'a> {
    /// The hidden states along the responses; empty if they are not known.
    states: Vec<KnownStates<'a>>,
    /// The number of final tokens in each slot.
    standing: Vec<usize>,
    vocab_size: usize,
    context: usize,
    /// The responses of the sequences that have not begun, in reverse order.
    waiting: Vec<KnownResponse<'a>>,
    /// For each slot, the prompt length in tokens and the response; `None` before the first
    /// sequence.
    slots: Vec<Option<(usize, KnownResponse<'a>)>>,
}

impl<'a> ResponseTarget<'a> {
    /// Creates a target with a vocabulary of `vocab_size` tokens. Its sequences must begin in the
    /// order of `responses`.
    pub fn new(
        responses: impl IntoIterator<Item = KnownResponse<'a>>,
        vocab_size: usize,
        context: usize,
        num_slots: usize,
    ) -> Self {
        let mut waiting: Vec<KnownResponse<'a>> = responses.into_iter().collect();
        waiting.reverse();
        let (states, standing) = (Vec::new(), vec![0; num_slots]);
        Self { states, standing, vocab_size, context, waiting, slots: vec![None; num_slots] }
    }

    /// Adds the hidden states along the responses.
    #[must_use]
    pub fn with_states(self, states: Vec<KnownStates<'a>>) -> Self {
        Self { states, ..self }
    }

    /// Returns whether the hidden states along the responses are known.
    pub(crate) fn has_states(&self) -> bool {
        !self.states.is_empty()
    }

    /// Returns the rows of logits that follow texts, each in its slot.
    fn rows<'t>(&self, texts: impl ExactSizeIterator<Item = (usize, &'t [u32])>) -> Logits {
        let mut values = Vec::with_capacity(texts.len() * self.vocab_size);
        for (slot, tokens) in texts {
            let (num_prompt, known) = self.slots[slot].expect("the sequence began");
            let at = tokens.len() - num_prompt;
            let KnownResponse { response, probs } = known;
            debug_assert_eq!(tokens[num_prompt..], response[..at]);
            let certain = || TopProbs::certain(response[at]).logits(self.vocab_size);
            values.extend(probs.map_or_else(certain, |probs| probs[at].logits(self.vocab_size)));
        }
        Logits::new(values, self.vocab_size)
    }
}

impl KeptStates for ResponseTarget<'_> {
    fn num_standing(&self, slot: usize) -> usize {
        self.standing[slot]
    }

    /// Returns the states of a text that begins with the same tokens, which determine them.
    fn kept_states(
        &mut self,
        slot: usize,
        tokens: &[u32],
        from: usize,
        layers: &[usize],
    ) -> Vec<Rows> {
        let known = &tokens[..self.standing[slot] - 1];
        let text = self.states.iter().find(|text| text.ids.starts_with(known));
        let text = text.expect("the states along every response are known");
        let of_layer = |layer: &usize| {
            let found = text.layers.iter().find(|(number, _)| number == layer);
            let (_, states) = found.expect("the states after the drafter's layers are known");
            states.slice(from..known.len())
        };
        layers.iter().map(of_layer).collect()
    }
}

impl Target for ResponseTarget<'_> {
    fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// # Panics
    /// If more sequences begin than there are responses.
    fn begin(&mut self, slot: usize, prompt: &[u32]) -> Result<()> {
        let response = self.waiting.pop().expect("each sequence has an answer");
        self.slots[slot] = Some((prompt.len(), response));
        Ok(())
    }

    fn begin_round(&mut self, slot: usize, num_standing: usize) {
        self.standing[slot] = num_standing;
    }

    /// # Panics
    /// If a proposal is not empty. In debug builds also if the tokens differ from the response.
    fn verify(&mut self, batch: &[Verification<'_>]) -> Result<Logits> {
        assert!(batch.iter().all(|one| one.proposal.is_empty()), "only answers are known");
        Ok(self.rows(batch.iter().map(|one| (one.slot, one.tokens))))
    }

    fn logits_along(&mut self, slot: usize, text: &[u32], lens: Range<usize>) -> Result<Logits> {
        Ok(self.rows(lens.map(|len| (slot, &text[..len]))))
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        self.context
    }
}
