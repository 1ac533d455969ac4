//! What `tune` and `replay` leave in `checkpoints/<recipe>/tuning/`: `costs.json`, `trees.json` and
//! `replay.json`.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_files::{parse_json, write_whole};
use draftsmith_model::WeightDtype;
use draftsmith_theory::{DrafterId, TreeShape};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::costs::{Costs, Measurement};
use crate::recipe::{GivenCosts, Recipe};
use crate::results::{CostSource, DecodingName, DrafterName, Estimate, Replay};

/// Costs that were measured for a drafter and decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredCosts {
    pub(crate) costs: Costs,
    /// Half the 95 % interval of the least certain cost, relative to it.
    pub(crate) uncertainty: f64,
    pub(crate) num_passes: usize,
}

impl From<Measurement> for MeasuredCosts {
    fn from(Measurement { costs, uncertainty, num_passes }: Measurement) -> Self {
        Self { costs, uncertainty, num_passes }
    }
}

/// An entry of `costs.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CostsEntry {
    pub(crate) decoding: DecodingName,
    /// What the models computed in.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub(crate) dtype: WeightDtype,
    #[serde(flatten)]
    pub(crate) measured: MeasuredCosts,
}

/// The costs that are given, of those of a recipe's drafters that any are given for.
///
/// # Errors
/// If they do not say whose they are.
pub(crate) fn given_costs(
    given: Option<&GivenCosts>,
    drafters: &[DrafterName],
) -> Result<Vec<Costs>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let ids = drafters.iter().filter_map(|drafter| drafter.id());
    let of_each = ids.map(|id| Costs::given(given, id, drafters.len()));
    Ok(of_each.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// An entry of `trees.json`: a drafter's fastest static tree by replay of greedy responses, with a chain
/// as long as the tree is deep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TunedTree {
    pub(crate) drafter: DrafterId,
    /// The models that it was tuned with ([`Exports::models_hash`](crate::exports::Exports::models_hash)).
    pub(crate) models: String,
    /// The dtype they computed in.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub(crate) dtype: WeightDtype,
    pub(crate) shape: TreeShape,
    /// How many shapes were tried.
    pub(crate) num_tried: usize,
    /// Prompts it was tuned on.
    pub(crate) num_prompts: usize,
    /// Whose costs it is best for.
    pub(crate) cost_source: CostSource,
    /// Modelled speed over the target alone.
    pub(crate) speedup: f64,
    /// Target forwards a token.
    pub(crate) verification_rate: f64,
    /// Discarded candidates a token.
    pub(crate) discard_rate: f64,
    /// The drafter's best fixed length without a tree.
    pub(crate) best_fixed_length: usize,
    /// Modelled speed over that, minus 1: below 0 where the drafter's chains are faster.
    pub(crate) expected_gain: Estimate,
}

/// What `tune` leaves of each drafter and decoding, of models of one dtype: a list in a file of its own.
pub(crate) trait Tuned: Serialize + DeserializeOwned {
    /// The file's name.
    const FILE: &'static str;
    /// What the models computed in.
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

/// What `tune` left for the recipe with models that compute in `dtype`; nothing where it has not run with
/// such, or was not asked for any.
///
/// # Errors
/// If the file is there and cannot be read.
pub(crate) fn read_tuned<T: Tuned>(recipe: &Recipe, dtype: WeightDtype) -> Result<Vec<T>> {
    let mut all: Vec<T> = read_written(&recipe.tuning_dir().join(T::FILE), "tune")?;
    all.retain(|entry| entry.dtype() == dtype);
    Ok(all)
}

/// Writes what `tune` leaves.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn write_tuned<T: Tuned>(recipe: &Recipe, entries: &[T]) -> Result<()> {
    let text = serde_json::to_string_pretty(entries).context("entries are plain numbers")?;
    Ok(write_whole(&recipe.tuning_dir().join(T::FILE), text + "\n")?)
}

/// What `replay` found for the recipe of models that compute in `dtype`; nothing where it has not run
/// for such.
///
/// # Errors
/// If the file is there and cannot be read.
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

/// Reads what `command` wrote; nothing where it has not run.
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
