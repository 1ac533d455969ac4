//! One sequence on its way: a state machine that a caller advances.
//!
//! A round is a draft phase, a target forward and a commit. Whoever advances a sequence runs the
//! target in between, for this sequence alone or for many at once, and takes the times. What a
//! sequence draws, when its rule stops and where it ends is its own: it comes out the same whatever
//! runs beside it.

use std::sync::Arc;
use std::time::Duration;

use draftsmith_theory::{
    Commit, Decoding, DraftLimits, Draws, Proposal, Round, RoundEnd, StopRule, TextEnd,
    TokenChoice, Trace, argmax, verify_greedy, verify_sampled,
};

use crate::drafter::{DraftRound, Drafter};
use crate::error::DecodeError;
use crate::logits::Logits;
use crate::target::{Target, Verification};

/// When a generation ends.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The most new tokens.
    pub max_new_tokens: usize,
    /// Tokens that end a response; they are kept as its last token.
    pub eos_token_ids: Vec<u32>,
    /// What else ends a response: behind the token that completes a stop string, which is kept whole.
    pub text_end: Option<Arc<dyn TextEnd + Send + Sync>>,
}

impl Limits {
    /// End tokens and a length alone.
    pub const fn new(max_new_tokens: usize, eos_token_ids: Vec<u32>) -> Self {
        Self { max_new_tokens, eos_token_ids, text_end: None }
    }

    /// The same, as a draft phase reads them that has so much room.
    pub(crate) fn of_drafts(&self, room: usize) -> DraftLimits<'_> {
        let text_end = self.text_end.as_deref().map(|end| end as &dyn TextEnd);
        DraftLimits { room, eos_token_ids: &self.eos_token_ids, text_end }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end token.
    Eos,
    /// A stop string.
    StopString,
    /// The token limit, or the end of the context.
    Length,
    /// The observer asked for it.
    Stopped,
}

/// The new tokens and how they came about.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The new tokens only, an end token or the one that completes a stop string included.
    pub token_ids: Vec<u32>,
    /// The rounds.
    pub trace: Trace,
    /// Why it ended.
    pub finish: Finish,
}

/// What one round gave, as an observer sees it.
#[derive(Debug, Clone, Copy)]
pub struct RoundTokens<'a> {
    /// The tokens kept, in order: accepted candidates, then the target's own.
    pub kept: &'a [u32],
    /// Candidates drafted.
    pub num_drafted: usize,
    /// Candidates accepted, up to where the text ends.
    pub num_accepted: usize,
    /// The target's own logits where each token was verified or drawn, `[kept, vocab]`; none
    /// where the candidates that stand were not proposed as the first ones, one behind the other.
    pub logits: &'a [f32],
}

/// A sequence to decode.
pub struct Request<'a> {
    /// At least one token.
    pub prompt: &'a [u32],
    /// How tokens are chosen.
    pub decoding: Decoding,
    /// When it ends.
    pub limits: &'a Limits,
    /// When draft phases end; None where nothing is drafted.
    pub rule: Option<&'a mut dyn StopRule>,
    /// Its own.
    pub draws: &'a mut dyn Draws,
}

/// What a sequence waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A proposal for [`Sequence::draft_round`].
    NeedsDraft,
    /// A target forward over [`Sequence::verification`], then [`Sequence::commit`].
    NeedsTarget,
    /// Nothing more.
    Finished(Finish),
}

/// One sequence in a slot of a target and a drafter.
pub struct Sequence<'a> {
    slot: usize,
    /// What stands, with the proposal's tokens at its end between draft and commit.
    tokens: Vec<u32>,
    prompt_len: usize,
    max_len: usize,
    decoding: Decoding,
    limits: &'a Limits,
    rule: Option<&'a mut dyn StopRule>,
    draws: &'a mut dyn Draws,
    proposal: Proposal,
    /// Tokens kept of the last round.
    num_kept: usize,
    /// Whether those that stand of its proposal were its first nodes.
    are_first: bool,
    trace: Trace,
    stage: Stage,
}

impl<'a> Sequence<'a> {
    /// Starts a sequence in a slot: target and drafter read its prompt but for the last token.
    ///
    /// # Errors
    /// If the prompt is empty or does not fit, or a model fails.
    pub fn begin<T: Target, D: Drafter<T> + ?Sized>(
        request: Request<'a>,
        slot: usize,
        target: &mut T,
        drafter: &mut D,
    ) -> Result<Self, DecodeError> {
        let Request { prompt, decoding, limits, mut rule, draws } = request;
        if prompt.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        target.begin(slot, prompt)?;
        drafter.begin(target, slot, prompt)?;
        if let Some(rule) = &mut rule {
            rule.begin_sequence();
        }
        // The last token of the context can be written without being read.
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
        Ok(sequence)
    }

    /// What a round begins with.
    fn first_stage(&self) -> Stage {
        if self.rule.is_some() { Stage::NeedsDraft } else { Stage::NeedsTarget }
    }

    /// Tokens that may still be kept.
    fn num_remaining(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len())
    }

    /// What the sequence waits for.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The slot it is read in.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The round that a drafter is to propose tokens for: never more than could be kept beside the
    /// target's own. The sequence then needs the target.
    ///
    /// # Panics
    /// Unless the sequence needs a draft.
    pub fn draft_round(&mut self) -> DraftRound<'_> {
        assert_eq!(self.stage, Stage::NeedsDraft);
        self.stage = Stage::NeedsTarget;
        let room = self.num_remaining() - 1;
        DraftRound {
            slot: self.slot,
            tokens: &mut self.tokens,
            proposal: &mut self.proposal,
            rule: &mut **self.rule.as_mut().expect("a sequence that drafts has a rule"),
            limits: self.limits.of_drafts(room),
            decoding: &self.decoding,
            draws: &mut *self.draws,
        }
    }

    /// What the target is to read.
    pub fn verification(&self) -> Verification<'_> {
        Verification { slot: self.slot, tokens: &self.tokens, proposal: &self.proposal }
    }

    /// Keeps what stands of the proposal by the target's `logits`, of which this sequence's rows
    /// begin at `first_row`, cut where the response ends or at the limit; target and drafter forget the rest.
    ///
    /// # Panics
    /// Unless the sequence needs the target.
    pub fn commit<T: Target, D: Drafter<T> + ?Sized>(
        &mut self,
        target: &mut T,
        drafter: &mut D,
        logits: &Logits,
        first_row: usize,
    ) {
        assert_eq!(self.stage, Stage::NeedsTarget);
        let num_standing = self.tokens.len() - self.proposal.len();
        let (standing, proposal) = (&self.tokens[..num_standing], &self.proposal);
        // Row 0 is behind what stands, row i + 1 behind node i.
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
        // What is read of the sequence that stands, but for its last token: that is read next, as
        // the first of the next forward.
        target.commit(self.slot, num_standing, &path);
        drafter.commit(self.slot, num_standing, &path);
    }

    /// Cuts what a round yielded behind the first `num_standing` tokens, and tells the rule.
    fn keep(&mut self, num_standing: usize, mut round: Round) {
        let limits = self.limits.of_drafts(0);
        let is_end = |len: &usize| limits.is_end(&self.tokens[..*len]);
        let end = (num_standing + 1..=self.tokens.len()).find(is_end);
        let upto_end = end.map(|len| len - num_standing);
        let num_yielded = upto_end.unwrap_or(self.tokens.len() - num_standing);
        self.num_kept = num_yielded.min(self.max_len - num_standing);
        self.tokens.truncate(num_standing + self.num_kept);
        self.trace.num_tokens += self.num_kept;
        // Look-ups, and what grows beside a tree's chain, may run past the text's end.
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

    /// What the last round gave, whose rows of the target's logits begin at `first_row`; nothing
    /// before the first.
    pub fn last_round<'l>(&'l self, logits: &'l Logits, first_row: usize) -> RoundTokens<'l> {
        let round = self.trace.rounds.last().copied().unwrap_or_default();
        let num_rows = if self.are_first { self.num_kept } else { 0 };
        RoundTokens {
            kept: &self.tokens[self.tokens.len() - self.num_kept..],
            num_drafted: round.num_drafted,
            num_accepted: round.num_accepted,
            logits: logits.of_rows(first_row..first_row + num_rows),
        }
    }

    /// Ends the sequence, unless it has.
    pub fn stop(&mut self) {
        if !matches!(self.stage, Stage::Finished(_)) {
            self.stage = Stage::Finished(Finish::Stopped);
        }
    }

    /// Notes the time that reading the prompt took.
    pub fn set_prefill_time(&mut self, time: Duration) {
        self.trace.prefill_time = time;
    }

    /// Notes the times of the last round.
    pub fn set_round_times(&mut self, draft_time: Duration, verify_time: Duration) {
        if let Some(round) = self.trace.rounds.last_mut() {
            (round.draft_time, round.verify_time) = (draft_time, verify_time);
        }
    }

    /// What came of it.
    ///
    /// # Panics
    /// Unless the sequence is finished.
    pub fn into_generation(mut self) -> Generation {
        let Stage::Finished(finish) = self.stage else {
            panic!("a generation is of a finished sequence")
        };
        let token_ids = self.tokens.split_off(self.prompt_len);
        Generation { token_ids, trace: self.trace, finish }
    }
}
