//! The cost of rounds: the seconds of a draft forward for each drafter, and of a verification for
//! each number of rows.
//!
//! Engines verify rows in blocks, so one more row may cost little or much. [`RoundCosts`] therefore
//! keeps the measured time for each number of rows. It keeps a time for each drafter, because a
//! cascade has several in a round. SpecDec++'s linear [`CostModel`](crate::CostModel) summarises
//! the costs of one drafter.
//!
//! A draft forward takes longer the more time has passed since the last one, because its weights
//! have been evicted from the processor's caches. So the costs for a stop rule are measured in
//! rounds under that rule.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::least_squares::non_negative_least_squares;
use crate::serialized::deserialize_by_new;
use crate::{CostModel, DrafterId, Forwards, MAX_DRAFTERS, Result, Round, TheoryError};

/// The costs in seconds of draft forwards, and of verifications of 1, 2, … rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RoundCosts {
    draft_seconds: BTreeMap<DrafterId, f64>,
    verify_seconds: Vec<f64>,
}

deserialize_by_new!(RoundCosts { draft_seconds: BTreeMap<DrafterId, f64>, verify_seconds: Vec<f64> });

impl RoundCosts {
    /// Creates costs from the seconds of draft forwards and of verifications of 1, 2, … rows.
    /// Beyond the last number of rows, each further row adds the mean increase.
    ///
    /// # Errors
    /// Without verifications, or if a time is negative or not finite.
    pub fn new(draft_seconds: BTreeMap<DrafterId, f64>, verify_seconds: Vec<f64>) -> Result<Self> {
        let is_time = |seconds: &f64| *seconds >= 0.0 && seconds.is_finite();
        let are_times = draft_seconds.values().chain(&verify_seconds).all(is_time);
        TheoryError::ensure(are_times && !verify_seconds.is_empty(), || {
            "costs of rounds need a verification, and times that are finite and not negative".into()
        })?;
        Ok(Self { draft_seconds, verify_seconds })
    }

    /// Creates costs from points of a number of rows and its seconds of verification, with linear
    /// interpolation between them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_points(
        draft_seconds: BTreeMap<DrafterId, f64>,
        mut points: Vec<(usize, f64)>,
    ) -> Result<Self> {
        points.retain(|(rows, _)| *rows > 0);
        points.sort_by_key(|(rows, _)| *rows);
        points.dedup_by_key(|(rows, _)| *rows);
        let most = points.last().map_or(0, |(rows, _)| *rows);
        let at = |rows: usize| {
            let after = points.partition_point(|(known, _)| *known < rows);
            let (x1, y1) = points[after];
            match after.checked_sub(1).map(|before| points[before]) {
                Some((x0, y0)) => y0 + (y1 - y0) * (rows - x0) as f64 / (x1 - x0) as f64,
                // Fewer rows than the first measured number cost as much as that.
                None => y1,
            }
        };
        Self::new(draft_seconds, (1..=most).map(at).collect())
    }

    /// Creates the costs of one drafter from a cost model that is linear in the verified rows.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[cfg(test)]
    pub(crate) fn from_line(drafter: DrafterId, line: CostModel) -> Result<Self> {
        let verify = |rows| line.target_seconds + rows * line.row_seconds;
        let draft_seconds = BTreeMap::from([(drafter, line.draft_seconds)]);
        Self::new(draft_seconds, vec![verify(1.0), verify(2.0)])
    }

    /// Creates the costs of SpecDec++ (§4.2) with these costs of draft forwards. A verification of
    /// several rows takes [`CostModel::PAPER`]'s time, and one of a single row
    /// [`CostModel::PAPER_ALONE`].
    ///
    /// # Panics
    /// If a cost is negative or not finite.
    pub fn paper(draft_seconds: BTreeMap<DrafterId, f64>) -> Self {
        // Beyond these rows, each further one would add a little.
        let mut verify_seconds = vec![CostModel::PAPER.target_seconds; 1024];
        verify_seconds[0] = CostModel::PAPER_ALONE;
        Self::new(draft_seconds, verify_seconds).expect("the paper's costs are times")
    }

    /// Estimates costs from timed rounds: the mean time of a verification for each number of rows,
    /// and the mean time of a draft forward. If several drafters ran, least squares over the rounds
    /// gives the time of each. None without rounds, or if the rounds do not separate the drafters'
    /// costs.
    pub fn of_rounds<'a>(rounds: impl IntoIterator<Item = &'a Round>) -> Option<Self> {
        let rounds: Vec<&Round> = rounds.into_iter().collect();
        let mut verify: BTreeMap<usize, (f64, usize)> = BTreeMap::new();
        for round in &rounds {
            let (total, count) = verify.entry(round.num_drafted + 1).or_default();
            *total += round.verify_time.as_secs_f64();
            *count += 1;
        }
        let points = verify.into_iter().map(|(rows, (total, count))| (rows, total / count as f64));
        Self::from_points(draft_seconds_of(&rounds)?, points.collect()).ok()
    }

    /// Returns t_draft of a drafter: the seconds of one draft forward.
    ///
    /// # Errors
    /// If the drafter's cost is unknown.
    pub fn draft_seconds(&self, drafter: DrafterId) -> Result<f64> {
        let known = self.draft_seconds.get(&drafter).copied();
        known.ok_or_else(|| {
            TheoryError::invalid(format!(
                "the cost of a forward of the drafter `{drafter}` is unknown"
            ))
        })
    }

    /// Returns the same costs with t_draft of a drafter set to `draft_seconds`.
    #[must_use]
    pub fn with_draft_seconds(mut self, drafter: DrafterId, draft_seconds: f64) -> Self {
        self.draft_seconds.insert(drafter, draft_seconds);
        self
    }

    /// Returns costs with each t_draft replaced by `draft(t_draft)`, and the time of each number of
    /// rows by `verify(num_rows, seconds)`. Negative times become 0.
    #[must_use]
    pub fn map(mut self, draft: impl Fn(f64) -> f64, verify: impl Fn(usize, f64) -> f64) -> Self {
        self.draft_seconds.values_mut().for_each(|seconds| *seconds = draft(*seconds).max(0.0));
        for (nth, seconds) in self.verify_seconds.iter_mut().enumerate() {
            *seconds = verify(nth + 1, *seconds).max(0.0);
        }
        self
    }

    /// Returns the seconds of a verification of `num_rows` rows, at least 1.
    pub fn verify_seconds(&self, num_rows: usize) -> f64 {
        let known = self.verify_seconds.len();
        match self.verify_seconds.get(num_rows.saturating_sub(1)) {
            Some(seconds) => *seconds,
            None => self.verify_seconds[known - 1] + (num_rows - known) as f64 * self.row_seconds(),
        }
    }

    /// Computes t_row, the mean time in seconds by which one more row lengthens a forward, over the
    /// measured numbers of rows. Never negative.
    pub fn row_seconds(&self) -> f64 {
        let known = self.verify_seconds.len();
        if known < 2 {
            return 0.0;
        }
        let rise = self.verify_seconds[known - 1] - self.verify_seconds[0];
        (rise / (known - 1) as f64).max(0.0)
    }

    /// Computes the seconds of a round with these draft forwards and `num_drafted` candidates.
    ///
    /// # Errors
    /// If t_draft of a drafter is unknown.
    pub fn round_seconds(&self, forwards: Forwards, num_drafted: usize) -> Result<f64> {
        let mut seconds = self.verify_seconds(num_drafted + 1);
        for (drafter, count) in forwards.iter() {
            seconds += count as f64 * self.draft_seconds(drafter)?;
        }
        Ok(seconds)
    }

    /// Predicts the total seconds of rounds from their forwards and candidates. Their measured
    /// times are not used.
    ///
    /// # Errors
    /// If t_draft of a drafter is unknown.
    pub fn seconds<'a>(&self, rounds: impl IntoIterator<Item = &'a Round>) -> Result<f64> {
        let rounds = rounds.into_iter();
        rounds.map(|round| self.round_seconds(round.forwards, round.num_drafted)).sum()
    }

    /// Returns the linear cost model that is exact at one row: t_draft, t_target and t_row.
    ///
    /// # Errors
    /// If t_draft is unknown.
    pub fn line(&self, drafter: DrafterId) -> Result<CostModel> {
        let row_seconds = self.row_seconds();
        Ok(CostModel {
            draft_seconds: self.draft_seconds(drafter)?,
            target_seconds: (self.verify_seconds[0] - row_seconds).max(0.0),
            row_seconds,
        })
    }

    /// Returns the linear cost model of rounds with candidates: t_draft, t_target and t_row. It is
    /// exact at two rows and at the most rows, and ignores the forward of one row.
    ///
    /// # Errors
    /// If t_draft is unknown.
    pub fn drafting_line(&self, drafter: DrafterId) -> Result<CostModel> {
        let [_, second, .., last] = self.verify_seconds[..] else { return self.line(drafter) };
        let num_more = self.verify_seconds.len() - 2;
        let row_seconds = ((last - second) / num_more as f64).max(0.0);
        Ok(CostModel {
            draft_seconds: self.draft_seconds(drafter)?,
            target_seconds: (second - 2.0 * row_seconds).max(0.0),
            row_seconds,
        })
    }
}

/// Estimates the seconds of a forward of each drafter in these rounds; None if the rounds do not
/// separate the drafters' costs.
fn draft_seconds_of(rounds: &[&Round]) -> Option<BTreeMap<DrafterId, f64>> {
    let mut total = Forwards::default();
    for (drafter, count) in rounds.iter().flat_map(|round| round.forwards.iter()) {
        total.add(drafter, count);
    }
    let spent: Vec<f64> = rounds.iter().map(|round| round.draft_time.as_secs_f64()).collect();
    let drafters: Vec<(DrafterId, usize)> = total.iter().collect();
    match drafters[..] {
        [] => return Some(BTreeMap::new()),
        [(drafter, count)] => {
            let spent: f64 = spent.iter().sum();
            return Some(BTreeMap::from([(drafter, spent / count as f64)]));
        }
        _ => (),
    }
    let mut columns: [Vec<f64>; MAX_DRAFTERS] = Default::default();
    for (column, (drafter, _)) in columns.iter_mut().zip(&drafters) {
        column.extend(rounds.iter().map(|round| round.forwards.of_drafter(*drafter) as f64));
    }
    let used: Vec<usize> = (0..drafters.len()).collect();
    let seconds = non_negative_least_squares(&columns, &used, &spent)?;
    Some(drafters.into_iter().map(|(drafter, _)| drafter).zip(seconds).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Counts;

    const EXIT: DrafterId = DrafterId::named("exit2");

    fn draft(seconds: f64) -> BTreeMap<DrafterId, f64> {
        BTreeMap::from([(DrafterId::DRAFT, seconds)])
    }

    fn close(found: f64, expected: f64) {
        // A few products and sums of f64.
        assert!(
            (found - expected).abs() < 1e-12 * expected.abs().max(1.0),
            "{found} != {expected}"
        );
    }

    #[test]
    fn a_straight_line_costs_as_much_as_the_model() {
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.03 };
        let costs = RoundCosts::from_line(DrafterId::DRAFT, model).expect("times");
        for (num_draft_forwards, num_drafted) in [(0, 0), (1, 1), (5, 5), (6, 5), (40, 40)] {
            let counts = Counts {
                num_target_forwards: 1,
                num_draft_forwards,
                num_drafted,
                ..Counts::default()
            };
            let expected = model.seconds(&counts);
            let forwards = Forwards::of(DrafterId::DRAFT, num_draft_forwards);
            close(costs.round_seconds(forwards, num_drafted).expect("a known drafter"), expected);
        }
        let line = costs.line(DrafterId::DRAFT).expect("a known drafter");
        for line in [line, costs.drafting_line(DrafterId::DRAFT).expect("a known drafter")] {
            close(line.target_seconds, 0.1);
            close(line.row_seconds, 0.03);
        }
        let paper = RoundCosts::paper(draft(0.0234)).drafting_line(DrafterId::DRAFT);
        assert_eq!(paper.expect("a known drafter"), CostModel::PAPER);
    }

    #[test]
    fn times_are_interpolated_and_extrapolated_linearly() {
        let points = vec![(8, 1.0), (2, 0.4), (4, 0.5), (4, 9.0)];
        let costs = RoundCosts::from_points(draft(0.1), points).expect("times");
        let found = [1, 2, 3, 4, 6, 8].map(|rows| costs.verify_seconds(rows));
        for (found, expected) in found.into_iter().zip([0.4, 0.4, 0.45, 0.5, 0.75, 1.0]) {
            close(found, expected);
        }
        close(costs.verify_seconds(15), 1.0 + 7.0 * 0.6 / 7.0);
    }

    #[test]
    fn timed_rounds_give_back_the_steps_of_their_costs() {
        let verify = |rows: usize| 100 + 40 * rows.div_ceil(3) as u64;
        let round = |num_drafted: usize| Round {
            num_drafted,
            depth: num_drafted,
            forwards: Forwards::of(DrafterId::DRAFT, num_drafted),
            num_accepted: 0,
            draft_time: Duration::from_millis(7 * num_drafted as u64),
            verify_time: Duration::from_millis(verify(num_drafted + 1)),
        };
        let rounds: Vec<Round> = [0, 1, 2, 3, 5, 5, 8].map(round).to_vec();
        let costs = RoundCosts::of_rounds(&rounds).expect("rounds");
        close(costs.draft_seconds(DrafterId::DRAFT).expect("a known drafter"), 0.007);
        for rows in [1, 2, 3, 4, 6, 9] {
            close(costs.verify_seconds(rows), verify(rows) as f64 / 1e3);
        }
        let spent: f64 = rounds.iter().map(|r| (r.draft_time + r.verify_time).as_secs_f64()).sum();
        close(costs.seconds(&rounds).expect("a known drafter"), spent);
        assert_eq!(RoundCosts::of_rounds(&[]), None);
    }

    #[test]
    fn each_drafter_of_a_round_has_a_cost() {
        let round = |of_draft: usize, of_exit: usize| {
            let mut forwards = Forwards::of(DrafterId::DRAFT, of_draft);
            forwards.add(EXIT, of_exit);
            Round {
                num_drafted: of_exit,
                depth: of_exit,
                forwards,
                num_accepted: 0,
                draft_time: Duration::from_millis(9 * of_draft as u64 + 2 * of_exit as u64),
                verify_time: Duration::from_millis(100),
            }
        };
        let rounds = [round(1, 4), round(2, 6), round(1, 2), round(0, 0), round(3, 5)];
        let costs = RoundCosts::of_rounds(&rounds).expect("rounds");
        close(costs.draft_seconds(DrafterId::DRAFT).expect("a known drafter"), 0.009);
        close(costs.draft_seconds(EXIT).expect("a known drafter"), 0.002);
        let spent: f64 = rounds.iter().map(|r| (r.draft_time + r.verify_time).as_secs_f64()).sum();
        close(costs.seconds(&rounds).expect("known drafters"), spent);
        // Forwards in one proportion do not separate the drafters' costs.
        assert_eq!(RoundCosts::of_rounds(&[round(1, 4), round(2, 8)]), None);
        let one = RoundCosts::new(draft(0.009), vec![0.1]).expect("times");
        let message = format!("the cost of a forward of the drafter `{EXIT}` is unknown");
        let refused = TheoryError::Invalid(message);
        assert_eq!(one.seconds(&rounds), Err(refused.clone()));
        assert_eq!(one.line(EXIT), Err(refused));
    }

    #[test]
    fn invalid_times_are_errors() {
        assert!(RoundCosts::new(draft(0.1), Vec::new()).is_err());
        assert!(RoundCosts::new(draft(-0.1), vec![1.0]).is_err());
        assert!(RoundCosts::new(draft(0.1), vec![1.0, f64::NAN]).is_err());
    }
}
