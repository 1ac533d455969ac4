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
mod look_ups;
mod predicted;
mod recorded_steps;
mod step_function;

use crate::{
    Counts, DraftLimits, DraftPhase, DrafterId, Forwards, HeadTiming, Oracle, Round, RoundCosts,
    RoundEnd, StopRule, StopRuleConfig, TheoryError, Trace, acceptance_prob, trace::RoundCounts,
};
use look_ups::LookedUp;
use recorded_steps::RecordedSteps;

pub use cost_optimal::{CostOptimum, cost_optimal};
pub use predicted::PredictedProb;

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
    /// What the acceptance head predicts for this candidate. Nothing without a head, and of a
    /// rollout's or a response's last candidate where the head predicts once it is read, which then
    /// nobody asks about.
    pub predicted_acceptance_prob: PredictedProb,
    /// log q of the candidate under the distribution that acceptance labels are defined by.
    pub draft_log_prob: f64,
    /// log p, likewise. NaN behind a rejected candidate where the target was not asked, since only an
    /// acceptance head is judged by it.
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
}

/// A response, recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// What the response answers.
    pub prompt: Vec<u32>,
    /// The response's tokens, at least one.
    pub places: Vec<RecordedPlace>,
    /// The most tokens the response might have had.
    pub limit: usize,
    /// What a round looks up that begins at each place; empty where the drafter is always asked.
    looked_up: Vec<LookedUp>,
}

impl Recording {
    /// A response to a prompt.
    pub fn new(prompt: Vec<u32>, places: Vec<RecordedPlace>, limit: usize) -> Self {
        Self { prompt, places, limit, looked_up: Vec::new() }
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

    /// The same recordings with a perfect acceptance head, one that predicts every candidate's true
    /// acceptance probability: what a rule gains with it is the most that a head can give that
    /// rule. It predicts when the recorded head does; where there was none, once a candidate is
    /// read. The target must have been asked about every candidate.
    pub fn with_perfect_head(&self) -> Self {
        let head = self.head.or(Some(HeadTiming::AfterRead));
        let mut recordings = Self { head, ..self.clone() };
        for place in recordings.responses.iter_mut().flat_map(|response| &mut response.places) {
            let rollout = place.rollout.iter_mut().flatten();
            for candidate in std::iter::once(&mut place.candidate).chain(rollout) {
                candidate.predicted_acceptance_prob =
                    PredictedProb::InAnyRound(candidate.acceptance_prob());
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
            let RoundCounts { num_accepted, num_kept, .. } = round;
            rule.end_round(RoundEnd { num_accepted, num_kept });
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

#[cfg(test)]
pub(crate) mod test_recordings;

#[cfg(test)]
mod tests {
    use super::test_recordings::random;
    use super::*;
    use crate::{
        Bounds, ConfidenceThresholdConfig, CostModel, FixedLengthConfig, HeuristicConfig,
        JointConfidenceConfig, RejectionThresholdConfig,
    };

    fn total(counts: Vec<Counts>) -> Counts {
        counts.into_iter().sum()
    }

    fn of(spent: Vec<Spending>) -> Counts {
        spent.into_iter().map(|spent| spent.counts).sum()
    }

    fn free() -> RoundCosts {
        RoundCosts::new([(DrafterId::Draft, 0.0)].into(), vec![0.0]).expect("times")
    }

    #[test]
    fn rounds_cost_what_their_forwards_and_rows_do() {
        let recordings = random(9, 30, 0.7);
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.03 };
        let costs = RoundCosts::from_line(DrafterId::Draft, model).expect("times");
        let spent = recordings.replay(&fixed(3), &costs).expect("replays");
        for spent in spent {
            let expected = model.seconds(&crate::Observation::new(&spent.counts, 0.0));
            // Some tens of rounds, summed in another order.
            assert!((spent.seconds - expected).abs() < 1e-12 * expected.max(1.0));
        }
    }

    fn fixed(candidate_length: usize) -> StopRuleConfig {
        StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length })
    }

    #[test]
    fn a_drafter_without_a_price_is_told() {
        let drafter = DrafterId::SelfDraft { exit_layer: 3 };
        let recordings = Recordings { drafter, ..random(9, 3, 0.7) };
        let refused = recordings.replay(&fixed(3), &free()).expect_err("no price");
        assert!(refused.to_string().contains("`self_draft_3`"), "{refused}");
        assert_eq!(recordings.replay_oracle(&free()), Err(refused.clone()));
        let bounds = Bounds { min: 1, max: 4 };
        let found = cost_optimal(&recordings, crate::AcceptanceSignal::Entropy, &free(), bounds);
        assert_eq!(found, Err(refused));
        // What is counted alone needs none.
        assert!(recordings.replay_counts(&fixed(3)).is_ok());
    }

    #[test]
    fn lengths_of_rounds_are_those_that_are_counted() {
        let recordings = random(5, 30, 0.7);
        let rule = StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
            confidence_threshold: 0.5,
            before_draw: true,
            bounds: Bounds { min: 0, max: 6 },
        });
        for config in [rule, fixed(3)] {
            let counts = total(recordings.replay_counts(&config).expect("replays"));
            let lengths = recordings.round_lengths(&config).expect("replays");
            assert_eq!(lengths.len(), counts.num_target_forwards);
            let rounds = recordings.trace(&config).expect("replays").rounds;
            let total = |of: fn(&Round) -> usize| rounds.iter().map(of).sum::<usize>();
            assert_eq!(total(|round| round.num_accepted), counts.num_accepted);
            assert_eq!(total(Round::num_draft_forwards), counts.num_draft_forwards);
            assert_eq!(lengths.iter().sum::<usize>(), counts.num_drafted);
            let longest = config.init().expect("valid").bounds().max;
            assert!(lengths.iter().all(|length| *length <= longest));
            assert!(lengths.windows(2).any(|two| two[0] != two[1]), "rounds differ: {lengths:?}");
        }
    }

    #[test]
    fn every_token_comes_out_once_and_forwards_add_up() {
        let recordings = random(1, 40, 0.7);
        let bounds = Bounds { min: 1, max: 8 };
        let mut rules: Vec<StopRuleConfig> = (1..=8).map(fixed).collect();
        rules.push(StopRuleConfig::Heuristic(HeuristicConfig { initial_length: 3, bounds }));
        for threshold in [0.2, 0.5, 0.9] {
            rules.push(StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: threshold,
                without_lag: false,
                bounds,
            }));
            rules.push(StopRuleConfig::JointConfidence(JointConfidenceConfig {
                confidence_threshold: threshold,
                bounds,
            }));
        }
        for rule in &rules {
            let counts = total(recordings.replay_counts(rule).expect("replays"));
            assert_eq!(counts.num_tokens, recordings.num_tokens());
            counts.check_forward_identity().expect("a forward a candidate");
            assert!(counts.num_accepted + counts.num_target_forwards >= counts.num_tokens);
        }
        let plain = of(recordings.plain(&free()));
        assert_eq!((plain.verification_rate(), plain.discard_rate()), (1.0, 0.0));
        plain.check_forward_identity().expect("a forward a token");
    }

    #[test]
    fn without_lag_the_same_forwards_verify_fewer_rows() {
        let recordings = random(2, 40, 0.7);
        let bounds = Bounds { min: 1, max: 8 };
        let counts = |without_lag| {
            let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: 0.4,
                without_lag,
                bounds,
            });
            total(recordings.replay_counts(&rule).expect("replays"))
        };
        let (late, own) = (counts(false), counts(true));
        assert!(own.num_drafted < own.num_draft_forwards);
        assert!(own.num_verified_rows() < late.num_verified_rows());
        assert!(own.discard_rate() < late.discard_rate());
    }

    #[test]
    fn a_head_that_looks_ahead_saves_the_forwards_that_nothing_is_drawn_from() {
        let late = random(2, 40, 0.7);
        let ahead = Recordings { head: Some(HeadTiming::AtDraw), ..late.clone() };
        let bounds = Bounds { min: 1, max: 8 };
        let counts = |recordings: &Recordings, without_lag| {
            let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: 0.4,
                without_lag,
                bounds,
            });
            total(recordings.replay_counts(&rule).expect("replays"))
        };
        let (own, early) = (counts(&late, true), counts(&ahead, true));
        assert_eq!(early, counts(&ahead, false));
        // The same rounds, but for those at the bound, and each without the forward that only
        // asked.
        assert_eq!(early.num_drafted, own.num_drafted);
        assert_eq!(early.num_accepted, own.num_accepted);
        assert!(early.num_draft_forwards < own.num_draft_forwards);
        early.check_forward_identity().expect("a forward a candidate");
    }

    #[test]
    fn longer_rounds_verify_less_often_and_discard_more() {
        let recordings = random(3, 60, 0.6);
        let counts: Vec<Counts> =
            (1..=8).map(|k| total(recordings.replay_counts(&fixed(k)).expect("replays"))).collect();
        assert!(
            counts.windows(2).all(|two| two[1].num_target_forwards <= two[0].num_target_forwards)
        );
        assert!(counts.windows(2).all(|two| two[1].num_discarded >= two[0].num_discarded));
    }

    #[test]
    fn the_oracle_discards_nothing_and_verifies_least() {
        let recordings = random(4, 40, 0.7);
        let oracle = of(recordings.replay_oracle(&free()).expect("a price"));
        // An accepted end token leaves the target's own token behind it without use.
        let ends = |response: &&Recording| {
            let last = response.places.last().expect("a token");
            last.rollout.is_none() && last.candidate.token_id == recordings.eos_token_ids[0]
        };
        let num_behind_the_end = recordings.responses.iter().filter(ends).count();
        assert!(num_behind_the_end > 0);
        assert_eq!(oracle.num_discarded, num_behind_the_end);
        oracle.check_forward_identity().expect("a forward a candidate");
        let longest = total(recordings.replay_counts(&fixed(8)).expect("replays"));
        assert!(oracle.num_target_forwards <= longest.num_target_forwards);
    }

    #[test]
    fn a_perfect_head_predicts_what_is_true() {
        let recordings = random(5, 3, 0.5).with_perfect_head();
        for place in recordings.responses.iter().flat_map(|response| &response.places) {
            for candidate in place.rollout.iter().flatten().chain([&place.candidate]) {
                let expected = PredictedProb::InAnyRound(candidate.acceptance_prob());
                assert_eq!(candidate.predicted_acceptance_prob, expected);
            }
        }
    }

    #[test]
    fn what_was_not_recorded_is_refused() {
        let mut recordings = random(6, 2, 0.5);
        let refused = recordings.replay_counts(&fixed(9));
        assert_eq!(refused, Err(TheoryError::NotRecorded { longest: 9, recorded: 8 }));
        recordings.head = None;
        let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold: 0.5,
            without_lag: false,
            bounds: Bounds { min: 1, max: 4 },
        });
        assert_eq!(recordings.replay_counts(&rule), Err(TheoryError::NoHeadRecorded));
    }
}
