//! Look-ups along recorded responses.
//!
//! A look-up depends only on the accepted text. Recordings hold the prompt, so look-ups are
//! replayed exactly in greedy and in sampled decoding. Stop rules do not apply to rounds with
//! looked-up candidates.

use super::{RecordedPlace, Recording, Recordings};
use crate::trace::RoundCounts;
use crate::{
    Bounds, DraftSignals, LookupFirst, MaxGram, RoundCosts, RoundLengths, StopRule, TimedCounts,
};

/// The result of a round's look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LookedUp {
    /// The number of candidates found; 0 if nothing is found and the drafter drafts instead.
    pub(super) num_candidates: usize,
    /// The number of leading candidates that match the response.
    num_accepted: usize,
}

impl LookedUp {
    /// Returns the counts of the round if `num_left` tokens of the response remain. As in decoding,
    /// a looked-up candidate counts as a draft forward that costs nothing.
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
    /// Returns the same recordings with a look-up first in each round; the drafter drafts only if
    /// the look-up finds nothing.
    pub fn with_look_ups(&self, first: LookupFirst) -> Self {
        let mut recordings = self.clone();
        for response in &mut recordings.responses {
            let lookup = MaxGram::new(first.config(), self.answers.clone());
            let mut lookup = lookup.for_answer(response.number);
            lookup.begin(&response.prompt);
            response.looked_up = looked_up_by(response, |sequence, room| {
                lookup.extend(sequence, None, first.most.min(room), &self.eos_token_ids);
            });
        }
        recordings
    }

    /// Replays look-ups without a drafter: if nothing is found, the target decodes one token by
    /// itself.
    pub fn replay_look_ups(&self, first: LookupFirst, costs: &RoundCosts) -> Vec<TimedCounts> {
        let recordings = self.with_look_ups(first);
        let seconds = |_, num_candidates| costs.verify_seconds(num_candidates + 1);
        let replay =
            |response| recordings.replay_one(response, &mut NeverDrafts, seconds, |_, _| {});
        recordings.responses.iter().map(replay).collect()
    }

    /// Replays each response with these look-ups as the only drafter, and counts its rounds by
    /// number of candidates.
    pub fn look_up_lengths(&self, first: LookupFirst) -> Vec<RoundLengths> {
        self.with_look_ups(first).lengths_under(&mut NeverDrafts)
    }
}

/// A stop rule for replays without a drafter, which never drafts.
pub(super) struct NeverDrafts;

impl StopRule for NeverDrafts {
    fn bounds(&self) -> Bounds {
        Bounds { min: 0, max: 0 }
    }

    fn stops(&mut self, _candidates: &[u32], _signals: &DraftSignals) -> bool {
        true
    }
}

/// Looks up the candidates of a round for every position at which it could begin. `extend` gets the
/// sequence and the maximum number of candidates, and appends the candidates that it finds.
pub(super) fn looked_up_by(
    response: &Recording,
    mut extend: impl FnMut(&mut Vec<u32>, usize),
) -> Vec<LookedUp> {
    let token = |place: &RecordedPlace| place.candidate.token_id;
    let tokens: Vec<u32> = response.places.iter().map(token).collect();
    let mut sequence = response.prompt.clone();
    let mut all = Vec::with_capacity(tokens.len());
    for (at, token) in tokens.iter().enumerate() {
        let num_before = sequence.len();
        extend(&mut sequence, response.limit - at - 1);
        let num_candidates = sequence.len() - num_before;
        let found = sequence[num_before..].iter().zip(&tokens[at..]);
        let num_accepted = found.take_while(|(found, token)| found == token).count();
        all.push(LookedUp { num_candidates, num_accepted });
        sequence.truncate(num_before);
        sequence.push(*token);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::replay::test_recordings::random;
    use crate::{DrafterId, FixedLengthConfig, StopRuleConfig, StoredAnswers};

    /// Creates recordings of one response with these tokens and a drafter that always drafts 7.
    fn recordings(prompt: &[u32], tokens: &[u32], limit: usize) -> Recordings {
        let any = random(1, 1, 0.5);
        let candidate = |token_id| crate::RecordedCandidate {
            token_id,
            ..any.responses[0].places[0].candidate.clone()
        };
        let place = |(at, token): (usize, &u32)| RecordedPlace {
            candidate: candidate(*token),
            rollout: (*token != 7 && at + 1 < limit).then(|| vec![candidate(7); 8]),
        };
        let places = tokens.iter().enumerate().map(place).collect();
        Recordings {
            responses: vec![Recording::new(prompt.to_vec(), places, limit)],
            eos_token_ids: vec![9],
            ..any
        }
    }

    const DRAFT: DrafterId = DrafterId::DRAFT;
    const LOOK_UP: DrafterId = DrafterId::LOOK_UP;

    fn rounds(recordings: &Recordings, first: &str) -> Vec<(DrafterId, usize, usize)> {
        let rule = StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: 2 });
        let recordings = recordings.with_look_ups(first.parse().expect("one"));
        let trace = recordings.trace(&rule).expect("recorded");
        let of = |round: &crate::Round| {
            let drafter = round.forwards.iter().next().map_or(DrafterId::DRAFT, |(id, _)| id);
            (drafter, round.num_drafted, round.num_accepted)
        };
        trace.rounds.iter().map(of).collect()
    }

    #[test]
    fn repetitions_are_looked_up_and_the_rest_is_drafted() {
        // After `1 2` the prompt continued with `3 4 5`, the response with `3 4 8`.
        let found = recordings(&[1, 2, 3, 4, 5, 1, 2], &[3, 4, 8, 7, 7, 9], 9);
        assert_eq!(rounds(&found, "2x3"), [(LOOK_UP, 3, 2), (DRAFT, 2, 2)]);
        assert_eq!(rounds(&found, "2x1"), [(LOOK_UP, 1, 1), (LOOK_UP, 1, 0), (DRAFT, 2, 2)]);
        assert_eq!(rounds(&found, "3x3"), [(DRAFT, 2, 0), (LOOK_UP, 3, 1), (DRAFT, 2, 2)]);
    }

    #[test]
    fn without_a_drafter_the_target_decodes_the_rest() {
        let found = recordings(&[1, 2, 3, 4, 5, 1, 2], &[3, 4, 8, 7, 7, 9], 9);
        let costs = RoundCosts::new(Default::default(), vec![1.0, 2.0, 4.0, 8.0]).expect("times");
        let [spent] = found.replay_look_ups("2x3".parse().expect("one"), &costs)[..] else {
            panic!("a response")
        };
        // Three candidates, two of them accepted, then three target tokens.
        assert_eq!(spent.counts.num_tokens, 6);
        assert_eq!(spent.counts.num_target_forwards, 4);
        assert_eq!((spent.counts.num_drafted, spent.counts.num_accepted), (3, 2));
        assert_eq!(spent.seconds, 8.0 + 3.0);
        let nothing = found.replay_look_ups("9x3".parse().expect("one"), &costs);
        assert_eq!(nothing, found.plain(&costs));
    }

    #[test]
    fn a_look_up_in_the_answers_of_a_run_sees_those_before_its_own() {
        let texts: [&[u32]; 4] = [&[3, 4, 5, 6, 2], &[8, 3, 4, 5, 6, 2], &[8, 3, 4, 5], &[1, 8, 3]];
        let any = recordings(&[1], &[2], 9);
        let recording = |(number, tokens): (usize, &&[u32])| {
            recordings(&[1, 2], tokens, 9).responses.remove(0).numbered(number)
        };
        let all: Vec<Recording> = texts.iter().enumerate().map(recording).collect();
        let look_up = |responses: &[Recording], answers: StoredAnswers| {
            let answers = Some(Arc::new(answers));
            let found = Recordings { responses: responses.to_vec(), answers, ..any.clone() };
            found.with_look_ups("answers:1x4".parse().expect("one")).responses
        };
        // In any order.
        let reversed: Vec<Recording> = all.iter().rev().cloned().collect();
        let seen = look_up(&reversed, StoredAnswers::of_run(&texts));
        for response in &seen {
            let at = response.number;
            let before = StoredAnswers::build(texts[..at].iter().copied(), |_| Ok::<_, ()>(()));
            assert_eq!(*response, look_up(&all[at..=at], before.expect("small"))[0]);
        }
        let found = |at: usize| {
            let looked_up = &seen[texts.len() - 1 - at].looked_up;
            looked_up.iter().map(|it| it.num_accepted).sum::<usize>()
        };
        assert!(found(0) == 0 && found(1) > 0, "{seen:?}");
    }

    #[test]
    fn look_ups_end_at_the_limit_and_at_end_tokens() {
        let room = recordings(&[1, 2, 3, 1], &[2, 3], 2);
        assert_eq!(rounds(&room, "1x4"), [(LOOK_UP, 1, 1)]);
        let ended = recordings(&[1, 2, 9, 1], &[2, 9], 9);
        assert_eq!(rounds(&ended, "1x4"), [(LOOK_UP, 2, 2)]);
    }
}
