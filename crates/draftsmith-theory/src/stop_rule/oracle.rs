//! The oracle, the best stop rule possible if the response were known.

use super::{Bounds, DraftSignals, RoundEnd, StopRule};

/// The oracle of SpecDec++ (Lemma 2.1) for greedy decoding. It stops just before the first
/// candidate that would be rejected.
///
/// It knows the target's greedy response and the positions S where the draft would choose another
/// token. So it discards nothing except the target's own token after an accepted end token. The
/// target runs |S| + 1 times, which is the minimum for any rule. This also holds if the token limit
/// ends the response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Oracle {
    /// For each response token, the number of accepted candidates in a round that begins there.
    num_accepted: Vec<usize>,
    bounds: Bounds,
    num_kept: usize,
}

impl Oracle {
    /// Creates the rule for one response. For each response token, `num_accepted` has the number of
    /// accepted candidates in a round that begins there. Rounds have no other limit.
    pub fn new(num_accepted: Vec<usize>) -> Self {
        let longest = num_accepted.iter().copied().max().unwrap_or(0);
        Self { num_accepted, bounds: Bounds { min: 1, max: longest.max(1) }, num_kept: 0 }
    }

    /// Returns whether the candidate after the first `num_drafted` ones would be rejected or lie
    /// past the end of the response.
    fn rejects(&self, num_drafted: usize) -> bool {
        self.num_accepted.get(self.num_kept).is_none_or(|num| num_drafted >= *num)
    }
}

impl StopRule for Oracle {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn begin_sequence(&mut self) {
        self.num_kept = 0;
    }

    fn skips_drafting(&mut self) -> bool {
        self.rejects(0)
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        self.rejects(candidates.len())
    }

    fn end_round(&mut self, end: RoundEnd) {
        self.num_kept += end.num_kept;
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;

    #[test]
    fn it_drafts_up_to_the_next_mismatch_and_skips_where_the_first_candidate_mismatches() {
        let mut rule = Oracle::new(vec![2, 1, 0, 0, 2, 1]);
        let signals = [DraftSignals::default(); 8];
        rule.begin_sequence();
        assert!(!rule.skips_drafting());
        assert_eq!(round_length(&mut rule, &signals), Some(2));
        rule.end_round(RoundEnd { num_accepted: 2, num_kept: 3 });
        assert!(rule.skips_drafting());
        rule.end_round(RoundEnd { num_accepted: 0, num_kept: 1 });
        assert_eq!(round_length(&mut rule, &signals), Some(2));
        rule.begin_sequence();
        assert_eq!(round_length(&mut rule, &signals), Some(2));
    }
}
