//! Rounds of changing lengths, and what they cost.
//!
//! Rounds under a rule differ in length, and a verification takes longer the longer ago the last
//! one was: weights leave the caches. So they are measured by rounds whose lengths are a rule's
//! own, one after the other as it would draft them. Lengths by chance have other times, and too
//! long ones make rules look worse than they are.

use std::collections::BTreeMap;

use anyhow::Result;
use draftsmith_theory::{
    Bounds, DraftSignals, DrafterId, Round, RoundCosts, SignalNeeds, StopRule,
};

use super::LENGTHS;
use crate::statistics::median_of;

/// Rounds of one length, among rounds of changing lengths, that are enough to measure its cost; with
/// fewer it is estimated from all.
const MIN_ROUNDS: usize = 30;

/// Lengths of rounds, one after the other and then from the first again.
#[derive(Debug, Clone, Default)]
pub(super) struct MixedLengths {
    lengths: Vec<usize>,
    /// The greatest, 1 at least: asked for in each round, while drafting is timed.
    longest: usize,
    next: usize,
}

impl MixedLengths {
    pub(super) fn of(lengths: Vec<usize>) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(1).max(1);
        Self { lengths, longest, next: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// # Panics
    /// If there are none.
    fn next(&mut self) -> usize {
        let length = self.lengths[self.next];
        self.next = (self.next + 1) % self.lengths.len();
        length
    }
}

/// Rounds whose signals are asked for and not looked at.
#[derive(Debug)]
pub(super) struct Probe<'a> {
    lengths: &'a mut MixedLengths,
    /// This round's.
    length: usize,
    needs: SignalNeeds,
}

impl<'a> Probe<'a> {
    pub(super) fn new(lengths: &'a mut MixedLengths, needs: SignalNeeds) -> Self {
        Self { lengths, length: 0, needs }
    }
}

impl StopRule for Probe<'_> {
    fn bounds(&self) -> Bounds {
        Bounds { min: 1, max: self.lengths.longest }
    }

    fn begin_round(&mut self) {
        self.length = self.lengths.next();
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

/// The medians over rounds of changing lengths, of each length that was met often enough. Of
/// others, what rounds of that length alone cost, and as much more as rounds of changing lengths
/// cost more on the whole.
pub(super) fn mixed_costs<'a>(
    rounds: impl Iterator<Item = &'a Round> + Clone,
    alone: &RoundCosts,
    drafter: DrafterId,
) -> Result<RoundCosts> {
    let rows = |round: &Round| round.num_drafted + 1;
    let verify = |round: &Round| round.verify_time.as_secs_f64();
    let dearer = rounds.clone().map(|round| verify(round) / alone.verify_seconds(rows(round)));
    let dearer = median_of(dearer).unwrap_or(1.0);
    let max_rows = LENGTHS[LENGTHS.len() - 1] + 1;
    let points = (1..=max_rows).map(|number| {
        let alike: Vec<f64> =
            rounds.clone().filter(|round| rows(round) == number).map(verify).collect();
        let met = median_of(alike.iter().copied()).filter(|_| alike.len() >= MIN_ROUNDS);
        met.unwrap_or_else(|| dearer * alone.verify_seconds(number))
    });
    let draft_seconds = match mixed_draft_seconds(rounds.clone()) {
        Some(seconds) => seconds,
        None => alone.draft_seconds(drafter)?,
    };
    Ok(RoundCosts::new([(drafter, draft_seconds)].into(), points.collect())?)
}

/// A draft forward's share of the time of rounds of several lengths; None without one. The first
/// forward of a round costs more than the others, so that it is the time of all over the number of
/// all, and no average over rounds.
fn mixed_draft_seconds<'a>(rounds: impl Iterator<Item = &'a Round>) -> Option<f64> {
    let mut by_forwards: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for round in rounds.filter(|round| round.num_draft_forwards() > 0) {
        let alike = by_forwards.entry(round.num_draft_forwards()).or_default();
        alike.push(round.draft_time.as_secs_f64());
    }
    let (mut seconds, mut num_forwards) = (0.0, 0);
    for (forwards, times) in by_forwards {
        num_forwards += forwards * times.len();
        // Not the sum itself, which a few slow rounds would move.
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
            forwards: Forwards::of(DrafterId::Draft, num_drafted),
            num_accepted: 0,
            draft_time: Duration::from_micros(draft_micros),
            verify_time: Duration::from_micros(verify_micros),
        }
    }

    #[test]
    fn a_draft_forward_has_its_share_of_all_drafting() {
        let mut rounds = vec![round(1, 30, 0); 3];
        rounds.extend(vec![round(4, 90, 0); 3]);
        // One that was held up, and one without a forward.
        rounds.extend([round(4, 9000, 0), round(0, 5, 0)]);
        let expected = (3.0 * 30e-6 + 4.0 * 90e-6) / (3.0 + 16.0);
        let found = mixed_draft_seconds(rounds.iter()).expect("there are forwards");
        assert!((found - expected).abs() < 1e-12, "{found}");
        assert_eq!(mixed_draft_seconds([round(0, 5, 0)].iter()), None);
    }

    #[test]
    fn lengths_that_were_seldom_met_cost_more_as_the_others_do() {
        let alone = (1..=14).map(|rows| rows as f64 * 100e-6).collect();
        let drafter = DrafterId::Draft;
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
