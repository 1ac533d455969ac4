//! Which prompts are recorded: those that rules are chosen on, and those that `evaluate` measures
//! with.

use std::sync::Arc;

use anyhow::{Result, bail};
use draftsmith_data::{DataSet, ResponseRow};
use draftsmith_train::is_held_out;

use super::PromptSet;
use crate::built_data::built_data;
use crate::console::Console;
use crate::conversation::SetPrompt;
use crate::prompts::{PromptChoice, Source, read_sources, spread};
use crate::recipe::{EvaluateRecipe, Recipe};
use crate::text_side::TextSide;
use crate::workspace::Workspace;

/// Where the prompts of a set come from.
pub(crate) enum SetSources {
    /// Files, of each of which at most so many prompts are taken.
    Files(Vec<Source>, Option<usize>),
    /// The built data, of which at most so many prompts are taken.
    HeldOut(Arc<DataSet>, Option<usize>),
}

impl SetSources {
    /// Reads them.
    ///
    /// # Errors
    /// If a file is missing or broken, or there is no built data of the recipe's models and settings.
    pub(crate) fn read(recipe: &Recipe, set: PromptSet, workspace: &Workspace) -> Result<Self> {
        let (tune, evaluate) = recipe.need_tuning("record")?;
        Ok(match (set, &tune.prompts) {
            (PromptSet::Test, _) => {
                let sources = read_sources(&evaluate.prompts, &recipe.reading(evaluate.split))?;
                Self::Files(sources, evaluate.num_prompts)
            }
            (PromptSet::Validation, Some(paths)) => {
                Self::Files(read_sources(paths, &recipe.reading(tune.split))?, tune.num_prompts)
            }
            (PromptSet::Validation, None) => Self::HeldOut(
                built_data(recipe, workspace, workspace.vocab_size()?)?,
                tune.num_prompts,
            ),
        })
    }

    /// The prompts of the set, spread evenly over each file or the held-out ones.
    ///
    /// # Errors
    /// If one does not fit the models' context, or training held out none.
    pub(crate) fn choose(
        self,
        recipe: &Recipe,
        workspace: &Workspace,
        console: &Console,
    ) -> Result<Vec<SetPrompt>> {
        let text = workspace.text_side()?;
        let (_, evaluate) = recipe.need_tuning("record")?;
        match self {
            Self::Files(sources, num_prompts) => {
                let choice = PromptChoice { num_prompts, skip_long: evaluate.skip_long_prompts };
                let datasets = choice.of_each(sources, text, console)?;
                let prompts = datasets.into_iter().flat_map(|dataset| dataset.prompts);
                Ok(prompts.map(SetPrompt::Conversation).collect())
            }
            Self::HeldOut(data, num_prompts) => {
                held_out(recipe, evaluate, &data.rows, num_prompts, text)
            }
        }
    }
}

/// The first turns of the prompts that rules are chosen on, by row id.
///
/// # Errors
/// As for recording them.
pub(crate) fn validation_prompts(
    recipe: &Recipe,
    workspace: &Workspace,
    console: &Console,
) -> Result<Vec<(String, Vec<u32>)>> {
    let sources = SetSources::read(recipe, PromptSet::Validation, workspace)?;
    let (chosen, text) = (sources.choose(recipe, workspace, console)?, workspace.text_side()?);
    chosen
        .into_iter()
        .map(|prompt| {
            Ok(match prompt {
                SetPrompt::Conversation(prompt) => {
                    let ids = text.encode(&prompt.messages(0, &[]))?;
                    (prompt.id, ids)
                }
                SetPrompt::HeldOut { id, prompt_ids } => (id, prompt_ids),
            })
        })
        .collect()
}

/// The prompts that training held out.
fn held_out(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    rows: &[ResponseRow],
    num_prompts: Option<usize>,
    text: &TextSide,
) -> Result<Vec<SetPrompt>> {
    let (num_rows, share) = (rows.len(), recipe.held_out_share());
    let mut prompts: Vec<(String, Vec<u32>)> = rows
        .iter()
        .filter(|row| is_held_out(row, share))
        .map(|row| (row.id.clone(), row.prompt_ids.clone()))
        .collect();
    if evaluate.skip_long_prompts {
        prompts.retain(|(_, prompt_ids)| prompt_ids.len() < text.context);
    }
    if prompts.is_empty() {
        bail!(
            "of {num_rows} prompts in `{}`, training held out none (`validation_fraction` is {share}): \
             build more data, or set `tune.prompts`",
            recipe.data_dir().display()
        );
    }
    spread(prompts, num_prompts)
        .into_iter()
        .map(|(id, prompt_ids)| {
            text.check_fits(&id, &prompt_ids)?;
            Ok(SetPrompt::HeldOut { id, prompt_ids })
        })
        .collect()
}
