//! The loop over epochs: train, validate, keep the best weights, checkpoint, stop.
//!
//! burn-train's own loop counts batches to know when a step ends, forgets the labels of a
//! validation batch, keeps no best model in memory, cannot end with an error of ours and saves at
//! the ends of epochs only; this one is a strategy in its place, with the same events and metrics.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::lr_scheduler::LrScheduler;
use burn::module::Module;
use burn::optim::GradientsAccumulator;
use burn::tensor::Tensor;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingItem, ValidLoader,
};
use draftsmith_theory::HeadScores;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::batches::{Start, TrainingBatch};
use crate::checkpoint::{self, Standing};
use crate::clipping::Clipping;
use crate::error::{TrainError, to_host};
use crate::metrics::{Score, ScoreSlot};
use crate::step_log::{StepLog, StepMetrics};
use crate::trainer::Trainer;

/// The share of the time that saving states may take: none is saved before so many times what the
/// last one took has gone by.
const TIMES_A_SAVE: u32 = 50;

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
    type Part: Module + 'static;
    /// What validation adds up.
    type Tally: Default;
    /// What it makes of that.
    type Scores: std::fmt::Debug + Copy + Send + Sync + Serialize + DeserializeOwned + 'static;

    /// The recipe's section, for messages.
    const SECTION: &'static str;
    /// The role of the frozen model, for messages.
    const FROZEN: &'static str;
    /// The scores that are metrics.
    const SCORES: &'static [Score<Self::Scores>];

    /// Leaves the rest.
    fn part(self) -> Self::Part;

    /// How a step's gradients are cut.
    fn clipping(&self) -> Clipping;

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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpochScores<S = HeadScores> {
    /// Its number, counted from 1.
    pub epoch: usize,
    /// Optimiser steps taken by its end, since training began.
    pub num_steps: usize,
    /// Mean of its batches' training losses, each taken before the step that it leads to.
    pub training_loss: f64,
    /// The scores on the validation rows at its end.
    pub validation: S,
}

/// What a run leaves behind.
#[derive(Debug)]
pub(crate) struct History<L: Trainee> {
    pub(crate) standing: Standing<L::Scores>,
    /// The weights with the best scores so far, on the device without autodiff.
    pub(crate) best: Option<L::Part>,
    /// Whether it stopped before the end of its last epoch.
    pub(crate) interrupted: bool,
}

/// How a run ended, once it has.
pub(crate) type Outcome<L> = Arc<Mutex<Option<Result<History<L>, TrainError>>>>;

/// The strategy: what the loop needs besides burn-train's components, and where it leaves its
/// result.
pub(crate) struct EpochLoop<L: Trainee> {
    /// Taken once, when the loop begins.
    pub(crate) begun: Mutex<Option<(Trainer<L>, StepLog)>>,
    /// Tells the training loader which batches to prepare.
    pub(crate) start: Start,
    pub(crate) slot: ScoreSlot<L::Scores>,
    pub(crate) loss_slot: ScoreSlot<f64>,
    pub(crate) saving: Saving,
    pub(crate) max_steps: Option<usize>,
    pub(crate) outcome: Outcome<L>,
}

/// Where and how often states are saved.
#[derive(Debug, Clone)]
pub(crate) struct Saving {
    pub(crate) dir: PathBuf,
    pub(crate) fingerprint: String,
    pub(crate) interval: Duration,
}

impl<L: Trainee> SupervisedLearningStrategy<L> for EpochLoop<L> {
    /// The learner only satisfies burn-train: its model is the trainer's, its optimiser unused.
    fn fit(
        &self,
        components: TrainingComponents<L>,
        _learner: Learner<L>,
        training: TrainLoader<L>,
        validation: ValidLoader<L>,
        _starting_epoch: usize,
    ) -> (L, SupervisedTrainingEventProcessor<L>) {
        let begun = self.begun.lock().expect("nothing panics while it holds the trainer").take();
        let (trainer, log) = begun.expect("a loop runs once");
        let mut run = Run {
            steps_before: trainer.standing.num_steps,
            seconds_before: trainer.standing.seconds,
            trainer,
            events: components.event_processor,
            interrupter: components.interrupter,
            training,
            validation,
            slot: &self.slot,
            loss_slot: &self.loss_slot,
            saving: &self.saving,
            log,
            max_steps: self.max_steps,
            begun: Instant::now(),
            saved: Instant::now(),
            save_took: Duration::ZERO,
        };
        let finished = run.epochs(components.num_epochs, &self.start);
        let Run { trainer: Trainer { model, standing, best, .. }, events, .. } = run;
        let outcome = finished.map(|finished| History { standing, best, interrupted: !finished });
        *self.outcome.lock().expect("nothing panics while it holds the outcome") = Some(outcome);
        (model, events)
    }
}

struct Run<'a, L: Trainee> {
    trainer: Trainer<L>,
    events: SupervisedTrainingEventProcessor<L>,
    interrupter: Interrupter,
    training: TrainLoader<L>,
    validation: ValidLoader<L>,
    slot: &'a ScoreSlot<L::Scores>,
    loss_slot: &'a ScoreSlot<f64>,
    saving: &'a Saving,
    log: StepLog,
    max_steps: Option<usize>,
    steps_before: usize,
    seconds_before: f64,
    begun: Instant,
    saved: Instant,
    save_took: Duration,
}

/// A batch whose step is not finished.
struct Pending {
    loss: Tensor<1>,
    num_supervised: usize,
    row_ids: Vec<String>,
}

impl<L: Trainee> Run<'_, L> {
    /// Runs the epochs that are left, and leaves a state; false if it was stopped before the end.
    fn epochs(&mut self, num_epochs: usize, start: &Start) -> Result<bool, TrainError> {
        while self.trainer.standing.epoch <= num_epochs {
            start.set(self.trainer.standing.epoch as u64, self.trainer.standing.epoch_steps);
            let is_whole = self.epoch()?;
            self.save()?;
            if !is_whole {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs what is left of an epoch; false if the run is to end here.
    fn epoch(&mut self) -> Result<bool, TrainError> {
        let epoch = self.trainer.standing.epoch;
        let is_whole = self.train(epoch)?;
        self.check_learner()?;
        if !is_whole {
            return Ok(false);
        }
        let Some(validation) = self.validate(epoch)? else {
            return self.check_learner().map(|()| false);
        };
        let scores: Vec<(&str, f64)> =
            L::SCORES.iter().map(|score| (score.name, (score.pick)(&validation))).collect();
        self.log.push_validation(self.trainer.standing.num_steps, &scores)?;
        let standing = &mut self.trainer.standing;
        standing.epochs.push(EpochScores {
            epoch,
            num_steps: standing.num_steps,
            training_loss: standing.training_loss(),
            validation,
        });
        let best = standing.best.map(|place| L::to_minimise(&standing.epochs[place].validation));
        if best.is_none_or(|best| L::to_minimise(&validation) < best) {
            standing.best = Some(standing.epochs.len() - 1);
            self.trainer.best = Some(self.trainer.model.valid().part());
        }
        standing.epoch += 1;
        standing.epoch_steps = 0;
        (standing.loss_sum, standing.num_losses) = (0.0, 0);
        self.tell_training(LearnerEvent::EndEpoch(epoch));
        self.interrupter.fail_on_error(self.events.flush());
        self.check_learner()?;
        Ok(true)
    }

    /// Trains on the epoch's batches; false if not all of them were seen. The gradients of a step
    /// that an interruption cuts short are dropped: a resumed run begins that step anew.
    fn train(&mut self, epoch: usize) -> Result<bool, TrainError> {
        let training = self.training.clone();
        let total_items = training.num_items();
        self.tell_training(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let mut batches = training.iter();
        let mut accumulator = GradientsAccumulator::new();
        let mut pending: Vec<Pending> = Vec::new();
        let mut iteration = 0;
        let mut rate = 0.0;
        let mut is_whole = true;
        loop {
            if self.interrupter.should_stop() || self.is_out_of_steps() {
                is_whole = batches.progress().is_completed();
                break;
            }
            let Some(batch) = batches.next() else { break };
            let batch = batch.map_err(|error| TrainError::Learner(Arc::new(error.into())))?;
            let (ends_step, num_supervised) = (batch.ends_step(), batch.num_supervised());
            let row_ids = batch.row_ids().to_vec();
            let trainer = &mut self.trainer;
            let output = TrainStep::step(&trainer.model, batch);
            accumulator.accumulate(&trainer.model, output.grads);
            let loss = L::training_loss(&output.item);
            pending.push(Pending { loss, num_supervised, row_ids });
            if ends_step {
                rate = trainer.schedule.step();
                let clipping = trainer.model.clipping();
                let (grads, norm) = clipping.clip(&trainer.model, accumulator.grads());
                trainer.model =
                    trainer.model.clone().optimize(&mut trainer.optimizer, rate.into(), grads);
                let num_supervised =
                    pending.iter().map(|batch| batch.num_supervised).sum::<usize>();
                let (losses, gradient_norm) = step_losses::<L>(&mut pending, norm, epoch)?;
                let standing = &mut trainer.standing;
                standing.num_steps += 1;
                standing.epoch_steps += 1;
                standing.num_supervised += num_supervised;
                standing.num_losses += losses.len();
                let loss_sum = losses.iter().sum::<f64>();
                standing.loss_sum += loss_sum;
                self.log.push(&StepMetrics {
                    step: standing.num_steps,
                    epoch,
                    loss: loss_sum / losses.len() as f64,
                    learning_rate: rate,
                    gradient_norm,
                })?;
                if self.saved.elapsed() > self.saving.interval.max(TIMES_A_SAVE * self.save_took) {
                    self.save()?;
                }
            }
            iteration += 1;
            let progress = batches.progress();
            let item = TrainingItem::new(output.item, progress, Some(iteration), Some(rate.into()));
            self.tell_training(LearnerEvent::ProcessedItem(item));
        }
        self.tell_training(LearnerEvent::EndSplit(epoch));
        Ok(is_whole)
    }

    /// Whether this run has taken the steps that it may.
    fn is_out_of_steps(&self) -> bool {
        let num_taken = self.trainer.standing.num_steps - self.steps_before;
        self.max_steps.is_some_and(|max_steps| num_taken >= max_steps)
    }

    /// Saves the present state, unless something failed.
    fn save(&mut self) -> Result<(), TrainError> {
        self.check_learner()?;
        let begun = Instant::now();
        self.trainer.standing.seconds = self.seconds_before + self.begun.elapsed().as_secs_f64();
        let Saving { dir, fingerprint, .. } = self.saving;
        let state = self.trainer.state().map_err(|e| TrainError::Device(e.to_string()))?;
        self.log.sync()?;
        checkpoint::save(dir, fingerprint, state)?;
        self.saved = Instant::now();
        self.save_took = begun.elapsed();
        Ok(())
    }

    /// Scores the present weights on the validation rows; `None` if that was interrupted.
    fn validate(&mut self, epoch: usize) -> Result<Option<L::Scores>, TrainError> {
        let validation = self.validation.clone();
        let total_items = validation.num_items();
        self.slot.set(None);
        self.tell_validation(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let model = self.trainer.model.valid();
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
            if self.interrupter.should_stop() {
                is_whole = batches.progress().is_completed();
                break;
            }
        }
        let scores = is_whole.then(|| L::scores(tally));
        self.slot.set(scores);
        self.loss_slot.set(Some(self.trainer.standing.training_loss()));
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

/// The losses of a finished step's batches, and the norm of its gradients: the step's one wait for
/// the device.
fn step_losses<L: Trainee>(
    pending: &mut Vec<Pending>,
    norm: Option<Tensor<1>>,
    epoch: usize,
) -> Result<(Vec<f64>, f64), TrainError> {
    let (mut numbers, row_ids): (Vec<_>, Vec<_>) =
        pending.drain(..).map(|batch| (batch.loss, batch.row_ids)).unzip();
    let num_losses = numbers.len();
    numbers.extend(norm);
    let mut losses: Vec<f64> =
        to_host(Tensor::cat(numbers, 0))?.into_iter().map(f64::from).collect();
    // Without a gradient there is nothing to move along.
    let norm = losses.split_off(num_losses).first().copied().unwrap_or(0.0);
    match losses.iter().position(|loss| !loss.is_finite()) {
        Some(nth) => Err(not_finite::<L>("training loss", epoch, row_ids[nth].clone())),
        None => Ok((losses, norm)),
    }
}

fn not_finite<L: Trainee>(what: &'static str, epoch: usize, row_ids: Vec<String>) -> TrainError {
    TrainError::NotFinite { what, epoch, row_ids, section: L::SECTION, frozen: L::FROZEN }
}
