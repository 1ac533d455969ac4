//! What any stop rule would have done, from recordings alone: no model runs.
//!
//! A recording is a response of the target with, at each of its tokens, what the drafter does
//! there: whether its candidate is the response's token and is accepted, and if not, what it drafts
//! instead and goes on to draft, since a rule that does not know of the rejection may let it. A
//! round from any accepted prefix is then a walk: along the response while candidates are accepted,
//! along that rollout from the first one that is not.
//!
//! Greedy decoding is replayed exactly, count for count. Sampled decoding is replayed exactly in
//! distribution: given that the target's token at a place is x, the candidate there was x and was
//! accepted with chance min(1, q(x)/p(x)), because that happens with chance min(p(x), q(x)) and x
//! comes out with chance p(x); otherwise the candidate was rejected, and then its distribution is
//! (q − p)+, normalised. No place is met twice in one replay, as a candidate or as a rejection, so
//! one draw of either serves every rule: rules are compared on the same luck.
//!
//! What a round looks up depends on what stands alone, so it is known along a response whose prompt
//! is known. It is certain, and stands as far as the response goes on so: sampled, that is p(x) of
//! the time.

mod cost_optimal;
mod judged;
mod likely_shapes;
mod look_ups;
mod recorded_steps;
mod static_trees;
#[cfg(test)]
pub(crate) mod test_recordings;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::{
    Counts, DraftLimits, DraftPhase, DrafterId, Forwards, HeadTiming, Oracle, Round, RoundCosts,
    StopRule, StopRuleConfig, TheoryError, Trace, acceptance_prob, trace::RoundCounts,
};
use look_ups::LookedUp;
use recorded_steps::RecordedSteps;

pub use cost_optimal::{CostOptimum, cost_optimal};

/// One candidate as it was drafted, and what is true of it.
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
    /// The acceptance head's prediction for this candidate. None without a head. A head that predicts
    /// once a candidate is read has none for the last candidate of a rollout or a response, either:
    /// no rule asks for it.
    pub predicted_acceptance_prob: Option<f64>,
    /// log q of the candidate under the distribution that acceptance labels are defined by.
    pub draft_log_prob: f64,
    /// log p, likewise. NaN where the target was not asked: only an acceptance head is judged by it, and,
    /// of a sampled response, a look-up stands by it.
    pub target_log_prob: f64,
}

impl RecordedCandidate {
    /// The label, min(1, p/q): what a perfect acceptance head would predict.
    pub fn acceptance_prob(&self) -> f64 {
        f64::from(acceptance_prob(self.target_log_prob as f32, self.draft_log_prob as f32))
    }
}

/// A place in a response.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedPlace {
    /// The response's token, as a candidate.
    pub candidate: RecordedCandidate,
    /// What is drafted instead: a candidate that is rejected, and what follows it. None where the
    /// response's token is drafted and accepted; also at the last place the limit allows, where
    /// nothing is drafted.
    pub rollout: Option<Vec<RecordedCandidate>>,
    /// Which of the drafter's tokens the response's is there ([`child_rank`](crate::child_rank)). None of
    /// sampled responses, and where it was not recorded.
    pub draft_rank: Option<u32>,
}

/// A response, recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// What the response answers.
    pub prompt: Vec<u32>,
    /// The response's tokens, at least one; copies of a recording share them.
    pub places: Arc<[RecordedPlace]>,
    /// The most tokens the response might have had.
    pub limit: usize,
    /// What a round looks up that begins at each place; empty where the drafter is always asked.
    looked_up: Vec<LookedUp>,
}

impl Recording {
    /// A response to a prompt.
    pub fn new(prompt: Vec<u32>, places: Vec<RecordedPlace>, limit: usize) -> Self {
        Self { prompt, places: places.into(), limit, looked_up: Vec::new() }
    }
}

/// What a response took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spending {
    /// What was counted.
    pub counts: Counts,
    /// The modelled time of all rounds.
    pub seconds: f64,
}

/// Modelled seconds a kept token, over all of `spent` together. NaN without tokens.
pub fn seconds_per_token(spent: &[Spending]) -> f64 {
    let tokens: usize = spent.iter().map(|spent| spent.counts.num_tokens).sum();
    spent.iter().map(|spent| spent.seconds).sum::<f64>() / tokens as f64
}

/// Responses recorded alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Recordings {
    /// What drafted.
    pub drafter: DrafterId,
    /// The greatest number of candidates a round can be replayed with.
    pub max_length: usize,
    /// Tokens that end a response.
    pub eos_token_ids: Vec<u32>,
    /// When the acceptance head predicts for candidates; None without one.
    pub head: Option<HeadTiming>,
    /// The responses.
    pub responses: Vec<Recording>,
}

impl Recordings {
    /// What happens under a rule, and what it costs: of each response, in order. As in the round
    /// loop, rounds stay within the rule's bounds.
    ///
    /// # Errors
    /// If the rule's settings are not valid, it may draft longer than was recorded, it reads an
    /// acceptance head where there was none, or `costs` has no price for the drafter.
    pub fn replay(
        &self,
        config: &StopRuleConfig,
        costs: &RoundCosts,
    ) -> Result<Vec<Spending>, TheoryError> {
        let mut rule = self.rule(config)?;
        let seconds = self.round_seconds(costs)?;
        let mut spend = |response| self.replay_one(response, &mut *rule, &seconds, |_, _| {});
        Ok(self.responses.iter().map(&mut spend).collect())
    }

    /// How many candidates a rule drafts, round by round over all responses.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn round_lengths(&self, config: &StopRuleConfig) -> Result<Vec<usize>, TheoryError> {
        Ok(self.trace(config)?.rounds.iter().map(|round| round.num_drafted).collect())
    }

    /// The rounds of all responses under a rule, whose times are not known.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn trace(&self, config: &StopRuleConfig) -> Result<Trace, TheoryError> {
        let mut rule = self.rule(config)?;
        let mut trace = Trace { num_tokens: self.num_tokens(), ..Trace::default() };
        for response in &self.responses {
            self.replay_one(response, &mut *rule, untimed, |drafter, counts| {
                let RoundCounts { num_drafted, num_draft_forwards, num_accepted, .. } = counts;
                let forwards = Forwards::of(drafter, num_draft_forwards);
                trace.rounds.push(Round {
                    num_drafted,
                    depth: num_drafted,
                    forwards,
                    num_accepted,
                    ..Round::default()
                });
            });
        }
        Ok(trace)
    }

    /// A rule that can be replayed here.
    fn rule(&self, config: &StopRuleConfig) -> Result<Box<dyn StopRule>, TheoryError> {
        let rule = config.init()?;
        let longest = rule.bounds().max;
        if longest > self.max_length {
            return Err(TheoryError::NotRecorded { longest, recorded: self.max_length });
        }
        if config.needs().acceptance_prob && self.head.is_none() {
            return Err(TheoryError::NoHeadRecorded);
        }
        Ok(rule)
    }

    /// The counts of [`replay`](Self::replay) alone.
    ///
    /// # Errors
    /// As there.
    pub fn replay_counts(&self, config: &StopRuleConfig) -> Result<Vec<Counts>, TheoryError> {
        let mut rule = self.rule(config)?;
        let mut count = |response| self.replay_one(response, &mut *rule, untimed, |_, _| {}).counts;
        Ok(self.responses.iter().map(&mut count).collect())
    }

    /// What the oracle does (SpecDec++, Lemma 2.1), with rounds of up to the recorded length. Of
    /// sampled recordings it knows the luck as well: no rule without that can do as well.
    ///
    /// # Errors
    /// If `costs` has no price for the drafter.
    pub fn replay_oracle(&self, costs: &RoundCosts) -> Result<Vec<Spending>, TheoryError> {
        let seconds = self.round_seconds(costs)?;
        let replay = |response: &Recording| {
            let is_mismatch = response.places.iter().map(|place| place.rollout.is_some()).collect();
            let mut oracle = Oracle::new(is_mismatch, self.max_length);
            self.replay_one(response, &mut oracle, &seconds, |_, _| {})
        };
        Ok(self.responses.iter().map(replay).collect())
    }

    /// What the target does alone.
    pub fn plain(&self, costs: &RoundCosts) -> Vec<Spending> {
        let plain = |response: &Recording| {
            let num_tokens = response.places.len();
            Spending {
                counts: Counts { num_tokens, num_target_forwards: num_tokens, ..Counts::default() },
                seconds: num_tokens as f64 * costs.verify_seconds(1),
            }
        };
        self.responses.iter().map(plain).collect()
    }

    /// Whether the target was asked about every candidate, also behind rejected ones.
    pub fn is_judged(&self) -> bool {
        let mut places = self.responses.iter().flat_map(|response| response.places.iter());
        places.all(|place| {
            let rollout = place.rollout.iter().flatten();
            let mut candidates = rollout.chain([&place.candidate]);
            candidates.all(|candidate| !candidate.target_log_prob.is_nan())
        })
    }

    /// The same recordings with a perfect acceptance head, one that predicts every candidate's true
    /// acceptance probability: what a rule gains with it is the most that a head can give that
    /// rule. It predicts when the recorded head does; where there was none, once a candidate is
    /// read. The target must have been asked about every candidate
    /// ([`Self::is_judged`]).
    pub fn with_perfect_head(&self) -> Self {
        let head = self.head.or(Some(HeadTiming::AfterRead));
        let knowing = self.with_candidates(|candidate| {
            candidate.predicted_acceptance_prob = Some(candidate.acceptance_prob());
        });
        Self { head, ..knowing }
    }

    /// The same recordings where every candidate is changed.
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

    /// The tokens of all responses.
    pub fn num_tokens(&self) -> usize {
        self.responses.iter().map(|response| response.places.len()).sum()
    }

    /// The seconds of a round of so many draft forwards and candidates.
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
    ) -> Spending {
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
                    (DrafterId::MaxGram, round)
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
        Spending { counts, seconds }
    }

    /// A round of the drafter, behind what `counts` says was kept.
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
            // What is recorded goes no further than where a text ended.
            text_end: None,
        };
        let places = &response.places[counts.num_tokens..];
        let mut steps = RecordedSteps::new(places, self.head);
        let mut phase = DraftPhase::begin(rule, limits);
        while phase.needs_step() && steps.has_next() {
            let signals = steps.step();
            let Ok(()) = phase.advance(&mut steps, signals, rule, limits, candidates);
        }
        let num_accepted = steps.num_accepted();
        RoundCounts {
            num_drafted: candidates.len(),
            num_draft_forwards: phase.num_steps(),
            num_accepted,
            num_kept: (num_accepted + 1).min(places.len()),
        }
    }
}

/// For those who count and do not time.
fn untimed(_num_draft_forwards: usize, _num_drafted: usize) -> f64 {
    0.0
}
