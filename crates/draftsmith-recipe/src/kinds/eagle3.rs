//! The kind `eagle3`: a drafter that reads the target's hidden states after three of its layers.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use draftsmith_data::ResponseRow;
use draftsmith_decode::{NamedParts, StateDraftParts};
use draftsmith_model::{
    CausalLm, DrafterDir, DrafterModel, Eagle3, Eagle3Config, ModelConfig, WeightDtype,
};
use serde::{Deserialize, Serialize};

use draftsmith_train::{
    DraftScores, Eagle3Training, Ending, LessonSettings, TrainError, TrainedExport, TrainingRun,
    train_state_drafters,
};
use serde_json::{Value, json};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::{
    DrafterFiles, DrafterKind, DrafterRecipes, KindDirectory, KindEntry, KindTraining, TrainedText,
    drafted_text, read_kind, settings_table, trainings_of,
};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_EAGLE3, ServerFlags};
use crate::exports::{ExportEntry, inspected, read_self_drafts_head};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "eagle3",
    read: read_kind::<Eagle3Kind>,
    directory: Some(KindDirectory {
        key: "path",
        export: ExportEntry {
            text: "EAGLE-3 drafter",
            known_by: "draft_vocab_size",
            is_of: Eagle3Config::is_of,
            command: Some("train-drafter"),
            forms: &[ExportForm::new("eagle3", forms::eagle3::export)],
            inspect: inspected::eagle3,
        },
    }),
};

/// The drafter's training settings, or the directory of a trained one as vLLM, SGLang and llama.cpp
/// load it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Eagle3Kind(pub Origin<Eagle3Training>);

impl DrafterKind for Eagle3Kind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn settings(&self) -> toml::Table {
        settings_table(self)
    }

    fn text(&self) -> String {
        "EAGLE-3".to_owned()
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        Some(&AS_EAGLE3)
    }

    fn check(&self, key: &str, _all: &DrafterRecipes) -> Result<()> {
        let Origin::Training(training) = &self.0 else { return Ok(()) };
        training.validate().with_context(|| format!("section `[{key}]`"))
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let (models, id) = (&loading.workspace.models, loading.id);
        let dir = loading.export_dir();
        ENTRY.need(&dir)?;
        let (shape, dtype) = (models.target_shape()?, models.dtype);
        let (config, network) = Eagle3::from_dir(&dir, shape, dtype, models.device())?;
        loading.check_target(&dir, config.target_hash.as_deref())?;
        let head = loading.head_dir()?.map(|head| {
            check_width(&dir, &config)?;
            let hash = || self.recorded_hash(loading);
            read_self_drafts_head(&head, shape.hidden_size, hash, loading.workspace)
        });
        let head = head.transpose()?;
        let sizes = vec![(id, num_read(&config))];
        let parts = StateDraftParts {
            network,
            layers: config.target_layers.to_vec(),
            head: head.as_ref().map(|head| head.head.clone()),
        };
        let parts = NamedParts { id, parts: Arc::new(parts) };
        Ok(LoadedDrafter { parts, head, dir: Some(dir.path), rule_dir: None, sizes })
    }

    fn path(&self) -> Option<&DrafterDir> {
        self.0.path()
    }

    fn training(&self) -> Option<&dyn KindTraining> {
        self.0.training().map(|training| training as _)
    }

    /// Returns `usize::MAX`, for all layers, because the drafter reads the states of deep layers.
    fn num_first_layers(&self) -> usize {
        usize::MAX
    }

    fn state_layers(&self, target: &ModelConfig) -> Result<Vec<usize>> {
        Ok(match &self.0 {
            Origin::Training(training) => {
                training.layers.unwrap_or(Eagle3Config::new(target).target_layers).to_vec()
            }
            Origin::Path(path) => {
                Eagle3Config::from_dir(path, target.shape.num_layers)?.target_layers.to_vec()
            }
        })
    }

    fn files(&self, loading: &Loading<'_>, dir: &DrafterDir) -> Result<Option<DrafterFiles>> {
        let num_layers = loading.workspace.models.target_shape()?.num_layers;
        let config = Eagle3Config::from_dir(dir, num_layers)?;
        let shape = (config.target_layers, config.norm_before_residual);
        let normed = if config.norm_output { " norm_output" } else { "" };
        let shape = format!("{shape:?} {}{normed}", config.model.to_json("float32"));
        let description = format!(
            "EAGLE-3 {}, {} parameters, drafts {} tokens",
            place_text(&config),
            config.num_parameters(),
            config.num_draft_tokens()
        );
        Ok(Some(DrafterFiles { shape, description }))
    }

    fn frozen(&self, loading: &Loading<'_>, dtype: WeightDtype) -> Result<DrafterModel> {
        let (models, dir) = (&loading.workspace.models, loading.export_dir());
        let shape = models.target_shape()?;
        let (config, drafter) = Eagle3::from_dir(&dir, shape, dtype, models.device())?;
        check_width(&dir, &config)?;
        let target = models.target_of_adapters(dtype)?.clone();
        Ok(DrafterModel::eagle3(target, drafter, config.target_layers))
    }
}

impl KindTraining for Eagle3Training {
    fn lessons(&self) -> LessonSettings {
        Self::lessons(self)
    }

    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        Self::check_layers(self, num_layers)
    }

    fn settings(&self) -> Value {
        json!(self)
    }

    fn pass(&self) -> Value {
        json!(self.of_pass())
    }

    fn shown(&self) -> &'static [&'static str] {
        &["accepted length", "agreement", "cross-entropy"]
    }

    fn train(
        &self,
        all: &[&dyn KindTraining],
        target: &CausalLm,
        rows: &[ResponseRow],
        seed: u64,
        run: TrainingRun<'_>,
    ) -> Result<Ending<Vec<TrainedExport>>, TrainError> {
        let trainings: Vec<Self> = trainings_of(all).cloned().collect();
        Ok(train_state_drafters(target, rows, &trainings, seed, run)?.into_exports())
    }

    fn describe(&self, dir: &Path, num_layers: usize, scores: &Value) -> Result<TrainedText> {
        let config = Eagle3Config::from_dir(dir, num_layers)?;
        let scores: DraftScores = serde_json::from_value(scores.clone())?;
        let (training, vocabulary) = (&config.training, config.draft_vocabulary.as_ref());
        let drafted = drafted_text(vocabulary, training).unwrap_or_default();
        let num_parameters = config.num_parameters();
        let lines = format!("{num_parameters} parameters{drafted}\n{}", scores.text());
        let properties =
            [("layers", json!(config.target_layers)), ("num_parameters", json!(num_parameters))];
        let (texts, agreement) = ((place_text(&config), lines), scores.agreement.first());
        Ok(TrainedText::new(texts, agreement, training, vocabulary, properties))
    }
}

/// Names the target's layers whose states the drafter reads.
fn place_text(config: &Eagle3Config) -> String {
    let [low, middle, high] = config.target_layers;
    format!("over layers {low}, {middle} and {high}")
}

/// Checks that the drafter's hidden size equals the target's. An acceptance head needs that,
/// because it reads the drafter's hidden states together with the target's embeddings.
fn check_width(dir: &Path, config: &Eagle3Config) -> Result<()> {
    let (own, target) = (config.model.shape.hidden_size, config.target_hidden_size);
    ensure!(
        own == target,
        "`{}` has hidden states of width {own}, and the target's have {target}: such a drafter can have no head",
        dir.display()
    );
    Ok(())
}

/// Counts the parameters that a draft forward reads: the drafter's without its embeddings, plus the
/// rows of the target's LM head for the draft vocabulary if the drafter has no LM head. `fc` is
/// included, although it is read only once per round.
fn num_read(config: &Eagle3Config) -> f64 {
    let embeddings = Eagle3Config { has_embedding: false, ..config.clone() };
    let shape = &config.model.shape;
    let head = if config.has_head { 0 } else { shape.hidden_size * config.num_draft_tokens() };
    (embeddings.num_parameters() + head) as f64
}
