//! Seconds of a round from its counts, where a verification's time is no straight line in its rows.
//!
//! Engines verify rows in blocks, so that one row more can cost little or much: here the time of a
//! verification is a number for each number of rows, as it was measured.
//! [`CostModel`](crate::CostModel), SpecDec++'s straight line, is what that comes to on the whole;
//! a rule that is chosen for a machine wants the steps.

use serde::{Deserialize, Serialize};

use crate::{CostModel, Round, TheoryError};

/// Seconds of a draft forward, and of verifications of 1, 2, … rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct RoundCosts {
    draft_seconds: f64,
    verify_seconds: Vec<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    draft_seconds: f64,
    verify_seconds: Vec<f64>,
}

impl TryFrom<Unchecked> for RoundCosts {
    type Error = TheoryError;

    fn try_from(unchecked: Unchecked) -> Result<Self, TheoryError> {
        Self::new(unchecked.draft_seconds, unchecked.verify_seconds)
    }
}

impl RoundCosts {
    /// Costs of a draft forward and of verifications of 1, 2, … rows; more rows go on as those
    /// given do on average.
    ///
    /// # Errors
    /// If there is no verification, or a time is negative or not finite.
    pub fn new(draft_seconds: f64, verify_seconds: Vec<f64>) -> Result<Self, TheoryError> {
        let is_time = |seconds: &f64| *seconds >= 0.0 && seconds.is_finite();
        if verify_seconds.is_empty()
            || !std::iter::once(&draft_seconds).chain(&verify_seconds).all(is_time)
        {
            return Err(TheoryError::RoundCosts);
        }
        Ok(Self { draft_seconds, verify_seconds })
    }

    /// Costs from times of some numbers of rows, the others on straight lines between.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_points(
        draft_seconds: f64,
        mut points: Vec<(usize, f64)>,
    ) -> Result<Self, TheoryError> {
        points.retain(|(rows, _)| *rows > 0);
        points.sort_by_key(|(rows, _)| *rows);
        points.dedup_by_key(|(rows, _)| *rows);
        let most = points.last().map_or(0, |(rows, _)| *rows);
        let at = |rows: usize| {
            let after = points.partition_point(|(known, _)| *known < rows);
            let (x1, y1) = points[after];
            match after.checked_sub(1).map(|before| points[before]) {
                Some((x0, y0)) => y0 + (y1 - y0) * (rows - x0) as f64 / (x1 - x0) as f64,
                // Fewer rows than were measured cost no more.
                None => y1,
            }
        };
        Self::new(draft_seconds, (1..=most).map(at).collect())
    }

    /// The costs that rounds took: the mean over draft forwards, and over the verifications of each
    /// number of rows. None without rounds, or where nothing took time.
    pub fn of_rounds<'a>(rounds: impl IntoIterator<Item = &'a Round>) -> Option<Self> {
        let (mut draft, mut num_forwards) = (0.0, 0);
        let mut verify: Vec<(f64, usize)> = Vec::new();
        for round in rounds {
            draft += round.draft_time.as_secs_f64();
            num_forwards += round.num_draft_forwards();
            let rows = round.num_drafted + 1;
            if verify.len() < rows {
                verify.resize(rows, (0.0, 0));
            }
            verify[rows - 1].0 += round.verify_time.as_secs_f64();
            verify[rows - 1].1 += 1;
        }
        let points = verify.into_iter().enumerate().filter(|(_, (_, count))| *count > 0);
        let points = points.map(|(index, (total, count))| (index + 1, total / count as f64));
        let draft_seconds = if num_forwards > 0 { draft / num_forwards as f64 } else { 0.0 };
        Self::from_points(draft_seconds, points.collect()).ok()
    }

    /// t_draft.
    pub fn draft_seconds(&self) -> f64 {
        self.draft_seconds
    }

    /// The same with another t_draft.
    pub fn with_draft_seconds(self, draft_seconds: f64) -> Self {
        Self { draft_seconds, ..self }
    }

    /// Seconds of a verification of so many rows, at least 1.
    pub fn verify_seconds(&self, num_rows: usize) -> f64 {
        let known = self.verify_seconds.len();
        match self.verify_seconds.get(num_rows.saturating_sub(1)) {
            Some(seconds) => *seconds,
            None => self.verify_seconds[known - 1] + (num_rows - known) as f64 * self.row_seconds(),
        }
    }

    /// t_row: what a row more costs on average, between one row and the most that are known; not
    /// less than 0.
    pub fn row_seconds(&self) -> f64 {
        let known = self.verify_seconds.len();
        if known < 2 {
            return 0.0;
        }
        let rise = self.verify_seconds[known - 1] - self.verify_seconds[0];
        (rise / (known - 1) as f64).max(0.0)
    }

    /// Seconds of a round of so many draft forwards and candidates.
    pub fn round_seconds(&self, num_draft_forwards: usize, num_drafted: usize) -> f64 {
        num_draft_forwards as f64 * self.draft_seconds + self.verify_seconds(num_drafted + 1)
    }

    /// Seconds of rounds, whose own times are not read.
    pub fn seconds<'a>(&self, rounds: impl IntoIterator<Item = &'a Round>) -> f64 {
        let rounds = rounds.into_iter();
        rounds.map(|round| self.round_seconds(round.num_draft_forwards(), round.num_drafted)).sum()
    }

    /// The straight line from one row on: t_draft, t_target, t_row.
    pub fn line(&self) -> CostModel {
        let row_seconds = self.row_seconds();
        CostModel {
            draft_seconds: self.draft_seconds,
            target_seconds: (self.verify_seconds[0] - row_seconds).max(0.0),
            row_seconds,
        }
    }
}

impl From<CostModel> for RoundCosts {
    fn from(model: CostModel) -> Self {
        let verify = |rows| model.target_seconds + rows * model.row_seconds;
        Self { draft_seconds: model.draft_seconds, verify_seconds: vec![verify(1.0), verify(2.0)] }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Counts, DrafterId, Forwards, Observation};

    fn close(found: f64, expected: f64) {
        // A few products and sums of f64.
        assert!(
            (found - expected).abs() < 1e-12 * expected.abs().max(1.0),
            "{found} != {expected}"
        );
    }

    #[test]
    fn a_straight_line_costs_what_the_model_says() {
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.03 };
        let costs = RoundCosts::from(model);
        for (num_draft_forwards, num_drafted) in [(0, 0), (1, 1), (5, 5), (6, 5), (40, 40)] {
            let counts = Counts {
                num_target_forwards: 1,
                num_draft_forwards,
                num_drafted,
                ..Counts::default()
            };
            let expected = model.seconds(&Observation::new(&counts, 0.0));
            close(costs.round_seconds(num_draft_forwards, num_drafted), expected);
        }
        let line = costs.line();
        close(line.target_seconds, 0.1);
        close(line.row_seconds, 0.03);
    }

    #[test]
    fn rows_between_those_measured_lie_on_lines_and_those_beyond_go_on() {
        let points = vec![(8, 1.0), (2, 0.4), (4, 0.5), (4, 9.0)];
        let costs = RoundCosts::from_points(0.1, points).expect("times");
        let found = [1, 2, 3, 4, 6, 8].map(|rows| costs.verify_seconds(rows));
        for (found, expected) in found.into_iter().zip([0.4, 0.4, 0.45, 0.5, 0.75, 1.0]) {
            close(found, expected);
        }
        close(costs.verify_seconds(15), 1.0 + 7.0 * 0.6 / 7.0);
    }

    #[test]
    fn steps_are_found_again_in_the_rounds_that_took_them() {
        let verify = |rows: usize| 100 + 40 * rows.div_ceil(3) as u64;
        let round = |num_drafted: usize| Round {
            num_drafted,
            forwards: Forwards::of(DrafterId::Draft, num_drafted),
            num_accepted: 0,
            draft_time: Duration::from_millis(7 * num_drafted as u64),
            verify_time: Duration::from_millis(verify(num_drafted + 1)),
        };
        let rounds: Vec<Round> = [0, 1, 2, 3, 5, 5, 8].map(round).to_vec();
        let costs = RoundCosts::of_rounds(&rounds).expect("rounds");
        close(costs.draft_seconds(), 0.007);
        for rows in [1, 2, 3, 4, 6, 9] {
            close(costs.verify_seconds(rows), verify(rows) as f64 / 1e3);
        }
        let spent: f64 = rounds.iter().map(|r| (r.draft_time + r.verify_time).as_secs_f64()).sum();
        close(costs.seconds(&rounds), spent);
        assert_eq!(RoundCosts::of_rounds(&[]), None);
    }

    #[test]
    fn what_is_no_time_is_refused() {
        assert!(RoundCosts::new(0.1, Vec::new()).is_err());
        assert!(RoundCosts::new(-0.1, vec![1.0]).is_err());
        assert!(RoundCosts::new(0.1, vec![1.0, f64::NAN]).is_err());
    }
}
