//! Recording: what a drafter drafts and signals at every place of a response, for replay without
//! models.
//!
//! The drafter reads the response token by token, as in decoding. Where its candidate is not the
//! response's token, or would be rejected, a draft phase runs on from that candidate, and is then
//! rolled back.

#[cfg(test)]
mod tests;

use std::ops::ControlFlow;

use draftsmith_theory::{
    Bounds, CandidateSource, Decoding, DraftPhase, DraftSignals, Drawn, Draws, HeadEstimate,
    PredictedProb, Proposal, RecordedCandidate, RecordedPlace, Recording, Sampling, SignalNeeds,
    StopRule, TokenChoice, argmax, largest_prob,
};

use crate::chain::draw;
use crate::draft_row::{DraftRow, draft_rows};
use crate::drafter::{AskedOf, DraftStep, StepDrafter};
use crate::error::DecodeError;
use crate::sequence::Limits;
use crate::target::{Target, Verification};

/// How responses are recorded.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// How the responses were decoded, and how rounds would be.
    pub decoding: Decoding,
    /// The limits they were decoded within.
    pub limits: Limits,
    /// The greatest number of candidates a round can later be replayed with.
    pub max_length: usize,
    /// Whether the drafter has an acceptance head, which is then asked about every candidate; one whose
    /// prediction depends on where a round began, in every round that may meet the candidate.
    pub has_head: bool,
    /// Whether the target is asked about what is drafted behind a rejected candidate, which no rule
    /// reads: acceptance heads are trained on it, and a perfect one predicts it. Otherwise its log p is
    /// NaN, and most of the target's work is saved.
    pub judges_rollouts: bool,
}

/// A response to record.
pub struct RecordRequest<'a> {
    /// At least one token.
    pub prompt: &'a [u32],
    /// What the target gave to it, at least one token.
    pub response: &'a [u32],
    /// Its own.
    pub draws: &'a mut dyn Draws,
}

/// Records what the drafter does along responses, which the target gave under the same decoding and
/// limits: as many side by side as the target has slots, a place of each at a time. Each gets the
/// recording that it would get alone.
///
/// Greedy: what is recorded is what any round would meet. Sampled: a draw of what any round would
/// meet, given the response (see [`Recordings`](draftsmith_theory::Recordings)).
///
/// Acceptance labels are of the distributions as served; greedy, of the models' own at temperature
/// 1.
///
/// `observe` is told at each place how many responses are recorded whole, and may break off: then
/// those are all that is returned.
///
/// # Errors
/// If a prompt or a response is empty or does not fit, or a model fails.
pub fn record<'a, T: Target, D: StepDrafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    options: &RecordOptions,
    requests: impl IntoIterator<Item = RecordRequest<'a>>,
    observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Recording>, DecodeError> {
    let mut waiting = requests.into_iter().enumerate();
    let mut free: Vec<usize> = (0..target.num_slots()).rev().collect();
    let mut running: Vec<Along<'a>> = Vec::with_capacity(free.len());
    let mut recorded: Vec<(usize, Recording)> = Vec::new();
    let mut recorder = Recorder { target, drafter, options };
    loop {
        while let Some(slot) = free.pop() {
            let Some((number, request)) = waiting.next() else { break };
            running.push(recorder.begin(number, request, slot)?);
        }
        if running.is_empty() || observe(recorded.len()).is_break() {
            break;
        }
        recorder.record_place(&mut running)?;
        for along in running.extract_if(.., |along| along.at() == along.response.len()) {
            free.push(along.slot);
            let prompt = along.tokens[..along.tokens.len() - along.places.len()].to_vec();
            recorded.push((along.number, Recording::new(prompt, along.places, along.limit)));
        }
    }
    recorded.sort_by_key(|(number, _)| *number);
    Ok(recorded.into_iter().map(|(_, recording)| recording).collect())
}

/// A response on its way.
struct Along<'a> {
    number: usize,
    slot: usize,
    response: &'a [u32],
    draws: &'a mut dyn Draws,
    /// The most tokens that a response can have.
    limit: usize,
    prompt_len: usize,
    /// The prompt and the response so far, with what is rolled out at its end.
    tokens: Vec<u32>,
    places: Vec<RecordedPlace>,
}

impl Along<'_> {
    /// A draft forward over what there is.
    fn step(&self, num_candidates: usize, needs: SignalNeeds) -> DraftStep<'_> {
        DraftStep::in_chain(self.slot, &self.tokens, num_candidates, needs)
    }

    /// What the target is to read, with a proposal at its end.
    fn verification<'p>(&'p self, proposal: &'p Proposal) -> Verification<'p> {
        Verification { slot: self.slot, tokens: &self.tokens, proposal }
    }

    /// Which of the response's tokens is next.
    fn at(&self) -> usize {
        self.places.len()
    }

    /// That token.
    fn token(&self) -> u32 {
        self.response[self.at()]
    }

    /// The numbers of tokens that rounds begin behind which meet what is drafted at a place: those that
    /// have accepted none of the response's tokens before it, one, and so on, as far as they are
    /// recorded.
    fn starts(&self, place: usize, options: &RecordOptions) -> Vec<usize> {
        let accepted = self.places[..place].iter().rev().take_while(|it| it.rollout.is_none());
        let num_before = accepted.take(options.max_length.saturating_sub(1)).count();
        let num_standing = self.prompt_len + place;
        (0..=num_before).map(|before| num_standing - before).collect()
    }

    /// The candidate that is drafted instead of the response's next token and then rejected, if one
    /// is.
    fn rejected(&mut self, step: &Step, target_logits: &[f32], decoding: &Decoding) -> Option<u32> {
        let token = self.token();
        let (TokenChoice::Sampled(sampling), Some(q)) = (decoding.choice, &step.probs) else {
            let choice = argmax(step.row.logits());
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
}

struct Recorder<'a, T, D: ?Sized> {
    target: &'a mut T,
    drafter: &'a mut D,
    options: &'a RecordOptions,
}

impl<T: Target, D: StepDrafter<T> + ?Sized> Recorder<'_, T, D> {
    /// Starts a response in a slot.
    fn begin<'r>(
        &mut self,
        number: usize,
        request: RecordRequest<'r>,
        slot: usize,
    ) -> Result<Along<'r>, DecodeError> {
        let RecordRequest { prompt, response, draws } = request;
        if prompt.is_empty() || response.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        let context = self.target.context().min(self.drafter.context());
        let max_len = prompt.len().saturating_add(self.options.limits.max_new_tokens).min(context);
        self.target.begin(slot, prompt)?;
        self.drafter.begin(self.target, slot, prompt)?;
        let (limit, tokens) = (max_len - prompt.len(), prompt.to_vec());
        let places = Vec::with_capacity(response.len());
        let prompt_len = prompt.len();
        Ok(Along { number, slot, response, draws, limit, prompt_len, tokens, places })
    }

    /// Records the next place of each response.
    fn record_place(&mut self, running: &mut [Along<'_>]) -> Result<(), DecodeError> {
        let needs = EverySignal { has_head: self.options.has_head }.needs();
        if self.asks_by_round() {
            for along in &*running {
                // One more than can meet this place: the candidate before it is asked about, too.
                let num_kept = self.options.max_length + 1;
                let num_standing = along.tokens.len();
                self.drafter.begin_round(self.target, along.slot, num_standing, num_kept);
            }
        }
        let steps = running.iter().map(|along| along.step(along.at(), needs));
        let steps = self.step(&steps.collect::<Vec<_>>())?;
        let nothing = Proposal::default();
        let batch: Vec<Verification<'_>> =
            running.iter().map(|along| along.verification(&nothing)).collect();
        let target_logits = self.target.verify(&batch)?;
        let mut rollouts = Vec::new();
        for (number, (along, step)) in running.iter_mut().zip(steps).enumerate() {
            // Round by round there is nothing behind the token.
            self.target.commit(along.slot, along.tokens.len(), &[]);
            if !along.places.is_empty() {
                let starts = along.starts(along.at() - 1, self.options);
                let predicted = self.predict_of_read(along.slot, &starts, &step)?;
                let last = along.places.last_mut().expect("there is one");
                enter(predicted, &mut last.candidate);
            }
            let decoding = &self.options.decoding;
            let before = along.tokens.iter().copied();
            let target_logits = &*decoding.penalised(target_logits.row(number), before);
            let mut candidate = step.candidate(along.token(), self.options);
            candidate.target_log_prob = self.target_log_prob(&candidate, target_logits);
            let starts = along.starts(along.at(), self.options);
            let (slot, token_id) = (along.slot, candidate.token_id);
            let predicted =
                self.predict_of_drawn(slot, &starts, step.row.own_logits(), token_id)?;
            enter(predicted, &mut candidate);
            // The last token that the limit allows is the target's own in any case.
            let room = along.limit.saturating_sub(along.at() + 1).min(self.options.max_length);
            let rejected =
                (room > 0).then(|| along.rejected(&step, target_logits, decoding)).flatten();
            if let Some(rejected) = rejected {
                let mut rollout = Rollout::begin(number, room, starts, self.options);
                self.advance(&mut rollout, along, &step, Some(rejected))?;
                let first = &mut rollout.candidates[0];
                first.target_log_prob = self.target_log_prob(first, target_logits);
                rollouts.push(rollout);
            }
            along.places.push(RecordedPlace { candidate, rollout: None });
        }
        if !rollouts.is_empty() {
            self.roll_out(&mut rollouts, running)?;
        }
        for along in running {
            along.tokens.push(along.response[along.at() - 1]);
        }
        Ok(())
    }

    /// Lets the drafter draft on from rejected candidates: up to the room there is, or an end token.
    /// Target and drafter are then back where they were.
    fn roll_out(
        &mut self,
        rollouts: &mut [Rollout],
        running: &mut [Along<'_>],
    ) -> Result<(), DecodeError> {
        loop {
            let going_on = rollouts.iter_mut().filter(|rollout| rollout.phase.needs_step());
            let mut going_on: Vec<&mut Rollout> = going_on.collect();
            if going_on.is_empty() {
                break;
            }
            let steps: Vec<DraftStep<'_>> = going_on
                .iter()
                .map(|rollout| {
                    let phase = &rollout.phase;
                    running[rollout.number].step(phase.num_candidates(), phase.needs())
                })
                .collect();
            for (step, rollout) in self.step(&steps)?.into_iter().zip(&mut going_on) {
                let slot = running[rollout.number].slot;
                let predicted = self.predict_of_read(slot, &rollout.starts, &step)?;
                enter(predicted, rollout.candidates.last_mut().expect("one was rejected"));
                self.advance(rollout, &mut running[rollout.number], &step, None)?;
            }
        }
        if self.options.judges_rollouts {
            self.judge(rollouts, running)?;
        }
        for rollout in rollouts {
            let along = &mut running[rollout.number];
            let num_standing = along.tokens.len() - rollout.candidates.len();
            along.tokens.truncate(num_standing);
            self.target.commit(along.slot, num_standing, &[]);
            self.drafter.commit(along.slot, num_standing, &[]);
            let place = along.places.last_mut().expect("a rollout is of a place");
            place.rollout = Some(std::mem::take(&mut rollout.candidates));
        }
        Ok(())
    }

    /// Asks the target about what is drafted behind rejected candidates.
    fn judge(
        &mut self,
        rollouts: &mut [Rollout],
        running: &[Along<'_>],
    ) -> Result<(), DecodeError> {
        // Of the token before the rejected one the row is known, and nothing follows the last one.
        let proposals: Vec<Proposal> = rollouts
            .iter()
            .map(|rollout| {
                let drafted = rollout.candidates.iter().map(|candidate| candidate.token_id);
                let drafted: Vec<u32> = drafted.collect();
                Proposal::certain_chain(drafted.get(1..drafted.len() - 1).unwrap_or(&[]))
            })
            .collect();
        let is_read = |rollout: &&Rollout| rollout.candidates.len() > 1;
        let batch: Vec<Verification<'_>> = rollouts
            .iter()
            .zip(&proposals)
            .filter(|(rollout, _)| is_read(rollout))
            .map(|(rollout, proposal)| {
                let Along { slot, tokens, .. } = &running[rollout.number];
                Verification { slot: *slot, tokens: &tokens[..tokens.len() - 1], proposal }
            })
            .collect();
        if !batch.is_empty() {
            let logits = self.target.verify(&batch)?;
            let mut rows = logits.rows();
            for rollout in rollouts.iter_mut().filter(|rollout| rollout.candidates.len() > 1) {
                let tokens = &running[rollout.number].tokens;
                let first = tokens.len() + 1 - rollout.candidates.len();
                let candidates = rollout.candidates[1..].iter_mut().zip(first..);
                for ((candidate, num_before), row) in candidates.zip(&mut rows) {
                    let before = tokens[..num_before].iter().copied();
                    let row = self.options.decoding.penalised(row, before);
                    candidate.target_log_prob = self.target_log_prob(candidate, &row);
                }
            }
        }
        Ok(())
    }

    /// Takes steps of the drafter.
    fn step(&mut self, steps: &[DraftStep<'_>]) -> Result<Vec<Step>, DecodeError> {
        let decoding = &self.options.decoding;
        let rows = draft_rows(self.drafter, self.target, steps, steps.iter().map(|_| decoding))?;
        let step_of = |row: DraftRow| Step { probs: decoding.sampled_probs(row.logits()), row };
        Ok(rows.into_iter().map(step_of).collect())
    }

    /// Goes on with a rollout behind a step: by the `rejected` candidate, if it is its first.
    fn advance(
        &mut self,
        rollout: &mut Rollout,
        along: &mut Along<'_>,
        step: &Step,
        rejected: Option<u32>,
    ) -> Result<(), DecodeError> {
        let Rollout { phase, rule, room, candidates, starts, .. } = rollout;
        let limits = self.options.limits.of_drafts(*room);
        let (slot, draws) = (along.slot, &mut *along.draws);
        let mut source =
            RolloutSource { recorder: self, slot, starts, draws, step, rejected, candidates };
        phase.advance(&mut source, step.row.signals(), rule, limits, &mut along.tokens)?;
        // A candidate that ends the response, which no rule is asked about.
        if let Some(last) = candidates.last_mut()
            && limits.is_end(&along.tokens)
        {
            let predicted =
                self.predict_of_drawn(slot, starts, step.row.own_logits(), last.token_id)?;
            enter(predicted, last);
        }
        Ok(())
    }

    /// Whether a head is asked about a candidate in every round that may meet it.
    fn asks_by_round(&self) -> bool {
        self.options.has_head && self.drafter.depends_on_round()
    }

    /// What a head predicts of the candidate that a draft forward in a slot has read, if that is when it
    /// predicts; `starts` is where rounds begin that meet the candidate.
    fn predict_of_read(
        &mut self,
        slot: usize,
        starts: &[usize],
        step: &Step,
    ) -> Result<PredictedProb, DecodeError> {
        if self.asks_by_round() {
            let probs = self.drafter.predict_by_round(slot, AskedOf::Read, starts)?;
            return Ok(probs.map(PredictedProb::by_round).unwrap_or_default());
        }
        Ok(match step.row.signals().acceptance_prob {
            Some(HeadEstimate::OfRead(prob)) => PredictedProb::InAnyRound(prob),
            Some(HeadEstimate::OfDrawn(_)) | None => PredictedProb::Nothing,
        })
    }

    /// What a head that looks ahead predicts of a token as the candidate of the last draft forward in
    /// a slot; `starts` is where rounds begin that meet it.
    fn predict_of_drawn(
        &mut self,
        slot: usize,
        starts: &[usize],
        logits: &[f32],
        candidate: u32,
    ) -> Result<PredictedProb, DecodeError> {
        if !self.options.has_head {
            return Ok(PredictedProb::Nothing);
        }
        if self.asks_by_round() {
            let asked = AskedOf::Drawn { logits, candidate };
            let probs = self.drafter.predict_by_round(slot, asked, starts)?;
            return Ok(probs.map(PredictedProb::by_round).unwrap_or_default());
        }
        let prob = self.drafter.predict_acceptance(self.target, (slot, 0), logits, candidate)?;
        Ok(prob.into())
    }

    /// What the target gives a candidate.
    fn target_log_prob(&self, candidate: &RecordedCandidate, target_logits: &[f32]) -> f64 {
        served(&self.options.decoding).probs(target_logits)[candidate.token_id as usize].ln()
    }
}

/// Enters what a head predicts of a candidate, if that is when it predicts.
fn enter(predicted: PredictedProb, candidate: &mut RecordedCandidate) {
    if predicted != PredictedProb::Nothing {
        candidate.predicted_acceptance_prob = predicted;
    }
}

/// The distributions that labels are of.
fn served(decoding: &Decoding) -> Sampling {
    match decoding.choice {
        TokenChoice::Greedy => Sampling::default(),
        TokenChoice::Sampled(sampling) => sampling,
    }
}

/// What is drafted from a rejected candidate on, itself included.
struct Rollout {
    /// Which of the running responses.
    number: usize,
    phase: DraftPhase,
    rule: EverySignal,
    room: usize,
    /// Where rounds begin that meet it.
    starts: Vec<usize>,
    candidates: Vec<RecordedCandidate>,
}

impl Rollout {
    fn begin(number: usize, room: usize, starts: Vec<usize>, options: &RecordOptions) -> Self {
        let mut rule = EverySignal { has_head: options.has_head };
        let limits = options.limits.of_drafts(room);
        let phase = DraftPhase::begin(&mut rule, limits);
        Self { number, phase, rule, room, starts, candidates: Vec::new() }
    }
}

/// A step, as what a rollout draws from.
struct RolloutSource<'s, 'r, 'a, T, D: ?Sized> {
    recorder: &'s mut Recorder<'a, T, D>,
    slot: usize,
    starts: &'s [usize],
    draws: &'r mut dyn Draws,
    step: &'s Step,
    rejected: Option<u32>,
    candidates: &'s mut Vec<RecordedCandidate>,
}

impl<T: Target, D: StepDrafter<T> + ?Sized> CandidateSource for RolloutSource<'_, '_, '_, T, D> {
    type Error = DecodeError;

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        let drawn = match self.rejected {
            Some(token_id) => Drawn { token_id, candidate_prob: None },
            None => draw(self.step.row.logits(), self.step.probs.as_deref(), needs, self.draws),
        };
        self.candidates.push(self.step.candidate(drawn.token_id, self.recorder.options));
        drawn
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        let (slot, logits) = (self.slot, self.step.row.own_logits());
        let predicted = self.recorder.predict_of_drawn(slot, self.starts, logits, candidate)?;
        let first = predicted.in_round(0);
        if let Some(drawn) = self.candidates.last_mut() {
            enter(predicted, drawn);
        }
        Ok(first)
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
            confidence_of_ten: true,
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
    row: DraftRow,
    /// What a candidate is drawn from; None where it is greedy.
    probs: Option<Vec<f64>>,
}

impl Step {
    /// A token as this forward's candidate; what the target gives it is not known yet.
    fn candidate(&self, token_id: u32, options: &RecordOptions) -> RecordedCandidate {
        let token = token_id as usize;
        let (logits, signals) = (self.row.logits(), self.row.signals());
        let draft_prob = match &self.probs {
            Some(probs) => probs[token],
            None => served(&options.decoding).probs(logits)[token],
        };
        let given = "a drafter gives the signals that are needed";
        RecordedCandidate {
            token_id,
            // As the round loop has it, to the last bit.
            candidate_prob: match self.probs {
                None if argmax(logits) == token_id => largest_prob(logits),
                _ => draft_prob,
            },
            confidence: signals.confidence.expect(given),
            confidence_of_ten: signals.confidence_of_ten.expect(given),
            entropy: signals.entropy.expect(given),
            predicted_acceptance_prob: PredictedProb::Nothing,
            draft_log_prob: draft_prob.ln(),
            target_log_prob: f64::NAN,
        }
    }
}
