//! Training of the acceptance head of the first draft model, or of a sweep of heads, into
//! `checkpoints/<recipe>/<drafter>/head/`.
//!
//! With a table `sweep`, every head of the sweep goes into
//! `checkpoints/<recipe>/<drafter>/sweep/NAME/`. Heads with the same mixing ratio are trained
//! together, and the best head is copied into `head/`, where the other stages read it. Heads that
//! are trained together do not influence each other, so an existing head is kept.

use anyhow::{Context, Result, ensure};
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::{Recipe, Workspace};
use draftsmith_theory::DrafterId;

use super::head_trainer::HeadTrainer;
use super::outcomes::HeadOutcome;
use super::{TrainingStage, TrainingWatch, check_dtype, sweep};

/// Trains the head of the recipe's first draft model, on one or several devices.
///
/// # Errors
/// If the recipe trains no head for its first draft model, data is missing, training fails, or it
/// is interrupted.
pub fn train_head(
    recipe: &Recipe,
    asked: Option<DrafterId>,
    workspace: &Workspace,
    watch: &dyn TrainingWatch,
) -> Result<HeadOutcome> {
    let (id, settings) = recipe.trained_head().context(
        "the recipe's first draft model has no table `head`: it says how the acceptance head is trained; \
         hint: add `[drafters.draft.head]`, or run `draftsmith train-drafter` for an adapter's head",
    )?;
    ensure!(
        asked.is_none_or(|asked| asked == id),
        "`train-head` trains the head of `{id}`, the first draft model, whose candidates the data has; \
         `train-drafter` trains those of adapters"
    );
    check_dtype(workspace, "head", settings.dtype)?;
    let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
    let stage = TrainingStage { recipe, workspace, data: &data, watch, command: "train-head" };
    stage.note_idle_devices("head", &settings.optimizer);
    let (is_swept, provenance) = (settings.sweep.is_some(), data.provenance.clone());
    let trainer = HeadTrainer { stage, id, is_swept, provenance };
    let mut heads = Vec::new();
    for pass in settings.passes() {
        let exported = trainer.pass(&pass)?;
        heads.extend(pass.into_iter().zip(exported));
    }
    let mut outcome = match settings.sweep {
        Some(_) => sweep::finish((recipe, id), workspace, heads, watch)?,
        None => HeadOutcome::of(heads.remove(0).1, None)?,
    };
    outcome.over_online = trainer.over_online(settings, &outcome.head_dir)?;
    Ok(outcome)
}
