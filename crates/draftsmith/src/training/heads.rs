//! Trains the acceptance heads of a draft model or an adapter. Heads that share a mixing ratio are trained
//! together, and finished heads are kept.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use draftsmith_data::{DataSet, Provenance};
use draftsmith_model::{DrafterModel, WeightDtype};
use draftsmith_train::{HeadData, HeadLabels, HeadTraining, train_heads};
use serde_json::json;

use super::export_job::{ExportJob, FrozenModel, KEPT, Planned, StepsLeft};
use super::head_outcome::{ExportedHead, HeadOutcome};
use crate::built_data::fingerprint;
use crate::console::{Console, Interrupted};
use crate::exports::adapter_head_dir;
use crate::recipe::Recipe;
use crate::rollouts::TrainingRollouts;
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
    fn command(&self) -> &'static str {
        match self {
            Self::Draft => "train-head",
            Self::Adapter { .. } => "train-adapter",
        }
    }

    fn head_dir(&self, recipe: &Recipe) -> PathBuf {
        match self {
            Self::Draft => recipe.head_dir(),
            Self::Adapter { dir, .. } => adapter_head_dir(dir),
        }
    }

    fn training_dir(&self, recipe: &Recipe) -> PathBuf {
        match self {
            Self::Draft => recipe.head_dir().with_file_name("head-training"),
            Self::Adapter { exit_layer, .. } => recipe
                .adapter_root()
                .with_file_name("adapter-head-training")
                .join(format!("exit-{exit_layer}")),
        }
    }

    /// Whether the recipe sweeps the head's settings.
    fn is_swept(&self, recipe: &Recipe) -> bool {
        let is_swept = || recipe.head.as_ref().is_some_and(|head| head.sweep.is_some());
        matches!(self, Self::Draft) && is_swept()
    }

    /// The adapter's directory, for a self-draft.
    fn adapter_dir(&self) -> Option<&Path> {
        match self {
            Self::Draft => None,
            Self::Adapter { dir, .. } => Some(dir),
        }
    }

    /// The model whose hidden states the head reads, computing in `dtype`.
    ///
    /// # Errors
    /// If a file is missing or broken.
    fn load(&self, workspace: &Workspace, dtype: WeightDtype) -> Result<DrafterModel> {
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

/// Trains the heads of one drafter.
pub(crate) struct HeadTrainer<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) workspace: &'a Workspace,
    pub(crate) drafter: HeadDrafter<'a>,
    pub(crate) data: &'a DataSet,
    /// The data's provenance, with the hash of the labels' drafter.
    pub(crate) provenance: Provenance,
    pub(crate) console: &'a Console,
}

impl HeadTrainer<'_> {
    /// Finds the heads with these settings, which share a mixing ratio, and trains the missing ones together.
    ///
    /// # Errors
    /// If labels cannot be made, training fails, or it was interrupted.
    pub(crate) fn pass(
        &self,
        heads: &[HeadTraining],
        steps_left: &mut StepsLeft,
    ) -> Result<Vec<ExportedHead>> {
        let planned = heads.iter().map(|settings| self.planned(settings));
        let planned = planned.collect::<Result<Vec<_>>>()?;
        let mut found: Vec<Option<ExportedHead>> = planned.iter().map(Planned::found).collect();
        let num_kept = found.iter().flatten().count();
        match (found.as_slice(), num_kept) {
            ([Some(only)], _) => self.note(format!("keeping `{}`, {KEPT}", only.dir.display())),
            (_, 0) => {}
            _ => self.note(format!("keeping {num_kept} heads of the sweep, {KEPT}")),
        }
        let missing = planned.into_iter().zip(heads).zip(&found);
        let missing = missing.filter(|(_, found)| found.is_none()).map(|(missing, _)| missing);
        let (planned, settings): (Vec<Planned>, Vec<HeadTraining>) =
            missing.map(|(planned, settings)| (planned, settings.clone())).unzip();
        let mut trained = self.train(&planned, &settings, steps_left)?.into_iter();
        for place in found.iter_mut().filter(|place| place.is_none()) {
            *place = trained.next();
        }
        Ok(found.into_iter().flatten().collect())
    }

    fn planned(&self, settings: &HeadTraining) -> Result<Planned> {
        let dir = match self.drafter.is_swept(self.recipe) {
            true => self.recipe.sweep_dir().join(settings.name()),
            false => self.drafter.head_dir(self.recipe),
        };
        // The fingerprint covers settings, seed, and the data with its provenance. It is the same for a single
        // head and in a sweep, because the weights are.
        let settings = json!({ "head": settings, "seed": self.recipe.seed });
        Ok(Planned { dir, fingerprint: fingerprint(settings, self.data, &self.provenance)? })
    }

    /// Trains heads together.
    fn train(
        &self,
        planned: &[Planned],
        heads: &[HeadTraining],
        steps_left: &mut StepsLeft,
    ) -> Result<Vec<ExportedHead>> {
        let Some(first) = heads.first() else { return Ok(Vec::new()) };
        let training_dir = self.drafter.training_dir(self.recipe);
        let training_dir = match self.drafter.is_swept(self.recipe) {
            true => training_dir.join(format!("r{}", first.mixing_ratio)),
            false => training_dir,
        };
        if heads.len() > 1 {
            self.note(format!(
                "training {} heads with mixing ratio {} together; epochs show the first head that is \
                 still being trained, now `{}`",
                heads.len(),
                first.mixing_ratio,
                first.name(),
            ));
        }
        let rollouts = self.rollouts(first)?;
        let recorded = rollouts.as_ref().map(TrainingRollouts::recorded);
        let data = HeadData { rows: &self.data.rows, rollouts: recorded };
        let frozen = self.drafter.load(self.workspace, first.dtype)?;
        let job = ExportJob {
            recipe: self.recipe,
            workspace: self.workspace,
            console: self.console,
            command: self.drafter.command(),
            data: self.data,
            provenance: &self.provenance,
            training_dir,
            num_epochs: first.optimizer.num_epochs,
            shown: &["KL", "unshifted KL", "AUROC", "ECE"],
            frozen: self.frozen_model(first)?,
        };
        let written = job.run(planned, steps_left, |run| {
            train_heads(frozen, data, heads, self.recipe.seed, run)
        })?;
        let Some(written) = written else { return Err(Interrupted.into()) };
        if !written.interrupted {
            return Ok(written.exports);
        }
        if let Ok([head]) = <[_; 1]>::try_from(written.exports) {
            HeadOutcome::of(head, None).print(self.console)?;
        }
        Err(Interrupted.into())
    }

    /// The rollouts to train on, if labels come from rollouts.
    fn rollouts(&self, settings: &HeadTraining) -> Result<Option<TrainingRollouts>> {
        match settings.labels {
            HeadLabels::Rollouts => TrainingRollouts::read_or_record(
                self.recipe,
                self.drafter.adapter_dir(),
                self.data,
                &self.provenance,
                settings.rollout_length,
                self.workspace,
                self.console,
            )
            .map(Some),
            HeadLabels::Sampled | HeadLabels::Overlap | HeadLabels::Greedy => Ok(None),
        }
    }

    /// The model whose hidden states heads read.
    fn frozen_model(&self, settings: &HeadTraining) -> Result<FrozenModel> {
        let name = match self.drafter {
            HeadDrafter::Draft => "draft".to_owned(),
            HeadDrafter::Adapter { exit_layer, .. } => format!("self-draft-{exit_layer}"),
        };
        let draft = self.provenance.draft.as_deref().unwrap_or_default();
        let is_self_draft = self.drafter.adapter_dir().is_some();
        let target = if is_self_draft { self.workspace.target_hash()? } else { "" };
        Ok(FrozenModel { name, models: format!("{draft} {target} {}", settings.dtype.name()) })
    }

    fn note(&self, text: String) {
        self.console.note(format!("{}: {text}", self.drafter.command()));
    }
}
