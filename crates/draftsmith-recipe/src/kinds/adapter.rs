//! The kind `adapter` (Kangaroo): a drafter made of the target's first layers and an adapter.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use draftsmith_data::ResponseRow;
use draftsmith_decode::{NamedParts, SelfDraftParts};
use draftsmith_model::{
    AdapterArchitecture, AdapterConfig, CausalLm, DrafterDir, DrafterModel, ModelConfig,
    WeightDtype,
};
use draftsmith_train::{
    AdapterScores, AdapterTraining, Ending, ExitLayers, FeatureFormat, InitialWeights,
    LessonSettings, TrainError, TrainedExport, TrainingRun, train_adapters,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::{
    DrafterFiles, DrafterKind, DrafterRecipes, KindDirectory, KindEntry, KindTraining, TrainedText,
    drafted_text, read_kind, settings_table, trainings_of,
};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_DRAFT_MODEL, ServerFlags};
use crate::exports::{AdapterExport, ExportEntry, describe_adapter, inspected};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "adapter",
    read: read_kind::<AdapterKind>,
    directory: Some(KindDirectory {
        key: "path",
        export: ExportEntry {
            text: "self-draft adapter",
            known_by: "exit_layer",
            is_of: |keys| keys.contains_key("exit_layer"),
            command: Some("train-drafter"),
            forms: &[
                ExportForm::new("draft-model", forms::draft_model::export),
                ExportForm::stopping("transformers", forms::transformers::of_adapter),
                ExportForm::stopping("vllm", forms::vllm::of_adapter),
                ExportForm::new("kangaroo", forms::foreign::kangaroo),
            ],
            inspect: inspected::adapter,
        },
    }),
};

/// The adapter's training settings, with one `exit_layer`, or the directory of a trained adapter.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AdapterKind(pub Origin<AdapterTraining>);

/// Returns a training's exit layer, or the first of several. A checked recipe has exactly one.
pub fn exit_layer(training: &AdapterTraining) -> usize {
    training.exit_layer.to_vec().into_iter().next().unwrap_or_default()
}

impl DrafterKind for AdapterKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn settings(&self) -> toml::Table {
        settings_table(self)
    }

    fn text(&self) -> String {
        let exit_layer = match &self.0 {
            Origin::Training(training) => Some(exit_layer(training)),
            Origin::Path(dir) => AdapterConfig::from_dir(dir).ok().map(|config| config.exit_layer),
        };
        let exit = exit_layer.map(|exit_layer| format!(", exit {exit_layer}"));
        format!("self-draft{}", exit.unwrap_or_default())
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        // A draft vocabulary saves nothing in servers, so the costs measured here would mislead.
        let is_served = |architecture, has_vocabulary: bool| {
            architecture != AdapterArchitecture::MlpOnly && !has_vocabulary
        };
        let is_served = match &self.0 {
            Origin::Training(it) => is_served(it.architecture, it.draft_vocabulary.is_some()),
            Origin::Path(dir) => AdapterConfig::from_dir(dir)
                .is_ok_and(|it| is_served(it.architecture, it.draft_vocabulary.is_some())),
        };
        is_served.then_some(&AS_DRAFT_MODEL)
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
        ENTRY.need(&dir)?;
        let export = AdapterExport::read(&dir, workspace)?;
        let head = loading.head_dir()?.map(|head| export.head(&head, workspace)).transpose()?;
        let parts = SelfDraftParts {
            exit_layer: export.config.exit_layer,
            adapter: export.adapter.clone(),
            head: head.as_ref().map(|head| head.head.clone()),
        };
        let parts = NamedParts { id, parts: Arc::new(parts) };
        let sizes = vec![(id, num_read(workspace.models.target_config()?, &export))];
        Ok(LoadedDrafter { parts, head, dir: Some(dir.path), rule_dir: None, sizes })
    }

    fn path(&self) -> Option<&DrafterDir> {
        self.0.path()
    }

    fn training(&self) -> Option<&dyn KindTraining> {
        self.0.training().map(|training| training as _)
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

    /// Returns Kangaroo's γ, its maximum number of candidates in a round.
    fn max_candidate_length(&self) -> usize {
        6
    }

    fn files(&self, _loading: &Loading<'_>, dir: &DrafterDir) -> Result<Option<DrafterFiles>> {
        let config = AdapterConfig::from_dir(dir)?;
        let shape = format!("{} {}", config.exit_layer, config.model.to_json("float32"));
        Ok(Some(DrafterFiles { shape, description: describe_adapter(&config) }))
    }

    fn weights_hash(&self, loading: &Loading<'_>) -> Result<String> {
        let dir = loading.export_dir();
        loading.workspace.artifacts.adapter_hash(&dir, &AdapterConfig::from_dir(&dir)?)
    }

    fn frozen(&self, loading: &Loading<'_>, dtype: WeightDtype) -> Result<DrafterModel> {
        let (workspace, dir) = (loading.workspace, loading.export_dir());
        let (config, adapter) = workspace.artifacts.adapter_in(&workspace.models, &dir, dtype)?;
        let target = workspace.models.target_of_adapters(dtype)?.clone();
        Ok(DrafterModel::self_draft(target, adapter, config.exit_layer))
    }
}

impl KindTraining for AdapterTraining {
    fn lessons(&self) -> LessonSettings {
        Self::lessons(self)
    }

    /// Returns `None`, because an adapter reads the states of layers that it runs itself.
    fn served_format(&self) -> Option<FeatureFormat> {
        None
    }

    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        let exit_layer = exit_layer(self);
        if exit_layer < num_layers {
            return Ok(());
        }
        Err(TrainError::ExitLayer { exit_layer, num_layers })
    }

    fn settings(&self) -> Value {
        json!(self)
    }

    fn pass(&self) -> Value {
        let mut settings = json!(self);
        settings["exit_layer"] = Value::Null;
        settings
    }

    fn shown(&self) -> &'static [&'static str] {
        &["cross-entropy", "agreement", "overlap"]
    }

    fn train(
        &self,
        all: &[&dyn KindTraining],
        target: &CausalLm,
        rows: &[ResponseRow],
        seed: u64,
        run: TrainingRun<'_>,
    ) -> Result<Ending<Vec<TrainedExport>>, TrainError> {
        let exit_layers = trainings_of(all).map(exit_layer);
        let exit_layer = ExitLayers::Many(exit_layers.collect());
        let settings = Self { exit_layer, ..self.clone() };
        Ok(train_adapters(target, rows, &settings, seed, run)?.into_exports())
    }

    fn describe(&self, dir: &Path, _num_layers: usize, scores: &Value) -> Result<TrainedText> {
        let config = AdapterConfig::from_dir(dir)?;
        let scores: AdapterScores = serde_json::from_value(scores.clone())?;
        let (training, vocabulary) = (&config.training, config.draft_vocabulary.as_ref());
        let drafted = drafted_text(vocabulary, training);
        let drafted = drafted.map(|text| text + ", to which the scores are limited");
        let lines = format!(
            "{}, {} parameters{}\nvalidation over {} tokens: cross-entropy {:.4} (the target's \
             own {:.4}), agreement {:.4}, overlap {:.4}",
            config.architecture,
            config.num_parameters(),
            drafted.unwrap_or_default(),
            scores.num_tokens,
            scores.cross_entropy,
            scores.target_entropy,
            scores.agreement,
            scores.overlap,
        );
        let place = format!("behind layer {}", config.exit_layer);
        let properties = [
            ("exit_layer", json!(config.exit_layer)),
            ("architecture", json!(config.architecture)),
            ("num_parameters", json!(config.num_parameters())),
        ];
        let texts = (place, lines);
        Ok(TrainedText::new(texts, scores.agreement, training, vocabulary, properties))
    }
}

/// Counts the parameters that a draft forward reads: those of the target's first layers, of the
/// adapter, and of the LM head's rows for the draft vocabulary.
fn num_read(config: &ModelConfig, export: &AdapterExport) -> f64 {
    let drawn = export.config.draft_vocabulary.as_ref().map(|all| all.ids().len());
    let mut layers = config.clone().with_tied_embeddings(true);
    layers.shape.num_layers = export.config.exit_layer;
    // The adapter's parameters include those of its own LM head, if it has one.
    let has_head = export.adapter.own_head().is_some();
    layers.shape.vocab_size = if has_head { 0 } else { drawn.unwrap_or(config.shape.vocab_size) };
    (layers.num_parameters() + export.adapter.num_parameters()) as f64
}
