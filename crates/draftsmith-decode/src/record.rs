//! Recording: what a drafter says at every place of a response, for replay without models.
//!
//! The drafter reads the response token by token, as in decoding. Where its candidate is not the
//! response's token, or would be rejected, it is let go on from its own candidate, and then called
//! back.

use draftsmith_theory::{
    Decoding, DraftSignals, Draws, HeadEstimate, RecordedCandidate, RecordedPlace, Recording,
    Sampling, SignalNeeds, argmax, largest_prob,
};

use crate::error::DecodeError;
use crate::round::{Drafter, Limits, Target};

/// How responses are recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordOptions {
    /// How the responses were decoded, and how rounds would be.
    pub decoding: Decoding,
    /// The limits they were decoded within.
    pub limits: Limits,
    /// The greatest number of candidates a round can later be replayed with.
    pub max_length: usize,
    /// Whether the drafter has an acceptance head, which is then asked about every candidate. What
    /// it says may not depend on where a round began.
    pub has_head: bool,
}

/// Records what the drafter does along `response`, which the target gave to `prompt` under the same
/// decoding and limits.
///
/// Greedy: what is recorded is what any round would meet. Sampled: a draw of what any round would
/// meet, given the response (see [`Recordings`](draftsmith_theory::Recordings)).
///
/// Acceptance labels are of the distributions as served; greedy, of the models' own at temperature
/// 1.
///
/// # Errors
/// If the prompt or the response is empty or does not fit, or a model fails.
pub fn record<T: Target, D: Drafter<T>>(
    target: &mut T,
    drafter: &mut D,
    options: &RecordOptions,
    prompt: &[u32],
    response: &[u32],
    draws: &mut dyn Draws,
) -> Result<Recording, DecodeError> {
    if prompt.is_empty() || response.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    let context = target.context().min(drafter.context());
    let limit = (prompt.len() + options.limits.max_new_tokens).min(context) - prompt.len();
    target.begin(prompt)?;
    drafter.begin(target, prompt)?;
    let mut recorder = Recorder { target, drafter, options, draws };
    let mut tokens = prompt.to_vec();
    let mut places: Vec<RecordedPlace> = Vec::with_capacity(response.len());
    for (at, &token) in response.iter().enumerate() {
        let step = recorder.step(&tokens, at)?;
        if let Some(last) = places.last_mut() {
            step.tells_of(&mut last.candidate);
        }
        let target_logits = recorder.target.logits(&tokens, 1)?;
        let target_logits = target_logits.row(0);
        let candidate = recorder.candidate(&step, token, target_logits)?;
        // The last token that the limit allows is the target's own in any case.
        let room = limit.saturating_sub(at + 1).min(options.max_length);
        let rejected = (room > 0).then(|| recorder.rejected(&step, token, target_logits)).flatten();
        let rollout = match rejected {
            Some(rejected) => {
                let first = recorder.candidate(&step, rejected, target_logits)?;
                Some(recorder.roll_out(&mut tokens, first, room)?)
            }
            None => None,
        };
        places.push(RecordedPlace { candidate, rollout });
        tokens.push(token);
    }
    Ok(Recording { places, limit })
}

struct Recorder<'a, T, D> {
    target: &'a mut T,
    drafter: &'a mut D,
    options: &'a RecordOptions,
    draws: &'a mut dyn Draws,
}

impl<T: Target, D: Drafter<T>> Recorder<'_, T, D> {
    /// A draft forward over all of `tokens`, behind `num_candidates` candidates.
    fn step(&mut self, tokens: &[u32], num_candidates: usize) -> Result<Step, DecodeError> {
        let needs = SignalNeeds {
            acceptance_prob: self.options.has_head,
            confidence: true,
            candidate_prob: true,
            entropy: true,
        };
        let drafted = self.drafter.draft(self.target, tokens, num_candidates, needs)?;
        let probs = match self.options.decoding {
            Decoding::Greedy => None,
            Decoding::Sampled(sampling) => Some(sampling.probs(&drafted.logits)),
        };
        Ok(Step { logits: drafted.logits, signals: drafted.signals, probs })
    }

    /// A token as the candidate of the last draft forward.
    fn candidate(
        &mut self,
        step: &Step,
        token: u32,
        target_logits: &[f32],
    ) -> Result<RecordedCandidate, DecodeError> {
        let mut candidate = step.candidate(token, target_logits, self.options);
        candidate.predicted_acceptance_prob = self.assess(step, token)?;
        Ok(candidate)
    }

    /// What a head that looks ahead says of a token as the candidate of the last draft forward.
    fn assess(&mut self, step: &Step, token: u32) -> Result<Option<f64>, DecodeError> {
        if !self.options.has_head {
            return Ok(None);
        }
        self.drafter.assess(self.target, &step.logits, token)
    }

    /// The candidate that is drafted instead of the response's `token` and then rejected, if one
    /// is.
    fn rejected(&mut self, step: &Step, token: u32, target_logits: &[f32]) -> Option<u32> {
        let (Decoding::Sampled(sampling), Some(q)) = (self.options.decoding, &step.probs) else {
            let choice = argmax(&step.logits);
            return (choice != token).then_some(choice);
        };
        let p = sampling.probs(target_logits);
        let token = token as usize;
        if self.draws.bernoulli(q[token] / p[token]) {
            return None;
        }
        let residual: Vec<f64> = q.iter().zip(&p).map(|(q, p)| (q - p).max(0.0)).collect();
        // q < p here, hence q > p elsewhere, but for a hair of rounding: then there is nothing to
        // reject.
        let something_left = residual.iter().any(|&weight| weight > 0.0);
        something_left.then(|| self.draws.categorical(&residual) as u32)
    }

    /// What is drafted from a rejected candidate on, itself included: up to `room` candidates,
    /// fewer where an end token comes. Target and drafter are then back at `tokens`.
    fn roll_out(
        &mut self,
        tokens: &mut Vec<u32>,
        rejected: RecordedCandidate,
        room: usize,
    ) -> Result<Vec<RecordedCandidate>, DecodeError> {
        let len = tokens.len();
        let mut steps: Vec<(Step, u32, Option<f64>)> = Vec::with_capacity(room - 1);
        let mut last = rejected.token_id;
        while steps.len() + 1 < room && !self.options.limits.eos_token_ids.contains(&last) {
            tokens.push(last);
            let step = self.step(tokens, tokens.len() - len)?;
            last = match &step.probs {
                None => argmax(&step.logits),
                Some(probs) => self.draws.categorical(probs) as u32,
            };
            let predicted = self.assess(&step, last)?;
            steps.push((step, last, predicted));
        }
        let mut rollout = vec![rejected];
        if !steps.is_empty() {
            let rows = self.target.logits(tokens, steps.len())?;
            for ((step, token, predicted), row) in steps.iter().zip(rows.rows()) {
                step.tells_of(rollout.last_mut().expect("the rejected candidate is there"));
                let mut candidate = step.candidate(*token, row, self.options);
                candidate.predicted_acceptance_prob = *predicted;
                rollout.push(candidate);
            }
        }
        tokens.truncate(len);
        self.target.roll_back(len);
        self.drafter.roll_back(len);
        Ok(rollout)
    }
}

/// A draft forward.
struct Step {
    logits: Vec<f32>,
    signals: DraftSignals,
    /// What a candidate is drawn from; None where it is greedy.
    probs: Option<Vec<f64>>,
}

impl Step {
    /// Enters what the head says of `read`, the candidate that this forward has read, if that is
    /// when it speaks.
    fn tells_of(&self, read: &mut RecordedCandidate) {
        if let Some(HeadEstimate::OfRead(prob)) = self.signals.acceptance_prob {
            read.predicted_acceptance_prob = Some(prob);
        }
    }

    /// A token as this forward's candidate.
    fn candidate(
        &self,
        token_id: u32,
        target_logits: &[f32],
        options: &RecordOptions,
    ) -> RecordedCandidate {
        let served = match options.decoding {
            Decoding::Greedy => Sampling::default(),
            Decoding::Sampled(sampling) => sampling,
        };
        let token = token_id as usize;
        let draft_prob = match &self.probs {
            Some(probs) => probs[token],
            None => served.probs(&self.logits)[token],
        };
        let given = "a drafter gives the signals that are needed";
        RecordedCandidate {
            token_id,
            // As the round loop has it, to the last bit.
            candidate_prob: match self.probs {
                None if argmax(&self.logits) == token_id => largest_prob(&self.logits),
                _ => draft_prob,
            },
            confidence: self.signals.confidence.expect(given),
            entropy: self.signals.entropy.expect(given),
            predicted_acceptance_prob: None,
            draft_log_prob: draft_prob.ln(),
            target_log_prob: served.probs(target_logits)[token].ln(),
        }
    }
}
