//! The files that `tune` and `replay` write into `checkpoints/<recipe>/tuning/`: `costs.json`,
//! `heads.json` and `replay.json`. Each entry names the dtype of its models, and readers ignore
//! entries of another dtype.

use anyhow::{Context, Result, bail};
use draftsmith_files::{if_present, parse_json, read_bytes, write_json};
use draftsmith_model::WeightDtype;
use draftsmith_report::{DecodingName, DrafterName};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::costs::{Costs, MeasuredCosts};
use draftsmith_recipe::{GivenCosts, Recipe, names_text};

/// An entry of `costs.json`: the costs of one drafter under one way of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostsEntry {
    /// The way of decoding, greedy or sampled.
    pub decoding: DecodingName,
    /// The dtype that the models computed in.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub dtype: WeightDtype,
    /// The measured costs.
    #[serde(flatten)]
    pub measured: MeasuredCosts,
}

/// Returns the costs that the user gives for a recipe's drafters. Drafters without given costs are
/// left out.
///
/// # Errors
/// If a cost names an unknown drafter, does not say which of several drafters it is for, or is not
/// a positive number.
pub fn given_costs(given: Option<&GivenCosts>, drafters: &[DrafterName]) -> Result<Vec<Costs>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let ids = drafters.iter().filter_map(|drafter| drafter.id());
    if let Some(unknown) = given.names().find(|name| !ids.clone().any(|id| id == *name)) {
        bail!(
            "key `draft_ms` of the costs names `{unknown}`, which is no drafter that is tuned; hint: those are {}",
            names_text(&ids.collect::<Vec<_>>())
        );
    }
    let of_each = ids.map(|id| Costs::given(given, id, drafters.len()));
    Ok(of_each.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// A file in a recipe's tuning directory.
#[derive(Debug, Clone, Copy)]
pub struct TuningFile {
    name: &'static str,
    /// The command that writes the file.
    command: &'static str,
}

impl TuningFile {
    /// The measured costs, a list of [`CostsEntry`].
    pub const COSTS: Self = Self { name: "costs.json", command: "tune" };
    /// The costs and races of a `tune` that is not finished.
    pub const RACES: Self = Self { name: "races.json", command: "tune" };
    /// The comparison of a sweep's acceptance heads.
    pub const HEADS: Self = Self { name: "heads.json", command: "tune" };
    /// The result of a finished `tune`, with the hash of what it was made from.
    pub const TUNED: Self = Self { name: "tuned.json", command: "tune" };
    /// The results of `replay`.
    pub const REPLAY: Self = Self { name: "replay.json", command: "replay" };

    /// Reads the file, or returns the default value if its command has not run.
    ///
    /// # Errors
    /// If the file exists but cannot be read.
    pub fn read<T: DeserializeOwned + Default>(self, recipe: &Recipe) -> Result<T> {
        let path = recipe.tuning_dir().join(self.name);
        let text = if_present(read_bytes(&path));
        let text = text.with_context(|| format!("cannot read `{}`", path.display()))?;
        let Some(text) = text else { return Ok(T::default()) };
        parse_json(&path, &text).with_context(|| {
            format!(
                "`{}` is not what this version writes; hint: run `draftsmith {}` again",
                path.display(),
                self.command
            )
        })
    }

    /// Removes the file if it is there.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(self, recipe: &Recipe) -> Result<()> {
        let path = recipe.tuning_dir().join(self.name);
        let removed = if_present(std::fs::remove_file(&path));
        removed.map(drop).with_context(|| format!("cannot remove `{}`", path.display()))
    }

    /// Writes the file as JSON, completely or not at all.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(self, recipe: &Recipe, value: &impl Serialize) -> Result<()> {
        Ok(write_json(&recipe.tuning_dir().join(self.name), value)?)
    }
}
