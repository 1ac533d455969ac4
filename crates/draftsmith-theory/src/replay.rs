//! Replay computes from recordings, without a model, what decoding under any stop rule would do.
//!
//! A recording is a response of the target with the drafter's behaviour at each position. Either
//! the drafter's candidate there is the response's token and is accepted, or the recording holds a
//! rollout: the rejected candidate and the candidates that the drafter would draft after it,
//! because a stop rule does not know of the rejection. A round from any accepted prefix then
//! follows the response while candidates are accepted, and the rollout from the first rejection on.
//!
//! For some drafters the candidates depend on where the round began. An EAGLE-3 drafter reads the
//! target's hidden states up to that position and its own output after it. Recordings of such
//! drafters have a rollout at every position. It holds the whole round from that position,
//! beginning with the accepted candidates.
//!
//! The replay of greedy decoding gives exactly the counts of decoding. The replay of sampled
//! decoding is exact in distribution. The target emits x with probability p(x), and the candidate
//! is x and accepted with probability min(p(x), q(x)). So given x, the candidate was x and accepted
//! with probability min(1, q(x)/p(x)). Otherwise a candidate with the normalised distribution (q −
//! p)+ was rejected. One replay reaches each position once, so one draw per position serves every
//! rule, and all rules are compared on the same draws.

mod cost_optimal;
mod judged;
mod look_ups;
mod ngram;
mod recorded_steps;
#[cfg(test)]
pub(crate) mod test_recordings;
#[cfg(test)]
mod tests;
mod text_position;

use std::sync::Arc;

use crate::{
    Counts, DraftLimits, DraftPhase, DrafterId, Forwards, HeadTiming, Oracle, Result, Round,
    RoundCosts, RoundForwards, StopRule, StopRuleConfig, StoredAnswers, TheoryError, TimedCounts,
    Trace, acceptance_prob, trace::RoundCounts,
};
use look_ups::LookedUp;
use recorded_steps::RecordedSteps;

pub use cost_optimal::{CostOptimum, cost_optimal};
pub use judged::{JudgedPrediction, RoundPrediction};
pub use ngram::NgramSimple;

/// A recorded candidate with its stop-rule signals and probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedCandidate {
    /// The candidate's token id.
    pub token_id: u32,
    /// The probability of [`DraftSignals::candidate_prob`](crate::DraftSignals::candidate_prob).
    pub candidate_prob: f64,
    /// The probability of [`DraftSignals::confidence`](crate::DraftSignals::confidence).
    pub confidence: f64,
    /// The probability of
    /// [`DraftSignals::confidence_of_ten`](crate::DraftSignals::confidence_of_ten).
    pub confidence_of_ten: f64,
    /// The entropy in nats of [`DraftSignals::entropy`](crate::DraftSignals::entropy).
    pub entropy: f64,
    /// The acceptance head's prediction for this candidate. None without a head. A head that
    /// predicts only once the draft model has read the candidate also has None for the last
    /// candidate of a rollout or response, which no rule needs.
    pub predicted_acceptance_prob: Option<f64>,
    /// The candidate's draft log-probability log q, in the distribution that defines labels.
    pub draft_log_prob: f64,
    /// The candidate's target log-probability log p under the same settings. NaN if the target was
    /// not evaluated. Only acceptance heads and look-ups in sampled responses need it.
    pub target_log_prob: f64,
}

impl RecordedCandidate {
    /// Computes the acceptance label min(1, p/q), which a perfect acceptance head would predict.
    pub fn acceptance_prob(&self) -> f64 {
        f64::from(acceptance_prob(self.target_log_prob as f32, self.draft_log_prob as f32))
    }
}

/// A position in a recorded response.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedPlace {
    /// The response's token, recorded as a candidate.
    pub candidate: RecordedCandidate,
    /// The rejected candidate and the candidates drafted after it, or a whole round, which may
    /// begin with accepted candidates. None if the drafter proposes the response's token here,
    /// which is accepted. Also None at the last position within the limit, where nothing is
    /// drafted.
    pub rollout: Option<Vec<RecordedCandidate>>,
}

impl RecordedPlace {
    /// Returns the first candidate of a round that begins at this position.
    pub fn drafted(&self) -> &RecordedCandidate {
        self.rollout.as_ref().and_then(|rollout| rollout.first()).unwrap_or(&self.candidate)
    }

    /// Returns the first candidate of a round that begins at this position, if it is rejected.
    pub fn rejected(&self) -> Option<&RecordedCandidate> {
        // A rejected candidate is never the response's token.
        Some(self.drafted()).filter(|drafted| drafted.token_id != self.candidate.token_id)
    }
}

/// A recorded response.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// The positions of the response, at least one. Clones of a recording share them.
    pub places: Arc<[RecordedPlace]>,
    /// The maximum number of tokens in the response.
    pub limit: usize,
    /// The number of draft forwards that a round takes.
    pub forwards: RoundForwards,
    /// The look-up result for a round that begins at each position; empty without look-ups.
    looked_up: Vec<LookedUp>,
    /// The number of the response in its run, by which look-ups see the answers before it.
    number: usize,
}

impl Recording {
    /// Creates the recording of a response to a prompt, without look-ups.
    pub fn new(prompt: Vec<u32>, places: Vec<RecordedPlace>, limit: usize) -> Self {
        let forwards = RoundForwards::EachStep;
        let looked_up = Vec::new();
        Self { prompt, places: places.into(), limit, forwards, looked_up, number: 0 }
    }

    /// Sets the number of the response in its run. [`Self::new`] sets 0.
    #[must_use]
    pub fn numbered(self, number: usize) -> Self {
        Self { number, ..self }
    }

    /// Sets the number of draft forwards of a round. [`Self::new`] sets one for each step.
    #[must_use]
    pub fn with_forwards(self, forwards: RoundForwards) -> Self {
        Self { forwards, ..self }
    }

    /// Counts the candidates that are accepted in a round of unlimited length that begins at
    /// position `start`.
    pub fn num_accepted(&self, start: usize) -> usize {
        let mut steps = RecordedSteps::new(&self.places[start..], None);
        while steps.has_next() && steps.is_accepted() {
            steps.step();
            steps.count();
        }
        steps.num_accepted
    }
}

/// The number of rounds of each length in a replayed response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundLengths {
    /// The number of rounds by number of candidates: entry i counts the rounds of i candidates.
    pub by_length: Vec<usize>,
    /// The number of tokens of the response.
    pub num_tokens: usize,
}

/// Computes the modelled seconds per kept token over all runs together. NaN without tokens.
pub fn seconds_per_token(runs: &[TimedCounts]) -> f64 {
    let tokens: usize = runs.iter().map(|run| run.counts.num_tokens).sum();
    runs.iter().map(|run| run.seconds).sum::<f64>() / tokens as f64
}

/// Recorded responses of one target and drafter.
#[derive(Debug, Clone, PartialEq)]
pub struct Recordings {
    /// The name of the drafter.
    pub drafter: DrafterId,
    /// The maximum number of candidates in a replayed round.
    pub max_length: usize,
    /// The ids of tokens that end a response.
    pub eos_token_ids: Vec<u32>,
    /// The time at which the acceptance head predicts; None without a head.
    pub head: Option<HeadTiming>,
    /// The recorded responses.
    pub responses: Vec<Recording>,
    /// The stored answers that look-ups search; None without any. They are no part of the files of
    /// recordings.
    pub answers: Option<Arc<StoredAnswers>>,
}

impl Recordings {
    /// Replays each response under a stop rule. Returns its counts and modelled seconds, in the
    /// order of the responses.
    ///
    /// # Errors
    /// If the rule's settings are invalid, it may draft more candidates than recorded, it needs an
    /// acceptance head that was not recorded, or `costs` lacks the drafter.
    pub fn replay(&self, config: &StopRuleConfig, costs: &RoundCosts) -> Result<Vec<TimedCounts>> {
        let mut rule = self.rule(config)?;
        let seconds = self.round_seconds(costs)?;
        let mut spend = |response| self.replay_one(response, &mut *rule, &seconds, |_, _| {});
        Ok(self.responses.iter().map(&mut spend).collect())
    }

    /// Replays all responses under a stop rule and returns their rounds, without times.
    ///
    /// # Errors
    /// As [`replay`](Self::replay), except that no costs are needed.
    pub fn trace(&self, config: &StopRuleConfig) -> Result<Trace> {
        let mut rule = self.rule(config)?;
        let mut trace = Trace { num_tokens: self.num_tokens(), ..Trace::default() };
        let mut observe = |drafter, round: RoundCounts| {
            trace.rounds.push(Round {
                num_drafted: round.num_drafted,
                depth: round.num_drafted,
                forwards: Forwards::of(drafter, round.num_draft_forwards),
                num_accepted: round.num_accepted,
                ..Round::default()
            });
        };
        for response in &self.responses {
            self.replay_one(response, &mut *rule, |_, _| 0.0, &mut observe);
        }
        Ok(trace)
    }

    /// Replays each response under a stop rule and counts its rounds by number of candidates.
    ///
    /// # Errors
    /// As [`replay`](Self::replay), except that no costs are needed.
    pub fn round_lengths(&self, config: &StopRuleConfig) -> Result<Vec<RoundLengths>> {
        let mut rule = self.rule(config)?;
        Ok(self.lengths_under(&mut *rule))
    }

    fn lengths_under(&self, rule: &mut dyn StopRule) -> Vec<RoundLengths> {
        let of_response = |response: &Recording| {
            let mut by_length = Vec::new();
            let mut observe = |_, round: RoundCounts| {
                by_length.resize(by_length.len().max(round.num_drafted + 1), 0);
                by_length[round.num_drafted] += 1;
            };
            self.replay_one(response, rule, |_, _| 0.0, &mut observe);
            RoundLengths { by_length, num_tokens: response.places.len() }
        };
        self.responses.iter().map(of_response).collect()
    }

    /// Builds the rule and checks that these recordings suffice for it.
    fn rule(&self, config: &StopRuleConfig) -> Result<Box<dyn StopRule>> {
        let rule = config.init()?;
        self.check(&*rule)?;
        Ok(rule)
    }

    /// Checks that these recordings suffice for a rule.
    fn check(&self, rule: &dyn StopRule) -> Result<()> {
        let longest = rule.bounds().max;
        TheoryError::ensure(longest <= self.max_length, || {
            let recorded = self.max_length;
            format!(
                "the rule may draft `{longest}` candidates a round, but `{recorded}` were recorded: record longer rollouts"
            )
        })?;
        self.check_head(rule.needs())
    }

    /// Checks that a head was recorded if it is needed.
    fn check_head(&self, needs: crate::SignalNeeds) -> Result<()> {
        TheoryError::ensure(!needs.acceptance_prob || self.head.is_some(), || {
            "the rule reads an acceptance head, but the rollouts were recorded without one".into()
        })
    }

    /// Replays each response as [`replay`](Self::replay) does, but without costs and seconds.
    ///
    /// # Errors
    /// As [`replay`](Self::replay), except that no costs are needed.
    pub fn replay_counts(&self, config: &StopRuleConfig) -> Result<Vec<Counts>> {
        self.replay_rule(&mut *self.rule(config)?)
    }

    /// Replays each response as [`replay_counts`](Self::replay_counts) does, under a rule without a
    /// [`StopRuleConfig`], such as one that you are developing. Its [`StopRule::needs`] must name
    /// every signal that it reads, because decoding gives it no others.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn replay_rule(&self, rule: &mut dyn StopRule) -> Result<Vec<Counts>> {
        self.check(rule)?;
        let mut count = |response| self.replay_one(response, rule, |_, _| 0.0, |_, _| {}).counts;
        Ok(self.responses.iter().map(&mut count).collect())
    }

    /// Replays the oracle, which drafts exactly the candidates that will be accepted (SpecDec++,
    /// Lemma 2.1), even more than [`Self::max_length`] in a round. Only rounds that were recorded
    /// as a whole end at the recorded length. For sampled recordings it knows the random draws too.
    ///
    /// # Errors
    /// If `costs` lacks the drafter.
    pub fn replay_oracle(&self, costs: &RoundCosts) -> Result<Vec<TimedCounts>> {
        let seconds = self.round_seconds(costs)?;
        let replay = |response: &Recording| {
            let num_accepted = (0..response.places.len()).map(|start| response.num_accepted(start));
            let mut oracle = Oracle::new(num_accepted.collect());
            self.replay_one(response, &mut oracle, &seconds, |_, _| {})
        };
        Ok(self.responses.iter().map(replay).collect())
    }

    /// Returns the counts and modelled seconds of plain decoding for each response: one target
    /// forward per token.
    pub fn plain(&self, costs: &RoundCosts) -> Vec<TimedCounts> {
        let plain = |response: &Recording| {
            let num_tokens = response.places.len();
            TimedCounts {
                counts: Counts { num_tokens, num_target_forwards: num_tokens, ..Counts::default() },
                seconds: num_tokens as f64 * costs.verify_seconds(1),
            }
        };
        self.responses.iter().map(plain).collect()
    }

    /// Returns the recordings with each response's first token moved to the end of its prompt,
    /// because servers emit it when they have read the prompt. Responses of one token are left out.
    #[must_use]
    pub fn after_first_token(&self) -> Self {
        let later = |response: &Recording| {
            let (first, later) = response.places.split_first()?;
            let mut prompt = response.prompt.clone();
            prompt.push(first.candidate.token_id);
            let limit = response.limit.saturating_sub(1);
            (!later.is_empty()).then(|| {
                let recording = Recording::new(prompt, later.to_vec(), limit);
                recording.with_forwards(response.forwards).numbered(response.number)
            })
        };
        let responses = self.responses.iter().filter_map(later).collect();
        Self { responses, ..self.clone() }
    }

    /// Returns whether the target was evaluated for every candidate, even after rejected ones.
    pub fn is_judged(&self) -> bool {
        let mut places = self.responses.iter().flat_map(|response| response.places.iter());
        places.all(|place| {
            let rollout = place.rollout.iter().flatten();
            let mut candidates = rollout.chain([&place.candidate]);
            candidates.all(|candidate| !candidate.target_log_prob.is_nan())
        })
    }

    /// Returns the same recordings with a perfect acceptance head, which predicts every candidate's
    /// true acceptance probability. It shows the most that a head can gain for a rule. Its timing
    /// is that of the recorded head, or [`HeadTiming::AfterRead`] if none was recorded.
    /// [`Self::is_judged`] must hold.
    pub fn with_perfect_head(&self) -> Self {
        let head = self.head.or(Some(HeadTiming::AfterRead));
        let knowing = self.with_candidates(|candidate| {
            candidate.predicted_acceptance_prob = Some(candidate.acceptance_prob());
        });
        Self { head, ..knowing }
    }

    /// Returns the same recordings with the predictions of another head. For each response,
    /// `predictions` lists the predictions for the response's tokens, then those for the candidates
    /// of its rollouts.
    ///
    /// # Panics
    /// If there are fewer predictions than candidates.
    pub fn with_head(&self, head: HeadTiming, predictions: &[f32]) -> Self {
        let mut recordings = Self { head: Some(head), ..self.clone() };
        let mut predictions = predictions.iter();
        let mut predict = |candidates: &mut dyn Iterator<Item = &mut RecordedCandidate>| {
            let mut last = None;
            for candidate in candidates {
                let predicted = predictions.next().expect("a prediction for every candidate");
                candidate.predicted_acceptance_prob = Some(f64::from(*predicted));
                last = Some(candidate);
            }
            // Nothing is drafted after the last candidate, so the draft model never reads it.
            if let Some(last) = last.filter(|_| head == HeadTiming::AfterRead) {
                last.predicted_acceptance_prob = None;
            }
        };
        for response in &mut recordings.responses {
            let places = Arc::make_mut(&mut response.places);
            predict(&mut places.iter_mut().map(|place| &mut place.candidate));
            let rollouts = places.iter_mut().filter_map(|place| place.rollout.as_mut());
            rollouts.for_each(|rollout| predict(&mut rollout.iter_mut()));
        }
        recordings
    }

    /// Copies the recordings and applies `change` to every candidate.
    fn with_candidates(&self, change: impl Fn(&mut RecordedCandidate)) -> Self {
        let mut recordings = self.clone();
        for response in &mut recordings.responses {
            for place in Arc::make_mut(&mut response.places) {
                change(&mut place.candidate);
                place.rollout.iter_mut().flatten().for_each(&change);
            }
        }
        recordings
    }

    /// Counts the tokens of all responses.
    pub fn num_tokens(&self) -> usize {
        self.responses.iter().map(|response| response.places.len()).sum()
    }

    /// Returns a function from a round's numbers of draft forwards and candidates to its seconds.
    fn round_seconds(&self, costs: &RoundCosts) -> Result<impl Fn(usize, usize) -> f64> {
        let draft_seconds = costs.draft_seconds(self.drafter)?;
        Ok(move |num_draft_forwards, num_drafted| {
            num_draft_forwards as f64 * draft_seconds + costs.verify_seconds(num_drafted + 1)
        })
    }

    fn replay_one(
        &self,
        response: &Recording,
        rule: &mut dyn StopRule,
        round_seconds: impl Fn(usize, usize) -> f64,
        mut observe: impl FnMut(DrafterId, RoundCounts),
    ) -> TimedCounts {
        let mut seconds = 0.0;
        let mut counts = Counts::default();
        let mut candidates = Vec::with_capacity(self.max_length);
        rule.begin_sequence();
        while counts.num_tokens < response.places.len() {
            let num_left = response.places.len() - counts.num_tokens;
            let looked_up = response.looked_up.get(counts.num_tokens).copied();
            let (drafter, round) = match looked_up.filter(|found| found.num_candidates > 0) {
                Some(found) => {
                    let round = found.round(num_left);
                    seconds += round_seconds(0, round.num_drafted);
                    (DrafterId::LOOK_UP, round)
                }
                None => {
                    let round = self.draft_round(response, counts, rule, &mut candidates);
                    seconds += round_seconds(round.num_draft_forwards, round.num_drafted);
                    (self.drafter, round)
                }
            };
            observe(drafter, round);
            counts.add_round(round);
            rule.end_round(round.end());
        }
        TimedCounts { counts, seconds }
    }

    /// Replays one drafted round, which begins after the tokens that `counts` has kept.
    fn draft_round(
        &self,
        response: &Recording,
        counts: Counts,
        rule: &mut dyn StopRule,
        candidates: &mut Vec<u32>,
    ) -> RoundCounts {
        candidates.clear();
        let limits = DraftLimits {
            room: response.limit - counts.num_tokens - 1,
            eos_token_ids: &self.eos_token_ids,
            // The recording stops where the text ended.
            text_end: None,
        };
        let places = &response.places[counts.num_tokens..];
        let mut steps = RecordedSteps::new(places, self.head);
        let mut phase = DraftPhase::begin(rule, limits);
        while phase.needs_step() && steps.has_next() {
            let signals = steps.step();
            let Ok(()) = phase.advance(&mut steps, signals, rule, limits, candidates);
        }
        let num_accepted = steps.num_accepted;
        RoundCounts {
            num_drafted: candidates.len(),
            num_draft_forwards: response.forwards.of_steps(phase.num_steps()),
            num_accepted,
            num_kept: (num_accepted + 1).min(places.len()),
        }
    }
}
