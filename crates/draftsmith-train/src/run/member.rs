//! A member of a training: one head or drafter. Several members can be trained side by side on the
//! same batches.
//!
//! Members are independent. They share only batches and learning rates: each has separate weights,
//! optimizer state, clipping, scores, best epoch and early stopping, and ends with the same bits as
//! if it were trained alone.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::data::TrainingBatch;
use crate::error::{Result, Section, TrainError, to_host};
use crate::run::devices::PerDevice;
use crate::run::optimizer::OptimizerSettings;
use crate::run::progress::{EpochScores, MemberProgress};
use crate::run::update::{Gradient, Updates};

/// A trained model with its settings: its training step, its validation step and its scores.
pub(crate) trait Trainee: Module + Sync {
    /// The inputs and labels that it reads from a batch.
    type Content: Send + Sync + 'static;
    /// The trained module, which is exported.
    type Part: Module + 'static;
    /// The result of a validation step.
    type Output: Send + Sync;
    /// The sums that validation accumulates over batches.
    type Tally: Send;
    /// The scores that are computed from the sums.
    type Scores: std::fmt::Debug + Clone + Send + Sync + Serialize + DeserializeOwned + 'static;

    /// The recipe's section, for messages.
    const SECTION: Section;
    /// The role of the frozen model, for messages.
    const FROZEN: &'static str;
    /// The scores that are shown and logged.
    const SCORES: &'static [Score<Self::Scores>];

    /// Extracts the trained module.
    fn part(self) -> Self::Part;

    /// Computes the loss of a batch, `[1]`, without its autodiff graph. Also returns the gradients
    /// of the loss times the batch's share of the step.
    fn train_step(&self, batch: &TrainingBatch<Self::Content>) -> (Tensor<1>, GradientsParams);

    /// Computes the outputs that [`Self::count`] needs for a batch, without autodiff.
    fn validation_step(&self, batch: &TrainingBatch<Self::Content>) -> Self::Output;

    /// Returns an empty tally.
    fn tally(&self) -> Self::Tally;

    /// Adds the output for a validation batch to the tally, and waits for the device once. Returns
    /// the batch's loss; `None` if a prediction is not finite.
    fn count(output: Self::Output, tally: &mut Self::Tally) -> Result<Option<f64>>;

    fn scores(tally: Self::Tally) -> Self::Scores;

    /// Returns the number that is smallest for the best epoch.
    fn to_minimise(&self, scores: &Self::Scores) -> f64;
}

/// One score of a validation.
#[derive(Debug)]
pub struct Score<S> {
    pub(crate) name: &'static str,
    pub(crate) higher_is_better: bool,
    pub(crate) pick: fn(&S) -> f64,
}

impl<S> Score<S> {
    /// Names a score that is better if it is higher.
    pub(crate) const fn higher(name: &'static str, pick: fn(&S) -> f64) -> Self {
        Self { name, higher_is_better: true, pick }
    }

    /// Names a score that is better if it is lower.
    pub(crate) const fn lower(name: &'static str, pick: fn(&S) -> f64) -> Self {
        Self { name, higher_is_better: false, pick }
    }
}

/// A member with all of its state that a step or validation changes.
pub(crate) struct TrainingMember<L: Trainee> {
    /// The name of the member's directory within the training's directory; empty for a single
    /// member.
    pub(crate) name: String,
    /// The trained model on the first device, with autodiff.
    pub(crate) model: L,
    /// Copies of the model on the other devices; empty before training begins.
    copies: Vec<L>,
    pub(crate) updates: Updates,
    pub(crate) progress: MemberProgress<L::Scores>,
    /// The weights of the best epoch, on the first device without autodiff.
    pub(crate) best: Option<L::Part>,
    unfinished: UnfinishedStep,
}

/// The results of those batches of a step that are already done.
#[derive(Default)]
struct UnfinishedStep {
    gradient: Option<Gradient>,
    /// The loss of each batch, `[1]`.
    losses: Vec<Tensor<1>>,
    /// The norm of the step's gradients before clipping, `[1]`. `None` before the optimizer step,
    /// or if the step has no gradients.
    norm: Option<Tensor<1>>,
}

/// The losses and the gradient norm of an optimizer step.
pub(crate) struct StepNumbers {
    /// The loss of each batch.
    pub(crate) losses: Vec<f64>,
    /// The global norm of the step's gradients before clipping.
    pub(crate) gradient_norm: f64,
}

impl StepNumbers {
    /// Computes the mean loss of the step's batches.
    pub(crate) fn loss(&self) -> f64 {
        self.losses.iter().sum::<f64>() / self.losses.len() as f64
    }
}

impl<L: Trainee> TrainingMember<L> {
    /// Creates a member before its first step.
    pub(crate) fn new(name: String, model: L, settings: &OptimizerSettings) -> Self {
        Self {
            name,
            model,
            copies: Vec::new(),
            updates: Updates::new(settings),
            progress: MemberProgress::default(),
            best: None,
            unfinished: UnfinishedStep::default(),
        }
    }

    /// Returns the model on the n-th device.
    pub(crate) fn on_device(&self, nth: usize) -> &L {
        if nth == 0 { &self.model } else { &self.copies[nth - 1] }
    }

    /// Adds the losses and gradients of batches to the current step, in order. If given a learning
    /// rate, it then takes the optimizer step.
    pub(crate) fn add(
        &mut self,
        batches: Vec<(Tensor<1>, GradientsParams)>,
        learning_rate: Option<f64>,
        devices: &PerDevice<Device>,
    ) {
        for (loss, gradients) in batches {
            let more = Gradient::of(&self.model, gradients, devices.first());
            let step = &mut self.unfinished;
            step.gradient = match (step.gradient.take(), more) {
                (Some(sum), Some(more)) => Some(sum.plus(more)),
                (sum, more) => sum.or(more),
            };
            self.unfinished.losses.push(loss.to_device(devices.first()));
        }
        if let Some(rate) = learning_rate {
            if let Some(gradient) = self.unfinished.gradient.take() {
                let (model, norm) = self.updates.step(rate, self.model.clone(), gradient);
                (self.model, self.unfinished.norm) = (model, Some(norm));
            }
            self.copy_to(devices);
        }
    }

    /// Begins the training half of an epoch. Drops the batches of an unfinished step, and copies
    /// the weights to the other devices.
    pub(crate) fn begin(&mut self, devices: &PerDevice<Device>) {
        self.unfinished = UnfinishedStep::default();
        self.copy_to(devices);
    }

    /// Copies the weights to the other devices.
    fn copy_to(&mut self, devices: &PerDevice<Device>) {
        let copies = devices.others().iter().map(|device| self.model.clone().fork(device));
        self.copies = copies.collect();
    }

    /// Records the scores of an epoch, and keeps the weights if they are the best so far.
    pub(crate) fn end_epoch(&mut self, epoch: usize, num_steps: usize, validation: L::Scores) {
        let progress = &mut self.progress;
        let training_loss = progress.training_loss();
        (progress.loss_sum, progress.num_losses) = (0.0, 0);
        let model = &self.model;
        let best = progress.best.map(|best| model.to_minimise(&progress.epochs[best].validation));
        let is_best = best.is_none_or(|best| model.to_minimise(&validation) < best);
        progress.epochs.push(EpochScores { epoch, num_steps, training_loss, validation });
        if is_best {
            progress.best = Some(progress.epochs.len() - 1);
            self.best = Some(self.model.valid().part());
        }
    }

    /// Builds the error for a number that is not finite.
    pub(crate) fn not_finite(
        &self,
        what: &'static str,
        epoch: usize,
        row_ids: Vec<String>,
    ) -> TrainError {
        let name = &self.name;
        let what = if name.is_empty() { what.to_owned() } else { format!("{what} of `{name}`") };
        let ids = row_ids.iter().map(|id| format!("`{id}`")).collect::<Vec<_>>().join(", ");
        let message = format!(
            "the {what} is not finite in epoch {epoch}, at rows {ids}: the learning rate may be too high \
             (`{}.optimizer.learning_rate`), or the {}'s hidden states are broken there",
            L::SECTION,
            L::FROZEN
        );
        TrainError::NotFinite { message, row_ids }
    }
}

/// Adds a step that all `members` took to their progress, and waits for the device once. The step
/// had `num_supervised` supervised positions, and `row_ids` lists the rows of each batch.
///
/// # Errors
/// [`TrainError::NotFinite`] for a member's first batch whose loss is not finite, or for all batches of
/// the step if only its gradients are not.
pub(crate) fn count_step<L: Trainee>(
    members: &mut [&mut TrainingMember<L>],
    num_supervised: usize,
    epoch: usize,
    row_ids: &[Vec<String>],
) -> Result<Vec<StepNumbers>> {
    let tensors = members.iter().flat_map(|member| {
        let step = &member.unfinished;
        step.losses.iter().cloned().chain(step.norm.clone())
    });
    let numbers = to_host(Tensor::cat(tensors.collect(), 0))?;
    let mut numbers = numbers.into_iter().map(f64::from);
    let mut of_members = Vec::with_capacity(members.len());
    for member in members {
        let step = std::mem::take(&mut member.unfinished);
        let losses: Vec<f64> = numbers.by_ref().take(step.losses.len()).collect();
        if let Some(batch) = losses.iter().position(|loss| !loss.is_finite()) {
            return Err(member.not_finite("training loss", epoch, row_ids[batch].clone()));
        }
        let gradient_norm = step.norm.and_then(|_| numbers.next()).unwrap_or(0.0);
        if !gradient_norm.is_finite() {
            return Err(member.not_finite("gradient", epoch, row_ids.concat()));
        }
        let progress = &mut member.progress;
        progress.num_steps += 1;
        progress.num_supervised += num_supervised;
        progress.num_losses += losses.len();
        progress.loss_sum += losses.iter().sum::<f64>();
        of_members.push(StepNumbers { losses, gradient_norm });
    }
    Ok(of_members)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::AcceptanceHeadConfig;

    use super::*;
    use crate::HeadTraining;
    use crate::head::learner::HeadLearner;

    #[test]
    fn infinite_gradients_name_every_row_of_the_step() {
        let training = HeadTraining::default();
        let (device, optimizer) = (Device::flex(), training.optimizer);
        let learner = HeadLearner {
            head: AcceptanceHeadConfig::new(4, 1, true).init(&device.clone().autodiff()),
            rejection_weight: training.rejection_weight,
        };
        let mut member = TrainingMember::new("layer-1".to_owned(), learner, &optimizer);
        let rows = [vec!["set#1".to_owned()], vec!["set#2".to_owned()]];
        let number = |number: f32| Tensor::<1>::from_floats([number], &device);
        let mut step = |norm: f32| {
            member.unfinished.losses = vec![number(0.5), number(0.25)];
            member.unfinished.norm = Some(number(norm));
            count_step(&mut [&mut member], 7, 2, &rows)
        };
        assert_eq!(step(3.0).unwrap()[0].gradient_norm, 3.0);
        for norm in [f32::NAN, f32::INFINITY] {
            let message = step(norm).map(|_| ()).unwrap_err().to_string();
            let said =
                "the gradient of `layer-1` is not finite in epoch 2, at rows `set#1`, `set#2`";
            assert!(message.starts_with(said), "{message}");
        }
        assert_eq!(member.progress.num_steps, 1);
    }
}
