//! Trains a drafter of the kind `eagle3`.

use anyhow::Result;
use draftsmith_data::DataSet;
use draftsmith_model::{Eagle3Config, ModelError};
use draftsmith_theory::DrafterId;
use draftsmith_train::{Eagle3Training, Section, train_eagle3};
use serde_json::json;

use super::COMMAND;
use crate::console::Console;
use crate::devices::check_devices;
use crate::training::eagle3_outcome::Eagle3Outcome;
use crate::training::export_job::{ExportJob, KEPT, Planned};
use draftsmith_recipe::Recipe;
use draftsmith_recipe::built_data::fingerprint;
use draftsmith_recipe::watch::Interrupted;
use draftsmith_recipe::workspace::Workspace;

/// The outcome of a drafter, which is trained unless it is there.
pub(super) fn train(
    recipe: &Recipe,
    (id, settings): (DrafterId, &Eagle3Training),
    workspace: &Workspace,
    data: &DataSet,
    console: &Console,
) -> Result<Eagle3Outcome> {
    let models = &workspace.models;
    check_devices(console, COMMAND, Section::Eagle3, models, settings.dtype, &settings.optimizer)?;
    let mut identity = json!({ "eagle3": settings, "seed": recipe.seed });
    if data.provenance.served_model.is_some() {
        // Served data have only the name of the target.
        identity["layers"] = json!(models.target_hash()?);
    }
    let planned = Planned {
        id,
        fingerprint: fingerprint(identity, data, &data.provenance)?,
        dir: recipe.export_dir(id),
    };
    let num_layers = models.target_shape()?.num_layers;
    let read =
        |dir: &_| -> Result<Eagle3Config, ModelError> { Eagle3Config::from_dir(dir, num_layers) };
    if let Some(found) = planned.found(read) {
        console.note(format!("{COMMAND}: `{}` is there, {KEPT}", planned.dir.display()));
        return Ok(Eagle3Outcome::of(id, found));
    }
    let target = models.target_of_adapters(settings.dtype)?;
    console.note(format!("{COMMAND}: an EAGLE-3 drafter"));
    let job = ExportJob {
        recipe,
        workspace,
        console,
        command: COMMAND,
        data,
        provenance: &data.provenance,
        training_dir: recipe.checkpoint_dir().join(format!("{id}-training")),
        shown: &["accepted length", "agreement", "cross-entropy"],
        feature_name: "target".to_owned(),
        feature_models: format!("{} {}", models.target_hash()?, settings.dtype.name()),
    };
    let mut written = job.run(std::slice::from_ref(&planned), |run| {
        train_eagle3(target, &data.rows, settings, recipe.seed, run)
    })?;
    match written.exports.pop() {
        Some(export) if !written.interrupted => Ok(Eagle3Outcome::of(id, export)),
        _ => Err(Interrupted.into()),
    }
}
