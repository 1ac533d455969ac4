//! Replay: what decoding under any stop rule would have done, from recordings, without a model.
//!
//! A recording is a response of the target with the drafter's behaviour at each token: whether its
//! candidate there is the response's token and is accepted, and if not, a rollout: the rejected
//! candidate and those that the drafter would draft after it, because the rule does not know of the
//! rejection. A round from any accepted prefix then follows the response while candidates are accepted,
//! and the rollout from the first rejection.
//!
//! What some drafters draft depends on where their round began: EAGLE-3's reads the target's states up to there
//! and its own output after it. Their recordings have a rollout at every position, which is the whole round from
//! there, with its accepted candidates first.
//!
//! The replay of greedy decoding is exact, count for count. The replay of sampled decoding is exact in
//! distribution. Given that the target's token is x, the candidate was x and was accepted with
//! probability min(1, q(x)/p(x)), since that happens with probability min(p(x), q(x)) and x is emitted
//! with probability p(x). Otherwise the candidate was rejected, with the normalised distribution (q −
//! p)+. One replay reaches each position once, so one draw serves every rule, and all rules are compared
//! on the same draws.

mod cost_optimal;
mod judged;
mod look_ups;
mod ngram;
mod recorded_steps;
#[cfg(test)]
pub(crate) mod test_recordings;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::{
    Counts, DraftLimits, DraftPhase, DrafterId, Forwards, HeadTiming, Oracle, Round, RoundCosts,
    RoundForwards, StopRule, StopRuleConfig, TheoryError, TimedCounts, Trace, acceptance_prob,
    trace::RoundCounts,
};
use look_ups::LookedUp;
use recorded_steps::RecordedSteps;

pub use cost_optimal::{CostOptimum, cost_optimal};
pub use judged::{JudgedPrediction, RoundPrediction};
pub use ngram::NgramSimple;

/// A drafted candidate with its signals and probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedCandidate {
    /// The token.
    pub token_id: u32,
    /// [`DraftSignals::candidate_prob`](crate::DraftSignals::candidate_prob).
    pub candidate_prob: f64,
    /// [`DraftSignals::confidence`](crate::DraftSignals::confidence).
    pub confidence: f64,
    /// [`DraftSignals::confidence_of_ten`](crate::DraftSignals::confidence_of_ten).
    pub confidence_of_ten: f64,
    /// [`DraftSignals::entropy`](crate::DraftSignals::entropy).
    pub entropy: f64,
    /// The acceptance head's prediction for this candidate. None without a head, and, for a head that
    /// predicts after reading, for the last candidate of a rollout or response, which no rule needs.
    pub predicted_acceptance_prob: Option<f64>,
    /// log q of the candidate, under the distribution that defines acceptance labels.
    pub draft_log_prob: f64,
    /// log p of the candidate, likewise. NaN if the target was not evaluated, which only acceptance heads
    /// and look-ups in sampled responses need.
    pub target_log_prob: f64,
}

impl RecordedCandidate {
    /// Computes the label, min(1, p/q), which a perfect acceptance head would predict.
    pub fn acceptance_prob(&self) -> f64 {
        f64::from(acceptance_prob(self.target_log_prob as f32, self.draft_log_prob as f32))
    }
}

/// A position in a response.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedPlace {
    /// The response's token, as a candidate.
    pub candidate: RecordedCandidate,
    /// The rejected candidate and the candidates that follow it, or a whole round, which may begin with accepted
    /// candidates. None if the response's token is drafted and accepted as in any round, and at the last position
    /// within the limit, where nothing is drafted.
    pub rollout: Option<Vec<RecordedCandidate>>,
}

impl RecordedPlace {
    /// Returns the candidate that a round which begins here drafts first.
    pub fn drafted(&self) -> &RecordedCandidate {
        self.rollout.as_ref().and_then(|rollout| rollout.first()).unwrap_or(&self.candidate)
    }

    /// Returns the candidate that a round which begins here drafts first, if it is rejected.
    pub fn rejected(&self) -> Option<&RecordedCandidate> {
        // A rejected candidate is never the response's token.
        Some(self.drafted()).filter(|drafted| drafted.token_id != self.candidate.token_id)
    }
}

/// A recorded response.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// The response's tokens, at least one; clones of a recording share them.
    pub places: Arc<[RecordedPlace]>,
    /// The maximum number of tokens in the response.
    pub limit: usize,
    /// The forwards that a round of it takes.
    pub forwards: RoundForwards,
    /// The look-up of a round that begins at each position; empty without look-ups.
    looked_up: Vec<LookedUp>,
}

impl Recording {
    /// Creates the recording of a response to a prompt, without look-ups.
    pub fn new(prompt: Vec<u32>, places: Vec<RecordedPlace>, limit: usize) -> Self {
        let forwards = RoundForwards::EachStep;
        Self { prompt, places: places.into(), limit, forwards, looked_up: Vec::new() }
    }

    /// Sets the forwards of a round, which are one for each step until then.
    #[must_use]
    pub fn with_forwards(self, forwards: RoundForwards) -> Self {
        Self { forwards, ..self }
    }

    /// Counts the candidates that are accepted in a round that begins at `start`, if the round is long enough.
    pub fn num_accepted(&self, start: usize) -> usize {
        let mut steps = RecordedSteps::new(&self.places[start..], None);
        while steps.has_next() && steps.is_accepted() {
            steps.step();
            steps.count();
        }
        steps.num_accepted
    }
}

/// The rounds of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundLengths {
    /// How many rounds have each number of candidates, from 0.
    pub by_length: Vec<usize>,
    /// The response's tokens.
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
    /// The drafter.
    pub drafter: DrafterId,
    /// The maximum number of candidates in a replayed round.
    pub max_length: usize,
    /// Tokens that end a response.
    pub eos_token_ids: Vec<u32>,
    /// When the acceptance head predicts; None without a head.
    pub head: Option<HeadTiming>,
    /// The responses.
    pub responses: Vec<Recording>,
}

impl Recordings {
    /// Replays each response under a rule: counts and modelled seconds, in order.
    ///
    /// # Errors
    /// If the rule's settings are invalid, it may draft more candidates than recorded, it needs an
    /// acceptance head that was not recorded, or `costs` lacks the drafter.
    pub fn replay(
        &self,
        config: &StopRuleConfig,
        costs: &RoundCosts,
    ) -> Result<Vec<TimedCounts>, TheoryError> {
        let mut rule = self.rule(config)?;
        let seconds = self.round_seconds(costs)?;
        let mut spend = |response| self.replay_one(response, &mut *rule, &seconds, |_, _| {});
        Ok(self.responses.iter().map(&mut spend).collect())
    }

    /// Replays all responses under a rule and returns their rounds, without times.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn trace(&self, config: &StopRuleConfig) -> Result<Trace, TheoryError> {
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

    /// Replays each response under a rule and counts its rounds by number of candidates.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn round_lengths(&self, config: &StopRuleConfig) -> Result<Vec<RoundLengths>, TheoryError> {
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
    fn rule(&self, config: &StopRuleConfig) -> Result<Box<dyn StopRule>, TheoryError> {
        let rule = config.init()?;
        self.check(&*rule)?;
        Ok(rule)
    }

    /// Checks that these recordings suffice for a rule.
    fn check(&self, rule: &dyn StopRule) -> Result<(), TheoryError> {
        let longest = rule.bounds().max;
        if longest > self.max_length {
            return Err(TheoryError::NotRecorded { longest, recorded: self.max_length });
        }
        if rule.needs().acceptance_prob && self.head.is_none() {
            return Err(TheoryError::NoHeadRecorded);
        }
        Ok(())
    }

    /// Replays each response as [`replay`](Self::replay) does, but returns only counts and needs no costs.
    ///
    /// # Errors
    /// As there.
    pub fn replay_counts(&self, config: &StopRuleConfig) -> Result<Vec<Counts>, TheoryError> {
        self.replay_rule(&mut *self.rule(config)?)
    }

    /// Replays each response as [`replay_counts`](Self::replay_counts) does, under a rule that is not in the table,
    /// such as one that you are developing. Its [`StopRule::needs`] must name every signal that it reads: decoding
    /// gives it no others.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn replay_rule(&self, rule: &mut dyn StopRule) -> Result<Vec<Counts>, TheoryError> {
        self.check(rule)?;
        let mut count = |response| self.replay_one(response, rule, |_, _| 0.0, |_, _| {}).counts;
        Ok(self.responses.iter().map(&mut count).collect())
    }

    /// Replays the oracle (SpecDec++, Lemma 2.1), with rounds of up to the recorded length. For sampled
    /// recordings it also knows the draws.
    ///
    /// # Errors
    /// If `costs` lacks the drafter.
    pub fn replay_oracle(&self, costs: &RoundCosts) -> Result<Vec<TimedCounts>, TheoryError> {
        let seconds = self.round_seconds(costs)?;
        let replay = |response: &Recording| {
            let num_accepted = (0..response.places.len()).map(|start| response.num_accepted(start));
            let mut oracle = Oracle::new(num_accepted.collect(), self.max_length);
            self.replay_one(response, &mut oracle, &seconds, |_, _| {})
        };
        Ok(self.responses.iter().map(replay).collect())
    }

    /// Returns the counts and modelled seconds of plain decoding for each response: one target forward per token.
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

    /// Returns the recordings with each response's first token as the end of its prompt, as on servers, where it comes
    /// from reading the prompt. Responses of one token are left out.
    #[must_use]
    pub fn after_first_token(&self) -> Self {
        let later = |response: &Recording| {
            let (first, later) = response.places.split_first()?;
            let mut prompt = response.prompt.clone();
            prompt.push(first.candidate.token_id);
            let limit = response.limit.saturating_sub(1);
            (!later.is_empty()).then(|| {
                Recording::new(prompt, later.to_vec(), limit).with_forwards(response.forwards)
            })
        };
        let responses = self.responses.iter().filter_map(later).collect();
        Self { responses, ..self.clone() }
    }

    /// Returns whether the target was evaluated for every candidate, including those after rejected ones.
    pub fn is_judged(&self) -> bool {
        let mut places = self.responses.iter().flat_map(|response| response.places.iter());
        places.all(|place| {
            let rollout = place.rollout.iter().flatten();
            let mut candidates = rollout.chain([&place.candidate]);
            candidates.all(|candidate| !candidate.target_log_prob.is_nan())
        })
    }

    /// Returns the same recordings with a perfect acceptance head, which predicts every candidate's true acceptance
    /// probability: the most that a head can gain for a rule. It predicts when the recorded head does, or after reading
    /// if none was recorded. [`Self::is_judged`] must hold.
    pub fn with_perfect_head(&self) -> Self {
        let head = self.head.or(Some(HeadTiming::AfterRead));
        let knowing = self.with_candidates(|candidate| {
            candidate.predicted_acceptance_prob = Some(candidate.acceptance_prob());
        });
        Self { head, ..knowing }
    }

    /// Returns the same recordings with the predictions of another head. For each response, `predictions` first has
    /// those of the response's tokens, then those of its rollouts' candidates.
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
            // Nothing is drafted after the last one, which would read it.
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
    fn round_seconds(
        &self,
        costs: &RoundCosts,
    ) -> Result<impl Fn(usize, usize) -> f64, TheoryError> {
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
