//! Calibrates a head's predictions: chooses the form by cross-validation over prompts, and fits it to all of
//! them.

use anyhow::{Context, Result, bail};
use draftsmith_theory::{
    Calibration, CalibrationKind, CalibrationTrial, Decoding, HeadScores, preferred_calibration,
    try_calibrations,
};
use serde::Serialize;

use crate::recipe::CalibrationChoice;
use crate::results::FittedCalibration;
use crate::rollouts::RecordedSet;

/// The calibrations of a head under one way of decoding.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CalibrationChoices {
    /// The calibration that is written into the export; null if predictions stay uncalibrated.
    pub(crate) chosen: Option<FittedCalibration>,
    /// Every form, cross-validated; empty for fewer than two prompts.
    pub(crate) tried: Vec<TriedCalibration>,
}

/// The scores of predictions under one form.
#[derive(Debug, Serialize)]
pub(crate) struct TriedCalibration {
    /// Null for uncalibrated predictions.
    pub(crate) kind: Option<CalibrationKind>,
    pub(crate) scores: HeadScores,
}

/// Chooses a form as the recipe says, and fits it to all of `set`.
///
/// # Errors
/// If the recipe asks for a form that cannot be fitted.
pub(super) fn calibrate(
    choice: CalibrationChoice,
    set: &RecordedSet,
    decoding: Decoding,
) -> Result<CalibrationChoices> {
    let prompts = set.judged_prompts(decoding);
    let Some(trials) = try_calibrations(&prompts) else {
        return match choice {
            CalibrationChoice::Auto | CalibrationChoice::None => Ok(CalibrationChoices::default()),
            CalibrationChoice::Platt | CalibrationChoice::Isotonic => bail!(
                "a calibration needs at least two prompts with candidates that the head predicts; hint: \
                 raise `tune.num_prompts`, or set `tune.calibration` to \"none\""
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
    Ok(CalibrationChoices {
        chosen: chosen.transpose()?,
        tried: trials.iter().map(tried).collect(),
    })
}
