//! Calibrating a head: which form convinces on the recorded prompts, and its fit to all of them.

use anyhow::{Context, Result, bail};
use draftsmith_theory::{
    Calibration, CalibrationKind, CalibrationTrial, Decoding, HeadScores, preferred_calibration,
    try_calibrations,
};
use serde::Serialize;

use crate::recipe::CalibrationChoice;
use crate::results::FittedCalibration;
use crate::rollouts::RecordedSet;

/// What was found about a head's predictions under one way of decoding.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Calibrating {
    /// The calibration that is written into the export; null where the head's own predictions are kept.
    pub(crate) chosen: Option<FittedCalibration>,
    /// Every form, cross-validated; none of fewer than two prompts.
    pub(crate) tried: Vec<TriedCalibration>,
}

/// How good predictions are under one form.
#[derive(Debug, Serialize)]
pub(crate) struct TriedCalibration {
    /// Null for the head's own predictions.
    pub(crate) kind: Option<CalibrationKind>,
    pub(crate) scores: HeadScores,
}

/// Chooses as the recipe says, and fits to all of `set`.
///
/// # Errors
/// If the recipe asks for a form that cannot be fitted.
pub(super) fn calibrate(
    choice: CalibrationChoice,
    set: &RecordedSet,
    decoding: Decoding,
) -> Result<Calibrating> {
    let prompts = set.judged_prompts(decoding);
    let Some(trials) = try_calibrations(&prompts) else {
        return match choice {
            CalibrationChoice::Auto | CalibrationChoice::None => Ok(Calibrating::default()),
            CalibrationChoice::Platt | CalibrationChoice::Isotonic => bail!(
                "a calibration is fitted and judged on two prompts at least, with candidates that \
                 the head predicts; hint: raise `tune.num_prompts`, or set `tune.calibration` to \"none\""
            ),
        };
    };
    let kind = match choice {
        CalibrationChoice::Auto => preferred_calibration(&trials).kind,
        CalibrationChoice::None => None,
        CalibrationChoice::Platt => Some(CalibrationKind::Platt),
        CalibrationChoice::Isotonic => Some(CalibrationKind::Isotonic),
    };
    let scores = |kind: Option<CalibrationKind>| -> Result<HeadScores> {
        let trial = trials.iter().find(|trial| trial.kind == kind);
        Ok(trial.context("every form is tried")?.scores)
    };
    let chosen = kind.map(|kind| {
        let map = Calibration::fit(kind, &prompts.concat()).context("the prompts have weight")?;
        let (num_prompts, before, after) = (prompts.len(), scores(None)?, scores(Some(kind))?);
        anyhow::Ok(FittedCalibration { map, num_prompts, before, after })
    });
    let tried =
        |trial: &CalibrationTrial| TriedCalibration { kind: trial.kind, scores: trial.scores };
    Ok(Calibrating { chosen: chosen.transpose()?, tried: trials.iter().map(tried).collect() })
}
