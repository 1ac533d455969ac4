//! Heads and adapters, as a recipe names or trains them.

use std::path::PathBuf;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig};

use crate::pair::{Pair, hash_dir};
use crate::recipe::{EvaluateRecipe, Recipe};

/// What was trained for a pair.
pub(crate) struct Trained {
    pub(crate) head: Option<Head>,
    /// By exit layer.
    pub(crate) adapters: Vec<TrainedAdapter>,
}

impl Trained {
    /// Reads the head and the adapters that the recipe's evaluation names, or those that it trains.
    ///
    /// # Errors
    /// If one is missing, broken, or of other models than `pair`.
    pub(crate) fn read(
        recipe: &Recipe,
        evaluate: &EvaluateRecipe,
        pair: &Pair,
        device: &Device,
    ) -> Result<Self> {
        let head = read_head(recipe, evaluate, pair, device)?;
        let adapters = read_adapters(recipe, adapter_dirs(recipe, evaluate), pair, device)?;
        Ok(Self { head, adapters })
    }
}

/// The directories of the adapters that are evaluated.
pub(crate) fn adapter_dirs(recipe: &Recipe, evaluate: &EvaluateRecipe) -> Vec<PathBuf> {
    match &evaluate.adapters {
        Some(dirs) => dirs.clone(),
        None => recipe.adapter_dirs().into_iter().map(|(_, dir)| dir).collect(),
    }
}

/// An adapter and where it came from.
pub(crate) struct TrainedAdapter {
    pub(crate) adapter: Adapter,
    pub(crate) config: AdapterConfig,
    pub(crate) dir: PathBuf,
}

/// Reads adapters, each of another exit layer and all of this target.
fn read_adapters(
    recipe: &Recipe,
    dirs: Vec<PathBuf>,
    pair: &Pair,
    device: &Device,
) -> Result<Vec<TrainedAdapter>> {
    if dirs.is_empty() {
        return Ok(Vec::new());
    }
    let target_hash = hash_dir(&recipe.models.target)?;
    let mut adapters: Vec<TrainedAdapter> = Vec::with_capacity(dirs.len());
    for dir in dirs {
        if !dir.join("config.json").is_file() {
            bail!(
                "there is no adapter in `{}`; hint: run `draftsmith train-adapter` with this \
                 recipe first, or set `evaluate.adapters`",
                dir.display()
            );
        }
        let (config, adapter) = pair.read_adapter(&dir, &target_hash, device)?;
        if adapters.iter().any(|other| other.config.exit_layer == config.exit_layer) {
            bail!(
                "two adapters sit behind layer {}, the second in `{}`: evaluate one at a time",
                config.exit_layer,
                dir.display()
            );
        }
        adapters.push(TrainedAdapter { adapter, config, dir });
    }
    adapters.sort_by_key(|adapter| adapter.config.exit_layer);
    Ok(adapters)
}

/// A head and where it came from.
pub(crate) struct Head {
    pub(crate) head: AcceptanceHead,
    pub(crate) config: AcceptanceHeadConfig,
    pub(crate) dir: PathBuf,
}

/// Reads the head that the recipe names, or trains.
fn read_head(
    recipe: &Recipe,
    evaluate: &EvaluateRecipe,
    pair: &Pair,
    device: &Device,
) -> Result<Option<Head>> {
    let dir = match (&evaluate.head, &recipe.head) {
        (Some(dir), _) => dir.clone(),
        (None, Some(_)) => recipe.head_dir(),
        (None, None) => return Ok(None),
    };
    if !dir.join("config.json").is_file() {
        bail!(
            "there is no acceptance head in `{}`; \
             hint: run `draftsmith train-head` with this recipe first, or set `evaluate.head`",
            dir.display()
        );
    }
    let Some(draft) = &pair.draft else {
        bail!("an acceptance head needs its draft; hint: set `models.draft`, or drop the head");
    };
    let (config, head) = AcceptanceHead::from_dir(&dir, draft.config().hidden_size, device)?;
    let draft_hash = hash_dir(recipe.need_draft("evaluate")?)?;
    if config.draft_hash.as_ref().is_some_and(|hash| *hash != draft_hash) {
        bail!(
            "the head in `{}` was trained on another draft (hash {}, this one's is {draft_hash}): \
             train it again, or point `models.draft` at the draft it belongs to",
            dir.display(),
            config.draft_hash.unwrap_or_default()
        );
    }
    Ok(Some(Head { head, config, dir }))
}
