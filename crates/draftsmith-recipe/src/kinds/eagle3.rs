//! The kind `eagle3`: a drafter that reads the target's hidden states after three of its layers.

use std::path::Path;

use anyhow::{Result, ensure};
use draftsmith_decode::StateDraftParts;
use draftsmith_model::{
    DrafterDir, DrafterModel, Eagle3, Eagle3Config, ModelError, StateNorms, WeightDtype,
};
use draftsmith_train::{Eagle3Shape, Eagle3Training};
use serde::{Deserialize, Serialize};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin, read_network};
use super::{DrafterFiles, DrafterKind, KindEntry, read_kind};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_EAGLE3, ServerFlags};
use crate::exports::{ExportEntry, inspected, read_self_drafts_head};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "eagle3",
    read: read_kind::<Eagle3Kind>,
    export: Some(ExportEntry {
        key: "path",
        text: "EAGLE-3 drafter",
        known_by: "draft_vocab_size",
        is_of: Eagle3Config::is_of,
        command: Some("train-drafter"),
        forms: &[ExportForm::new("eagle3", forms::eagle3::export)],
        inspect: inspected::eagle3,
    }),
};

/// The drafter's training settings, or the directory of a trained one as vLLM, SGLang and llama.cpp
/// load it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Eagle3Kind(pub Origin<Eagle3Training>);

impl SelfDraftForm for Eagle3Shape {
    fn config_in(dir: &DrafterDir, num_layers: usize) -> Result<Eagle3Config, ModelError> {
        Eagle3Config::beside(dir, num_layers)
    }

    fn about(config: &Eagle3Config) -> AboutDraft {
        let layers = &config.target_layers;
        let (low, high) = layers.split_at(layers.len() - 1);
        let low: Vec<String> = low.iter().map(ToString::to_string).collect();
        let place = format!("over layers {} and {}", low.join(", "), high[0]);
        let mut shape = format!(
            "{:?} {}",
            (layers, config.norm_before_residual),
            config.model.to_json("float32")
        );
        if config.norm_output {
            shape += " norm_output";
        }
        if config.state_norms != StateNorms::Absent {
            shape += &format!(" {:?}", config.state_norms);
        }
        if let Some(window) = &config.model.spec.window {
            shape += &format!(" window {}", window.size);
        }
        let description = format!(
            "EAGLE-3 {place}, {} parameters, drafts {} tokens",
            config.num_parameters(),
            config.num_draft_tokens()
        );
        AboutDraft::of(config, place, DrafterFiles { shape, description })
    }
}

impl DrafterKind for Eagle3Kind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn text(&self) -> String {
        "EAGLE-3".to_owned()
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        Some(&AS_EAGLE3)
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let (config, network) = read_network(loading)?;
        let head = loading.head_dir()?.map(|head| {
            check_width(&loading.export_dir(), &config)?;
            let hash = || self.recorded_hash(loading);
            read_self_drafts_head(&head, config.target_hidden_size, hash, loading.workspace)
        });
        let (head, sizes) = (head.transpose()?, [num_read(&config), config.num_parameters()]);
        let parts = StateDraftParts {
            network,
            layers: config.target_layers,
            head: head.as_ref().map(|head| head.head.clone()),
        };
        Ok(LoadedDrafter::of_self_draft(loading, parts, head, sizes))
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
fn num_read(config: &Eagle3Config) -> usize {
    let embeddings = config.clone().with(|it| it.has_embedding = false);
    let shape = &config.model.shape;
    let head = if config.has_head { 0 } else { shape.hidden_size * config.num_draft_tokens() };
    embeddings.num_parameters() + head
}
