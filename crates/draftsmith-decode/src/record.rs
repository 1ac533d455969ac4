//! Recording: what a drafter drafts and signals at every place of a response, for replay without
//! models.
//!
//! The drafter reads the response token by token, as in decoding. Where its candidate is not the
//! response's token, or would be rejected, a draft phase runs on from that candidate, and is then
//! rolled back.

use draftsmith_theory::{
    Bounds, Decoding, DraftLimits, DraftSignals, DraftSteps, Drawn, Draws, HeadEstimate, Proposal,
    RecordedCandidate, RecordedPlace, Recording, Sampling, SignalNeeds, StopRule, argmax,
    draft_phase, largest_prob,
};

use crate::drafter::{StepDrafter, draw};
use crate::error::DecodeError;
use crate::sequence::Limits;
use crate::target::{Target, Verification};

/// Where the one sequence is read.
const SLOT: usize = 0;

/// How responses are recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordOptions {
    /// How the responses were decoded, and how rounds would be.
    pub decoding: Decoding,
    /// The limits they were decoded within.
    pub limits: Limits,
    /// The greatest number of candidates a round can later be replayed with.
    pub max_length: usize,
    /// Whether the drafter has an acceptance head, which is then asked about every candidate. Its
    /// prediction may not depend on where a round began.
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
pub fn record<T: Target, D: StepDrafter<T> + ?Sized>(
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
    let limit =
        prompt.len().saturating_add(options.limits.max_new_tokens).min(context) - prompt.len();
    target.begin(SLOT, prompt)?;
    drafter.begin(target, SLOT, prompt)?;
    let mut recorder = Recorder { target, drafter, options, draws };
    let needs = EverySignal { has_head: options.has_head }.needs();
    let mut tokens = prompt.to_vec();
    let mut places: Vec<RecordedPlace> = Vec::with_capacity(response.len());
    for (at, &token) in response.iter().enumerate() {
        let step = recorder.step(&tokens, at, needs)?;
        if let Some(last) = places.last_mut() {
            step.predicts_for(&mut last.candidate);
        }
        let verification =
            Verification { slot: SLOT, tokens: &tokens, proposal: &Proposal::default() };
        let target_logits = recorder.target.verify(&[verification])?;
        let target_logits = target_logits.row(0);
        let candidate = recorder.candidate(&step, token, target_logits)?;
        // The last token that the limit allows is the target's own in any case.
        let room = limit.saturating_sub(at + 1).min(options.max_length);
        let rejected = (room > 0).then(|| recorder.rejected(&step, token, target_logits)).flatten();
        let rollout = match rejected {
            Some(rejected) => {
                Some(recorder.roll_out(&mut tokens, step, rejected, target_logits, room)?)
            }
            None => None,
        };
        places.push(RecordedPlace { candidate, rollout });
        tokens.push(token);
    }
    Ok(Recording { places, limit })
}

struct Recorder<'a, T, D: ?Sized> {
    target: &'a mut T,
    drafter: &'a mut D,
    options: &'a RecordOptions,
    draws: &'a mut dyn Draws,
}

impl<T: Target, D: StepDrafter<T> + ?Sized> Recorder<'_, T, D> {
    /// A draft forward over all of `tokens`, behind `num_candidates` candidates.
    fn step(
        &mut self,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Step, DecodeError> {
        let drafted = self.drafter.draft(self.target, SLOT, tokens, num_candidates, needs)?;
        let probs = self.options.decoding.sampled_probs(&drafted.logits);
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
        candidate.predicted_acceptance_prob = self.predict_acceptance(step, token)?;
        Ok(candidate)
    }

    /// What a head that looks ahead predicts of a token as the candidate of the last draft forward.
    fn predict_acceptance(&mut self, step: &Step, token: u32) -> Result<Option<f64>, DecodeError> {
        if !self.options.has_head {
            return Ok(None);
        }
        self.drafter.predict_acceptance(self.target, SLOT, &step.logits, token)
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

    /// What is drafted from a `rejected` candidate of step `first` on, itself included: up to `room`
    /// candidates, fewer where an end token comes. Target and drafter are then back at `tokens`.
    fn roll_out(
        &mut self,
        tokens: &mut Vec<u32>,
        first: Step,
        rejected: u32,
        target_logits: &[f32],
        room: usize,
    ) -> Result<Vec<RecordedCandidate>, DecodeError> {
        let num_standing = tokens.len();
        let limits = DraftLimits { room, eos_token_ids: &self.options.limits.eos_token_ids };
        let mut rule = EverySignal { has_head: self.options.has_head };
        let mut steps =
            Rollout { recorder: self, rejected, steps: vec![first], predicted: Vec::new() };
        draft_phase(&mut steps, &mut rule, limits, tokens)?;
        let Rollout { steps, mut predicted, .. } = steps;
        let drafted = tokens.split_off(num_standing);
        if predicted.len() < drafted.len() {
            // An end token, which no rule is asked about.
            let (step, token) = (&steps[steps.len() - 1], drafted[drafted.len() - 1]);
            predicted.push(self.predict_acceptance(step, token)?);
        }
        let mut rollout = vec![steps[0].candidate(rejected, target_logits, self.options)];
        if let [read @ .., _] = drafted.as_slice()
            && !read.is_empty()
        {
            tokens.extend_from_slice(read);
            // Of the token before the rejected one the row is known.
            let proposal = &Proposal::certain_chain(&read[1..]);
            let rows = self.target.verify(&[Verification { slot: SLOT, tokens, proposal }])?;
            tokens.truncate(num_standing);
            for ((step, token), row) in steps[1..].iter().zip(&drafted[1..]).zip(rows.rows()) {
                rollout.push(step.candidate(*token, row, self.options));
            }
        }
        for (candidate, predicted) in rollout.iter_mut().zip(predicted) {
            candidate.predicted_acceptance_prob = predicted;
        }
        for (step, read) in steps[1..].iter().zip(&mut rollout) {
            step.predicts_for(read);
        }
        self.target.commit(SLOT, num_standing, &[]);
        self.drafter.commit(SLOT, num_standing, &[]);
        Ok(rollout)
    }
}

/// The draft phase that begins with a rejected candidate, whose step has been taken.
struct Rollout<'r, 'a, T, D: ?Sized> {
    recorder: &'r mut Recorder<'a, T, D>,
    rejected: u32,
    steps: Vec<Step>,
    /// What a head that looks ahead predicts of the candidates so far.
    predicted: Vec<Option<f64>>,
}

impl<T: Target, D: StepDrafter<T> + ?Sized> DraftSteps for Rollout<'_, '_, T, D> {
    type Error = DecodeError;

    fn step(
        &mut self,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<DraftSignals, DecodeError> {
        if num_candidates > 0 {
            self.steps.push(self.recorder.step(tokens, num_candidates, needs)?);
        }
        Ok(self.steps[num_candidates].signals)
    }

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        match self.steps.as_slice() {
            [_] => Drawn { token_id: self.rejected, candidate_prob: None },
            [.., step] => {
                draw(&step.logits, step.probs.as_deref(), needs, &mut *self.recorder.draws)
            }
            [] => unreachable!("the first step is there"),
        }
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        let step = &self.steps[self.steps.len() - 1];
        let predicted = self.recorder.predict_acceptance(step, candidate)?;
        self.predicted.push(predicted);
        Ok(predicted)
    }
}

/// A rule that never stops and reads all that any rule may read.
struct EverySignal {
    has_head: bool,
}

impl StopRule for EverySignal {
    fn bounds(&self) -> Bounds {
        Bounds { min: 0, max: usize::MAX }
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds {
            acceptance_prob: self.has_head,
            confidence: true,
            candidate_prob: true,
            entropy: true,
        }
    }

    fn stops(&mut self, _candidates: &[u32], _signals: &DraftSignals) -> bool {
        false
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
    /// Enters what the head predicts for `read`, the candidate that this forward has read, if that
    /// is when it predicts.
    fn predicts_for(&self, read: &mut RecordedCandidate) {
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
