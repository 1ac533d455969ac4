//! Trains a drafter of the kind `eagle3`.

use std::path::Path;

use anyhow::Result;
use draftsmith_model::Eagle3Config;
use draftsmith_theory::DrafterId;
use draftsmith_train::{Eagle3Training, Section, train_eagle3};

use super::{COMMAND, Inputs};
use crate::devices::check_devices;
use crate::training::eagle3_outcome::Eagle3Outcome;
use crate::training::export_job::{KEPT, Planned};
use draftsmith_recipe::watch::Interrupted;

/// The outcome of a drafter, which is trained unless it is there.
pub(super) fn train(
    inputs: Inputs<'_>,
    id: DrafterId,
    settings: &Eagle3Training,
) -> Result<Eagle3Outcome> {
    let Inputs { recipe, workspace, data, console } = inputs;
    let models = &workspace.models;
    check_devices(console, COMMAND, Section::Eagle3, models, settings.dtype, &settings.optimizer)?;
    let planned = Planned {
        id,
        fingerprint: inputs.fingerprint("eagle3", settings)?,
        dir: recipe.export_dir(id),
    };
    let num_layers = models.target_shape()?.num_layers;
    let read = |dir: &Path| Eagle3Config::from_dir(dir, num_layers);
    if let Some(found) = planned.found(read) {
        console.note(format!("{COMMAND}: `{}` is there, {KEPT}", planned.dir.display()));
        return Ok(Eagle3Outcome::of(id, found));
    }
    let target = models.target_of_adapters(settings.dtype)?;
    console.note(format!("{COMMAND}: an EAGLE-3 drafter"));
    let job = inputs.job(id, settings.dtype, &["accepted length", "agreement", "cross-entropy"])?;
    let mut written = job.run(std::slice::from_ref(&planned), |run| {
        train_eagle3(target, &data.rows, settings, recipe.seed, run)
    })?;
    match written.exports.pop() {
        Some(export) if !written.interrupted => Ok(Eagle3Outcome::of(id, export)),
        _ => Err(Interrupted.into()),
    }
}
