//! The decoding loops: plain, and by rounds of drafting and verification.
//!
//! They see models only through [`Target`] and [`Drafter`], which probability tables implement
//! too: what the exactness tests enumerate is the loop that ships. A drawn candidate always goes
//! to the target; stop rules, end tokens and limits decide only whether another one is drawn.

use std::ops::ControlFlow;
use std::time::Instant;

use draftsmith_theory::{
    Decoding, DraftLimits, DraftSignals, DraftSteps, Drawn, Draws, Round, RoundEnd, SignalNeeds,
    StopRule, Trace, Verdict, argmax, draft_phase, largest_prob, verify_greedy, verify_sampled,
};

use crate::error::DecodeError;
use crate::session::Logits;

/// The verified model, reading one sequence.
pub trait Target {
    /// Starts a sequence: forgets the last one and reads `prompt[..-1]`.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn begin(&mut self, prompt: &[u32]) -> Result<(), DecodeError>;

    /// Reads what it has not read of `tokens`, the whole sequence, and returns the logits after
    /// each of its last `num_rows` tokens.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn logits(&mut self, tokens: &[u32], num_rows: usize) -> Result<Logits, DecodeError>;

    /// Forgets all tokens from position `len` on.
    fn roll_back(&mut self, len: usize);

    /// The longest sequence it can read.
    fn context(&self) -> usize;
}

/// What proposes candidates. It is handed the target at each step, because a self-draft runs the
/// target's own layers; a separate draft ignores it.
pub trait Drafter<T> {
    /// Starts a sequence, after the target has.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn begin(&mut self, target: &mut T, prompt: &[u32]) -> Result<(), DecodeError>;

    /// Reads what it has not read of `tokens`, the whole sequence with this round's
    /// `num_candidates` candidates at its end, and returns what the next candidate is drawn from,
    /// with the signals that are needed of it.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn draft(
        &mut self,
        target: &mut T,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError>;

    /// The chance that `candidate` is accepted, which was just drawn from `logits`, those of the
    /// last [`draft`](Self::draft), as predicted by an acceptance head that looks ahead and does not
    /// wait for the candidate to be read. None without such a head. Asked where the rule reads an
    /// acceptance head.
    ///
    /// # Errors
    /// If the prediction is not a number or the device fails.
    fn predict_acceptance(
        &mut self,
        target: &mut T,
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let _ = (target, logits, candidate);
        Ok(None)
    }

    /// Forgets all tokens from position `len` on.
    fn roll_back(&mut self, len: usize);

    /// The longest sequence it can read.
    fn context(&self) -> usize;
}

/// One step of drafting.
#[derive(Debug, Clone)]
pub struct Drafted {
    /// Logits over the target's vocabulary.
    pub logits: Vec<f32>,
    /// What stop rules may read.
    pub signals: DraftSignals,
    /// Forwards of the draft that this step took.
    pub num_forwards: usize,
}

/// When a generation ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The most new tokens.
    pub max_new_tokens: usize,
    /// Tokens that end a response; they are kept as its last token.
    pub eos_token_ids: Vec<u32>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// An end token.
    Eos,
    /// The token limit, or the end of the context.
    Length,
    /// The observer asked for it.
    Stopped,
}

/// The new tokens and how they came about.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The new tokens only, an end token included.
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
    /// Candidates accepted, before any cut.
    pub num_accepted: usize,
}

/// The state that both loops share: the sequence, its limits and its trace.
struct Sequence<'a> {
    tokens: Vec<u32>,
    prompt_len: usize,
    max_len: usize,
    limits: &'a Limits,
    trace: Trace,
    finish: Option<Finish>,
}

impl<'a> Sequence<'a> {
    fn new(prompt: &[u32], limits: &'a Limits, context: usize) -> Self {
        // The last token of the context can be written without being read.
        let max_len = (prompt.len() + limits.max_new_tokens).min(context);
        let finish = (prompt.len() >= max_len).then_some(Finish::Length);
        Self {
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            max_len,
            limits,
            trace: Trace::default(),
            finish,
        }
    }

    /// Tokens that may still be kept.
    fn num_remaining(&self) -> usize {
        self.max_len - self.tokens.len()
    }

    /// Appends what a round yielded, cut at an end token or the limit, and tells the observer.
    /// Returns the number of tokens kept.
    fn keep(
        &mut self,
        yielded: &[u32],
        round: Round,
        observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
    ) -> usize {
        let is_eos = |id: &u32| self.limits.eos_token_ids.contains(id);
        let upto_eos = yielded.iter().position(is_eos).map(|i| i + 1);
        let num_kept = upto_eos.unwrap_or(yielded.len()).min(self.num_remaining());
        let kept = &yielded[..num_kept];
        self.tokens.extend_from_slice(kept);
        self.trace.num_tokens += num_kept;
        self.trace.rounds.push(round);
        let told =
            RoundTokens { kept, num_drafted: round.num_drafted, num_accepted: round.num_accepted };
        let goes_on = observe(told).is_continue();
        self.finish = if upto_eos == Some(num_kept) {
            Some(Finish::Eos)
        } else if self.num_remaining() == 0 {
            Some(Finish::Length)
        } else if !goes_on {
            Some(Finish::Stopped)
        } else {
            None
        };
        num_kept
    }

    fn end(self, finish: Finish) -> Generation {
        let token_ids = self.tokens[self.prompt_len..].to_vec();
        Generation { token_ids, trace: self.trace, finish }
    }
}

/// Decodes with the target alone, one token a forward: the baseline of every speed-up. Its rounds
/// have no candidates.
///
/// `observe` sees every round's tokens as they come, and may break off.
///
/// # Errors
/// If the prompt is empty or does not fit, or the model fails.
pub fn decode_plain<T: Target>(
    target: &mut T,
    decoding: &Decoding,
    prompt: &[u32],
    limits: &Limits,
    draws: &mut dyn Draws,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation, DecodeError> {
    if prompt.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    let mut sequence = Sequence::new(prompt, limits, target.context());
    let begun = Instant::now();
    target.begin(prompt)?;
    sequence.trace.prefill_time = begun.elapsed();
    loop {
        if let Some(finish) = sequence.finish {
            return Ok(sequence.end(finish));
        }
        let begun = Instant::now();
        let logits = target.logits(&sequence.tokens, 1)?;
        let token = match decoding {
            Decoding::Greedy => argmax(logits.row(0)),
            Decoding::Sampled(sampling) => draws.categorical(&sampling.probs(logits.row(0))) as u32,
        };
        let round = Round { verify_time: begun.elapsed(), ..Round::default() };
        sequence.keep(&[token], round, observe);
    }
}

/// Decodes by rounds: the drafter draws candidates until the stop rule, its bounds, an end token
/// or the limit ends the phase (a rule may also skip it), the target verifies them in one forward,
/// and both roll back to what stands.
///
/// The output is the target's: token for token when greedy, in distribution when sampled.
/// No round drafts more than could be kept beside the target's own token.
///
/// # Errors
/// If the prompt is empty or does not fit, or a model fails.
#[expect(clippy::too_many_arguments, reason = "each is one independent choice of the caller")]
pub fn decode_speculative<T: Target, D: Drafter<T>>(
    target: &mut T,
    drafter: &mut D,
    rule: &mut dyn StopRule,
    decoding: &Decoding,
    prompt: &[u32],
    limits: &Limits,
    draws: &mut dyn Draws,
    observe: &mut dyn FnMut(RoundTokens<'_>) -> ControlFlow<()>,
) -> Result<Generation, DecodeError> {
    if prompt.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    let mut sequence = Sequence::new(prompt, limits, target.context().min(drafter.context()));
    let begun = Instant::now();
    target.begin(prompt)?;
    drafter.begin(target, prompt)?;
    sequence.trace.prefill_time = begun.elapsed();
    rule.begin_sequence();
    loop {
        if let Some(finish) = sequence.finish {
            return Ok(sequence.end(finish));
        }
        let confirmed = sequence.tokens.len();
        let begun = Instant::now();
        let phase_limits = DraftLimits {
            room: sequence.num_remaining() - 1,
            eos_token_ids: &limits.eos_token_ids,
        };
        let mut steps = DrafterSteps {
            target: &mut *target,
            drafter: &mut *drafter,
            decoding,
            draws: &mut *draws,
            logits: Vec::new(),
            draft_probs: Vec::new(),
            num_forwards: 0,
        };
        draft_phase(&mut steps, rule, phase_limits, &mut sequence.tokens)?;
        let DrafterSteps { draft_probs, num_forwards, .. } = steps;
        let draft_time = begun.elapsed();
        let begun = Instant::now();
        let candidates = sequence.tokens[confirmed..].to_vec();
        let logits = target.logits(&sequence.tokens, candidates.len() + 1)?;
        let verdict = verify(decoding, &candidates, &draft_probs, &logits, draws);
        let mut yielded = candidates;
        let round = Round {
            num_drafted: yielded.len(),
            num_draft_forwards: num_forwards,
            num_accepted: verdict.num_accepted,
            draft_time,
            verify_time: begun.elapsed(),
        };
        yielded.truncate(verdict.num_accepted);
        yielded.push(verdict.next_token);
        sequence.tokens.truncate(confirmed);
        let num_kept = sequence.keep(&yielded, round, observe);
        rule.end_round(RoundEnd { num_accepted: verdict.num_accepted, num_kept });
        // Each keeps what it has read of the sequence that stands, but for its last token: that
        // is read next, as the first of the next forward.
        target.roll_back(sequence.tokens.len() - 1);
        drafter.roll_back(sequence.tokens.len() - 1);
    }
}

/// A drafter's forwards as the steps of a draft phase.
struct DrafterSteps<'a, T, D> {
    target: &'a mut T,
    drafter: &'a mut D,
    decoding: &'a Decoding,
    draws: &'a mut dyn Draws,
    /// Of the last step.
    logits: Vec<f32>,
    /// What each candidate was drawn from; empty when greedy.
    draft_probs: Vec<Vec<f64>>,
    num_forwards: usize,
}

impl<T, D: Drafter<T>> DraftSteps for DrafterSteps<'_, T, D> {
    type Error = DecodeError;

    fn step(
        &mut self,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<DraftSignals, DecodeError> {
        let Drafted { logits, signals, num_forwards } =
            self.drafter.draft(self.target, tokens, num_candidates, needs)?;
        self.logits = logits;
        self.num_forwards += num_forwards;
        Ok(signals)
    }

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        let probs = self.decoding.sampled_probs(&self.logits);
        let drawn = draw(&self.logits, probs.as_deref(), needs, self.draws);
        self.draft_probs.extend(probs);
        drawn
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        self.drafter.predict_acceptance(self.target, &self.logits, candidate)
    }
}

/// Draws a candidate from a draft step: from `probs`, or the most probable token without.
pub(crate) fn draw(
    logits: &[f32],
    probs: Option<&[f64]>,
    needs: SignalNeeds,
    draws: &mut dyn Draws,
) -> Drawn {
    let token_id = match probs {
        Some(probs) => draws.categorical(probs) as u32,
        None => argmax(logits),
    };
    let candidate_prob = || match probs {
        Some(probs) => probs[token_id as usize],
        None => largest_prob(logits),
    };
    Drawn { token_id, candidate_prob: needs.candidate_prob.then(candidate_prob) }
}

fn verify(
    decoding: &Decoding,
    candidates: &[u32],
    draft_probs: &[Vec<f64>],
    logits: &Logits,
    draws: &mut dyn Draws,
) -> Verdict {
    match decoding {
        Decoding::Greedy => {
            let choices: Vec<u32> = logits.rows().map(argmax).collect();
            verify_greedy(candidates, &choices)
        }
        Decoding::Sampled(sampling) => {
            let target_probs: Vec<Vec<f64>> =
                logits.rows().map(|row| sampling.probs(row)).collect();
            verify_sampled(candidates, draft_probs, &target_probs, draws)
        }
    }
}
