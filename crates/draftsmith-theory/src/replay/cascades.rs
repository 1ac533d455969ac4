//! Cascades of the recorded drafter over look-ups, along recorded responses.
//!
//! A reviewer that forgives nothing emits its own tokens, whatever it reviews: greedily its most
//! probable ones, sampled ones of its own distribution, of which a looked-up token stands exactly where
//! it is the one drawn. So the chain that the target reads is the one that was recorded, and look-ups
//! say only how many of its tokens a forward gives. That is a function of the text, and so a cascade
//! is replayed as a rule is: greedy count for count, sampled in distribution. A lenient reviewer emits
//! other tokens, about which nothing is recorded.

use super::recorded_steps::RecordedSteps;
use super::{Recording, Recordings, Spending};
use crate::trace::RoundCounts;
use crate::{
    Bigrams, CandidateSource, CascadeAcceptance, Counts, Emitted, MaxGram, MaxGramConfig,
    RoundCosts, SignalNeeds, TheoryError,
};

/// A cascade of one drafter and of look-ups, by its matrix `[[drafted, behind], [0, reviewed]]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LookUpCascade {
    /// Candidates of the drafter in a round, at least.
    pub drafted: usize,
    /// Candidates that are looked up behind them, less those of which the drafter gave more.
    pub behind: usize,
    /// What is looked up for each of the drafter's forwards, which reviews it.
    pub reviewed: usize,
}

/// How tokens are looked up.
#[derive(Debug, Clone, Copy)]
pub struct LookUps<'b> {
    /// Where, and how much must be found.
    pub config: MaxGramConfig,
    /// What goes on where a look-up does not.
    pub bigrams: Option<&'b Bigrams>,
}

impl LookUpCascade {
    /// The matrix K.
    pub fn lengths(self) -> Vec<Vec<usize>> {
        vec![vec![self.drafted, self.behind], vec![0, self.reviewed]]
    }

    /// The most of the drafter's own candidates that a round can have: its last forward may let more
    /// stand than were asked for.
    pub fn longest_drafted(self) -> usize {
        if self.drafted > 0 { self.drafted + self.reviewed } else { 0 }
    }

    /// The most candidates that a round can have.
    pub fn longest(self) -> usize {
        self.longest_drafted().max(self.drafted + self.behind)
    }
}

impl Recordings {
    /// What a cascade takes that forgives nothing, of each response, in order. `forward_seconds` are
    /// those of a forward of the drafter that reads so many rows.
    ///
    /// # Errors
    /// If its chains may be longer than was recorded.
    pub fn replay_cascade(
        &self,
        cascade: LookUpCascade,
        look_ups: LookUps<'_>,
        forward_seconds: impl Fn(usize) -> f64,
        costs: &RoundCosts,
    ) -> Result<Vec<Spending>, TheoryError> {
        // Behind a chain of all that is recorded nobody knows whether the text ended there.
        let longest = cascade.longest_drafted() + usize::from(cascade.behind > 0);
        if longest > self.max_length {
            return Err(TheoryError::NotRecorded { longest, recorded: self.max_length });
        }
        let replay = |response| {
            let mut along = Along::begin(self, response, look_ups);
            let mut spending = Spending { counts: Counts::default(), seconds: 0.0 };
            while spending.counts.num_tokens < response.places.len() {
                let (round, seconds) = along.round(cascade, &forward_seconds);
                spending.seconds += seconds + costs.verify_seconds(round.num_drafted + 1);
                spending.counts.add_round(round);
            }
            spending
        };
        Ok(self.responses.iter().map(replay).collect())
    }

    /// What a look-up finds at each place of a response that is drafted at, if it finds something.
    pub fn first_looked_up(&self, response: &Recording, look_ups: LookUps<'_>) -> Vec<Option<u32>> {
        let mut along = Along::begin(self, response, look_ups);
        let mut find = || {
            let standing = along.sequence.len();
            let found = along.look_up(1).first().copied();
            along.forget(standing);
            along.stand(1);
            found
        };
        response.drafted_places().iter().map(|_| find()).collect()
    }

    /// How often the drafter's candidates stand, and the first tokens of look-ups behind it: the drafter
    /// is the first of the two.
    pub fn look_up_acceptance(&self, look_ups: LookUps<'_>) -> CascadeAcceptance {
        let [of_drafter, looked_up] = [0, 1].map(|drafter| Emitted { drafter, instead_of: None });
        let chance = |stands: bool| f64::from(u8::from(stands));
        let mut all = CascadeAcceptance::default();
        for response in &self.responses {
            let found = self.first_looked_up(response, look_ups);
            for (place, found) in response.drafted_places().iter().zip(found) {
                all.begin_place();
                let token = place.candidate.token_id;
                let drafted = place.rollout.as_ref().map_or(token, |rollout| rollout[0].token_id);
                all.add(0, of_drafter, chance(place.rollout.is_none()));
                if let Some(found) = found {
                    all.add(0, looked_up, chance(found == token));
                    all.add(1, looked_up, chance(found == drafted));
                }
            }
        }
        all
    }
}

/// A response on its way.
struct Along<'r> {
    recordings: &'r Recordings,
    response: &'r Recording,
    lookup: MaxGram,
    bigrams: Option<&'r Bigrams>,
    /// The prompt and the tokens that stand.
    sequence: Vec<u32>,
    /// How many of the response's those are.
    at: usize,
}

impl<'r> Along<'r> {
    fn begin(recordings: &'r Recordings, response: &'r Recording, look_ups: LookUps<'r>) -> Self {
        let mut lookup = MaxGram::new(look_ups.config);
        lookup.begin(&response.prompt);
        let (bigrams, sequence) = (look_ups.bigrams, response.prompt.clone());
        Self { recordings, response, lookup, bigrams, sequence, at: 0 }
    }

    /// A round of the cascade, and what its draft forwards take.
    fn round(
        &mut self,
        cascade: LookUpCascade,
        forward_seconds: impl Fn(usize) -> f64,
    ) -> (RoundCounts, f64) {
        let standing = self.sequence.len();
        let room = cascade.longest().min(self.response.limit - self.at - 1);
        let mut steps = RecordedSteps::new(&self.response.places[self.at..], None);
        let (mut num_draft_forwards, mut seconds) = (0, 0.0);
        let most = cascade.drafted.min(room);
        while self.sequence.len() - standing < most && steps.has_next() && !self.is_over(standing) {
            let before = self.sequence.len();
            let left = room - (before - standing) - 1;
            let proposed = self.look_up(cascade.reviewed.min(left));
            num_draft_forwards += 1 + proposed.len();
            seconds += forward_seconds(proposed.len() + 1);
            self.forget(before);
            // The drafter's own tokens, as far as they were looked up, and one more.
            let mut proposed = proposed.into_iter();
            loop {
                steps.step();
                let token = steps.draw(SignalNeeds::default()).token_id;
                self.sequence.push(token);
                let stood = proposed.next() == Some(token);
                if !stood || self.is_over(standing) || !steps.has_next() {
                    break;
                }
            }
        }
        let num_of_drafter = self.sequence.len() - standing;
        let mut num_accepted = steps.num_accepted();
        let most = (cascade.drafted + cascade.behind).min(room);
        // A chain of which nothing more is recorded ended where the text did.
        let ended = self.is_over(standing) || (num_of_drafter > 0 && !steps.has_next());
        if num_of_drafter < most && !ended {
            let found = self.look_up(most - num_of_drafter);
            num_draft_forwards += found.len();
            if num_accepted == num_of_drafter {
                let rest = &self.response.places[self.at + num_accepted..];
                let pairs = found.iter().zip(rest);
                let stand = pairs.take_while(|(found, place)| **found == place.candidate.token_id);
                num_accepted += stand.count();
            }
        }
        let num_drafted = self.sequence.len() - standing;
        let num_kept = (num_accepted + 1).min(self.response.places.len() - self.at);
        self.forget(standing);
        self.stand(num_kept);
        (RoundCounts { num_drafted, num_draft_forwards, num_accepted, num_kept }, seconds)
    }

    /// Appends what is looked up behind the sequence, up to `most` tokens, and returns it.
    fn look_up(&mut self, most: usize) -> Vec<u32> {
        let before = self.sequence.len();
        loop {
            let left = most - (self.sequence.len() - before);
            let eos_token_ids = &self.recordings.eos_token_ids;
            let found = match left {
                0 => 0,
                _ => self.lookup.extend(&mut self.sequence, self.bigrams, left, eos_token_ids),
            };
            if found == 0 || self.is_over(before) {
                return self.sequence[before..].to_vec();
            }
        }
    }

    /// Whether the last token behind the first `standing` ones ends the text.
    fn is_over(&self, standing: usize) -> bool {
        let last = self.sequence[standing..].last();
        last.is_some_and(|last| self.recordings.eos_token_ids.contains(last))
    }

    /// Takes back all but the first `len` tokens.
    fn forget(&mut self, len: usize) {
        self.sequence.truncate(len);
        self.lookup.truncate(len);
    }

    /// Appends the response's next tokens.
    fn stand(&mut self, num_kept: usize) {
        let kept = &self.response.places[self.at..self.at + num_kept];
        self.sequence.extend(kept.iter().map(|place| place.candidate.token_id));
        self.at += num_kept;
    }
}
