//! One of the heads or adapters that are trained side by side, on the same batches in the same
//! steps. A training of one thing has one member.
//!
//! Members share nothing but the batches and the learning rate: each has its weights, optimizer,
//! clipping, scores and best epoch, so that it comes out as if it had been trained alone.

use burn::optim::{GradientsAccumulator, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_train::{TrainOutput, TrainStep};

use crate::error::{TrainError, to_host};
use crate::run::devices::PerDevice;
use crate::run::progress::{EpochScores, MemberProgress};
use crate::run::trainee::Trainee;
use crate::section::Section;

/// A member: all that a step or a validation changes of it.
pub(crate) struct Member<L: Trainee> {
    /// Its directory in the training's; empty if it is the only one.
    pub(crate) name: String,
    /// On the first device, with autodiff.
    pub(crate) model: L,
    /// The same on each of the other devices, as long as it is trained.
    copies: Vec<L>,
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) progress: MemberProgress<L::Scores>,
    /// The weights of the best epoch, on the first device without autodiff.
    pub(crate) best: Option<L::Part>,
    unfinished: UnfinishedStep<L>,
}

/// What of a step is done.
struct UnfinishedStep<L> {
    gradients: GradientsAccumulator<L>,
    /// `[1]` each: its batches' losses.
    losses: Vec<Tensor<1>>,
    /// `[1]`: the norm of its gradients, once all are there. None without a gradient.
    norm: Option<Tensor<1>>,
}

/// A member's numbers of a step.
pub(crate) struct StepNumbers {
    /// The mean of its batches' losses.
    pub(crate) loss: f64,
    /// The norm of its gradients, before they were cut.
    pub(crate) gradient_norm: f64,
}

impl<L: Trainee> Member<L> {
    /// One that has not begun.
    pub(crate) fn new(name: String, model: L, optimizer: ModuleOptimizer) -> Self {
        let (progress, unfinished) = (MemberProgress::default(), UnfinishedStep::default());
        Self { name, model, copies: Vec::new(), optimizer, progress, best: None, unfinished }
    }

    /// The model on the n-th device.
    pub(crate) fn on_device(&self, nth: usize) -> &L {
        if nth == 0 { &self.model } else { &self.copies[nth - 1] }
    }

    /// Adds what batches gave, in their order; with a learning rate, also takes the step that they
    /// end. What they give besides gradients.
    pub(crate) fn add(
        &mut self,
        outputs: Vec<TrainOutput<<L as TrainStep>::Output>>,
        learning_rate: Option<f64>,
        devices: &PerDevice<Device>,
    ) -> Vec<<L as TrainStep>::Output> {
        let mut items = Vec::with_capacity(outputs.len());
        for TrainOutput { grads, item } in outputs {
            let grads = grads.to_device(devices.first(), &self.model);
            self.unfinished.gradients.accumulate(&self.model, grads);
            self.unfinished.losses.push(L::training_loss(&item).to_device(devices.first()));
            items.push(item);
        }
        if let Some(rate) = learning_rate {
            let grads = self.unfinished.gradients.grads();
            let (grads, norm) = self.model.clipping().clip(&self.model, grads);
            self.model = self.model.clone().optimize(&mut self.optimizer, rate.into(), grads);
            self.unfinished.norm = norm;
            self.copy_to(devices);
        }
        items
    }

    /// Begins an epoch's training: what was left of a step is dropped.
    pub(crate) fn begin(&mut self, devices: &PerDevice<Device>) {
        self.unfinished = UnfinishedStep::default();
        self.copy_to(devices);
    }

    /// Gives the other devices the model's weights.
    fn copy_to(&mut self, devices: &PerDevice<Device>) {
        let copies = devices.others().iter().map(|device| self.model.clone().fork(device));
        self.copies = copies.collect();
    }

    /// Keeps the scores of an epoch, and its weights if they are the best so far.
    pub(crate) fn end_epoch(&mut self, epoch: usize, num_steps: usize, validation: L::Scores) {
        let progress = &mut self.progress;
        let training_loss = progress.training_loss();
        progress.epochs.push(EpochScores { epoch, num_steps, training_loss, validation });
        (progress.loss_sum, progress.num_losses) = (0.0, 0);
        let model = &self.model;
        let best = progress.best.map(|place| model.to_minimise(&progress.epochs[place].validation));
        if best.is_none_or(|best| model.to_minimise(&validation) < best) {
            progress.best = Some(progress.epochs.len() - 1);
            self.best = Some(self.model.valid().part());
        }
    }
}

/// The error of a number of a member that is not finite.
pub(crate) fn not_finite<L: Trainee>(
    what: &'static str,
    section: Section,
    member: &str,
    epoch: usize,
    row_ids: Vec<String>,
) -> TrainError {
    let whose = if member.is_empty() { String::new() } else { format!(" of `{member}`") };
    let what = format!("{what}{whose}");
    TrainError::NotFinite { what, epoch, row_ids, section, frozen: L::FROZEN }
}

/// Counts a step that all `members` took, of batches with so many supervised positions and these
/// rows: one wait for the device.
///
/// # Errors
/// [`TrainError::NotFinite`] for the first batch of a member whose loss is not finite, or for the
/// step's batches together if only their gradients are not.
pub(crate) fn count_step<L: Trainee>(
    members: &mut [&mut Member<L>],
    num_supervised: usize,
    epoch: usize,
    row_ids: &[Vec<String>],
) -> Result<Vec<StepNumbers>, TrainError> {
    let tensors = members.iter().flat_map(|member| {
        let step = &member.unfinished;
        step.losses.iter().cloned().chain(step.norm.clone())
    });
    let numbers = to_host(Tensor::cat(tensors.collect(), 0))?;
    let mut numbers = numbers.into_iter().map(f64::from);
    let mut of_members = Vec::with_capacity(members.len());
    for member in members {
        let section = member.model.section();
        let step = std::mem::take(&mut member.unfinished);
        let losses: Vec<f64> = numbers.by_ref().take(step.losses.len()).collect();
        if let Some(batch) = losses.iter().position(|loss| !loss.is_finite()) {
            let row_ids = row_ids[batch].clone();
            return Err(not_finite::<L>("training loss", section, &member.name, epoch, row_ids));
        }
        // Without a gradient there is nothing to move along.
        let gradient_norm = step.norm.and_then(|_| numbers.next()).unwrap_or(0.0);
        if !gradient_norm.is_finite() {
            return Err(not_finite::<L>(
                "gradient",
                section,
                &member.name,
                epoch,
                row_ids.concat(),
            ));
        }
        let loss_sum = losses.iter().sum::<f64>();
        let progress = &mut member.progress;
        progress.num_steps += 1;
        progress.num_supervised += num_supervised;
        progress.num_losses += losses.len();
        progress.loss_sum += loss_sum;
        of_members.push(StepNumbers { loss: loss_sum / losses.len() as f64, gradient_norm });
    }
    Ok(of_members)
}

impl<L> Default for UnfinishedStep<L> {
    fn default() -> Self {
        Self { gradients: GradientsAccumulator::new(), losses: Vec::new(), norm: None }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use draftsmith_model::AcceptanceHeadConfig;

    use super::*;
    use crate::HeadTraining;
    use crate::head::learner::HeadLearner;

    #[test]
    fn a_step_whose_gradients_alone_are_not_finite_names_its_batches() {
        let training = HeadTraining::default();
        let (device, optimizer) = (Device::flex(), training.optimizer);
        let learner = HeadLearner {
            head: AcceptanceHeadConfig::new(4, 1, true).init(&device.clone().autodiff()),
            rejection_weight: training.rejection_weight,
            clipping: optimizer.clipping,
            section: Section::Head,
        };
        let mut member = Member::new("layer-1".to_owned(), learner, optimizer.adam_w());
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
