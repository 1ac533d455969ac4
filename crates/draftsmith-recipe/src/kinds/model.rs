//! The kind `model`: a separate, smaller draft model with the target's tokenizer.

use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use draftsmith_decode::{DraftModelParts, NamedParts};
use draftsmith_model::{CausalLm, DrafterModel, WeightDtype};
use draftsmith_theory::{DrafterId, ModelSummary, Road};
use serde::{Deserialize, Serialize};

use super::loaded::{DrafterSize, LoadedDrafter, Loading};
use super::{DrafterKind, KindEntry, Role, read_kind};
use crate::exports::servers::{AS_DRAFT_MODEL, ServerFlags};
use crate::exports::{ExportEntry, HeadExport, inspected, read_model_head, summary_of};

/// The entry of this kind in the table of kinds.
pub static ENTRY: KindEntry = KindEntry {
    name: "model",
    read: read_kind::<ModelKind>,
    export: Some(ExportEntry {
        key: "model",
        text: "draft model",
        known_by: "model_type",
        is_of: |keys| keys.contains_key("model_type") || keys.contains_key("architectures"),
        command: None,
        forms: &[],
        inspect: inspected::model,
    }),
};

/// The settings of a draft model.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelKind {
    /// The checkpoint directory in Hugging Face's format, the Hub name: `org/name@revision`, or a GGUF
    /// file.
    pub model: PathBuf,
}

impl DrafterKind for ModelKind {
    fn entry(&self) -> &'static KindEntry {
        &ENTRY
    }

    fn text(&self) -> String {
        "separate draft".to_owned()
    }

    fn road(&self) -> Road {
        Road::SeparateDraft
    }

    fn load(&self, loading: &Loading<'_>) -> Result<LoadedDrafter> {
        let Loading { id, workspace, .. } = *loading;
        let model = workspace.draft_model(id)?;
        let head = loading.head_dir()?.map(|dir| read_model_head(&dir, id, None, workspace));
        Ok(LoadedDrafter::of_model(id, model, head.transpose()?))
    }

    fn role(&self) -> Role {
        Role::Steps
    }

    fn served(&self) -> Option<&'static ServerFlags> {
        Some(&AS_DRAFT_MODEL)
    }

    fn model(&self) -> Option<&Path> {
        Some(&self.model)
    }

    fn recorded_hash(&self, loading: &Loading<'_>) -> Result<String> {
        Ok(loading.workspace.models.draft_model_hash(loading.id)?.to_owned())
    }

    fn summaries(
        &self,
        loading: &Loading<'_>,
        loaded: &LoadedDrafter,
    ) -> Result<Vec<ModelSummary>> {
        let Loading { id, workspace, .. } = *loading;
        let (config, hash) =
            (workspace.models.draft_model_config(id)?, workspace.models.draft_model_hash(id)?);
        let own = summary_of(id.as_str(), &self.model, config, hash);
        let head = loaded.head.as_ref().map(|head| loading.head_summary(head));
        iter::once(Ok(own)).chain(head).collect()
    }

    fn frozen(&self, loading: &Loading<'_>, dtype: WeightDtype) -> Result<DrafterModel> {
        Ok(loading.workspace.models.draft_model_in(loading.id, dtype)?.into())
    }

    fn with_head(
        &self,
        loading: &Loading<'_>,
        dir: &Path,
        reviewer: Option<&str>,
    ) -> Result<NamedParts> {
        let Loading { id, workspace, .. } = *loading;
        let head = read_model_head(dir, id, reviewer, workspace)?;
        Ok(parts(id, workspace.draft_model(id)?, Some(&head)))
    }
}

fn parts(id: DrafterId, model: &CausalLm, head: Option<&HeadExport>) -> NamedParts {
    let head = head.map(|export| export.head.clone());
    NamedParts { id, parts: Arc::new(DraftModelParts { model: model.clone(), head }) }
}

impl LoadedDrafter {
    /// Wraps a draft model that is already in memory, with its acceptance head.
    pub fn of_model(id: DrafterId, model: &CausalLm, head: Option<HeadExport>) -> Self {
        let num = model.config().num_parameters();
        let sizes = vec![DrafterSize { id, num_read: num, num_own: num }];
        Self { parts: parts(id, model, head.as_ref()), head, dir: None, rule_dir: None, sizes }
    }
}
