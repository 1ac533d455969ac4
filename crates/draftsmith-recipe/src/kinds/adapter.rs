//! The kind `adapter` (Kangaroo): the target's first layers and an adapter.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use draftsmith_decode::{NamedParts, SelfDraftParts};
use draftsmith_model::{AdapterConfig, DrafterModel, ModelConfig, WeightDtype};
use draftsmith_train::{
    AdapterTraining, ExitLayers, InitialWeights, OptimizerSettings, Teaching, TrainError,
};
use serde::{Deserialize, Serialize};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::{DrafterKind, DrafterRecipes, KindTraining, Role};
use crate::exports::{AdapterExport, ExportKind, describe_adapter, need_export};
use draftsmith_report::{ModelSummary, Road};

/// How the adapter is trained, with one `exit_layer`, or the directory of a trained one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AdapterKind(pub Origin<AdapterTraining>);

impl AdapterKind {
    /// The kind's name in recipes.
    pub(super) const NAME: &str = "adapter";

    /// Builds the kind for the trained adapter in a directory, without reading it.
    pub fn in_dir(dir: &Path) -> Self {
        Self(Origin::Path(dir.to_path_buf()))
    }
}

/// Returns a training's exit layer. A recipe that was checked has exactly one; of several, this is the first.
pub fn exit_layer(training: &AdapterTraining) -> usize {
    training.exit_layer.to_vec().into_iter().next().unwrap_or_default()
}

impl DrafterKind for AdapterKind {
    fn text(&self) -> String {
        let exit_layer = match &self.0 {
            Origin::Training(training) => Some(exit_layer(training)),
            Origin::Path(dir) => AdapterConfig::from_dir(dir).ok().map(|config| config.exit_layer),
        };
        let exit = exit_layer.map(|exit_layer| format!(", exit {exit_layer}"));
        format!("self-draft{}", exit.unwrap_or_default())
    }

    fn road(&self) -> Road {
        Road::SelfDraft
    }

    fn check(&self, key: &str, _all: &DrafterRecipes) -> Result<()> {
        let Origin::Training(training) = &self.0 else { return Ok(()) };
        if let ExitLayers::Many(layers) = &training.exit_layer {
            bail!(
                "key `{key}.exit_layer` is {layers:?}: expected one number; hint: add a table `[drafters.NAME]` for \
                 each layer, adapters with equal settings are trained in one pass"
            );
        }
        training.validate().with_context(|| format!("section `[{key}]`"))
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let Loading { id, workspace, .. } = *loading;
        let dir = loading.export_dir();
        let export = AdapterExport::read(&dir, workspace)?;
        let head = match loading.head_dir()? {
            Some(head) => Some(export.head(&head, workspace)?),
            None => None,
        };
        let parts = SelfDraftParts {
            exit_layer: export.config.exit_layer,
            adapter: export.adapter.clone(),
            head: head.as_ref().map(|head| head.head.clone()),
        };
        let parts = NamedParts { id, parts: Arc::new(parts) };
        let sizes = vec![(id, num_read(workspace.models.target_config()?, &export))];
        Ok(LoadedDrafter { parts, head, dir: Some(dir), adapter: Some(export), sizes })
    }

    fn role(&self) -> Role {
        Role::Steps
    }

    fn path(&self) -> Option<&Path> {
        self.0.path()
    }

    fn training(&self) -> Option<&dyn KindTraining> {
        self.0.training().map(|training| training as _)
    }

    fn adapter(&self) -> Option<&AdapterTraining> {
        self.0.training()
    }

    fn num_first_layers(&self) -> usize {
        match &self.0 {
            Origin::Training(training) => {
                let copied = match training.initial {
                    InitialWeights::Target => training.num_layers,
                    InitialWeights::Random => 0,
                };
                exit_layer(training) + copied
            }
            Origin::Path(dir) => AdapterConfig::from_dir(dir).map_or(0, |config| config.exit_layer),
        }
    }

    fn has_exit(&self) -> bool {
        true
    }

    /// Returns Kangaroo's γ.
    fn max_candidate_length(&self) -> usize {
        6
    }

    fn recorded_hash(&self, loading: &Loading<'_>) -> Result<String> {
        let dir = loading.export_dir();
        need_export(ExportKind::Adapter, &dir)?;
        let config = AdapterConfig::from_dir(&dir)?;
        let shape = format!("{} {}", config.exit_layer, config.model.to_json("float32"));
        loading.workspace.artifacts.export_hash(&dir, &shape)
    }

    fn weights_hash(&self, loading: &Loading<'_>) -> Result<String> {
        let dir = loading.export_dir();
        loading.workspace.artifacts.adapter_hash(&dir, &AdapterConfig::from_dir(&dir)?)
    }

    fn summaries(
        &self,
        loading: &Loading<'_>,
        loaded: &LoadedDrafter,
    ) -> Result<Vec<ModelSummary>> {
        let own = loaded.adapter.as_ref().map(|export| {
            loading.dir_summary(loading.id.as_str(), &export.dir, describe_adapter(export))
        });
        let head = loaded.head.as_ref().map(|head| loading.head_summary(head));
        own.into_iter().chain(head).collect()
    }

    fn frozen(&self, loading: &Loading<'_>, dtype: WeightDtype) -> Result<DrafterModel> {
        let (workspace, dir) = (loading.workspace, loading.export_dir());
        let (config, adapter) = workspace.artifacts.adapter_in(&workspace.models, &dir, dtype)?;
        let target = workspace.models.target_of_adapters(dtype)?.clone();
        Ok(DrafterModel::self_draft(target, adapter, config.exit_layer))
    }
}

impl KindTraining for AdapterTraining {
    fn optimizer(&self) -> &OptimizerSettings {
        &self.optimizer
    }

    fn teacher(&self) -> Teaching {
        self.teacher
    }

    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        let exit_layer = exit_layer(self);
        if exit_layer < num_layers {
            return Ok(());
        }
        Err(TrainError::ExitLayer { exit_layer, num_layers })
    }
}

/// Counts the parameters that a draft forward reads: the target's first layers, the adapter, and the LM head's
/// rows for the draft vocabulary.
fn num_read(config: &ModelConfig, export: &AdapterExport) -> f64 {
    let drawn = export.config.draft_vocabulary.as_ref().map(|all| all.ids().len());
    let mut layers = config.clone().with_tied_embeddings(true);
    layers.shape.num_layers = export.config.exit_layer;
    // The parameters of an adapter include those of a separate LM head.
    let has_head = export.adapter.own_head().is_some();
    layers.shape.vocab_size = if has_head { 0 } else { drawn.unwrap_or(config.shape.vocab_size) };
    (layers.num_parameters() + export.adapter.num_parameters()) as f64
}
