//! The state of one sequence while it is decoded: a state machine that the decoding loop advances.
//!
//! A round consists of a draft phase, a target forward and a commit. A sequence alternates between
//! needing a draft and needing the target until it is finished. The loop runs the models for one or
//! many sequences at once, and measures the times. Each sequence has its own random draws, stop
//! rule and limits, so its output does not depend on the other sequences of the batch.
//!
//! Models are used only through the traits [`Target`] and [`Drafter`]. Probability tables implement
//! these too, so the tests in `exactness.rs` can enumerate every outcome of this code. The slots of
//! a target or drafter share only weights.

use std::sync::Arc;
use std::time::{Duration, Instant};

use draftsmith_theory::{
    Commit, Decoding, DraftLimits, Draws, Proposal, Round, RoundEnd, StopRule, TextEnd,
    TokenChoice, Trace, argmax, verify_greedy, verify_sampled,
};

use crate::drafter::{DraftRound, Drafter};
use crate::error::{DecodeError, Result};
use crate::target::{Logits, Target, Verification};

/// The conditions that end a generation.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The maximum number of new tokens.
    pub max_new_tokens: usize,
    /// The end-of-sequence token ids. A response includes the one that ends it.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings, if any. The response ends after the token that completes one, and includes
    /// that token.
    pub text_end: Option<Arc<dyn TextEnd + Send + Sync>>,
}

impl Limits {
    /// Creates limits without stop strings.
    pub const fn new(max_new_tokens: usize, eos_token_ids: Vec<u32>) -> Self {
        Self { max_new_tokens, eos_token_ids, text_end: None }
    }

    /// Returns the limits of a draft phase of at most `room` candidates.
    pub(crate) fn of_drafts(&self, room: usize) -> DraftLimits<'_> {
        let text_end = self.text_end.as_deref().map(|end| end as &dyn TextEnd);
        DraftLimits { room, eos_token_ids: &self.eos_token_ids, text_end }
    }
}

/// The reason why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token was generated.
    Eos,
    /// A stop string was completed.
    StopString,
    /// The token limit or the end of the context was reached.
    Length,
    /// The observer stopped the generation.
    Stopped,
}

/// The result of a generation: its new tokens, and the rounds that produced them.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The new tokens, including an end-of-sequence token or the token that completes a stop
    /// string.
    pub token_ids: Vec<u32>,
    /// The rounds with their counts and times.
    pub trace: Trace,
    /// The reason why the generation ended.
    pub finish: Finish,
}

/// The result of one round, as passed to the observer.
#[derive(Debug, Clone, Copy)]
pub struct RoundTokens<'a> {
    /// The tokens that the round added: accepted candidates, then the target's own token. The last
    /// ones are missing if the response ended earlier.
    pub kept: &'a [u32],
    /// The number of candidates that were drafted.
    pub num_drafted: usize,
    /// The number of accepted candidates, not counting any after the end of the response.
    pub num_accepted: usize,
    /// The target's logits from which each kept token was chosen, before any repetition penalty, as
    /// `[kept, vocabulary]` in row-major order. Empty if the accepted candidates were not the first
    /// nodes of the proposal, which is possible only for trees.
    pub logits: &'a [f32],
}

/// A request to decode one sequence.
pub struct Request<'a> {
    /// The prompt's token ids, at least one.
    pub prompt: &'a [u32],
    /// The choice of tokens: greedy or sampled, and any repetition penalty.
    pub decoding: Decoding,
    /// The conditions that end the generation.
    pub limits: &'a Limits,
    /// The stop rule that ends draft phases; `None` for plain decoding.
    pub rule: Option<&'a mut dyn StopRule>,
    /// The source of the sequence's random draws.
    pub draws: &'a mut dyn Draws,
}

/// The next thing that a sequence needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// A proposal from the drafter, for [`Sequence::draft_round`].
    NeedsDraft,
    /// A target forward over [`Sequence::verification`], then [`Sequence::commit`].
    NeedsTarget,
    /// Nothing, because the generation has ended.
    Finished(Finish),
}

/// The state of one sequence, which occupies the same slot in the target and in the drafter.
pub(crate) struct Sequence<'a> {
    pub(crate) slot: usize,
    /// The prompt, then the new tokens, then between draft and commit the proposal's tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    max_len: usize,
    decoding: Decoding,
    limits: &'a Limits,
    rule: Option<&'a mut dyn StopRule>,
    draws: &'a mut dyn Draws,
    proposal: Proposal,
    /// The number of tokens kept in the last round.
    num_kept: usize,
    /// Whether the candidates accepted in the last round were the first nodes of its proposal, as
    /// they always are in a chain.
    are_first: bool,
    trace: Trace,
    /// The next thing that the sequence needs.
    pub(crate) stage: Stage,
}

impl<'a> Sequence<'a> {
    /// Starts a sequence in a slot. The target and the drafter read the prompt except its last
    /// token.
    ///
    /// # Errors
    /// If the prompt is empty or does not fit, or a model fails.
    pub(crate) fn begin<T: Target, D: Drafter<T> + ?Sized>(
        request: Request<'a>,
        (slot, num_kept): (usize, usize),
        target: &mut T,
        drafter: &mut D,
    ) -> Result<Self> {
        let begun = Instant::now();
        let Request { prompt, decoding, limits, mut rule, draws } = request;
        if prompt.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        if num_kept > 0 {
            target.resume(slot, prompt, num_kept)?;
            drafter.commit(slot, num_kept, &[]);
        } else {
            target.begin(slot, prompt)?;
            drafter.begin(target, slot, prompt)?;
        }
        if let Some(rule) = &mut rule {
            rule.begin_sequence();
        }
        // The context may be filled completely, because the last token is never read.
        let context = target.context().min(drafter.context());
        let mut sequence = Self {
            slot,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            max_len: prompt.len().saturating_add(limits.max_new_tokens).min(context),
            decoding,
            limits,
            rule,
            draws,
            proposal: Proposal::default(),
            num_kept: 0,
            are_first: true,
            trace: Trace::default(),
            stage: Stage::Finished(Finish::Length),
        };
        if sequence.num_remaining() > 0 {
            sequence.stage = sequence.first_stage();
        }
        sequence.trace.prefill_time = begun.elapsed();
        Ok(sequence)
    }

    /// Returns the first stage of a round.
    fn first_stage(&self) -> Stage {
        if self.rule.is_some() { Stage::NeedsDraft } else { Stage::NeedsTarget }
    }

    /// Returns the number of tokens that the limits still allow.
    fn num_remaining(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len())
    }

    /// Begins a round and returns it for the drafter to fill. Its `room` leaves space for the
    /// target's own token. The sequence then needs the target.
    ///
    /// # Panics
    /// If the sequence's stage is not [`Stage::NeedsDraft`].
    pub(crate) fn draft_round<T: Target>(&mut self, target: &mut T) -> DraftRound<'_> {
        assert_eq!(self.stage, Stage::NeedsDraft);
        target.begin_round(self.slot, self.tokens.len());
        self.stage = Stage::NeedsTarget;
        let room = self.num_remaining() - 1;
        DraftRound {
            slot: self.slot,
            tokens: &mut self.tokens,
            proposal: &mut self.proposal,
            rule: &mut **self.rule.as_mut().expect("a sequence that drafts has a stop rule"),
            limits: self.limits.of_drafts(room),
            decoding: &self.decoding,
            draws: &mut *self.draws,
        }
    }

    /// Returns the tokens and the proposal for the target to verify.
    pub(crate) fn verification(&self) -> Verification<'_> {
        Verification { slot: self.slot, tokens: &self.tokens, proposal: &self.proposal }
    }

    /// Appends the candidates that the target accepts and the target's own token, up to the end of
    /// the response or the token limit. The target and the drafter forget the rejected candidates.
    /// This sequence's rows of `logits` begin at `first_row`.
    ///
    /// # Panics
    /// If the sequence's stage is not [`Stage::NeedsTarget`].
    pub(crate) fn commit<T: Target, D: Drafter<T> + ?Sized>(
        &mut self,
        target: &mut T,
        drafter: &mut D,
        logits: &Logits,
        first_row: usize,
    ) {
        assert_eq!(self.stage, Stage::NeedsTarget);
        let num_standing = self.tokens.len() - self.proposal.len();
        let (standing, proposal) = (&self.tokens[..num_standing], &self.proposal);
        // Row 0 follows the last token before the proposal, and row i + 1 follows node i.
        let row = |at: usize| {
            let path = proposal.path_to(at.checked_sub(1)).map(|node| node.token_id);
            let before = standing.iter().copied().chain(path);
            self.decoding.penalised(logits.row(first_row + at), before)
        };
        let Commit { path, next_token } = match self.decoding.choice {
            TokenChoice::Greedy => verify_greedy(proposal, |at| argmax(&row(at))),
            TokenChoice::Sampled(sampling) => {
                let probs_after = |at| sampling.probs(&row(at));
                verify_sampled(proposal, probs_after, &mut *self.draws)
            }
        };
        self.tokens.truncate(num_standing);
        self.tokens.extend(path.iter().map(|node| self.proposal.nodes()[*node].token_id));
        self.tokens.push(next_token);
        let round = Round {
            num_drafted: self.proposal.len(),
            depth: self.proposal.depth(),
            forwards: self.proposal.forwards,
            num_accepted: path.len(),
            ..Round::default()
        };
        self.are_first = path.iter().enumerate().all(|(at, node)| at == *node);
        self.proposal.clear();
        self.keep(num_standing, round);
        // Neither model has read the sequence's last token. It is the first token of the next
        // forward.
        target.commit(self.slot, num_standing, &path);
        drafter.commit(self.slot, num_standing, &path);
    }

    /// Cuts a round's tokens at the end of the response, and reports the round to the stop rule.
    /// The round's tokens follow the first `num_standing` tokens.
    fn keep(&mut self, num_standing: usize, mut round: Round) {
        let limits = self.limits.of_drafts(0);
        let is_end = |len: &usize| limits.is_end(&self.tokens[..*len]);
        let end = (num_standing + 1..=self.tokens.len()).find(is_end);
        let upto_end = end.map(|len| len - num_standing);
        let num_yielded = upto_end.unwrap_or(self.tokens.len() - num_standing);
        self.num_kept = num_yielded.min(self.max_len - num_standing);
        self.tokens.truncate(num_standing + self.num_kept);
        self.trace.num_tokens += self.num_kept;
        // Copied candidates and the side branches of a tree may continue past the end of the
        // response.
        round.num_accepted = round.num_accepted.min(num_yielded);
        self.trace.rounds.push(round);
        if let Some(rule) = &mut self.rule {
            rule.end_round(RoundEnd { num_accepted: round.num_accepted, num_kept: self.num_kept });
        }
        let is_eos = |id: &u32| self.limits.eos_token_ids.contains(id);
        self.stage = if upto_end == Some(self.num_kept) {
            let by_token = self.tokens.last().is_some_and(is_eos);
            Stage::Finished(if by_token { Finish::Eos } else { Finish::StopString })
        } else if self.num_remaining() == 0 {
            Stage::Finished(Finish::Length)
        } else {
            self.first_stage()
        };
    }

    /// Returns the result of the last round, or an empty result before the first round. The round's
    /// rows of the target's logits begin at `first_row`.
    pub(crate) fn last_round<'l>(
        &'l self,
        logits: &'l Logits,
        first_row: usize,
    ) -> RoundTokens<'l> {
        let round = self.trace.rounds.last().copied().unwrap_or_default();
        let num_rows = if self.are_first { self.num_kept } else { 0 };
        RoundTokens {
            kept: &self.tokens[self.tokens.len() - self.num_kept..],
            num_drafted: round.num_drafted,
            num_accepted: round.num_accepted,
            logits: logits.of_rows(first_row..first_row + num_rows),
        }
    }

    /// Ends the sequence as stopped by the observer, unless it has already ended.
    pub(crate) fn stop(&mut self) {
        if !matches!(self.stage, Stage::Finished(_)) {
            self.stage = Stage::Finished(Finish::Stopped);
        }
    }

    /// Sets the times of the last round.
    pub(crate) fn set_round_times(&mut self, draft_time: Duration, verify_time: Duration) {
        if let Some(round) = self.trace.rounds.last_mut() {
            (round.draft_time, round.verify_time) = (draft_time, verify_time);
        }
    }

    /// Converts a finished sequence into its result.
    ///
    /// # Panics
    /// If the sequence is not finished.
    pub(crate) fn into_generation(mut self) -> Generation {
        let Stage::Finished(finish) = self.stage else { panic!("the sequence is not finished") };
        let token_ids = self.tokens.split_off(self.prompt_len);
        Generation { token_ids, trace: self.trace, finish }
    }
}
