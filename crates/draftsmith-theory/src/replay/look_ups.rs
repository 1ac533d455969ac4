//! Look-ups along recorded responses.

use super::{RecordedPlace, Recording, Recordings, Spending};
use crate::trace::RoundCounts;
use crate::{Bounds, DraftSignals, LookupFirst, MaxGram, RoundCosts, StopRule};

/// What a round looks up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LookedUp {
    /// 0 where nothing is found, and the drafter is asked.
    pub(super) num_candidates: usize,
    /// Those that the response goes on with.
    num_accepted: usize,
}

impl LookedUp {
    /// The round's counts, of a response of which `num_left` tokens are left. A candidate that is
    /// looked up counts as a forward, as in decoding, which has no price.
    pub(super) fn round(self, num_left: usize) -> RoundCounts {
        RoundCounts {
            num_drafted: self.num_candidates,
            num_draft_forwards: self.num_candidates,
            num_accepted: self.num_accepted,
            num_kept: (self.num_accepted + 1).min(num_left),
        }
    }
}

impl Recordings {
    /// The same responses where each round is looked up first, and drafted where nothing is found.
    pub fn behind_look_ups(&self, first: LookupFirst) -> Self {
        let mut recordings = self.clone();
        for response in &mut recordings.responses {
            response.looked_up = looked_up(response, first, &self.eos_token_ids);
        }
        recordings
    }

    /// What look-ups take without the drafter: where nothing is found, the target decodes alone.
    pub fn replay_look_ups(&self, first: LookupFirst, costs: &RoundCosts) -> Vec<Spending> {
        let behind = self.behind_look_ups(first);
        let seconds = |_, num_candidates| costs.verify_seconds(num_candidates + 1);
        let replay = |response| behind.replay_one(response, &mut NeverDrafts, seconds, |_, _| {});
        behind.responses.iter().map(replay).collect()
    }
}

/// The rule of rounds without a drafter.
struct NeverDrafts;

impl StopRule for NeverDrafts {
    fn bounds(&self) -> Bounds {
        Bounds { min: 0, max: 0 }
    }

    fn stops(&mut self, _candidates: &[u32], _signals: &DraftSignals) -> bool {
        true
    }
}

fn looked_up(response: &Recording, first: LookupFirst, eos_token_ids: &[u32]) -> Vec<LookedUp> {
    let token = |place: &RecordedPlace| place.candidate.token_id;
    let tokens: Vec<u32> = response.places.iter().map(token).collect();
    let mut sequence = response.prompt.clone();
    let mut lookup = MaxGram::new(first.config());
    lookup.begin(&sequence);
    let mut all = Vec::with_capacity(tokens.len());
    for (at, token) in tokens.iter().enumerate() {
        let standing = sequence.len();
        let most = first.most.min(response.limit - at - 1);
        let num_candidates = lookup.extend(&mut sequence, None, most, eos_token_ids);
        let found = sequence[standing..].iter().zip(&tokens[at..]);
        let num_accepted = found.take_while(|(found, token)| found == token).count();
        all.push(LookedUp { num_candidates, num_accepted });
        sequence.truncate(standing);
        sequence.push(*token);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::test_recordings::random;
    use crate::{DrafterId, FixedLengthConfig, StopRuleConfig};

    /// A response of these tokens, of which the drafter says 7, 7, …
    fn recordings(prompt: &[u32], tokens: &[u32], limit: usize) -> Recordings {
        let any = random(1, 1, 0.5);
        let candidate = |token_id| crate::RecordedCandidate {
            token_id,
            ..any.responses[0].places[0].candidate.clone()
        };
        let place = |(at, token): (usize, &u32)| RecordedPlace {
            candidate: candidate(*token),
            rollout: (*token != 7 && at + 1 < limit).then(|| vec![candidate(7); 8]),
            draft_rank: None,
        };
        let places = tokens.iter().enumerate().map(place).collect();
        Recordings {
            responses: vec![Recording::new(prompt.to_vec(), places, limit)],
            eos_token_ids: vec![9],
            ..any
        }
    }

    fn rounds(recordings: &Recordings, first: &str) -> Vec<(DrafterId, usize, usize)> {
        let rule = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: 2 });
        let recordings = recordings.behind_look_ups(first.parse().expect("one"));
        let trace = recordings.trace(&rule).expect("recorded");
        let of = |round: &crate::Round| {
            let drafter = round.forwards.iter().next().map_or(DrafterId::Draft, |(id, _)| id);
            (drafter, round.num_drafted, round.num_accepted)
        };
        trace.rounds.iter().map(of).collect()
    }

    #[test]
    fn what_repeats_is_looked_up_and_what_does_not_is_drafted() {
        use DrafterId::{Draft, MaxGram};
        // Behind `1 2` the prompt went on with `3 4 5`, the response with `3 4 8`.
        let found = recordings(&[1, 2, 3, 4, 5, 1, 2], &[3, 4, 8, 7, 7, 9], 9);
        assert_eq!(rounds(&found, "2x3"), [(MaxGram, 3, 2), (Draft, 2, 2)]);
        assert_eq!(rounds(&found, "2x1"), [(MaxGram, 1, 1), (MaxGram, 1, 0), (Draft, 2, 2)]);
        assert_eq!(rounds(&found, "3x3"), [(Draft, 2, 0), (MaxGram, 3, 1), (Draft, 2, 2)]);
    }

    #[test]
    fn look_ups_alone_leave_the_rest_to_the_target() {
        let found = recordings(&[1, 2, 3, 4, 5, 1, 2], &[3, 4, 8, 7, 7, 9], 9);
        let costs = RoundCosts::new(Default::default(), vec![1.0, 2.0, 4.0, 8.0]).expect("times");
        let [spent] = found.replay_look_ups("2x3".parse().expect("one"), &costs)[..] else {
            panic!("a response")
        };
        // Three candidates, of which two stand, then the target thrice.
        assert_eq!(spent.counts.num_tokens, 6);
        assert_eq!(spent.counts.num_target_forwards, 4);
        assert_eq!((spent.counts.num_drafted, spent.counts.num_accepted), (3, 2));
        assert_eq!(spent.seconds, 8.0 + 3.0);
        let nothing = found.replay_look_ups("9x3".parse().expect("one"), &costs);
        assert_eq!(nothing, found.plain(&costs));
    }

    #[test]
    fn look_ups_end_at_the_limit_and_at_end_tokens() {
        use DrafterId::MaxGram;
        let room = recordings(&[1, 2, 3, 1], &[2, 3], 2);
        assert_eq!(rounds(&room, "1x4"), [(MaxGram, 1, 1)]);
        let ended = recordings(&[1, 2, 9, 1], &[2, 9], 9);
        assert_eq!(rounds(&ended, "1x4"), [(MaxGram, 2, 2)]);
    }
}
