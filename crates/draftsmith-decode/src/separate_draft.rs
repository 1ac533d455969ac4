//! A separate, smaller model as the drafter, with or without an acceptance head and a calibration of what it says.
//!
//! A head of the paper's form speaks in the draft forward that reads the candidate, and its word comes to the host with
//! that forward's logits. One that looks ahead speaks once the candidate is drawn: a sync of its own, in place of the
//! draft forward that it may save.

#[cfg(test)]
mod tests;

use draftsmith_model::{AcceptanceHead, CausalLm, DrawnCandidate, Rows};
use draftsmith_theory::{Calibration, DraftSignals, HeadEstimate, SignalNeeds, SoftmaxSummary};

use crate::error::DecodeError;
use crate::round::{Drafted, Drafter, Target};
use crate::session::{ModelSession, check_logits, to_host};

/// A draft model that reads what the target reads and proposes one candidate a forward.
#[derive(Debug)]
pub struct SeparateDraft<'m> {
    session: ModelSession<'m>,
    head: Option<&'m AcceptanceHead>,
    calibration: Option<&'m Calibration>,
    /// The forwards whose candidates the head may yet be asked about and told more of than hidden states, longer and
    /// longer.
    forwards: Vec<Forward>,
    /// The last forward's final hidden state, for a head that looks ahead.
    hidden: Option<Rows>,
    /// The target's vocabulary, which rows are cut or padded to.
    vocab_size: usize,
}

/// A draft forward, as a head is told of it.
#[derive(Debug, Clone, Copy)]
struct Forward {
    /// Tokens read then.
    num_read: usize,
    /// Candidates of the round among them.
    num_candidates: usize,
    /// Of the draft's own logits, before they are cut to the target's vocabulary: as in training.
    softmax: SoftmaxSummary,
}

impl Forward {
    /// The candidate drawn from it.
    fn candidate(&self, log_prob: Option<f64>) -> DrawnCandidate {
        DrawnCandidate {
            entropy: self.softmax.entropy,
            top_prob: self.softmax.largest_prob,
            log_prob,
            position: self.num_candidates,
        }
    }
}

impl<'m> SeparateDraft<'m> {
    /// A drafter for sequences of up to `capacity` tokens under a target with `vocab_size`
    /// embeddings.
    ///
    /// The two vocabularies may differ in padding: a candidate that the target has no embedding
    /// for is never drawn, one that the draft has none for has chance 0.
    pub fn new(
        draft: &'m CausalLm,
        head: Option<&'m AcceptanceHead>,
        vocab_size: usize,
        capacity: usize,
    ) -> Self {
        let session = ModelSession::new(draft, capacity, "draft");
        Self { session, head, calibration: None, forwards: Vec::new(), hidden: None, vocab_size }
    }

    /// From now on the head's predictions are calibrated so, or told as they are. A calibration belongs to a way of
    /// decoding, so that a drafter for several changes it between them.
    pub fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        self.calibration = calibration;
    }

    /// Tokens as the draft can read them: one it has no embedding for becomes token 0, which
    /// costs agreement and nothing else.
    fn readable(&self, tokens: &[u32]) -> Vec<u32> {
        let own = self.draft_vocab_size() as u32;
        tokens.iter().map(|id| if *id < own { *id } else { 0 }).collect()
    }

    fn draft_vocab_size(&self) -> usize {
        self.session.model().config().vocab_size
    }

    /// The numbers that `head` is told of the candidate at position `at`, drawn from the forward that ended before it.
    fn scalars(&self, head: &AcceptanceHead, at: usize) -> Vec<f32> {
        if head.reads().is_hidden_alone() {
            return Vec::new();
        }
        let drawn_from = self.forwards.iter().rfind(|forward| forward.num_read == at);
        let drawn_from = drawn_from.expect("a candidate is drawn from a forward");
        head.reads().scalars(&drawn_from.candidate(None), self.draft_vocab_size()).collect()
    }

    /// What rules are told where the head says `logit`.
    fn acceptance_prob(&self, logit: f32) -> Result<f64, DecodeError> {
        let prob = 1.0 / (1.0 + (-f64::from(logit)).exp());
        if prob.is_nan() {
            let num_tokens = self.session.num_read();
            return Err(DecodeError::NotFinite { role: "acceptance head", num_tokens });
        }
        Ok(self.calibration.map_or(prob, |calibration| calibration.apply(prob)))
    }

    /// Keeps what `head` will be told of candidates drawn from a forward.
    fn remember(
        &mut self,
        head: &AcceptanceHead,
        num_candidates: usize,
        logits: &[f32],
        hidden: Rows,
    ) {
        if head.reads().is_hidden_alone() {
            return;
        }
        // What came before a round's first candidate is asked about no more, nor what a head that looks ahead has
        // spoken of.
        if num_candidates == 0 || head.reads().looks_ahead() {
            self.forwards.clear();
        }
        let num_read = self.session.num_read();
        self.forwards.push(Forward {
            num_read,
            num_candidates,
            softmax: SoftmaxSummary::of(logits),
        });
        self.hidden = head.reads().looks_ahead().then_some(hidden);
    }
}

impl<T> Drafter<T> for SeparateDraft<'_> {
    fn begin(&mut self, _target: &mut T, prompt: &[u32]) -> Result<(), DecodeError> {
        self.forwards.clear();
        // A draft begins as any model does: it reads the prompt but for its last token.
        self.session.begin(&self.readable(prompt))
    }

    fn draft(
        &mut self,
        _target: &mut T,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError> {
        let new = self.readable(&tokens[self.session.num_read()..]);
        let normed = self.session.read(&new, 1);
        let (role, num_tokens) = (self.session.role(), self.session.num_read());
        let logits = self.session.model().logits(&normed);
        let head = self.head.filter(|_| needs.acceptance_prob);
        // The last token read is the candidate before the one now drafted: its own hidden state,
        // hence the head's word on it.
        let speaks = |head: &&AcceptanceHead| num_candidates > 0 && !head.reads().looks_ahead();
        let (mut logits, acceptance_prob) = match head.filter(speaks) {
            Some(head) => {
                let scalars = self.scalars(head, num_tokens - 1);
                let acceptance = head.acceptance_logits(&normed, None, &scalars);
                let [logits, acceptance] = to_host([logits, acceptance], role)?;
                (logits, Some(HeadEstimate::OfRead(self.acceptance_prob(acceptance[0])?)))
            }
            None => {
                let [logits] = to_host([logits], role)?;
                (logits, None)
            }
        };
        check_logits(&logits, role, num_tokens)?;
        if let Some(head) = head {
            self.remember(head, num_candidates, &logits, normed);
        }
        logits.resize(self.vocab_size, f32::NEG_INFINITY);
        let signals = DraftSignals { acceptance_prob, ..needs.signals_of_logits(&logits) };
        Ok(Drafted { logits, signals, num_forwards: 1 })
    }

    /// # Panics
    /// If the last draft step did not ask for the head's word.
    fn assess(&mut self, logits: &[f32], candidate: u32) -> Result<Option<f64>, DecodeError> {
        let Some(head) = self.head.filter(|head| head.reads().looks_ahead()) else {
            return Ok(None);
        };
        let drawn_from = self.forwards.last().zip(self.hidden.as_ref());
        let (forward, hidden) = drawn_from.expect("the draft step was asked for the head's word");
        let log_prob = forward.softmax.log_prob(logits[candidate as usize]);
        let drawn = forward.candidate(Some(log_prob));
        let scalars: Vec<f32> = head.reads().scalars(&drawn, self.draft_vocab_size()).collect();
        let embedding = self.session.model().embed_ids(&self.readable(&[candidate]));
        let acceptance = head.acceptance_logits(hidden, Some(&embedding), &scalars);
        let [acceptance] = to_host([acceptance], self.session.role())?;
        self.acceptance_prob(acceptance[0]).map(Some)
    }

    fn roll_back(&mut self, len: usize) {
        self.session.truncate(len);
        self.forwards.retain(|forward| forward.num_read <= len);
    }

    fn context(&self) -> usize {
        self.session.capacity()
    }
}
