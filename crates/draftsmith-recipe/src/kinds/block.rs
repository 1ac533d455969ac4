//! The kind `block`: a drafter that proposes all candidates of a round in one forward (DFlash, DSpark).

use std::path::Path;

use anyhow::{Result, ensure};
use draftsmith_decode::BlockDraftParts;
use draftsmith_model::{BlockDrafterConfig, BlockForm, ConfidenceHead, DrafterDir, ModelError};
use draftsmith_theory::{HeadTiming, RoundForwards};
use draftsmith_train::{BlockShape, BlockTraining};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin, over_layers, read_network};
use super::{DrafterFiles, DrafterKind, KindEntry, read_kind};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_DSPARK, ServerFlags};
use crate::exports::{ExportEntry, inspected};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "block",
    read: read_kind::<BlockKind>,
    export: Some(ExportEntry {
        key: "path",
        text: "block drafter",
        known_by: "sample_from_anchor",
        is_of: BlockDrafterConfig::is_of,
        command: Some("train-drafter"),
        forms: &[ExportForm::new("dspark", forms::dspark::export)],
        inspect,
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
    let BlockForm { block_size, is_anchor_first, is_causal, .. } = &config.own;
    let own = json!({
        "layers": config.target_layers,
        "num_layers": config.model.shape.num_layers,
        "block_size": block_size,
        "num_candidates": config.num_candidates(),
        "anchor_first": is_anchor_first,
        "causal": is_causal,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence != ConfidenceHead::Absent,
        "draft_vocabulary": config.vocabulary_size(),
        "target_hash": config.target_hash,
        "training": config.training,
    });
    inspected::state_network("block drafter", dir, &config.model, own)
}

impl SelfDraftForm for BlockShape {
    fn config_in(dir: &DrafterDir, num_layers: usize) -> Result<BlockDrafterConfig, ModelError> {
        BlockDrafterConfig::beside(dir, num_layers)
    }

    fn about(config: &BlockDrafterConfig) -> AboutDraft {
        let place = over_layers(&config.target_layers);
        let description = format!(
            "block drafter of {} layers {place}, {} parameters, drafts {} tokens",
            config.model.shape.num_layers,
            config.num_parameters(),
            config.num_draft_tokens()
        );
        let shape =
            BlockDrafterConfig { target_hash: None, training: Map::new(), ..config.clone() };
        let shape = shape.to_json().to_string();
        AboutDraft::of(config, place, DrafterFiles { shape, description })
    }
}

impl DrafterKind for BlockKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        Some(&AS_DSPARK)
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        ensure!(
            loading.head_dir()?.is_none(),
            "the drafter `{}` is of the kind `block`, which can have no acceptance head beside its own; hint: \
             remove `head`",
            loading.id
        );
        let (config, network) = read_network(loading)?;
        let sizes = [num_read(&config), config.num_parameters()];
        let parts = BlockDraftParts { network, layers: config.target_layers };
        Ok(LoadedDrafter::of_self_draft(loading, parts, None, sizes))
    }

    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::Once
    }

    fn own_head(&self) -> Option<HeadTiming> {
        let config = BlockDrafterConfig::from_dir(self.0.path()?).ok()?;
        (config.confidence != ConfidenceHead::Absent).then_some(HeadTiming::BeforeDraw)
    }

    /// Returns the number of candidates for which the drafter was trained.
    fn most_candidates(&self) -> Option<usize> {
        match &self.0 {
            Origin::Training(training) => Some(training.block_size),
            Origin::Path(path) => Some(BlockDrafterConfig::from_dir(path).ok()?.num_candidates()),
        }
    }
}

/// Counts the parameters that a draft forward reads: the drafter's without the Markov head's vectors,
/// plus the target's LM head if the drafter has none.
fn num_read(config: &BlockDrafterConfig) -> usize {
    let shape = &config.model.shape;
    let head = config.draft_vocabulary.as_ref().map_or(shape.hidden_size * shape.vocab_size, |_| 0);
    config.num_parameters() - config.markov_rank * shape.vocab_size + head
}
