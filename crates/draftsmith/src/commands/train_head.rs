//! `train-head`: an acceptance head from built data, into `checkpoints/<recipe>/head/`.
//!
//! With `[head.sweep]`, every head of the sweep into `checkpoints/<recipe>/sweep/NAME/`, those of
//! one mixing ratio side by side, and the best of them into `head/`, where the other stages look
//! for one. A head that is there already is not trained again, whatever is trained beside it: each
//! is what it would be alone.

use anyhow::{Context, Result, bail};
use draftsmith_train::Section;

use crate::built_data::built_rows;
use crate::console::Console;
use crate::recipe::Recipe;
use crate::table::render_sweep_table;
use crate::training::head_outcome::HeadOutcome;
use crate::training::heads::{HeadDrafter, HeadTrainer};
use crate::training::resumable::StepsLeft;
use crate::training::{check_devices, sweep};
use crate::workspace::Workspace;

/// Runs the stage on one device or several.
pub(crate) fn run(
    recipe: &Recipe,
    workspace: &Workspace,
    steps_left: &mut StepsLeft,
    console: &Console,
) -> Result<HeadOutcome> {
    let settings = recipe.head.as_ref().context(
        "the recipe has no section `[head]`: it says how the acceptance head is trained",
    )?;
    let (section, optimizer) = (Section::Head, &settings.optimizer);
    check_devices(console, "train-head", section, workspace.devices(), settings.dtype, optimizer)?;
    let draft_dir = recipe.need_draft("train-head")?;
    let data_dir = recipe.data_dir();
    let (rows, provenance) = built_rows(recipe, workspace.vocab_size()?)?;
    let draft_hash = workspace.draft_hash()?.context("there is a draft")?.to_owned();
    match &provenance.draft {
        Some(hash) if *hash == draft_hash => {}
        Some(hash) => bail!(
            "the data in `{}` was labelled with another draft (hash {hash}) than `{}` \
             (hash {draft_hash}): build it again",
            data_dir.display(),
            draft_dir.display()
        ),
        None => bail!(
            "the data in `{}` was built without a draft, so there is nothing to learn from; \
             hint: set `models.draft`, delete the directory and build it again",
            data_dir.display()
        ),
    }
    let drafter = HeadDrafter::Draft;
    let trainer = HeadTrainer { recipe, workspace, drafter, rows: &rows, provenance, console };
    let mut heads = Vec::new();
    for pass in settings.passes() {
        let exported = trainer.pass(&pass, steps_left)?;
        heads.extend(pass.into_iter().zip(exported));
    }
    let outcome = match settings.sweep {
        Some(_) => sweep::finish(recipe, workspace, heads, console)?,
        None => HeadOutcome::of(heads.remove(0).1, None),
    };
    console.document(&outcome)?;
    if let Some(rows) = &outcome.sweep {
        console.text(render_sweep_table(rows, console.width(), console.colour()))?;
    }
    outcome.tell(console)?;
    Ok(outcome)
}
