//! The files that `tune` and `replay` write into `checkpoints/<recipe>/tuning/`: `costs.json`, `trees.json`
//! and `replay.json`. Each entry names the dtype of its models; entries of another dtype are ignored.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_files::{parse_json, write_whole};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{DrafterId, TreeShape};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::costs::{Costs, MeasuredCosts};
use crate::recipe::{GivenCosts, Recipe};
use crate::results::{CostSource, DecodingName, DrafterName, Estimate, Replay};

/// An entry of `costs.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CostsEntry {
    pub(crate) decoding: DecodingName,
    /// The dtype that the models computed in.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub(crate) dtype: WeightDtype,
    #[serde(flatten)]
    pub(crate) measured: MeasuredCosts,
}

/// The costs that are given for a recipe's drafters.
///
/// # Errors
/// If they do not name their drafter.
pub(crate) fn given_costs(
    given: Option<&GivenCosts>,
    drafters: &[DrafterName],
) -> Result<Vec<Costs>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let ids = drafters.iter().filter_map(|drafter| drafter.id());
    let of_each = ids.map(|id| Costs::given(given, id, drafters.len()));
    Ok(of_each.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// An entry of `trees.json`: a drafter's fastest static tree by replay of greedy responses. Its chain is as
/// long as the tree is deep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TunedTree {
    pub(crate) drafter: DrafterId,
    /// The models that it was tuned with ([`Exports::models_hash`](crate::exports::Exports::models_hash)).
    pub(crate) models: String,
    /// The dtype they computed in.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub(crate) dtype: WeightDtype,
    pub(crate) shape: TreeShape,
    /// Shapes that were tried.
    pub(crate) num_tried: usize,
    /// Prompts it was tuned on.
    pub(crate) num_prompts: usize,
    /// The source of the costs that it is best for.
    pub(crate) cost_source: CostSource,
    /// Modelled speed over plain decoding.
    pub(crate) speedup: f64,
    /// Target forwards a token.
    pub(crate) verification_rate: f64,
    /// Discarded candidates a token.
    pub(crate) discard_rate: f64,
    /// The drafter's best fixed length without a tree.
    pub(crate) best_fixed_length: usize,
    /// Modelled speed over that length, minus 1; negative if the drafter's chains are faster.
    pub(crate) expected_gain: Estimate,
}

/// An entry of a file that `tune` writes: a list by drafter and decoding.
pub(crate) trait Tuned: Serialize + DeserializeOwned {
    /// The file's name.
    const FILE: &'static str;
    /// The dtype that the models computed in.
    fn dtype(&self) -> WeightDtype;
}

impl Tuned for CostsEntry {
    const FILE: &'static str = "costs.json";
    fn dtype(&self) -> WeightDtype {
        self.dtype
    }
}

impl Tuned for TunedTree {
    const FILE: &'static str = "trees.json";
    fn dtype(&self) -> WeightDtype {
        self.dtype
    }
}

/// The entries that `tune` wrote for the recipe with models that compute in `dtype`.
///
/// # Errors
/// If the file exists and cannot be read.
pub(crate) fn read_tuned<T: Tuned>(recipe: &Recipe, dtype: WeightDtype) -> Result<Vec<T>> {
    let mut all: Vec<T> = read_written(&recipe.tuning_dir().join(T::FILE), "tune")?;
    all.retain(|entry| entry.dtype() == dtype);
    Ok(all)
}

/// Writes a file of `tune`.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn write_tuned<T: Tuned>(recipe: &Recipe, entries: &[T]) -> Result<()> {
    let text = serde_json::to_string_pretty(entries).context("entries are plain numbers")?;
    Ok(write_whole(&recipe.tuning_dir().join(T::FILE), text + "\n")?)
}

/// The results of `replay` for the recipe with models that compute in `dtype`; empty if it has not run.
///
/// # Errors
/// If the file exists and cannot be read.
pub(crate) fn read_replay(recipe: &Recipe, dtype: WeightDtype) -> Result<Replay> {
    let replay: Replay = read_written(&recipe.tuning_dir().join(REPLAY), "replay")?;
    Ok(if replay.dtype == dtype { replay } else { Replay::default() })
}

/// Writes `replay.json`.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn write_replay(recipe: &Recipe, replay: &Replay) -> Result<()> {
    let text = serde_json::to_string_pretty(replay).context("results are plain numbers")?;
    Ok(write_whole(&recipe.tuning_dir().join(REPLAY), text + "\n")?)
}

const REPLAY: &str = "replay.json";

/// Reads a file that `command` wrote; the default value if it has not run.
fn read_written<T: DeserializeOwned + Default>(path: &Path, command: &str) -> Result<T> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(T::default()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read `{}`", path.display()));
        }
    };
    parse_json(path, text.as_bytes()).with_context(|| {
        format!(
            "`{}` is not what this version writes; hint: run `draftsmith {command}` again",
            path.display()
        )
    })
}
