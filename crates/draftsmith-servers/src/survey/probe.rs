//! Estimates how much an acceptance head could predict, with small heads that are briefly trained
//! on one half of the answers and scored on the other.
//!
//! The share of a constant prediction's KL divergence that they explain is a lower bound: a head
//! that is trained on thousands of prompts explains more.

use anyhow::{Context, Result};
use draftsmith_data::{ResponseRow, source_of};
use draftsmith_model::{HeadForm, HeadInput};
use draftsmith_theory::{HeadMetrics, JudgedPrediction, Recording};
use draftsmith_train::{
    Ending, HeadData, HeadLabels, HeadTraining, OptimizerSettings, TrainError, TrainingRun,
    train_heads,
};

use super::Surveyor;
use draftsmith_recipe::{HeadExport, Interrupted, LoadedDrafters};
use draftsmith_tune::rollouts::TrainingRollouts;

/// Returns the training settings of the probes: the recommended form of a head, a learning rate for
/// few steps, and the best epoch on held-out answers.
fn settings() -> HeadTraining {
    HeadTraining {
        num_layers: 1,
        form: HeadForm::LookAhead,
        inputs: vec![HeadInput::Entropy, HeadInput::TopProb],
        labels: HeadLabels::Rollouts,
        rejection_weight: 1.0,
        optimizer: OptimizerSettings {
            learning_rate: Some(3e-3),
            num_epochs: 12,
            patience: Some(3),
            gradient_accumulation: 1,
            validation_fraction: 0.25,
            ..OptimizerSettings::HEAD
        },
        ..HeadTraining::default()
    }
}

impl Surveyor<'_> {
    /// Trains an acceptance head on the recordings of some answers. Returns the draft model with
    /// the head; `None` if there are too few answers.
    pub(super) fn probe(
        &self,
        some: &[usize],
        recorded: &[(String, Recording)],
    ) -> Result<Option<LoadedDrafters>> {
        let settings = settings();
        let draft = self.workspace.models.draft_in(settings.dtype)?.context("there is a draft")?;
        let rows: Vec<ResponseRow> = some.iter().map(|nth| self.row(*nth)).collect();
        let recordings: Vec<(&str, &Recording)> =
            some.iter().map(|nth| (recorded[*nth].0.as_str(), &recorded[*nth].1)).collect();
        let rollouts = TrainingRollouts::of(&recordings, self.decoding.is_greedy());
        let data = HeadData { rows: &rows, rollouts: Some(rollouts.recorded()) };
        let dir = tempfile::tempdir().context("cannot make a temporary directory")?;
        let watch = self.watch.share();
        let run = TrainingRun {
            should_stop: Box::new(move || watch.is_interrupted()),
            ..TrainingRun::new(dir.path(), "survey")
        };
        let trained = match train_heads(draft, data, &[settings], self.seed, run) {
            Ok(Ending::Finished(mut heads)) => heads.remove(0),
            Ok(Ending::Stopped { .. }) => return Err(Interrupted.into()),
            Err(TrainError::TooFewRows(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // We read the head back from a file, because a module is slower right after training.
        let head_dir = dir.path().join("head");
        trained.model.write_dir(&head_dir, &trained.config)?;
        let head = HeadExport::read(&head_dir, draft.shape().hidden_size, self.workspace)?;
        let models = &self.workspace.models;
        let draft = models.draft_in(models.dtype)?.context("there is a draft")?;
        Ok(Some(LoadedDrafters::of_model(draft, Some(head))))
    }

    /// Converts an answer to a training row, without the target's probabilities.
    fn row(&self, nth: usize) -> ResponseRow {
        let answer = &self.answers[nth];
        ResponseRow {
            id: answer.id.clone(),
            source: source_of(&answer.id).to_owned(),
            prompt_ids: answer.prompt_ids.clone(),
            response_ids: answer.response_ids.clone(),
            response_target_log_prob: vec![f32::NEG_INFINITY; answer.response_ids.len()],
            target_outside_mass: None,
            draft: None,
            finish_reason: answer.finish,
        }
    }
}

/// The KL divergence of a head's predictions and of a constant prediction, by answer.
pub(super) struct Unexplained {
    /// KL(label ‖ prediction) in nats, summed over each answer's candidates: for the head, and for
    /// a constant prediction (the other half's mean label).
    of_answers: Vec<[f64; 2]>,
}

impl Unexplained {
    /// Scores the predictions of `judged` against the mean label of `others`.
    pub(super) fn of(judged: &[Vec<JudgedPrediction>], others: &[Vec<JudgedPrediction>]) -> Self {
        let (mut labels, mut weight) = (0.0, 0.0);
        for judged in others.iter().flatten() {
            labels += judged.weight * judged.label;
            weight += judged.weight;
        }
        let constant = if weight > 0.0 { labels / weight } else { 0.5 };
        let sums = |answer: &Vec<JudgedPrediction>| {
            [kl_sum(answer, &|prob| prob), kl_sum(answer, &|_| constant)]
        };
        Self { of_answers: judged.iter().map(sums).collect() }
    }

    /// Joins the answers of both halves; those of `other` come last.
    pub(super) fn join(mut self, other: Self) -> Self {
        self.of_answers.extend(other.of_answers);
        self
    }

    /// Computes the share of the constant prediction's KL divergence that the head explains over
    /// some answers. Negative if the constant is better.
    pub(super) fn share(&self, some: &[usize]) -> f64 {
        let sum = |of: usize| some.iter().map(|nth| self.of_answers[*nth][of]).sum::<f64>();
        1.0 - sum(0) / sum(1)
    }
}

fn kl_sum(judged: &[JudgedPrediction], predict: &dyn Fn(f64) -> f64) -> f64 {
    let weight: f64 = judged.iter().map(|judged| judged.weight).sum();
    if weight == 0.0 { 0.0 } else { weight * HeadMetrics::of(judged, predict).finish().kl }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(predicted_prob: f64, label: f64) -> JudgedPrediction {
        JudgedPrediction { predicted_prob, label, weight: 1.0 }
    }

    #[test]
    fn a_perfect_head_explains_all_and_the_mean_nothing() {
        let others = vec![vec![judged(0.5, 1.0), judged(0.5, 0.0)]];
        let share = |answers: &[Vec<JudgedPrediction>]| {
            Unexplained::of(answers, &others).share(&(0..answers.len()).collect::<Vec<_>>())
        };
        let perfect = vec![vec![judged(1.0, 1.0)], vec![judged(0.0, 0.0), judged(1.0, 1.0)]];
        assert!((share(&perfect) - 1.0).abs() < 1e-9);
        let constant = vec![vec![judged(0.5, 1.0), judged(0.5, 0.0)], vec![]];
        assert_eq!(share(&constant), 0.0);
        let wrong = vec![vec![judged(0.1, 1.0), judged(0.9, 0.0)]];
        assert!(share(&wrong) < 0.0);
    }
}
