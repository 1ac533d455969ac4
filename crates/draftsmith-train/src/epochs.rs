//! The loop over epochs: train, validate, keep the best weights, checkpoint, stop.
//!
//! burn-train's own loop counts batches to know when a step ends, forgets the labels of a
//! validation batch, keeps no best model in memory and cannot end with an error of ours; this one
//! is a strategy in its place, with the same learner, events, metrics and checkpointers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use burn::optim::GradientsAccumulator;
use burn::tensor::{Device, Tensor};
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingItem, ValidLoader,
};
use draftsmith_theory::HeadScores;
use serde::Serialize;

use crate::batches::TrainingBatch;
use crate::error::{TrainError, to_host};
use crate::metrics::{Score, ScoreSlot};

/// What the loop trains, and how it is scored: the head, or an adapter. burn-train's learner has
/// its steps.
pub(crate) trait Trainee:
    LearnerModel
    + TrainStep<Input = <Self as Trainee>::Batch>
    + InferenceStep<Input = <Self as Trainee>::Batch>
{
    /// What a step is given.
    type Batch: TrainingBatch;
    /// What the caller wants of it in the end.
    type Part: std::fmt::Debug + Send + 'static;
    /// What validation adds up.
    type Tally: Default;
    /// What it makes of that.
    type Scores: std::fmt::Debug + Copy + Send + Sync + 'static;

    /// The recipe's section, for messages.
    const SECTION: &'static str;
    /// The role of the frozen model, for messages.
    const FROZEN: &'static str;
    /// The scores that are metrics.
    const SCORES: &'static [Score<Self::Scores>];

    /// Leaves the rest.
    fn part(self) -> Self::Part;

    /// `[1]`, without a graph.
    fn training_loss(output: &<Self as TrainStep>::Output) -> Tensor<1>;

    /// Adds a validation batch, with one wait for the device; false if a prediction is not finite.
    fn count(
        output: &<Self as InferenceStep>::Output,
        tally: &mut Self::Tally,
    ) -> Result<bool, TrainError>;

    /// The scores of what was added.
    fn scores(tally: Self::Tally) -> Self::Scores;

    /// The number that the best epoch has the lowest of.
    fn to_minimise(scores: &Self::Scores) -> f64;
}

/// How one epoch went.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EpochScores<S = HeadScores> {
    /// Its number, counted from 1.
    pub epoch: usize,
    /// Optimiser steps taken by its end, since training began.
    pub num_steps: usize,
    /// Mean of its batches' training losses, each taken before the step that it leads to; None if
    /// it was interrupted before its first step.
    pub training_loss: Option<f64>,
    /// The scores on the validation rows at its end.
    pub validation: S,
}

/// What a run leaves behind.
#[derive(Debug)]
pub(crate) struct History<L: Trainee> {
    /// The one with the best scores so far, on the device without autodiff, and its place in
    /// `epochs`.
    pub(crate) best: Option<(L::Part, usize)>,
    pub(crate) epochs: Vec<EpochScores<L::Scores>>,
    /// Positions trained on.
    pub(crate) num_supervised: usize,
    /// Optimiser steps taken.
    pub(crate) num_steps: usize,
    /// Whether it stopped before the end of its last epoch.
    pub(crate) interrupted: bool,
}

/// How a run ended, once it has.
pub(crate) type Outcome<L> = Arc<Mutex<Option<Result<History<L>, TrainError>>>>;

/// The strategy: what the loop needs besides burn-train's components, and where it leaves its
/// result.
pub(crate) struct EpochLoop<L: Trainee> {
    /// Where training runs; with or without autodiff.
    pub(crate) device: Device,
    /// Tells the training loader which epoch to prepare.
    pub(crate) epoch: Arc<AtomicU64>,
    pub(crate) slot: ScoreSlot<L::Scores>,
    pub(crate) outcome: Outcome<L>,
}

impl<L: Trainee> SupervisedLearningStrategy<L> for EpochLoop<L> {
    fn fit(
        &self,
        components: TrainingComponents<L>,
        mut learner: Learner<L>,
        training: TrainLoader<L>,
        validation: ValidLoader<L>,
        starting_epoch: usize,
    ) -> (L, SupervisedTrainingEventProcessor<L>) {
        learner.fork(&self.device.clone().autodiff());
        let mut run = Run {
            learner,
            events: components.event_processor,
            interrupter: components.interrupter,
            training,
            validation,
            slot: &self.slot,
            history: History {
                best: None,
                epochs: Vec::new(),
                num_supervised: 0,
                num_steps: 0,
                interrupted: false,
            },
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

struct Run<'a, L: Trainee> {
    learner: Learner<L>,
    events: SupervisedTrainingEventProcessor<L>,
    interrupter: Interrupter,
    training: TrainLoader<L>,
    validation: ValidLoader<L>,
    slot: &'a ScoreSlot<L::Scores>,
    history: History<L>,
}

/// A batch whose step is not finished.
struct Pending {
    loss: Tensor<1>,
    num_supervised: usize,
    row_ids: Vec<String>,
}

impl<L: Trainee> Run<'_, L> {
    /// Runs one epoch; false if the run is to end here.
    ///
    /// A run that is stopped in its first epoch validates the weights it has, so that there is
    /// something to return; later, what is unfinished is dropped.
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
        let score_of = |place: usize| L::to_minimise(&self.history.epochs[place].validation);
        let last = self.history.epochs.len() - 1;
        let best = self.history.best.as_ref().map(|(_, place)| score_of(*place));
        if best.is_none_or(|best| score_of(last) < best) {
            self.history.best = Some((self.learner.model().valid().part(), last));
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
            let (ends_step, num_supervised) = (batch.ends_step(), batch.num_supervised());
            let row_ids = batch.row_ids().to_vec();
            let output = self.learner.train_step(batch);
            accumulator.accumulate(&self.learner.model(), output.grads);
            let loss = L::training_loss(&output.item);
            pending.push(Pending { loss, num_supervised, row_ids });
            if ends_step {
                self.learner.lr_step();
                self.learner.optimizer_step(accumulator.grads());
                self.history.num_steps += 1;
                self.history.num_supervised +=
                    pending.iter().map(|batch| batch.num_supervised).sum::<usize>();
                let losses = step_losses::<L>(&mut pending, epoch)?;
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
    /// there are earlier ones to fall back on.
    fn validate(&mut self, epoch: usize) -> Result<Option<L::Scores>, TrainError> {
        let validation = self.validation.clone();
        let total_items = validation.num_items();
        self.slot.set(None);
        self.tell_validation(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let model = self.learner.model().valid();
        let mut batches = validation.iter();
        let mut tally = L::Tally::default();
        let (mut iteration, mut is_whole) = (0, true);
        while let Some(batch) = batches.next() {
            let batch = batch.map_err(|error| TrainError::Learner(Arc::new(error.into())))?;
            let row_ids = batch.row_ids().to_vec();
            let output = InferenceStep::step(&model, batch);
            // The batch's one wait for the device.
            if !L::count(&output, &mut tally)? {
                return Err(not_finite::<L>("prediction", epoch, row_ids));
            }
            iteration += 1;
            let item = TrainingItem::new(output, batches.progress(), Some(iteration), None);
            self.tell_validation(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() && self.history.best.is_some() {
                is_whole = batches.progress().is_completed();
                break;
            }
        }
        let scores = is_whole.then(|| L::scores(tally));
        self.slot.set(scores);
        self.tell_validation(LearnerEvent::EndSplit(epoch));
        Ok(scores)
    }

    fn tell_training(&mut self, event: LearnerEvent<<L as TrainStep>::Output>) {
        self.interrupter.fail_on_error(self.events.process_train(event));
    }

    fn tell_validation(&mut self, event: LearnerEvent<<L as InferenceStep>::Output>) {
        self.interrupter.fail_on_error(self.events.process_valid(event));
    }

    /// The error that a metric or checkpoint thread stopped the run with, if one did.
    fn check_learner(&self) -> Result<(), TrainError> {
        self.interrupter.error().map_or(Ok(()), |error| Err(TrainError::Learner(error)))
    }
}

/// The losses of a finished step's batches: the step's one wait for the device.
fn step_losses<L: Trainee>(
    pending: &mut Vec<Pending>,
    epoch: usize,
) -> Result<Vec<f64>, TrainError> {
    let (losses, row_ids): (Vec<_>, Vec<_>) =
        pending.drain(..).map(|batch| (batch.loss, batch.row_ids)).unzip();
    let losses = to_host(Tensor::cat(losses, 0))?;
    match losses.iter().position(|loss| !loss.is_finite()) {
        Some(nth) => Err(not_finite::<L>("training loss", epoch, row_ids[nth].clone())),
        None => Ok(losses.into_iter().map(f64::from).collect()),
    }
}

fn not_finite<L: Trainee>(what: &'static str, epoch: usize, row_ids: Vec<String>) -> TrainError {
    TrainError::NotFinite { what, epoch, row_ids, section: L::SECTION, frozen: L::FROZEN }
}
