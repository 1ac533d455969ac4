//! The drafter of a head, and the directories of the head and its training state.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_model::{DrafterModel, WeightDtype};

use crate::exports::adapter_head_dir;
use crate::recipe::Recipe;
use crate::workspace::Workspace;

/// The drafter whose candidates a head judges.
pub(crate) enum HeadDrafter<'a> {
    /// A separate draft model.
    Draft,
    /// A self-draft with the adapter in `dir`.
    Adapter { dir: &'a Path, exit_layer: usize },
}

impl HeadDrafter<'_> {
    /// The command that trains the head.
    pub(super) fn command(&self) -> &'static str {
        match self {
            Self::Draft => "train-head",
            Self::Adapter { .. } => "train-adapter",
        }
    }

    pub(super) fn head_dir(&self, recipe: &Recipe) -> PathBuf {
        match self {
            Self::Draft => recipe.head_dir(),
            Self::Adapter { dir, .. } => adapter_head_dir(dir),
        }
    }

    pub(super) fn training_dir(&self, recipe: &Recipe) -> PathBuf {
        match self {
            Self::Draft => recipe.head_dir().with_file_name("head-training"),
            Self::Adapter { exit_layer, .. } => recipe
                .adapter_root()
                .with_file_name("adapter-head-training")
                .join(format!("exit-{exit_layer}")),
        }
    }

    /// Whether the recipe sweeps the head's settings.
    pub(super) fn is_swept(&self, recipe: &Recipe) -> bool {
        let is_swept = || recipe.head.as_ref().is_some_and(|head| head.sweep.is_some());
        matches!(self, Self::Draft) && is_swept()
    }

    /// The adapter's directory, for a self-draft.
    pub(super) fn adapter_dir(&self) -> Option<&Path> {
        match self {
            Self::Draft => None,
            Self::Adapter { dir, .. } => Some(dir),
        }
    }

    /// The model whose hidden states the head reads, computing in `dtype`.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(super) fn load(&self, workspace: &Workspace, dtype: WeightDtype) -> Result<DrafterModel> {
        Ok(match self {
            Self::Draft => workspace.draft_in(dtype)?.context("there is a draft")?.into(),
            Self::Adapter { dir, exit_layer } => {
                let (_, adapter) = workspace.adapter_in(dir, dtype)?;
                DrafterModel::self_draft(
                    workspace.target_of_adapters(dtype)?.clone(),
                    adapter,
                    *exit_layer,
                )
            }
        })
    }
}
