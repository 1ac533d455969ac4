//! The loop over epochs: train, validate, keep the best head, checkpoint, stop.
//!
//! burn-train's own loop counts batches to know when a step ends, forgets the labels of a
//! validation batch, keeps no best model in memory and cannot end with an error of ours; this one
//! is a strategy in its place, with the same learner, events, metrics and checkpointers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::optim::GradientsAccumulator;
use burn::tensor::{Device, Tensor};
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents,
    TrainingItem, ValidLoader,
};
use draftsmith_model::AcceptanceHead;
use draftsmith_theory::{HeadMetrics, HeadScores};
use serde::Serialize;

use crate::error::{TrainError, to_host};
use crate::learner::{HeadLearner, HeadOutput};
use crate::metrics::ScoreSlot;

/// How one epoch went.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EpochScores {
    /// Its number, counted from 1.
    pub epoch: usize,
    /// Optimiser steps taken by its end, since training began.
    pub num_steps: usize,
    /// Mean of its batches' training losses, each taken before the step that it leads to; None if
    /// it was interrupted before its first step.
    pub training_loss: Option<f64>,
    /// The head's scores on the validation rows at its end.
    pub validation: HeadScores,
}

/// What a run leaves behind.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The head with the lowest validation KL so far, on the device without autodiff, and its
    /// place in `epochs`.
    pub(crate) best: Option<(AcceptanceHead, usize)>,
    pub(crate) epochs: Vec<EpochScores>,
    /// Labels trained on.
    pub(crate) num_labels: usize,
    /// Optimiser steps taken.
    pub(crate) num_steps: usize,
    /// Whether it stopped before the end of its last epoch.
    pub(crate) interrupted: bool,
}

/// The strategy: what the loop needs besides burn-train's components, and where it leaves its
/// result.
pub(crate) struct EpochLoop {
    /// Where the head is trained; with or without autodiff.
    pub(crate) device: Device,
    /// Tells the training loader which epoch to prepare.
    pub(crate) epoch: Arc<AtomicU64>,
    pub(crate) slot: ScoreSlot,
    pub(crate) outcome: Arc<Mutex<Option<Result<History, TrainError>>>>,
}

impl SupervisedLearningStrategy<HeadLearner> for EpochLoop {
    fn fit(
        &self,
        components: TrainingComponents<HeadLearner>,
        mut learner: Learner<HeadLearner>,
        training: TrainLoader<HeadLearner>,
        validation: ValidLoader<HeadLearner>,
        starting_epoch: usize,
    ) -> (HeadLearner, SupervisedTrainingEventProcessor<HeadLearner>) {
        learner.fork(&self.device.clone().autodiff());
        let mut run = Run {
            learner,
            events: components.event_processor,
            interrupter: components.interrupter,
            training,
            validation,
            slot: &self.slot,
            history: History::default(),
        };
        let mut checkpointer = components.checkpointer;
        let mut result = Ok(());
        for epoch in starting_epoch..=components.num_epochs {
            self.epoch.store(epoch as u64, Ordering::SeqCst);
            match run.epoch(epoch) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            if let Some(checkpointer) = &mut checkpointer {
                checkpointer.checkpoint(&run.learner, epoch, &components.event_store);
            }
        }
        let outcome = result.map(|()| run.history);
        *self.outcome.lock().expect("nothing panics while it holds the outcome") = Some(outcome);
        (run.learner.model(), run.events)
    }
}

struct Run<'a> {
    learner: Learner<HeadLearner>,
    events: SupervisedTrainingEventProcessor<HeadLearner>,
    interrupter: Interrupter,
    training: TrainLoader<HeadLearner>,
    validation: ValidLoader<HeadLearner>,
    slot: &'a ScoreSlot,
    history: History,
}

/// A batch whose step is not finished.
struct Pending {
    loss: Tensor<1>,
    num_labels: usize,
    row_ids: Vec<String>,
}

impl Run<'_> {
    /// Runs one epoch; false if the run is to end here.
    ///
    /// A run that is stopped in its first epoch validates the weights it has, so that there is a
    /// head to return; later, what is unfinished is dropped.
    fn epoch(&mut self, epoch: usize) -> Result<bool, TrainError> {
        if self.interrupter.should_stop() && self.history.best.is_some() {
            self.history.interrupted = true;
            return Ok(false);
        }
        let (training_loss, is_whole) = self.train(epoch)?;
        self.check_learner()?;
        if !is_whole {
            self.history.interrupted = true;
            if self.history.best.is_some() {
                return Ok(false);
            }
        }
        let Some(validation) = self.validate(epoch)? else {
            self.history.interrupted = true;
            return Ok(false);
        };
        let num_steps = self.history.num_steps;
        self.history.epochs.push(EpochScores { epoch, num_steps, training_loss, validation });
        let best =
            self.history.best.as_ref().map(|(_, place)| self.history.epochs[*place].validation.kl);
        if best.is_none_or(|best| validation.kl < best) {
            let head = self.learner.model().valid().head;
            self.history.best = Some((head, self.history.epochs.len() - 1));
        }
        self.tell_training(LearnerEvent::EndEpoch(epoch));
        self.interrupter.fail_on_error(self.events.flush());
        self.check_learner()?;
        Ok(is_whole)
    }

    /// Trains on the epoch's batches: the mean loss, and whether all of them were seen. The
    /// gradients of a step that an interruption cuts short are dropped.
    fn train(&mut self, epoch: usize) -> Result<(Option<f64>, bool), TrainError> {
        let training = self.training.clone();
        let total_items = training.num_items();
        self.tell_training(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let mut batches = training.iter();
        let mut accumulator = GradientsAccumulator::new();
        let mut pending: Vec<Pending> = Vec::new();
        let (mut loss_sum, mut num_losses, mut iteration) = (0.0, 0_usize, 0);
        let mut is_whole = true;
        loop {
            if self.interrupter.should_stop() {
                is_whole = batches.progress().is_completed();
                break;
            }
            let Some(batch) = batches.next() else { break };
            let batch = batch.map_err(|error| TrainError::Learner(Arc::new(error.into())))?;
            let (ends_step, num_labels) = (batch.ends_step, batch.labels.dims()[0]);
            let row_ids = batch.row_ids.clone();
            let output = self.learner.train_step(batch);
            accumulator.accumulate(&self.learner.model(), output.grads);
            pending.push(Pending { loss: output.item.loss.clone(), num_labels, row_ids });
            if ends_step {
                self.learner.lr_step();
                self.learner.optimizer_step(accumulator.grads());
                self.history.num_steps += 1;
                self.history.num_labels += pending.iter().map(|b| b.num_labels).sum::<usize>();
                let losses = step_losses(&mut pending, epoch)?;
                loss_sum += losses.iter().sum::<f64>();
                num_losses += losses.len();
            }
            iteration += 1;
            let progress = batches.progress();
            let rate = Some(self.learner.lr_current());
            let item = TrainingItem::new(output.item, progress, Some(iteration), rate);
            self.tell_training(LearnerEvent::ProcessedItem(item));
        }
        self.tell_training(LearnerEvent::EndSplit(epoch));
        Ok(((num_losses > 0).then(|| loss_sum / num_losses as f64), is_whole))
    }

    /// Scores the present weights on the validation rows; `None` if that was interrupted while
    /// there is an earlier head to fall back on.
    fn validate(&mut self, epoch: usize) -> Result<Option<HeadScores>, TrainError> {
        let validation = self.validation.clone();
        let total_items = validation.num_items();
        self.slot.set(None);
        self.tell_validation(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let model = self.learner.model().valid();
        let mut batches = validation.iter();
        let mut metrics = HeadMetrics::default();
        let (mut iteration, mut is_whole) = (0, true);
        while let Some(batch) = batches.next() {
            let batch = batch.map_err(|error| TrainError::Learner(Arc::new(error.into())))?;
            let (labels, row_ids) = (batch.labels.clone(), batch.row_ids.clone());
            let output = InferenceStep::step(&model, batch);
            // The batch's one wait for the device.
            let logits = to_host(output.logit.clone())?;
            if !logits.iter().all(|logit| logit.is_finite()) {
                return Err(TrainError::NotFinite { what: "prediction", epoch, row_ids });
            }
            for (logit, label) in logits.into_iter().zip(to_host(labels)?) {
                let predicted_prob = 1.0 / (1.0 + (-f64::from(logit)).exp());
                metrics.update(predicted_prob, f64::from(label));
            }
            iteration += 1;
            let item = TrainingItem::new(output, batches.progress(), Some(iteration), None);
            self.tell_validation(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() && self.history.best.is_some() {
                is_whole = batches.progress().is_completed();
                break;
            }
        }
        let scores = is_whole.then(|| metrics.finish());
        self.slot.set(scores);
        self.tell_validation(LearnerEvent::EndSplit(epoch));
        Ok(scores)
    }

    fn tell_training(&mut self, event: LearnerEvent<HeadOutput>) {
        self.interrupter.fail_on_error(self.events.process_train(event));
    }

    fn tell_validation(&mut self, event: LearnerEvent<HeadOutput>) {
        self.interrupter.fail_on_error(self.events.process_valid(event));
    }

    /// The error that a metric or checkpoint thread stopped the run with, if one did.
    fn check_learner(&self) -> Result<(), TrainError> {
        self.interrupter.error().map_or(Ok(()), |error| Err(TrainError::Learner(error)))
    }
}

/// The losses of a finished step's batches: the step's one wait for the device.
fn step_losses(pending: &mut Vec<Pending>, epoch: usize) -> Result<Vec<f64>, TrainError> {
    let (losses, row_ids): (Vec<_>, Vec<_>) =
        pending.drain(..).map(|batch| (batch.loss, batch.row_ids)).unzip();
    let losses = to_host(Tensor::cat(losses, 0))?;
    match losses.iter().position(|loss| !loss.is_finite()) {
        Some(nth) => {
            let row_ids = row_ids[nth].clone();
            Err(TrainError::NotFinite { what: "training loss", epoch, row_ids })
        }
        None => Ok(losses.into_iter().map(f64::from).collect()),
    }
}
