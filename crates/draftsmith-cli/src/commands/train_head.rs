//! `train-head`: an acceptance head from built data, into `checkpoints/<recipe>/<drafter>/head/`.
//!
//! With a table `sweep` it trains every head of the sweep into `checkpoints/<recipe>/<drafter>/sweep/NAME/`, those with
//! the same mixing ratio side by side, and copies the best one into `head/`, where the other stages look for
//! it. A head that exists is kept: heads that are trained side by side do not depend on each other.

use anyhow::{Context, Result, bail};
use draftsmith_report::render_sweep_table;
use draftsmith_theory::DrafterId;
use draftsmith_train::Section;

use crate::console::Console;
use crate::devices::check_devices;
use crate::training::head_outcome::HeadOutcome;
use crate::training::heads::HeadTrainer;
use crate::training::sweep;
use draftsmith_recipe::Recipe;
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::workspace::Workspace;

/// Runs the stage on one device or several.
pub(crate) fn run(
    recipe: &Recipe,
    asked: Option<DrafterId>,
    workspace: &Workspace,
    console: &Console,
) -> Result<HeadOutcome> {
    let (id, settings) = recipe.trained_head().context(
        "the recipe's first draft model has no table `head`: it says how the acceptance head is trained; \
         hint: add `[drafters.draft.head]`, or run `draftsmith train-adapter` for an adapter's head",
    )?;
    if asked.is_some_and(|asked| asked != id) {
        bail!(
            "`train-head` trains the head of `{id}`, the first draft model, whose candidates the data has; \
             `train-adapter` trains those of adapters"
        );
    }
    let (section, optimizer) = (Section::Head, &settings.optimizer);
    check_devices(console, "train-head", section, &workspace.models, settings.dtype, optimizer)?;
    let data = built_data(recipe, workspace, workspace.models.vocab_size()?)?;
    let trainer = HeadTrainer {
        recipe,
        workspace,
        command: "train-head",
        id,
        training_dir: recipe.head_training_dir(id),
        is_swept: settings.sweep.is_some(),
        data: &data,
        provenance: data.provenance.clone(),
        console,
    };
    let mut heads = Vec::new();
    for pass in settings.passes() {
        let exported = trainer.pass(&pass)?;
        heads.extend(pass.into_iter().zip(exported));
    }
    let mut outcome = match settings.sweep {
        Some(_) => sweep::finish((recipe, id), workspace, heads, console)?,
        None => HeadOutcome::of(heads.remove(0).1, None),
    };
    outcome.over_online = trainer.over_online(settings, &outcome.head_dir)?;
    console.document(&outcome)?;
    if let Some(rows) = &outcome.sweep {
        console.text(render_sweep_table(rows, console.width(), console.colour()))?;
    }
    outcome.print(console)?;
    Ok(outcome)
}
