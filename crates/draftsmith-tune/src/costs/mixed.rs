//! The costs of rounds of varying lengths.
//!
//! Rounds under a stop rule differ in length. A verification takes longer the longer ago the last
//! one was, because the target's weights leave the caches. So we time rounds with exactly the
//! lengths that a rule gives, in their order. Random lengths would have other costs, and too long
//! rounds would make rules look worse than they are.

use std::collections::BTreeMap;

use anyhow::Result;
use draftsmith_report::median_of;
use draftsmith_theory::{
    Bounds, DraftSignals, DrafterId, Round, RoundCosts, SignalNeeds, StopRule,
};

use super::LENGTHS;

/// The minimum number of rounds of one length for measuring the cost of that length. With fewer
/// rounds the cost is estimated from rounds of all lengths.
const MIN_ROUNDS: usize = 30;

/// A stop rule that gives rounds the listed lengths in turn, and starts again after the last.
/// Signals are computed and ignored.
#[derive(Debug, Default)]
pub(super) struct MixedLengths {
    lengths: Vec<usize>,
    /// The maximum of `lengths`, at least 1. It is the upper bound of every round, so that all
    /// rounds are drafted in the same way.
    longest: usize,
    /// The index in `lengths` of the next round's length.
    next: usize,
    /// The length of the current round, in candidates.
    length: usize,
    needs: SignalNeeds,
}

impl MixedLengths {
    pub(super) fn new(lengths: Vec<usize>, needs: SignalNeeds) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(1).max(1);
        Self { lengths, longest, next: 0, length: 0, needs }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }
}

impl StopRule for MixedLengths {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: self.longest }
    }

    fn begin_round(&mut self) {
        self.length = self.lengths[self.next];
        self.next = (self.next + 1) % self.lengths.len();
    }

    fn skips_drafting(&mut self) -> bool {
        self.length == 0
    }

    fn stops(&mut self, candidates: &[u32], _signals: &DraftSignals) -> bool {
        candidates.len() >= self.length
    }

    fn needs(&self) -> SignalNeeds {
        self.needs
    }
}

/// Estimates the costs of rounds of varying lengths. For lengths with enough rounds, the
/// verification cost is the median. For other lengths it is the cost in `alone` (rounds of one
/// fixed length), times the median ratio of the two over all rounds.
pub(super) fn mixed_costs<'a>(
    rounds: impl Iterator<Item = &'a Round> + Clone,
    alone: &RoundCosts,
    drafter: DrafterId,
) -> Result<RoundCosts> {
    let rows = |round: &Round| round.num_drafted + 1;
    let verify = |round: &Round| round.verify_time.as_secs_f64();
    let ratio = rounds.clone().map(|round| verify(round) / alone.verify_seconds(rows(round)));
    let ratio = median_of(ratio).unwrap_or(1.0);
    let max_rows = LENGTHS[LENGTHS.len() - 1] + 1;
    let points = (1..=max_rows).map(|number| {
        let alike: Vec<f64> =
            rounds.clone().filter(|round| rows(round) == number).map(verify).collect();
        let met = median_of(alike.iter().copied()).filter(|_| alike.len() >= MIN_ROUNDS);
        met.unwrap_or_else(|| ratio * alone.verify_seconds(number))
    });
    let draft_seconds = mixed_draft_seconds(rounds.clone());
    let draft_seconds = draft_seconds.map_or_else(|| alone.draft_seconds(drafter), Ok)?;
    Ok(RoundCosts::new([(drafter, draft_seconds)].into(), points.collect())?)
}

/// Estimates the mean seconds of a draft forward in rounds of varying lengths, over all forwards,
/// since the first forward of a round costs more than the others. Returns `None` without a draft
/// forward.
fn mixed_draft_seconds<'a>(rounds: impl Iterator<Item = &'a Round>) -> Option<f64> {
    let mut by_forwards: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in rounds.filter(|round| round.num_draft_forwards() > 0) {
        let alike = by_forwards.entry(round.num_draft_forwards()).or_default();
        alike.push(round.draft_time.as_secs_f64());
    }
    let (mut seconds, mut num_forwards) = (0.0, 0);
    for (forwards, times) in by_forwards {
        num_forwards += forwards * times.len();
        // The median of each group is used instead of the sum, because a few slow rounds would
        // distort a sum.
        seconds += times.len() as f64 * median_of(times)?;
    }
    (num_forwards > 0).then(|| seconds / num_forwards as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use draftsmith_theory::Forwards;

    use super::*;

    fn round(num_drafted: usize, draft_micros: u64, verify_micros: u64) -> Round {
        Round {
            num_drafted,
            depth: num_drafted,
            forwards: Forwards::of(DrafterId::DRAFT, num_drafted),
            num_accepted: 0,
            draft_time: Duration::from_micros(draft_micros),
            verify_time: Duration::from_micros(verify_micros),
        }
    }

    #[test]
    fn a_draft_forward_has_its_share_of_all_drafting() {
        let mut rounds = vec![round(1, 30, 0); 3];
        rounds.extend(vec![round(4, 90, 0); 3]);
        // One slow round, and one without a forward.
        rounds.extend([round(4, 9000, 0), round(0, 5, 0)]);
        let expected = (3.0 * 30e-6 + 4.0 * 90e-6) / (3.0 + 16.0);
        let found = mixed_draft_seconds(rounds.iter()).expect("there are forwards");
        assert!((found - expected).abs() < 1e-12, "{found}");
        assert_eq!(mixed_draft_seconds([round(0, 5, 0)].iter()), None);
    }

    #[test]
    fn rare_lengths_are_scaled_like_the_others() {
        let alone = (1..=14).map(|rows| rows as f64 * 100e-6).collect();
        let drafter = DrafterId::DRAFT;
        let alone = RoundCosts::new([(drafter, 20e-6)].into(), alone).expect("times");
        let mut mixed_rounds = vec![round(2, 40, 330); MIN_ROUNDS];
        mixed_rounds.extend(vec![round(5, 100, 9000); MIN_ROUNDS - 1]);
        mixed_rounds.extend(vec![round(1, 20, 220); MIN_ROUNDS + 1]);
        let found = mixed_costs(mixed_rounds.iter(), &alone, drafter).expect("times");
        for (rows, expected) in [(1, 110.0), (2, 220.0), (3, 330.0), (6, 660.0), (14, 1540.0)] {
            let seconds = found.verify_seconds(rows);
            assert!((seconds * 1e6 - expected).abs() < 1e-6, "{rows} rows: {seconds}");
        }
        assert_eq!(mixed_costs([].iter(), &alone, drafter).expect("times"), alone);
    }
}
