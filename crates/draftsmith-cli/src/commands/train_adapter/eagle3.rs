//! Trains drafters of the kind `eagle3`.

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

/// Finds the drafters that exist, trains the missing ones in one pass over the data, and returns the outcomes of
/// all.
pub(super) fn train(
    inputs: Inputs<'_>,
    drafters: &[(DrafterId, &Eagle3Training)],
) -> Result<Vec<Eagle3Outcome>> {
    let Inputs { recipe, workspace, data, console } = inputs;
    let models = &workspace.models;
    let num_layers = models.target_shape()?.num_layers;
    let (mut outcomes, mut missing, mut trainings) = (Vec::new(), Vec::new(), Vec::new());
    for (id, settings) in drafters {
        let (id, dir) = (*id, recipe.export_dir(*id));
        let planned = Planned { id, fingerprint: inputs.fingerprint("eagle3", settings)?, dir };
        let Some(found) = planned.found(|dir: &Path| Eagle3Config::from_dir(dir, num_layers))
        else {
            missing.push(planned);
            trainings.push((*settings).clone());
            continue;
        };
        console.note(format!("{COMMAND}: `{}` is there, {KEPT}", planned.dir.display()));
        outcomes.push(Eagle3Outcome::of(id, found));
    }
    let Some((first, settings)) = missing.first().zip(trainings.first()) else {
        return Ok(outcomes);
    };
    check_devices(console, COMMAND, Section::Eagle3, models, settings.dtype, &settings.optimizer)?;
    let target = models.target_of_adapters(settings.dtype)?;
    console.note(match missing.len() {
        1 => format!("{COMMAND}: an EAGLE-3 drafter"),
        num => format!("{COMMAND}: {num} EAGLE-3 drafters, in one pass"),
    });
    let shown = &["accepted length", "agreement", "cross-entropy"];
    let job = inputs.job(first.id, settings.dtype, shown)?;
    let written =
        job.run(&missing, |run| train_eagle3(target, &data.rows, &trainings, recipe.seed, run))?;
    if written.interrupted {
        return Err(Interrupted.into());
    }
    let written = missing.iter().zip(written.exports);
    outcomes.extend(written.map(|(planned, export)| Eagle3Outcome::of(planned.id, export)));
    Ok(outcomes)
}
