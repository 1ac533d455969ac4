//! The prompts of the two recorded sets: validation prompts, on which rules are chosen, and the
//! test prompts of `evaluate`.

use anyhow::{Result, ensure};
use draftsmith_train::is_held_out;

use super::PromptSet;
use crate::conversation::SetPrompt;
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::{PromptChoice, Recipe, Watch, Workspace, read_sources, spread};

/// Reads the prompts of a set. If their number is limited, they are spread evenly over each file or
/// over the held-out prompts. Loads no model.
///
/// # Errors
/// If a file is missing or broken, the recipe's data has not been built, training held out no
/// prompt, or a prompt does not fit the models' context.
pub fn set_prompts(
    recipe: &Recipe,
    set: PromptSet,
    workspace: &Workspace,
    watch: &dyn Watch,
) -> Result<Vec<SetPrompt>> {
    let (tune, evaluate) = recipe.need_tuning("record")?;
    let (paths, split, num_prompts) = match (set, &tune.prompts) {
        (PromptSet::Test, _) => (&evaluate.prompts, evaluate.split, evaluate.num_prompts),
        (PromptSet::Validation, Some(paths)) => (paths, tune.split, tune.num_prompts),
        (PromptSet::Validation, None) => return held_out_prompts(recipe, workspace),
    };
    let sources = read_sources(paths, &recipe.reading(split))?;
    let choice = PromptChoice { num_prompts, skip_long: evaluate.skip_long_prompts };
    let datasets = choice.of_each(sources, workspace.text_side()?, watch)?;
    let prompts = datasets.into_iter().flat_map(|dataset| dataset.prompts);
    Ok(prompts.map(SetPrompt::Conversation).collect())
}

/// Reads prompts of the built data that training held out. If their number is limited, they are
/// spread evenly.
fn held_out_prompts(recipe: &Recipe, workspace: &Workspace) -> Result<Vec<SetPrompt>> {
    let (tune, evaluate) = recipe.need_tuning("record")?;
    let data = built_data(recipe, workspace, workspace.models.target_shape()?.vocab_size)?;
    let (text, share) = (workspace.text_side()?, recipe.held_out_share());
    let fits = |prompt_ids: &[u32]| !evaluate.skip_long_prompts || prompt_ids.len() < text.context;
    let held_out = data.rows.iter().filter(|row| is_held_out(row, share) && fits(&row.prompt_ids));
    let prompts: Vec<_> = held_out.map(|row| (row.id.clone(), row.prompt_ids.clone())).collect();
    ensure!(
        !prompts.is_empty(),
        "of {} prompts in `{}`, training held out none (`validation_fraction` is {share}): \
         build more data, or set `tune.prompts`",
        data.rows.len(),
        recipe.data_dir().display()
    );
    let chosen = spread(prompts, tune.num_prompts).into_iter().map(|(id, prompt_ids)| {
        text.check_fits(&id, &prompt_ids)?;
        Ok(SetPrompt::HeldOut { id, prompt_ids })
    });
    chosen.collect()
}

/// Encodes the first turn of each validation prompt. Returns row ids with token ids.
///
/// # Errors
/// As for [`set_prompts`].
pub fn validation_prompts(
    recipe: &Recipe,
    workspace: &Workspace,
    watch: &dyn Watch,
) -> Result<Vec<(String, Vec<u32>)>> {
    let text = workspace.text_side()?;
    let first_turn = |prompt: SetPrompt| {
        Ok(match prompt {
            SetPrompt::Conversation(prompt) => {
                let ids = text.encode_turn(&prompt, 0, &[])?;
                (prompt.id, ids)
            }
            SetPrompt::HeldOut { id, prompt_ids } => (id, prompt_ids),
        })
    };
    let prompts = set_prompts(recipe, PromptSet::Validation, workspace, watch)?;
    prompts.into_iter().map(first_turn).collect()
}
