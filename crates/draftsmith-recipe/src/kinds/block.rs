//! The kind `block`: a drafter that proposes all candidates of a round in one forward (DFlash, DSpark).

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use draftsmith_data::ResponseRow;
use draftsmith_decode::{BlockDraftParts, NamedParts};
use draftsmith_model::{
    BlockDrafter, BlockDrafterConfig, CausalLm, ConfidenceHead, DrafterDir, ModelConfig,
};
use draftsmith_theory::{HeadTiming, RoundForwards};
use draftsmith_train::{
    BlockTraining, DraftScores, Ending, LessonSettings, TrainError, TrainedExport, TrainingRun,
    train_state_drafters,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::{
    DrafterFiles, DrafterKind, DrafterRecipes, KindDirectory, KindEntry, KindTraining, TrainedText,
    read_kind, settings_table, trainings_of,
};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_DSPARK, ServerFlags};
use crate::exports::{ExportEntry, inspected};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "block",
    read: read_kind::<BlockKind>,
    directory: Some(KindDirectory {
        key: "path",
        export: ExportEntry {
            text: "block drafter",
            known_by: "sample_from_anchor",
            is_of: BlockDrafterConfig::is_of,
            command: Some("train-drafter"),
            forms: &[ExportForm::new("dspark", forms::dspark::export)],
            inspect,
        },
    }),
};

/// The drafter's training settings, or the directory of a trained one in DeepSpec's, z-lab's or the
/// speculators library's form.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockKind(pub Origin<BlockTraining>);

/// Describes the drafter in a directory.
fn inspect(dir: &Path) -> Result<Value> {
    let config = BlockDrafterConfig::from_dir(dir)?;
    let BlockDrafterConfig { target_layers, block_size, is_anchor_first, is_causal, .. } = &config;
    let own = json!({
        "layers": target_layers,
        "num_layers": config.model.shape.num_layers,
        "block_size": block_size,
        "num_candidates": config.num_candidates(),
        "anchor_first": is_anchor_first,
        "causal": is_causal,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence != ConfidenceHead::Absent,
        "draft_vocabulary": config.draft_vocabulary.as_ref().map(|all| all.ids().len()),
        "target_hash": config.target_hash,
        "training": config.training,
    });
    inspected::state_network("block drafter", dir, &config.model, own)
}

/// Reads the network of a block drafter.
///
/// # Errors
/// If the drafter has no files yet, they are invalid, or it was trained for another target.
pub fn read_network(loading: &Loading<'_>) -> Result<(BlockDrafterConfig, BlockDrafter)> {
    let (models, dir) = (&loading.workspace.models, loading.export_dir());
    ENTRY.need(&dir)?;
    let shape = models.target_shape()?;
    let read = BlockDrafter::from_dir(&dir, shape, models.dtype, models.device())?;
    loading.check_target(&dir, read.0.target_hash.as_deref())?;
    Ok(read)
}

impl DrafterKind for BlockKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn settings(&self) -> toml::Table {
        settings_table(self)
    }

    fn text(&self) -> String {
        "block drafter".to_owned()
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        Some(&AS_DSPARK)
    }

    fn check(&self, key: &str, _all: &DrafterRecipes) -> Result<()> {
        let Origin::Training(training) = &self.0 else { return Ok(()) };
        training.validate().with_context(|| format!("section `[{key}]`"))
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let id = loading.id;
        ensure!(
            loading.head_dir()?.is_none(),
            "the drafter `{id}` is of the kind `block`, which can have no acceptance head beside its own; hint: \
             remove `head`"
        );
        let (config, network) = read_network(loading)?;
        let size = num_read(&config);
        let parts = Arc::new(BlockDraftParts { network, layers: config.target_layers });
        let parts = NamedParts { id, parts };
        let (dir, sizes) = (Some(loading.export_dir().path), vec![(id, size)]);
        Ok(LoadedDrafter { parts, head: None, dir, rule_dir: None, sizes })
    }

    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::Once
    }

    fn own_head(&self) -> Option<HeadTiming> {
        let config = BlockDrafterConfig::from_dir(self.0.path()?).ok()?;
        (config.confidence != ConfidenceHead::Absent).then_some(HeadTiming::BeforeDraw)
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
            Origin::Training(training) => training.layers_of(target.shape.num_layers),
            Origin::Path(path) => BlockDrafterConfig::from_dir(path)?.target_layers,
        })
    }

    fn max_candidate_length(&self) -> usize {
        self.most_candidates().unwrap_or(1)
    }

    /// Returns the number of candidates for which the drafter was trained.
    fn most_candidates(&self) -> Option<usize> {
        match &self.0 {
            Origin::Training(training) => Some(training.shape.block_size),
            Origin::Path(path) => Some(BlockDrafterConfig::from_dir(path).ok()?.num_candidates()),
        }
    }

    fn files(&self, _loading: &Loading<'_>, dir: &DrafterDir) -> Result<Option<DrafterFiles>> {
        let config = BlockDrafterConfig::from_dir(dir)?;
        let description = format!(
            "block drafter of {} layers {}, {} parameters, drafts {} tokens",
            config.model.shape.num_layers,
            place_text(&config),
            config.num_parameters(),
            config.num_draft_tokens()
        );
        let shape = BlockDrafterConfig { target_hash: None, training: Map::new(), ..config };
        Ok(Some(DrafterFiles { shape: shape.to_json().to_string(), description }))
    }
}

impl KindTraining for BlockTraining {
    fn lessons(&self) -> LessonSettings {
        self.common.lessons()
    }

    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        Self::check_layers(self, num_layers)
    }

    fn settings(&self) -> Value {
        json!(self)
    }

    fn pass(&self) -> Value {
        json!(self.common.of_pass())
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

    fn describe(&self, dir: &Path, _num_layers: usize, scores: &Value) -> Result<TrainedText> {
        let config = BlockDrafterConfig::from_dir(dir)?;
        let scores: DraftScores = serde_json::from_value(scores.clone())?;
        let num_parameters = config.num_parameters();
        let lines = format!("{num_parameters} parameters\n{}", scores.text());
        let properties =
            [("layers", json!(config.target_layers)), ("num_parameters", json!(num_parameters))];
        let (texts, agreement) = ((place_text(&config), lines), scores.agreement.first());
        let (training, vocabulary) = (&config.training, config.draft_vocabulary.as_ref());
        Ok(TrainedText::new(texts, agreement, training, vocabulary, properties))
    }
}

/// Names the target's layers whose states the drafter reads, as in `over layers 2, 4, 6`.
fn place_text(config: &BlockDrafterConfig) -> String {
    let layers: Vec<String> = config.target_layers.iter().map(ToString::to_string).collect();
    format!("over layers {}", layers.join(", "))
}

/// Counts the parameters that a draft forward reads: the drafter's without the Markov head's vectors,
/// plus the target's LM head if the drafter has none.
fn num_read(config: &BlockDrafterConfig) -> f64 {
    let shape = &config.model.shape;
    let head = match config.draft_vocabulary {
        Some(_) => 0,
        None => shape.hidden_size * shape.vocab_size,
    };
    (config.num_parameters() - config.markov_rank * shape.vocab_size + head) as f64
}
