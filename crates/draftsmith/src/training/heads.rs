//! Acceptance heads of a drafter, a draft model or an adapter: those that share a mixing ratio are
//! trained side by side, and what is there is not trained again.

use anyhow::Result;
use draftsmith_data::{DataSet, Provenance};
use draftsmith_train::{HeadData, HeadLabels, HeadTraining, TrainingRun, train_heads};
use serde_json::json;

pub(crate) use super::drafter::HeadDrafter;
use super::export_job::{ExportJob, FrozenModel, KEPT, Planned};
use super::head_outcome::{ExportedHead, HeadOutcome};
use super::resumable::StepsLeft;
use crate::built_data::fingerprint;
use crate::console::{Console, Interrupted};
use crate::recipe::Recipe;
use crate::rollouts::{TrainingRecorder, TrainingRollouts};
use crate::workspace::Workspace;

/// What training heads of a drafter needs.
pub(crate) struct HeadTrainer<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) workspace: &'a Workspace,
    pub(crate) drafter: HeadDrafter<'a>,
    pub(crate) data: &'a DataSet,
    /// Of the data, with the hash of what drafted the labels.
    pub(crate) provenance: Provenance,
    pub(crate) console: &'a Console,
}

impl HeadTrainer<'_> {
    /// The heads of one pass over the data, which share a mixing ratio: those that are missing are
    /// trained side by side.
    ///
    /// # Errors
    /// If labels cannot be had, training fails, or it was interrupted.
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
            ([Some(only)], _) => self.note(format!("`{}` is there, {KEPT}", only.dir.display())),
            (_, 0) => {}
            _ => self.note(format!("{num_kept} heads of the sweep are there, {KEPT}")),
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
        // Heads of a sweep and alone have the same fingerprint: they have the same weights. It names
        // the settings, the seed, the data's rows and everything that they depend on.
        let settings = json!({ "head": settings, "seed": self.recipe.seed });
        Ok(Planned { dir, fingerprint: fingerprint(settings, self.data, &self.provenance)? })
    }

    /// Trains heads side by side.
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
                "{} heads in one pass, with a mixing ratio of {}; what is shown of its epochs is \
                 of the first that is still trained, now `{}`",
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
            let run = TrainingRun { more_devices: self.workspace.devices()[1..].to_vec(), ..run };
            train_heads(frozen, data, heads, self.recipe.seed, run)
        })?;
        let Some(written) = written else { return Err(Interrupted.into()) };
        if !written.interrupted {
            return Ok(written.exports);
        }
        if let Ok([head]) = <[_; 1]>::try_from(written.exports) {
            HeadOutcome::of(head, None).tell(self.console)?;
        }
        Err(Interrupted.into())
    }

    /// The rollouts that heads are trained on, where their labels are of those.
    fn rollouts(&self, settings: &HeadTraining) -> Result<Option<TrainingRollouts>> {
        match settings.labels {
            HeadLabels::Rollouts => TrainingRecorder {
                recipe: self.recipe,
                adapter_dir: self.drafter.adapter_dir(),
                data: self.data,
                provenance: &self.provenance,
                max_length: settings.rollout_length,
                workspace: self.workspace,
                console: self.console,
            }
            .read_or_record()
            .map(Some),
            HeadLabels::Sampled | HeadLabels::Overlap | HeadLabels::Greedy => Ok(None),
        }
    }

    /// The models whose hidden states heads read.
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
