//! Which lengths of a cascade over look-ups are best, by replay, and which the closed form takes for
//! best.
//!
//! Replay knows how many tokens each of the drafter's forwards would have given, and what the target
//! would have taken. CS-Drafting's closed form is told beside it.

use anyhow::{Context, Result};
use draftsmith_theory::{
    CascadeAcceptance, LookUpCascade, LookUps, Recordings, Spending, TheoryError, seconds_per_token,
};
use rayon::prelude::*;

use super::expected_cascades::{CascadePrices, ClosedFormCascade, LENGTHS, expected};
use crate::costs::Costs;

/// Look-ups that are tried, behind its candidates and under them.
const LOOKED_UP: [usize; 8] = [0, 1, 2, 3, 4, 6, 8, 10];

/// A cascade over look-ups as replay judges it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JudgedCascade {
    pub(crate) cascade: LookUpCascade,
    /// What it takes along the recordings, of each response.
    pub(crate) spent: Vec<Spending>,
    /// Modelled seconds a token.
    pub(crate) seconds_per_token: f64,
}

/// The cascades that are tried along rounds of so many recorded candidates: those in which something
/// is looked up.
pub(crate) fn tried_cascades(max_length: usize) -> Vec<LookUpCascade> {
    let all = LENGTHS.into_iter().flat_map(|drafted| {
        LOOKED_UP.into_iter().flat_map(move |behind| {
            LOOKED_UP.into_iter().map(move |reviewed| LookUpCascade { drafted, behind, reviewed })
        })
    });
    let is_recorded = |cascade: &LookUpCascade| {
        cascade.longest_drafted() + usize::from(cascade.behind > 0) <= max_length
    };
    // A drafter that takes no part reviews nothing.
    let looks_up = |it: &LookUpCascade| match it.drafted {
        0 => it.behind > 0 && it.reviewed == 0,
        _ => it.behind + it.reviewed > 0,
    };
    all.filter(looks_up).filter(is_recorded).collect()
}

/// Replays all of them.
///
/// # Errors
/// If the costs have no price for the drafter.
pub(crate) fn judge_cascades(
    recordings: &Recordings,
    look_ups: LookUps<'_>,
    costs: &Costs,
) -> Result<Vec<JudgedCascade>> {
    let judge = |cascade: LookUpCascade| -> Result<JudgedCascade, TheoryError> {
        let (review_seconds, rounds) = (costs.review_seconds()?, &costs.mixed_rounds);
        let spent = recordings.replay_cascade(cascade, look_ups, review_seconds, rounds)?;
        Ok(JudgedCascade { cascade, seconds_per_token: seconds_per_token(&spent), spent })
    };
    let tried = tried_cascades(recordings.max_length);
    Ok(tried.into_par_iter().map(judge).collect::<Result<_, _>>()?)
}

/// The one that takes the fewest seconds a token; the first of equals, which drafts least.
///
/// # Errors
/// If there is none.
pub(crate) fn fastest(judged: &[JudgedCascade]) -> Result<&JudgedCascade> {
    let by_time = |one: &&JudgedCascade, other: &&JudgedCascade| {
        one.seconds_per_token.total_cmp(&other.seconds_per_token)
    };
    judged.iter().min_by(by_time).context("some are tried")
}

/// What the closed form says of the same cascades, by how often tokens stand; `plain` are the target's
/// own seconds a token.
///
/// # Errors
/// If there is none, or no price of the drafter.
pub(crate) fn closed_form(
    acceptance: &CascadeAcceptance,
    costs: &Costs,
    judged: &[JudgedCascade],
    plain: f64,
) -> Result<ClosedFormCascade> {
    let prices = CascadePrices::new(costs, [None])?;
    let speed = |it: &JudgedCascade| expected(&it.cascade.lengths(), acceptance, &prices).speedup;
    let with_speed = judged.iter().map(|it| (it, speed(it)));
    // The first of equals, as in replay.
    let best = with_speed.rev().max_by(|(_, one), (_, other)| one.total_cmp(other));
    let (best, ewif) = best.context("some are tried")?;
    let (lengths, replayed) = (best.cascade.lengths(), plain / best.seconds_per_token);
    Ok(ClosedFormCascade { lengths, ewif, replayed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_tried_looks_something_up_and_stays_within_what_was_recorded() {
        for max_length in [2, 6, 20] {
            let tried = tried_cascades(max_length);
            assert!(tried.iter().all(|it| it.longest_drafted() <= max_length));
            assert!(tried.iter().all(|it| it.behind + it.reviewed > 0));
            let alone: Vec<_> = tried.iter().filter(|it| it.drafted == 0).collect();
            assert!(alone.len() == LOOKED_UP.len() - 1 && alone.iter().all(|it| it.reviewed == 0));
            assert!(
                tried.contains(&LookUpCascade { drafted: 1, behind: 10, reviewed: 1 })
                    == (max_length > 2)
            );
        }
        assert!(tried_cascades(1).iter().all(|it| it.drafted == 0));
    }
}
