//! The kind `eagle`: EAGLE-1's drafter, which reads what the target's LM head reads.

use anyhow::Result;
use draftsmith_decode::StateDraftParts;
use draftsmith_model::{DrafterDir, EagleConfig, EagleForm, ModelError};
use draftsmith_train::{EagleShape, EagleTraining};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin, read_network};
use super::{DrafterFiles, DrafterKind, KindEntry, read_kind};
use crate::exports::forms::{self, ExportForm};
use crate::exports::servers::{AS_EAGLE, ServerFlags};
use crate::exports::{ExportEntry, inspected};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "eagle",
    read: read_kind::<EagleKind>,
    export: Some(ExportEntry {
        key: "path",
        text: "EAGLE-1 drafter",
        known_by: "bias",
        is_of: EagleConfig::is_of,
        command: Some("train-drafter"),
        forms: &[
            ExportForm::new("eagle", |it| forms::eagle::export(it, false)),
            ExportForm::new("eagle-sglang", |it| forms::eagle::export(it, true)),
        ],
        inspect: |dir| {
            let config = EagleConfig::beside(dir, 0)?;
            let own = json!({
                "bias": config.has_bias,
                "target_hash": config.target_hash,
                "training": config.training,
            });
            inspected::state_network("EAGLE-1 drafter", dir, &config.model, own)
        },
    }),
};

/// The drafter's training settings, or the directory of a trained one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EagleKind(pub Origin<EagleTraining>);

impl SelfDraftForm for EagleShape {
    fn config_in(dir: &DrafterDir, num_layers: usize) -> Result<EagleConfig, ModelError> {
        EagleConfig::beside(dir, num_layers)
    }

    fn about(config: &EagleConfig) -> AboutDraft {
        let place = format!("over layer {}", config.target_layers[0]);
        let shape = format!("eagle {} {}", config.has_bias, config.model.to_json("float32"));
        let description = format!("EAGLE-1 {place}, {} parameters", config.num_parameters());
        let about = AboutDraft::of(config, place, DrafterFiles { shape, description });
        AboutDraft { properties: Vec::new(), ..about }
    }
}

impl DrafterKind for EagleKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn text(&self) -> String {
        "EAGLE-1".to_owned()
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        Some(&AS_EAGLE)
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let (config, network) = read_network::<EagleForm>(loading)?;
        let shape = &config.model.shape;
        let (own, head) = (config.num_parameters(), shape.hidden_size * shape.vocab_size);
        let parts = StateDraftParts { network, layers: config.target_layers, head: None };
        Ok(LoadedDrafter::of_self_draft(loading, parts, None, [own + head, own]))
    }
}
