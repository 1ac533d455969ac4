//! Calibrates a head's predictions: decides by cross-validation over prompts whether it helps, and fits the
//! calibration to all of them.

use anyhow::{Result, ensure};
use draftsmith_report::FittedCalibration;
use draftsmith_theory::{Calibration, Decoding, HeadScores, try_calibration};
use serde::Serialize;

use crate::rollouts::RecordedSet;
use draftsmith_recipe::CalibrationChoice;

/// The calibrations of a head under one way of decoding.
#[derive(Debug, Default, Serialize)]
pub struct CalibrationChoices {
    /// The calibration that is written into the export; null if predictions stay uncalibrated.
    pub chosen: Option<FittedCalibration>,
    /// Uncalibrated and calibrated predictions, cross-validated; empty for fewer than two prompts.
    pub tried: Vec<TriedCalibration>,
}

/// The scores of predictions under one form.
#[derive(Debug, Serialize)]
pub struct TriedCalibration {
    /// `platt`; null for uncalibrated predictions.
    pub kind: Option<&'static str>,
    /// The scores with it.
    pub scores: HeadScores,
}

/// Decides as the recipe says, and fits the calibration to all of `set`.
///
/// # Errors
/// If the recipe asks for a calibration that cannot be fitted.
pub(super) fn calibrate(
    choice: CalibrationChoice,
    set: &RecordedSet,
    decoding: Decoding,
) -> Result<CalibrationChoices> {
    let prompts = set.judged_prompts(decoding);
    let Some(trial) = try_calibration(&prompts) else {
        ensure!(
            choice != CalibrationChoice::Platt,
            "a calibration needs at least two prompts with candidates that the head predicts; hint: raise \
             `tune.num_prompts`, or set `tune.calibration` to \"none\""
        );
        return Ok(CalibrationChoices::default());
    };
    let is_chosen = match choice {
        CalibrationChoice::Auto => trial.is_better,
        CalibrationChoice::None => false,
        CalibrationChoice::Platt => true,
    };
    let fitted = Calibration::fit(&prompts.concat()).filter(|_| is_chosen);
    let chosen = fitted.map(|map| FittedCalibration {
        map,
        num_prompts: prompts.len(),
        before: trial.before,
        after: trial.after,
    });
    let tried = [(None, trial.before), (Some("platt"), trial.after)];
    let tried = tried.map(|(kind, scores)| TriedCalibration { kind, scores }).into();
    Ok(CalibrationChoices { chosen, tried })
}
