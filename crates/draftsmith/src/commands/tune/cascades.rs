//! The lengths of cascades over look-ups that a recipe leaves to `tune`.

use anyhow::Result;
use draftsmith_theory::{DrafterId, LookUps};
use serde::Serialize;

use super::judged::Judged;
use crate::recipe::EvaluateRecipe;
use crate::results::DecodingName;
use crate::sweep::cascades::{closed_form, fastest, judge_cascades};
use crate::tuning::TunedCascade;

/// Whether the recipe has a cascade over look-ups of this drafter whose lengths are to be found.
pub(super) fn is_asked_for(evaluate: &EvaluateRecipe, drafter: DrafterId) -> bool {
    let mut tuned = evaluate.cascades.iter().filter(|cascade| cascade.lengths.is_tuned());
    tuned.any(|cascade| cascade.drafters[0] == drafter)
}

/// A cascade that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct TriedCascade {
    /// K.
    pub(crate) lengths: Vec<Vec<usize>>,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

/// The fastest cascade of the drafter over look-ups, and all that were tried.
///
/// # Errors
/// If too little is recorded for one.
pub(super) fn best(
    by: &Judged<'_>,
    decoding: DecodingName,
    look_ups: LookUps<'_>,
) -> Result<(TunedCascade, Vec<TriedCascade>)> {
    let (recordings, costs) = (by.recordings, by.costs);
    let judged = judge_cascades(recordings, look_ups, costs)?;
    let best = fastest(&judged)?;
    let tried = judged
        .iter()
        .map(|it| TriedCascade { lengths: it.cascade.lengths(), gain: by.gain(&it.spent) });
    let tuned = TunedCascade {
        drafters: vec![recordings.drafter, DrafterId::MaxGram],
        decoding,
        dtype: by.dtype,
        lengths: best.cascade.lengths(),
        promise: by.promise(&best.spent, judged.len()),
        closed_form: closed_form(recordings, look_ups, costs, &judged, by.plain())?,
    };
    Ok((tuned, tried.collect()))
}
