//! The kind `medusa`: heads on the target's last hidden state, each of which proposes one candidate.

use std::path::Path;

use anyhow::{Result, ensure};
use draftsmith_decode::MedusaDraftParts;
use draftsmith_model::{DrafterDir, Medusa, MedusaConfig, ModelError};
use draftsmith_theory::RoundForwards;
use draftsmith_train::{MedusaShape, MedusaTraining};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::loaded::{LoadedDrafter, Loading};
use super::origin::Origin;
use super::self_draft::{AboutDraft, SelfDraftForm, SelfDraftOrigin};
use super::{DrafterFiles, DrafterKind, KindEntry, read_kind};
use crate::exports::ExportEntry;
use crate::exports::forms::{ExportForm, Exporting, Written};
use crate::exports::tuned::Tuned;
use crate::out_dir::OutDir;
use crate::watch::Silent;
use crate::workspace::hash_dir;

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "medusa",
    read: read_kind::<MedusaKind>,
    export: Some(ExportEntry {
        key: "path",
        text: "Medusa heads",
        known_by: "medusa_num_heads",
        is_of: |keys| ["medusa_num_heads", "medusa"].iter().any(|key| keys.contains_key(*key)),
        command: Some("train-drafter"),
        forms: &[ExportForm::new("medusa", export)],
        inspect,
    }),
};

/// The training settings of heads, or the directory of trained ones.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MedusaKind(pub Origin<MedusaTraining>);

/// Describes the heads in a directory.
fn inspect(dir: &Path) -> Result<Value> {
    let config = MedusaConfig::beside(dir, 0)?;
    let mut described = json!(config);
    described["kind"] = "Medusa heads".into();
    described["num_parameters"] = config.num_parameters().into();
    described["tuned"] = json!(Tuned::read(dir)?);
    described["hash"] = hash_dir(dir, &Silent)?.into();
    Ok(described)
}

/// Writes heads in the format of the authors' v1.3 files.
fn export(Exporting { source, out, open, .. }: &Exporting<'_>) -> Result<Written> {
    let models = open()?.models;
    let (shape, dtype) = (models.target_shape()?, models.dtype);
    let (config, heads) = Medusa::from_dir(source, shape, dtype, models.device())?;
    ensure!(config.vocab_size.is_some(), "Medusa's class needs heads with LM heads of their own");
    let dir = OutDir::begin_again(out)?;
    heads.write_authors(dir.path(), &config, &models.target_dir().to_string_lossy())?;
    dir.finish()?;
    let what = format!("{} Medusa heads for the authors' class", config.num_heads);
    let command = format!("python -m medusa.inference.cli --model {}", out.display());
    Ok(Written { what, ignored: Vec::new(), commands: vec![command] })
}

impl SelfDraftForm for MedusaShape {
    fn config_in(dir: &DrafterDir, num_layers: usize) -> Result<MedusaConfig, ModelError> {
        MedusaConfig::beside(dir, num_layers)
    }

    fn about(config: &MedusaConfig) -> AboutDraft {
        let (num_heads, num_parameters) = (config.num_heads, config.num_parameters());
        let size = format!("{num_heads} heads, {num_parameters} parameters");
        let (shape, description) = (format!("medusa {num_heads}"), format!("Medusa, {size}"));
        AboutDraft {
            files: DrafterFiles { shape, description },
            target_layers: vec![config.num_target_layers],
            place: "over the last layer".to_owned(),
            size,
            num_parameters,
            has_head: config.vocab_size.is_some(),
            num_draft_tokens: None,
            properties: vec![("num_heads", json!(num_heads))],
        }
    }
}

impl DrafterKind for MedusaKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn origin(&self) -> Option<&dyn SelfDraftOrigin> {
        Some(&self.0)
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        ensure!(
            loading.head_dir()?.is_none(),
            "the drafter `{}` is of the kind `medusa`, which can have no acceptance head; hint: remove `head`",
            loading.id
        );
        let (models, dir) = (&loading.workspace.models, loading.export_dir());
        ENTRY.need(&dir)?;
        let shape = models.target_shape()?;
        let (config, network) = Medusa::from_dir(&dir, shape, models.dtype, models.device())?;
        loading.workspace.check_target(("drafter", &dir), config.target_hash.as_deref())?;
        let num_own = config.num_parameters();
        // Without LM heads, each head reads the target's.
        let of_target = config.num_heads * shape.hidden_size * shape.vocab_size;
        let num_read = num_own + config.vocab_size.map_or(of_target, |_| 0);
        let parts = MedusaDraftParts { network, layers: vec![config.num_target_layers] };
        Ok(LoadedDrafter::of_self_draft(loading, parts, None, [num_read, num_own]))
    }

    fn round_forwards(&self) -> RoundForwards {
        RoundForwards::Once
    }

    fn most_candidates(&self) -> Option<usize> {
        match &self.0 {
            Origin::Training(training) => Some(training.num_heads),
            Origin::Path(dir) => Some(MedusaConfig::beside(dir, 0).ok()?.num_heads),
        }
    }
}
