//! What prompt lookup would gain by itself, without any draft.

use anyhow::Result;
use draftsmith_theory::{LookupFirst, Recordings, TimedCounts};
use serde::Serialize;

use crate::costs::Costs;
use crate::judging::over;
use crate::results::Estimate;
use crate::statistics::shown_interval;
use crate::sweep::best_look_ups_alone;

/// What prompt lookup alone comes to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct LookUps {
    /// What is best on all answers.
    pub(super) look_ups: LookupFirst,
    /// Over the target alone: each half judged by what the other chose.
    pub(super) speedup: Estimate,
}

impl LookUps {
    /// Chooses what to look up on each half of the answers for the other.
    ///
    /// # Errors
    /// If nothing was recorded.
    pub(super) fn of(halves: &[Recordings; 2], costs: &Costs, seed: u64) -> Result<Self> {
        let [one, other] = halves;
        let mut spent = Vec::new();
        for (chosen_on, judged_on) in [(other, one), (one, other)] {
            let first = best_look_ups_alone(chosen_on, costs)?;
            spent.extend(judged_on.replay_look_ups(first, &costs.rounds));
        }
        let responses = halves.iter().flat_map(|half| half.responses.clone()).collect();
        let all = Recordings { responses, ..one.clone() };
        let look_ups = best_look_ups_alone(&all, costs)?;
        let plain: Vec<TimedCounts> =
            halves.iter().flat_map(|half| half.plain(&costs.rounds)).collect();
        let speedup = |some: &[usize]| 1.0 + over(&plain, &spent, some);
        Ok(Self { look_ups, speedup: shown_interval(plain.len(), seed, speedup) })
    }
}
