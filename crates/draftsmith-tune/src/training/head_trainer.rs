//! Training of acceptance heads for one drafter. Heads with the same mixing ratio are trained
//! together, and finished heads are kept.

use std::path::Path;

use anyhow::{Context, Result};
use draftsmith_data::Provenance;
use draftsmith_model::{AcceptanceHeadConfig, DrafterModel, WeightDtype};
use draftsmith_report::LogLosses;
use draftsmith_theory::DrafterId;
use draftsmith_train::{HeadData, HeadLabels, HeadTraining, StatesSource, train_heads};
use serde_json::json;

use super::TrainingStage;
use super::export_job::{ExportJob, Exported, KEPT, Planned};
use super::outcomes::HeadOutcome;
use crate::over_online::trained_log_losses;
use crate::rollouts::{TrainingRecorder, TrainingRollouts};
use crate::served_states::StatesServer;
use draftsmith_recipe::built_data::fingerprint;
use draftsmith_recipe::{DrafterRecipe, HeadExport, Interrupted, head_within};

/// A trainer of acceptance heads for one drafter.
pub(super) struct HeadTrainer<'a> {
    pub(super) stage: TrainingStage<'a>,
    /// The name of the drafter whose heads are trained.
    pub(super) id: DrafterId,
    /// Whether the recipe sweeps the head's settings.
    pub(super) is_swept: bool,
    /// The data's provenance. Its `draft` is the hash of the drafter that the labels are for.
    pub(super) provenance: Provenance,
}

impl HeadTrainer<'_> {
    /// Returns the heads with these settings, and trains the missing ones together first. All
    /// settings must have the same mixing ratio.
    ///
    /// # Errors
    /// If labels cannot be computed, training fails, or it is interrupted.
    pub(super) fn pass(&self, heads: &[HeadTraining]) -> Result<Vec<Exported>> {
        let planned = heads.iter().map(|settings| self.planned(settings));
        let planned = planned.collect::<Result<Vec<_>>>()?;
        let mut found: Vec<Option<Exported>> = planned
            .iter()
            .map(|one| one.found().filter(|one| AcceptanceHeadConfig::from_dir(&one.dir).is_ok()))
            .collect();
        let num_kept = found.iter().flatten().count();
        match (found.as_slice(), num_kept) {
            ([Some(only)], _) => {
                self.stage.note(&format!("keeping `{}`, {KEPT}", only.dir.display()));
            }
            (_, 0) => {}
            _ => self.stage.note(&format!("keeping {num_kept} heads of the sweep, {KEPT}")),
        }
        let missing = planned.into_iter().zip(heads).zip(&found);
        let missing = missing.filter(|(_, found)| found.is_none()).map(|(missing, _)| missing);
        let (planned, settings): (Vec<Planned>, Vec<HeadTraining>) =
            missing.map(|(planned, settings)| (planned, settings.clone())).unzip();
        let mut trained = self.train(&planned, &settings)?.into_iter();
        for place in found.iter_mut().filter(|place| place.is_none()) {
            *place = trained.next();
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// Compares the predictions of the head in `dir` with vLLM's online estimator; `None` if its
    /// labels do not come from rollouts.
    ///
    /// # Errors
    /// If the head, the drafter or the rollouts cannot be read.
    pub(super) fn over_online(
        &self,
        settings: &HeadTraining,
        dir: &Path,
    ) -> Result<Option<LogLosses>> {
        let Some(rollouts) = self.rollouts(settings)? else { return Ok(None) };
        let drafter = self.frozen(settings.dtype)?;
        let TrainingStage { recipe, workspace, data, .. } = self.stage;
        let head = HeadExport::read(dir, drafter.hidden_size(), workspace)?;
        let own = (&head.head, settings);
        let server = self.states_server(settings.dtype)?;
        let source = server.as_ref().map(|server| server as &dyn StatesSource);
        trained_log_losses((self.id, &drafter), own, (data, &rollouts), source, recipe.seed)
    }

    fn planned(&self, settings: &HeadTraining) -> Result<Planned> {
        let TrainingStage { recipe, data, .. } = self.stage;
        let dir = match self.is_swept {
            true => recipe.sweep_dir(self.id).join(settings.name()),
            false => head_within(&recipe.export_dir(self.id)),
        };
        // The fingerprint covers the settings, the seed, and the data with its provenance. A head
        // trained alone or in a sweep has the same weights, so it has the same fingerprint.
        let settings = json!({ "head": settings, "seed": recipe.seed });
        let fingerprint = fingerprint(settings, data, &self.provenance)?;
        Ok(Planned { id: self.id, dir, fingerprint })
    }

    /// Trains the given heads together.
    fn train(&self, planned: &[Planned], heads: &[HeadTraining]) -> Result<Vec<Exported>> {
        let Some(first) = heads.first() else { return Ok(Vec::new()) };
        let TrainingStage { recipe, workspace, data, .. } = self.stage;
        let mut training_dir = recipe.head_training_dir(self.id);
        if self.is_swept {
            training_dir.push(format!("r{}", first.mixing_ratio));
        }
        if heads.len() > 1 {
            self.stage.note(&format!(
                "training {} heads with mixing ratio {} together; epochs show the first head that is \
                 still being trained, now `{}`",
                heads.len(),
                first.mixing_ratio,
                first.name(),
            ));
        }
        let rollouts = self.rollouts(first)?;
        let recorded = rollouts.as_ref().map(TrainingRollouts::recorded);
        let data = HeadData { rows: &data.rows, rollouts: recorded };
        let frozen = self.frozen(first.dtype)?;
        let draft = self.provenance.draft.as_deref().unwrap_or_default();
        let target = match self.drafter()?.kind.model() {
            None => workspace.models.target_hash()?,
            Some(_) => "",
        };
        let server = self.states_server(first.dtype)?;
        let served_as = workspace.models.served_as.as_deref().filter(|_| server.is_some());
        let served_as = served_as.map_or_else(String::new, |name| format!(" served as {name}"));
        let job = ExportJob {
            stage: self.stage,
            provenance: &self.provenance,
            training_dir,
            shown: &["KL", "unshifted KL", "AUROC", "ECE"],
            feature_name: self.id.to_string(),
            feature_models: format!("{draft} {target} {}{served_as}", first.dtype.name()),
            source: server.as_ref().map(|server| server as &dyn StatesSource),
        };
        let written = job.run(planned, |run| {
            Ok(train_heads(frozen, data, heads, recipe.seed, run)?.into_exports())
        })?;
        if !written.interrupted {
            return Ok(written.exports);
        }
        if let Ok([head]) = <[_; 1]>::try_from(written.exports) {
            self.stage.watch.line(&HeadOutcome::of(head, None)?.text());
        }
        Err(Interrupted.into())
    }

    /// Reads or records the rollouts to train on; `None` if labels do not come from rollouts.
    fn rollouts(&self, settings: &HeadTraining) -> Result<Option<TrainingRollouts>> {
        if settings.labels != HeadLabels::Rollouts {
            return Ok(None);
        }
        let TrainingStage { recipe, workspace, data, watch, .. } = self.stage;
        let (id, provenance, max_length) = (self.id, &self.provenance, settings.rollout_length);
        let recorder =
            TrainingRecorder { recipe, id, data, provenance, max_length, workspace, watch };
        recorder.read_or_record().map(Some)
    }

    /// Opens the servers that give the target's hidden states, if the drafter reads those of layers
    /// that are not here.
    fn states_server(&self, dtype: WeightDtype) -> Result<Option<StatesServer<'_>>> {
        let TrainingStage { recipe, workspace, watch, .. } = self.stage;
        let target = workspace.models.target_config()?;
        if recipe.states_server().is_none() || self.drafter()?.kind.state_layers(target)?.is_empty()
        {
            return Ok(None);
        }
        StatesServer::of_recipe(recipe, workspace, dtype, watch).map(Some)
    }

    fn drafter(&self) -> Result<&DrafterRecipe> {
        self.stage.recipe.drafters.get(self.id).context("the recipe has the drafter")
    }

    /// Loads the frozen model whose hidden states the head reads.
    fn frozen(&self, dtype: WeightDtype) -> Result<DrafterModel> {
        let TrainingStage { recipe, workspace, .. } = self.stage;
        self.drafter()?.kind.frozen(&recipe.loading(self.id, workspace), dtype)
    }
}
