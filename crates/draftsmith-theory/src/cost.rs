//! Seconds from counts: the cost model of SpecDec++ (Eq. 2.1–2.3), with a term for the rows a
//! target forward verifies.
//!
//! Eq. 2.1: T = t_draft·N_draft + t_target·N_target. Eq. 2.2: N_draft + N_target = N + N_discarded.
//! Together, Eq. 2.3: T/N = t_draft·(1 + discard_rate) + (t_target − t_draft)·verification_rate.
//! The model adds t_row·N_verified, since a forward of K + 1 rows is not free of K on every
//! machine. Prefill is timed apart and is no part of it.

use serde::{Deserialize, Serialize};

use crate::least_squares::{dot, least_squares, non_negative_least_squares};
use crate::{Counts, TheoryError, Trace};

/// One run, usually one prompt under one setting: what was counted, and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// N_draft.
    pub num_draft_forwards: usize,
    /// N_target.
    pub num_target_forwards: usize,
    /// N_verified: K + 1 for each round of K candidates.
    pub num_verified_rows: usize,
    /// Decoding time in seconds, without prefill.
    pub seconds: f64,
}

impl From<&Trace> for Observation {
    fn from(trace: &Trace) -> Self {
        Self::new(&trace.counts(), trace.decode_time().as_secs_f64())
    }
}

impl Observation {
    /// So many forwards and rows in so many seconds.
    pub fn new(counts: &Counts, seconds: f64) -> Self {
        Self {
            num_draft_forwards: counts.num_draft_forwards,
            num_target_forwards: counts.num_target_forwards,
            num_verified_rows: counts.num_verified_rows(),
            seconds,
        }
    }

    fn regressors(&self) -> [f64; 3] {
        [self.num_draft_forwards, self.num_target_forwards, self.num_verified_rows]
            .map(|count| count as f64)
    }
}

/// Seconds a draft forward, a target forward and a verified row take.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// t_draft.
    pub draft_seconds: f64,
    /// t_target, apart from its rows.
    pub target_seconds: f64,
    /// t_row; 0 where it cannot be told from the other two (see [`Fit::rows_separable`]).
    pub row_seconds: f64,
}

/// A fitted cost model and how well it fits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// The model.
    pub model: CostModel,
    /// Whether the observations tell the cost of a row from that of a forward. They cannot where
    /// N_verified = N_draft + N_target throughout, as with a separate draft: the row's cost is then
    /// part of both the others, and predictions are none the worse.
    pub rows_separable: bool,
    /// Centred R² of the seconds, 1 − Σ(t − t̂)² / Σ(t − t̄)². NaN if all observations took the
    /// same time.
    pub r_squared: f64,
    /// Mean of |t̂ − t| / t.
    pub mean_relative_error: f64,
    /// Greatest |t̂ − t| / t. SpecDec++ reports at most 0.062.
    pub max_relative_error: f64,
}

impl CostModel {
    /// Predicted seconds for an observation's counts (Eq. 2.1, and the rows); its own time is not
    /// read.
    pub fn seconds(&self, observation: &Observation) -> f64 {
        dot(&self.coefficients(), &observation.regressors())
    }

    /// Seconds a kept token (Eq. 2.3): t_draft·(1 + discard_rate) + (t_target −
    /// t_draft)·verification_rate.
    ///
    /// Rows add t_row·(1 + discard_rate), as N_verified = N_draft + N_target there. Only for counts
    /// that pass [`Counts::check_forward_identity`](crate::Counts::check_forward_identity).
    pub fn latency_per_token(&self, discard_rate: f64, verification_rate: f64) -> f64 {
        let Self { draft_seconds, target_seconds, row_seconds } = self;
        (draft_seconds + row_seconds) * (1.0 + discard_rate)
            + (target_seconds - draft_seconds) * verification_rate
    }

    /// The non-negative costs that minimise the sum of squared *relative* errors Σ (t̂/t − 1)².
    ///
    /// Relative, because timing noise grows with the time and the errors reported are relative:
    /// otherwise the longest answers alone would decide. Non-negative, because a negative cost
    /// predicts nonsense for other settings. Observations of several candidate lengths must be
    /// pooled: at one fixed K, N_draft = K·N_target.
    ///
    /// # Errors
    /// If a time is not positive and finite, or the observations do not tell the draft's cost from
    /// the target's.
    pub fn fit(observations: &[Observation]) -> Result<Fit, TheoryError> {
        for (index, &Observation { seconds, .. }) in observations.iter().enumerate() {
            if !(seconds > 0.0 && seconds.is_finite()) {
                return Err(TheoryError::ObservationTime { index, seconds });
            }
        }
        let columns: [Vec<f64>; 3] = std::array::from_fn(|column| {
            observations
                .iter()
                .map(|observation| observation.regressors()[column] / observation.seconds)
                .collect()
        });
        let times = vec![1.0; observations.len()];

        if least_squares(&columns, &[0, 1], &times).is_none() {
            return Err(TheoryError::Collinear { num_observations: observations.len() });
        }
        let rows_separable = least_squares(&columns, &[0, 1, 2], &times).is_some();
        let allowed: &[usize] = if rows_separable { &[0, 1, 2] } else { &[0, 1] };
        let coefficients = non_negative_least_squares(&columns, allowed, &times)
            .expect("a single non-negative column has a non-negative coefficient");
        let [draft_seconds, target_seconds, row_seconds] = coefficients;
        let model = Self { draft_seconds, target_seconds, row_seconds };
        Ok(Fit::of(model, rows_separable, observations))
    }

    fn coefficients(&self) -> [f64; 3] {
        [self.draft_seconds, self.target_seconds, self.row_seconds]
    }
}

impl Fit {
    fn of(model: CostModel, rows_separable: bool, observations: &[Observation]) -> Self {
        let num_observations = observations.len() as f64;
        let mean_seconds = observations.iter().map(|observation| observation.seconds).sum::<f64>()
            / num_observations;
        let (mut unexplained, mut total, mut sum_relative, mut max_relative) =
            (0.0, 0.0, 0.0, 0.0f64);
        for observation in observations {
            let error = model.seconds(observation) - observation.seconds;
            let relative = error.abs() / observation.seconds;
            unexplained += error * error;
            total += (observation.seconds - mean_seconds).powi(2);
            sum_relative += relative;
            max_relative = max_relative.max(relative);
        }
        Self {
            model,
            rows_separable,
            r_squared: if total > 0.0 { 1.0 - unexplained / total } else { f64::NAN },
            mean_relative_error: sum_relative / num_observations,
            max_relative_error: max_relative,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{DrafterId, Draws, Forwards, Round, SeededDraws};

    const PAPER: CostModel =
        CostModel { draft_seconds: 0.0234, target_seconds: 0.112, row_seconds: 0.0 };

    /// Prompts decoded with several candidate lengths, timed by `model` with relative noise up to
    /// `noise`.
    fn observations(
        model: &CostModel,
        extra_rows: bool,
        lengths: &[usize],
        noise: f64,
    ) -> Vec<Observation> {
        let mut draws = SeededDraws::new(1, &["cost"]);
        let mut observations = Vec::new();
        for &candidate_length in lengths {
            for _ in 0..20 {
                let num_target_forwards = 20 + draws.categorical(&[1.0; 60]);
                let num_draft_forwards = candidate_length * num_target_forwards;
                let extra = if extra_rows { draws.categorical(&[1.0; 200]) } else { 0 };
                let mut observation = Observation {
                    num_draft_forwards,
                    num_target_forwards,
                    num_verified_rows: num_draft_forwards + num_target_forwards + extra,
                    seconds: 1.0,
                };
                observation.seconds =
                    model.seconds(&observation) * (1.0 + noise * (2.0 * draws.uniform() - 1.0));
                observations.push(observation);
            }
        }
        observations
    }

    fn fit(observations: &[Observation]) -> Fit {
        CostModel::fit(observations).expect("separable observations")
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
    fn exact_times_give_back_the_costs() {
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.003 };
        let found = fit(&observations(&model, true, &[0, 2, 5, 12], 0.0));
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
    fn rows_that_cannot_be_told_apart_are_part_of_the_forwards() {
        let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.003 };
        let observations = observations(&model, false, &[2, 5, 12], 0.0);
        let found = fit(&observations);
        assert!(!found.rows_separable);
        close(found.model.draft_seconds, 0.023);
        close(found.model.target_seconds, 0.103);
        assert_eq!(found.model.row_seconds, 0.0);
        assert!(found.max_relative_error < 1e-12, "predictions are none the worse");
    }

    #[test]
    fn costs_are_never_negative() {
        // A draft forward that seems to save time: the fit must not believe it.
        let model = CostModel { draft_seconds: -0.001, target_seconds: 0.1, row_seconds: 0.001 };
        let found = fit(&observations(&model, true, &[1, 4, 8], 0.02)).model;
        assert_eq!(found.draft_seconds, 0.0);
        assert!(found.target_seconds > 0.0 && found.row_seconds >= 0.0);
    }

    #[test]
    fn noise_moves_the_fit_no_further_than_itself() {
        let found = fit(&observations(&PAPER, false, &[2, 4, 8, 16], 0.05));
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
        let mut fixed = observations(&PAPER, false, &[5], 0.01);
        assert_eq!(CostModel::fit(&fixed), Err(TheoryError::Collinear { num_observations: 20 }));
        for observation in &mut fixed {
            // A last round cut short by the end of the text does not make another candidate length.
            observation.num_draft_forwards -= observation.num_target_forwards % 5;
        }
        assert!(matches!(CostModel::fit(&fixed), Err(TheoryError::Collinear { .. })));
        let plain = observations(&PAPER, false, &[0], 0.0);
        assert!(matches!(CostModel::fit(&plain), Err(TheoryError::Collinear { .. })));
        assert!(matches!(CostModel::fit(&[]), Err(TheoryError::Collinear { num_observations: 0 })));
    }

    #[test]
    fn a_time_must_be_a_time() {
        let mut observations = observations(&PAPER, false, &[2, 5], 0.0);
        observations[3].seconds = 0.0;
        assert_eq!(
            CostModel::fit(&observations),
            Err(TheoryError::ObservationTime { index: 3, seconds: 0.0 })
        );
    }

    #[test]
    fn latency_a_token_is_the_modelled_time_over_the_tokens() {
        let round = Round {
            num_drafted: 4,
            depth: 4,
            forwards: Forwards::of(DrafterId::Draft, 4),
            num_accepted: 2,
            draft_time: Duration::from_millis(40),
            verify_time: Duration::from_millis(60),
        };
        let trace = Trace { rounds: vec![round; 5], num_tokens: 13, ..Trace::default() };
        let (observation, counts) = (Observation::from(&trace), trace.counts());
        assert_eq!((observation.num_draft_forwards, observation.num_target_forwards), (20, 5));
        assert_eq!((observation.num_verified_rows, observation.seconds), (25, 0.5));
        for model in [PAPER, CostModel { row_seconds: 0.01, ..PAPER }] {
            let latency =
                model.latency_per_token(counts.discard_rate(), counts.verification_rate());
            close(latency, model.seconds(&observation) / 13.0);
        }
        // The target alone: one forward a token, nothing discarded.
        close(PAPER.latency_per_token(0.0, 1.0), PAPER.target_seconds);
    }
}
