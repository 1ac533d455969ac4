//! The kind `adapter` (Kangaroo): a drafter made of the target's first layers and an adapter.

use anyhow::Result;
use draftsmith_decode::SelfDraftParts;
use draftsmith_model::{
    AdapterArchitecture, AdapterConfig, DrafterDir, DrafterModel, ModelConfig, ModelError,
    StateNetwork, WeightDtype,
};
use draftsmith_train::{AdapterShape, AdapterTraining, InitialWeights};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin};
use super::{DrafterFiles, DrafterKind, KindEntry, read_kind};
use crate::exports::forms::transformers::{self, drafted_by_adapter};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_DRAFT_MODEL, ServerFlags};
use crate::exports::{AdapterExport, ExportEntry, describe_adapter, inspected};
use crate::workspace::LayersNeeded;

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "adapter",
    read: read_kind::<AdapterKind>,
    export: Some(ExportEntry {
        key: "path",
        text: "self-draft adapter",
        known_by: "exit_layer",
        is_of: |keys| keys.contains_key("exit_layer"),
        command: Some("train-drafter"),
        forms: &[
            ExportForm::new("draft-model", forms::draft_model::export),
            ExportForm::stopping("transformers", |it| transformers::export(it, drafted_by_adapter)),
            ExportForm::stopping("vllm", |it| forms::vllm::export(it, drafted_by_adapter)),
            ExportForm::new("kangaroo", forms::foreign::kangaroo),
        ],
        inspect: inspected::adapter,
    }),
};

/// The adapter's training settings, with one `exit_layer`, or the directory of a trained adapter.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AdapterKind(pub Origin<AdapterTraining>);

impl SelfDraftForm for AdapterShape {
    fn config_in(dir: &DrafterDir, num_layers: usize) -> Result<AdapterConfig, ModelError> {
        AdapterConfig::beside(dir, num_layers)
    }

    fn about(config: &AdapterConfig) -> AboutDraft {
        let exit_layer = config.exit_layer();
        let shape = format!("{exit_layer} {}", config.model.to_json("float32"));
        let files = DrafterFiles { shape, description: describe_adapter(config) };
        let about = AboutDraft::of(config, format!("behind layer {exit_layer}"), files);
        AboutDraft {
            size: format!("{}, {}", config.architecture, about.size),
            properties: vec![
                ("exit_layer", json!(exit_layer)),
                ("architecture", json!(config.architecture)),
            ],
            ..about
        }
    }
}

impl DrafterKind for AdapterKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn text(&self) -> String {
        let exit_layer = self.0.layers(0).ok().and_then(|layers| layers.first().copied());
        let exit = exit_layer.map(|exit_layer| format!(", exit {exit_layer}"));
        format!("self-draft{}", exit.unwrap_or_default())
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        // A draft vocabulary saves nothing in servers, so the costs measured here would mislead.
        let is_served = |architecture, has_vocabulary: bool| {
            architecture != AdapterArchitecture::MlpOnly && !has_vocabulary
        };
        let is_served = match &self.0 {
            Origin::Training(it) => {
                is_served(it.architecture, it.common.draft_vocabulary.is_some())
            }
            Origin::Path(dir) => AdapterConfig::from_dir(dir)
                .is_ok_and(|it| is_served(it.architecture, it.draft_vocabulary.is_some())),
        };
        is_served.then_some(&AS_DRAFT_MODEL)
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let workspace = loading.workspace;
        let dir = loading.export_dir();
        ENTRY.need(&dir)?;
        let export = AdapterExport::read(&dir, workspace)?;
        let head = loading.head_dir()?.map(|head| export.head(&head, workspace)).transpose()?;
        let parts = SelfDraftParts {
            exit_layer: export.config.exit_layer(),
            adapter: export.adapter.clone(),
            head: head.as_ref().map(|head| head.head.clone()),
        };
        let num_read = num_read(workspace.models.target_config()?, &export);
        let sizes = [num_read, export.adapter.num_parameters()];
        Ok(LoadedDrafter::of_self_draft(loading, parts, head, sizes))
    }

    fn layers_needed(&self) -> LayersNeeded {
        let copied = match &self.0 {
            Origin::Training(it) if it.common.initial == InitialWeights::Target => it.num_layers,
            _ => 0,
        };
        let exit_layer = self.0.layers(0).ok().and_then(|layers| layers.first().copied());
        LayersNeeded::First(exit_layer.unwrap_or(0) + copied)
    }

    fn has_exit(&self) -> bool {
        true
    }

    /// Returns Kangaroo's γ, its maximum number of candidates in a round.
    fn max_candidate_length(&self) -> usize {
        6
    }

    fn weights_hash(&self, loading: &Loading<'_>) -> Result<String> {
        let dir = loading.export_dir();
        loading.workspace.artifacts.adapter_hash(&dir, &AdapterConfig::from_dir(&dir)?)
    }

    fn frozen(&self, loading: &Loading<'_>, dtype: WeightDtype) -> Result<DrafterModel> {
        let (workspace, dir) = (loading.workspace, loading.export_dir());
        let (config, adapter) = workspace.artifacts.adapter_in(&workspace.models, &dir, dtype)?;
        let target = workspace.models.target_of_adapters(dtype)?.clone();
        Ok(DrafterModel::self_draft(target, adapter, config.exit_layer()))
    }
}

/// Counts the parameters that a draft forward reads: those of the target's first layers, of the
/// adapter, and of the LM head's rows for the draft vocabulary.
fn num_read(config: &ModelConfig, export: &AdapterExport) -> usize {
    let drawn = export.config.vocabulary_size();
    let mut layers = config.clone().with_tied_embeddings(true);
    layers.shape.num_layers = export.config.exit_layer();
    // The adapter's parameters include those of its own LM head, if it has one.
    let has_head = export.adapter.own_head().is_some();
    layers.shape.vocab_size = if has_head { 0 } else { drawn.unwrap_or(config.shape.vocab_size) };
    layers.num_parameters() + export.adapter.num_parameters()
}
