//! The subcommands, one file each.

pub(crate) mod attach_head;
pub(crate) mod build_data;
pub(crate) mod build_datastore;
pub(crate) mod certify;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod costs;
pub(crate) mod doctor;
pub(crate) mod evaluate;
pub(crate) mod explain;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod record;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod states;
pub(crate) mod survey;
#[cfg(test)]
mod tests;
pub(crate) mod train_bigram;
pub(crate) mod train_drafter;
pub(crate) mod train_head;
pub(crate) mod tune;

use anyhow::Result;
use burn::tensor::Device;
use draftsmith_data::ResponseRow;
use draftsmith_model::WeightDtype;
use draftsmith_recipe::built_data::built_data;
use draftsmith_recipe::{Recipe, Workspace};
use draftsmith_train::is_held_out;

use crate::console::Console;

/// What a command without a recipe works with.
#[derive(Clone, Copy)]
pub(crate) struct DeviceJob<'a> {
    pub(crate) seed: Option<u64>,
    pub(crate) device: &'a Device,
    pub(crate) dtype: WeightDtype,
    pub(crate) console: &'a Console,
}

/// What the command of a stage works with.
#[derive(Clone, Copy)]
pub(crate) struct StageJob<'a> {
    pub(crate) recipe: &'a Recipe,
    /// The recipe's models and data.
    pub(crate) workspace: &'a Workspace,
    pub(crate) console: &'a Console,
}

impl StageJob<'_> {
    /// Visits the rows of the built data that training does not hold out, and describes them.
    fn each_known_row(self, visit: impl FnMut(&ResponseRow)) -> Result<String> {
        let Self { recipe, workspace, .. } = self;
        let data = built_data(recipe, workspace, workspace.models.vocab_size()?)?;
        let share = recipe.held_out_share();
        data.rows.iter().filter(|row| !is_held_out(row, share)).for_each(visit);
        Ok(format!("{} without {share}", data.hash))
    }
}
