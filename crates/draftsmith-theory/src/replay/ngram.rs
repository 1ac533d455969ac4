//! Replay of the n-gram look-ups of llama.cpp's server along recorded responses.

use std::ops::Range;

use super::look_ups::{NeverDrafts, looked_up_by};
use super::{Recordings, RoundLengths};

/// The settings of llama.cpp's `ngram-simple` drafter (`common/ngram-map.cpp`, release b11434). If
/// the last tokens of a sequence occur earlier, it proposes the tokens after the latest such
/// occurrence.
///
/// It proposes nothing while the sequence is shorter than match and candidates together. It also
/// proposes nothing if it would find fewer candidates than it matches tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NgramSimple {
    /// The number of tokens to match, at least 1 (`--spec-ngram-simple-size-n`).
    pub num_matched: usize,
    /// The maximum number of candidates (`--spec-ngram-simple-size-m`).
    pub most: usize,
}

impl NgramSimple {
    /// Finds the candidates to propose after a sequence. The slice is empty if nothing matches.
    pub fn find(self, sequence: &[u32]) -> &[u32] {
        &sequence[self.range(sequence)]
    }

    fn range(self, sequence: &[u32]) -> Range<usize> {
        let Self { num_matched, most } = self;
        // The last token is not part of the searched history.
        let num_before = sequence.len().saturating_sub(1);
        if num_matched == 0 || num_before <= num_matched + most + 1 {
            return 0..0;
        }
        let pattern = &sequence[sequence.len() - num_matched..];
        let is_match = |at: &usize| sequence[*at..*at + num_matched] == *pattern;
        let Some(at) = (1..num_before - num_matched).rev().find(is_match) else { return 0..0 };
        let from = at + num_matched;
        let found = from..(from + most).min(num_before);
        if found.len() < num_matched { 0..0 } else { found }
    }
}

impl Recordings {
    /// Replays each response with these look-ups as the only drafter, and counts its rounds by
    /// number of candidates.
    pub fn ngram_lengths(&self, ngram: NgramSimple) -> Vec<RoundLengths> {
        let mut recordings = self.clone();
        for response in &mut recordings.responses {
            response.looked_up = looked_up_by(response, |sequence, room| {
                let Range { start, end } = ngram.range(sequence);
                sequence.extend_from_within(start..end.min(start + room));
            });
        }
        recordings.lengths_under(&mut NeverDrafts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::test_recordings::random;
    use crate::{RecordedPlace, Recording};

    #[test]
    fn the_latest_place_that_matches_is_copied() {
        let ngram = |num_matched, most| NgramSimple { num_matched, most };
        let text = [5, 1, 2, 3, 4, 1, 2, 6, 7, 8, 1, 2];
        assert_eq!(ngram(2, 3).find(&text), [6, 7, 8]);
        // Up to the last token, which is not searched.
        assert_eq!(ngram(2, 6).find(&text), [6, 7, 8, 1]);
        assert_eq!(ngram(3, 4).find(&text), [], "`8 1 2` is there once");
        assert_eq!(ngram(1, 9).find(&text), [], "the text is too short");
        // Fewer candidates than matched tokens: none. The first token is never matched.
        assert_eq!(ngram(3, 3).find(&[9, 9, 9, 9, 1, 2, 3, 4, 1, 2, 3]), [4, 1, 2]);
        assert_eq!(ngram(3, 3).find(&[9, 9, 9, 9, 9, 1, 2, 3, 1, 2, 3]), []);
        assert_eq!(ngram(1, 1).find(&[3, 1, 2, 4, 3]), []);
        assert_eq!(ngram(0, 1).find(&text), []);
    }

    #[test]
    fn rounds_follow_the_response() {
        let any = random(1, 1, 0.5);
        let candidate = |token_id| crate::RecordedCandidate {
            token_id,
            ..any.responses[0].places[0].candidate.clone()
        };
        let place = |token: &u32| RecordedPlace { candidate: candidate(*token), rollout: None };
        let response = |tokens: &[u32], limit| {
            let prompt = vec![5, 1, 2, 3, 4, 8, 1, 2];
            Recording::new(prompt, tokens.iter().map(place).collect(), limit)
        };
        // `3 4` is right, then 7 is decoded; then `1 2` again, and `3 4` again, of which there is
        // room for one.
        let responses = vec![response(&[3, 4, 7, 1, 2, 3, 4], 7)];
        let found =
            Recordings { responses, ..any }.ngram_lengths(NgramSimple { num_matched: 2, most: 2 });
        assert_eq!(found, [RoundLengths { by_length: vec![2, 1, 1], num_tokens: 7 }]);
    }
}
