//! The cost model of SpecDec++ (Eq. 2.1–2.3), which predicts seconds from counts, with an added
//! term for verified rows.
//!
//! Eq. 2.1: T = t_draft·N_draft + t_target·N_target. And N_draft + N_target = N + N_discarded.
//! Together, Eq. 2.3: T/N = t_draft·(1 + discard_rate) + (t_target − t_draft)·verification_rate.
//! The model adds t_row·N_verified, because on some machines the time of a forward of K + 1 rows
//! depends on K. It covers decoding without prefill.

use serde::{Deserialize, Serialize};

use crate::least_squares::{dot, least_squares, non_negative_least_squares};
use crate::{Counts, Result, TheoryError, Trace};

/// The counts of a run and its time, measured without prefill or modelled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedCounts {
    /// The counts.
    pub counts: Counts,
    /// The time of all rounds, in seconds.
    pub seconds: f64,
}

impl From<&Trace> for TimedCounts {
    fn from(trace: &Trace) -> Self {
        Self { counts: trace.counts(), seconds: trace.decode_time().as_secs_f64() }
    }
}

/// The costs of a draft forward, a target forward and a verified row, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// t_draft: the seconds of a draft forward.
    pub draft_seconds: f64,
    /// t_target: the seconds of a target forward, without those of its rows.
    pub target_seconds: f64,
    /// t_row: the seconds of a verified row; 0 if they could not be separated from the other two
    /// (see [`CostFit::rows_separable`]).
    pub row_seconds: f64,
}

/// A fitted cost model and the quality of its fit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostFit {
    /// The model.
    pub model: CostModel,
    /// Whether the cost of a row can be told apart from the cost of a forward in these runs. It
    /// cannot if N_verified = N_draft + N_target in every run, as with a separate draft model. Then
    /// the costs of both forwards include the row's, and predictions stay correct.
    pub rows_separable: bool,
    /// The centred R² of the seconds, 1 − Σ(t − t̂)² / Σ(t − t̄)². NaN if all runs took the same
    /// time.
    pub r_squared: f64,
    /// The mean of |t̂ − t| / t over the runs.
    pub mean_relative_error: f64,
    /// The maximum of |t̂ − t| / t over the runs. SpecDec++ reports at most 0.062.
    pub max_relative_error: f64,
}

impl CostModel {
    /// The costs of speculative rounds in SpecDec++ (§4.2): a 7B draft and a 70B target on A100s, with
    /// free verified rows.
    pub const PAPER: Self = Self { draft_seconds: 0.0234, target_seconds: 0.112, row_seconds: 0.0 };

    /// The seconds of a forward of the same target by itself in SpecDec++ (§4.2).
    pub const PAPER_ALONE: f64 = 0.108;

    /// Returns c₁ and c₂ of SpecDec++'s Theorem 3.1 in seconds. A round of K candidates costs
    /// c₁·(K + 1) + c₂.
    pub fn theorem_costs(&self) -> [f64; 2] {
        [self.draft_seconds + self.row_seconds, self.target_seconds - self.draft_seconds]
    }

    /// Returns the threshold of SpecDec++'s Theorem 3.1, (c₂ + Δ)/(c₁ + c₂ + Δ). To stop is optimal
    /// if a rejection among the candidates is at least as probable. Δ is in seconds.
    pub fn rejection_threshold(&self, delta: f64) -> f64 {
        let [c1, c2] = self.theorem_costs();
        (c2 + delta) / (c1 + c2 + delta)
    }

    /// Returns the seconds Δ at which a threshold below 1 is that of Theorem 3.1.
    pub fn implied_delta(&self, threshold: f64) -> f64 {
        let [c1, c2] = self.theorem_costs();
        c1 * threshold / (1.0 - threshold) - c2
    }

    /// Predicts the seconds that a run with these counts takes (Eq. 2.1, plus the term for rows).
    pub fn seconds(&self, counts: &Counts) -> f64 {
        let coefficients = [self.draft_seconds, self.target_seconds, self.row_seconds];
        dot(&coefficients, &regressors(counts))
    }

    /// Fits non-negative costs to timed runs by minimising the sum of squared *relative* errors Σ
    /// (t̂/t − 1)². Usually there is one run for each prompt and setting.
    ///
    /// Errors are relative because timing noise grows with the time; otherwise the longest
    /// responses would dominate. Costs are non-negative because a negative cost predicts nonsense
    /// for other settings. Pool runs of several candidate lengths K: at one fixed K, N_draft =
    /// K·N_target, and the two costs cannot be told apart.
    ///
    /// # Errors
    /// If a time is not positive and finite, or the runs do not separate the draft's cost from the
    /// target's.
    pub fn fit(runs: &[TimedCounts]) -> Result<CostFit> {
        for (index, &TimedCounts { seconds, .. }) in runs.iter().enumerate() {
            TheoryError::ensure(seconds > 0.0 && seconds.is_finite(), || {
                format!("run `{index}` must have a positive finite time, not `{seconds}` seconds")
            })?;
        }
        let columns: [Vec<f64>; 3] = std::array::from_fn(|column| {
            runs.iter().map(|run| regressors(&run.counts)[column] / run.seconds).collect()
        });
        let times = vec![1.0; runs.len()];

        TheoryError::ensure(least_squares(&columns, &[0, 1], &times).is_some(), || {
            format!(
                "`{}` runs do not separate the draft's cost from the target's: pool runs of several candidate lengths",
                runs.len()
            )
        })?;
        let rows_separable = least_squares(&columns, &[0, 1, 2], &times).is_some();
        let allowed: &[usize] = if rows_separable { &[0, 1, 2] } else { &[0, 1] };
        let coefficients = non_negative_least_squares(&columns, allowed, &times)
            .expect("a single non-negative column has a non-negative coefficient");
        let [draft_seconds, target_seconds, row_seconds] = coefficients;
        let model = Self { draft_seconds, target_seconds, row_seconds };
        Ok(CostFit::of(model, rows_separable, runs))
    }
}

impl CostFit {
    fn of(model: CostModel, rows_separable: bool, runs: &[TimedCounts]) -> Self {
        let num_runs = runs.len() as f64;
        let mean_seconds = runs.iter().map(|run| run.seconds).sum::<f64>() / num_runs;
        let (mut unexplained, mut total, mut sum_relative, mut max_relative) =
            (0.0, 0.0, 0.0, 0.0f64);
        for TimedCounts { counts, seconds } in runs {
            let error = model.seconds(counts) - seconds;
            let relative = error.abs() / seconds;
            unexplained += error * error;
            total += (seconds - mean_seconds).powi(2);
            sum_relative += relative;
            max_relative = max_relative.max(relative);
        }
        Self {
            model,
            rows_separable,
            r_squared: if total > 0.0 { 1.0 - unexplained / total } else { f64::NAN },
            mean_relative_error: sum_relative / num_runs,
            max_relative_error: max_relative,
        }
    }
}

/// Returns N_draft, N_target and N_verified, which are multiplied by the model's three costs.
fn regressors(counts: &Counts) -> [f64; 3] {
    [counts.num_draft_forwards, counts.num_target_forwards, counts.num_verified_rows()]
        .map(|count| count as f64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{DrafterId, Draws, Forwards, Round, SeededDraws};

    const PAPER: CostModel = CostModel::PAPER;

    #[test]
    fn a_threshold_implies_the_delta_that_gives_it() {
        assert!((PAPER.rejection_threshold(0.0) - 0.0886 / 0.112).abs() < 1e-12);
        for threshold in [0.3, 0.7, 0.9] {
            let delta = PAPER.implied_delta(threshold);
            assert!((PAPER.rejection_threshold(delta) - threshold).abs() < 1e-12);
        }
    }

    /// Simulates prompts that are decoded with several candidate lengths and timed by `model`, with
    /// relative noise up to `noise`.
    fn runs(
        model: &CostModel,
        extra_rows: bool,
        lengths: &[usize],
        noise: f64,
    ) -> Vec<TimedCounts> {
        let mut draws = SeededDraws::new(1, &["cost"]);
        let mut runs = Vec::new();
        for &candidate_length in lengths {
            for _ in 0..20 {
                let num_target_forwards = 20 + draws.categorical(&[1.0; 60]);
                let num_draft_forwards = candidate_length * num_target_forwards;
                let extra = if extra_rows { draws.categorical(&[1.0; 200]) } else { 0 };
                let counts = Counts {
                    num_draft_forwards,
                    num_target_forwards,
                    num_drafted: num_draft_forwards + extra,
                    ..Counts::default()
                };
                let seconds =
                    model.seconds(&counts) * (1.0 + noise * (2.0 * draws.uniform() - 1.0));
                runs.push(TimedCounts { counts, seconds });
            }
        }
        runs
    }

    fn fit(runs: &[TimedCounts]) -> CostFit {
        CostModel::fit(runs).expect("separable runs")
    }

    #[track_caller]
    fn close(found: f64, expected: f64) {
        // The regressors' condition number is below 1e3, so f64 leaves a dozen digits.
        assert!(
            (found - expected).abs() < 1e-11 * expected.abs().max(1e-3),
            "{found} != {expected}"
        );
    }

    #[test]
    fn exact_times_recover_the_costs() {
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.003 };
        let found = fit(&runs(&model, true, &[0, 2, 5, 12], 0.0));
        assert!(found.rows_separable);
        close(found.model.draft_seconds, 0.02);
        close(found.model.target_seconds, 0.1);
        close(found.model.row_seconds, 0.003);
        close(found.r_squared, 1.0);
        assert!(
            found.max_relative_error < 1e-12
                && found.mean_relative_error <= found.max_relative_error
        );
    }

    #[test]
    fn inseparable_rows_are_part_of_the_forwards() {
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.003 };
        let runs = runs(&model, false, &[2, 5, 12], 0.0);
        let found = fit(&runs);
        assert!(!found.rows_separable);
        close(found.model.draft_seconds, 0.023);
        close(found.model.target_seconds, 0.103);
        assert_eq!(found.model.row_seconds, 0.0);
        assert!(found.max_relative_error < 1e-12, "predictions stay correct");
    }

    #[test]
    fn costs_are_never_negative() {
        // A draft forward that seems to save time.
        let model = CostModel { draft_seconds: -0.001, target_seconds: 0.1, row_seconds: 0.001 };
        let found = fit(&runs(&model, true, &[1, 4, 8], 0.02)).model;
        assert_eq!(found.draft_seconds, 0.0);
        assert!(found.target_seconds > 0.0 && found.row_seconds >= 0.0);
    }

    #[test]
    fn noise_moves_the_fit_no_more_than_its_size() {
        let found = fit(&runs(&PAPER, false, &[2, 4, 8, 16], 0.05));
        assert!((found.model.draft_seconds / PAPER.draft_seconds - 1.0).abs() < 0.05);
        assert!((found.model.target_seconds / PAPER.target_seconds - 1.0).abs() < 0.05);
        assert!(
            found.r_squared > 0.98
                && found.max_relative_error < 0.1
                && found.mean_relative_error < 0.05
        );
    }

    #[test]
    fn one_candidate_length_is_refused() {
        let mut fixed = runs(&PAPER, false, &[5], 0.01);
        let refused = |runs: &[TimedCounts]| CostModel::fit(runs).unwrap_err().to_string();
        let message = "`20` runs do not separate the draft's cost from the target's: pool runs of several candidate \
                       lengths";
        assert_eq!(refused(&fixed), message);
        for TimedCounts { counts, .. } in &mut fixed {
            // A last round cut short by the end of the text does not make another candidate length.
            counts.num_draft_forwards -= counts.num_target_forwards % 5;
        }
        assert_eq!(refused(&fixed), message);
        let plain = runs(&PAPER, false, &[0], 0.0);
        assert!(refused(&plain).contains("runs do not separate"));
        assert!(refused(&[]).starts_with("`0` runs do not separate"));
    }

    #[test]
    fn a_time_must_be_positive() {
        let mut runs = runs(&PAPER, false, &[2, 5], 0.0);
        runs[3].seconds = 0.0;
        assert_eq!(
            CostModel::fit(&runs).unwrap_err().to_string(),
            "run `3` must have a positive finite time, not `0` seconds"
        );
    }

    /// Checks Eq. 2.3 with t_row: since N_verified = N_draft + N_target, t_row adds to t_draft and
    /// t_target.
    #[test]
    fn the_modelled_time_of_a_token_is_equation_2_3() {
        let latency_per_token = |model: &CostModel, counts: &Counts| {
            let CostModel { draft_seconds, target_seconds, row_seconds } = model;
            (draft_seconds + row_seconds) * (1.0 + counts.discard_rate())
                + (target_seconds - draft_seconds) * counts.verification_rate()
        };
        let round = Round {
            num_drafted: 4,
            depth: 4,
            forwards: Forwards::of(DrafterId::DRAFT, 4),
            num_accepted: 2,
            draft_time: Duration::from_millis(40),
            verify_time: Duration::from_millis(60),
        };
        let counts = Trace { rounds: vec![round; 5], num_tokens: 13, ..Trace::default() }.counts();
        assert_eq!((counts.num_draft_forwards, counts.num_target_forwards), (20, 5));
        assert_eq!(counts.num_verified_rows(), 25);
        for model in [PAPER, CostModel { row_seconds: 0.01, ..PAPER }] {
            close(latency_per_token(&model, &counts), model.seconds(&counts) / 13.0);
        }
        // The target by itself: one forward a token, nothing discarded.
        let plain = Counts { num_tokens: 1, num_target_forwards: 1, ..Counts::default() };
        close(latency_per_token(&PAPER, &plain), PAPER.target_seconds);
    }
}
