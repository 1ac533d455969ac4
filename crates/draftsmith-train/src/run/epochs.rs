//! The loop over epochs: train, validate, keep the best weights, checkpoint, stop.
//!
//! It trains one head or adapter, or several side by side: its members see the same batches, and
//! take their steps at the same time. burn-train's events and metrics show the first that is still
//! trained.
//!
//! burn-train's own loop counts batches to know when a step ends, forgets the labels of a
//! validation batch, keeps no best model in memory, cannot end with an error of ours and saves at
//! the ends of epochs only; this one is a strategy in its place, with the same events and metrics.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::lr_scheduler::LrScheduler;
use burn::module::Module;
use burn::tensor::Tensor;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingItem, ValidLoader,
};
use draftsmith_theory::HeadScores;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::data::batches::{Start, TrainingBatch, next_batches};
use crate::error::TrainError;
use crate::log::metrics::{Score, ScoreSlot};
use crate::log::step_log::{StepLog, StepMetrics};
use crate::run::checkpoint;
use crate::run::clipping::Clipping;
use crate::run::devices::side_by_side;
use crate::run::member::{Member, StepNumbers, count_step, not_finite};
use crate::run::trainer::Trainer;
use crate::section::Section;

/// The share of the time that saving states may take: none is saved before so many times what the
/// last one took has gone by.
const TIMES_A_SAVE: u32 = 50;

/// What the loop trains, and how it is scored: the head, or an adapter. burn-train's learner has
/// its steps.
pub(crate) trait Trainee:
    LearnerModel
    + Sync
    + TrainStep<Input = <Self as Trainee>::Batch>
    + InferenceStep<Input = <Self as Trainee>::Batch>
{
    /// What a step is given.
    type Batch: TrainingBatch + Clone + Sync;
    /// What the caller wants of it in the end.
    type Part: Module + 'static;
    /// What validation adds up.
    type Tally: Send;
    /// What it makes of that.
    type Scores: std::fmt::Debug + Copy + Send + Sync + Serialize + DeserializeOwned + 'static;

    /// The role of the frozen model, for messages.
    const FROZEN: &'static str;
    /// The scores that are metrics.
    const SCORES: &'static [Score<Self::Scores>];

    /// The recipe's section, for messages.
    fn section(&self) -> Section;

    /// Leaves the rest.
    fn part(self) -> Self::Part;

    /// How a step's gradients are cut.
    fn clipping(&self) -> Clipping;

    /// `[1]`, without a graph.
    fn training_loss(output: &<Self as TrainStep>::Output) -> Tensor<1>;

    /// Nothing added.
    fn tally(&self) -> Self::Tally;

    /// Adds a validation batch, with one wait for the device; false if a prediction is not finite.
    fn count(
        output: &<Self as InferenceStep>::Output,
        tally: &mut Self::Tally,
    ) -> Result<bool, TrainError>;

    /// The scores of what was added.
    fn scores(tally: Self::Tally) -> Self::Scores;

    /// The number that the best epoch has the lowest of.
    fn to_minimise(&self, scores: &Self::Scores) -> f64;
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
pub(crate) struct History<L: Trainee> {
    pub(crate) trainer: Trainer<L>,
    /// Whether it stopped before the end of its last epoch, with members that are still trained.
    pub(crate) interrupted: bool,
}

/// How a run ended, once it has.
pub(crate) type Outcome<L> = Arc<Mutex<Option<Result<History<L>, TrainError>>>>;

/// The strategy: what the loop needs besides burn-train's components, and where it leaves its
/// result.
pub(crate) struct EpochLoop<L: Trainee> {
    /// Taken once, when the loop begins.
    pub(crate) begun: Mutex<Option<(Trainer<L>, Vec<StepLog>)>>,
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
    /// The learner only satisfies burn-train: its model is the first member's, its optimiser
    /// unused.
    fn fit(
        &self,
        components: TrainingComponents<L>,
        _learner: Learner<L>,
        training: TrainLoader<L>,
        validation: ValidLoader<L>,
        _starting_epoch: usize,
    ) -> (L, SupervisedTrainingEventProcessor<L>) {
        let begun = self.begun.lock().expect("nothing panics while it holds the trainer").take();
        let (trainer, logs) = begun.expect("a loop runs once");
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
            logs,
            max_steps: self.max_steps,
            begun: Instant::now(),
            saved: Instant::now(),
            save_took: Duration::ZERO,
        };
        let finished = run.epochs(components.num_epochs, &self.start);
        let Run { trainer, events, .. } = run;
        let model = trainer.members[0].model.clone();
        let outcome = finished.map(|finished| History { trainer, interrupted: !finished });
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
    /// One for each member.
    logs: Vec<StepLog>,
    max_steps: Option<usize>,
    steps_before: usize,
    seconds_before: f64,
    begun: Instant,
    saved: Instant,
    save_took: Duration,
}

/// The batches of a step that is not finished.
#[derive(Default)]
struct Pending {
    num_supervised: usize,
    /// Of each batch.
    row_ids: Vec<Vec<String>>,
}

impl<L: Trainee> Run<'_, L> {
    /// Runs the epochs that are left, and leaves a state; false if it was stopped before the end.
    fn epochs(&mut self, num_epochs: usize, start: &Start) -> Result<bool, TrainError> {
        while self.trainer.standing.epoch <= num_epochs && !self.trainer.active().is_empty() {
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
        let num_steps = self.trainer.standing.num_steps;
        for ((member, log), validation) in self.logged().into_iter().zip(validation) {
            let numbers: Vec<(&str, f64)> =
                L::SCORES.iter().map(|score| (score.name, (score.pick)(&validation))).collect();
            log.push_validation(num_steps, &numbers)?;
            member.end_epoch(epoch, num_steps, validation);
        }
        let standing = &mut self.trainer.standing;
        standing.epoch += 1;
        standing.epoch_steps = 0;
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
        self.trainer.begin();
        let num_devices = self.trainer.devices.num_devices();
        let mut pending = Pending::default();
        let mut iteration = 0;
        let mut rate = 0.0;
        let mut is_whole = true;
        loop {
            if self.interrupter.should_stop() || self.is_out_of_steps() {
                is_whole = batches.progress().is_completed();
                break;
            }
            let (dealt, progress) = next_batches(&mut *batches, num_devices)?;
            let Some(last) = dealt.last() else { break };
            let ends_step = last.ends_step();
            for batch in &dealt {
                pending.num_supervised += batch.num_supervised();
                pending.row_ids.push(batch.row_ids().to_vec());
            }
            if ends_step {
                rate = self.trainer.schedule.step();
            }
            let shown = self.trainer.train(&dealt, ends_step.then_some(rate));
            if ends_step {
                self.end_step(epoch, rate, std::mem::take(&mut pending))?;
            }
            for (shown, progress) in shown.into_iter().zip(progress) {
                iteration += 1;
                let rate = Some(rate.into());
                let item = TrainingItem::new(shown, progress, Some(iteration), rate);
                self.tell_training(LearnerEvent::ProcessedItem(item));
            }
        }
        self.tell_training(LearnerEvent::EndSplit(epoch));
        Ok(is_whole)
    }

    /// Counts a step that the members took.
    fn end_step(
        &mut self,
        epoch: usize,
        learning_rate: f64,
        pending: Pending,
    ) -> Result<(), TrainError> {
        let Pending { num_supervised, row_ids } = pending;
        let told = count_step(&mut self.trainer.active(), num_supervised, epoch, &row_ids)?;
        let standing = &mut self.trainer.standing;
        standing.num_steps += 1;
        standing.epoch_steps += 1;
        let step = standing.num_steps;
        for ((_, log), numbers) in self.logged().into_iter().zip(told) {
            let StepNumbers { loss, gradient_norm } = numbers;
            log.push(&StepMetrics { step, epoch, loss, learning_rate, gradient_norm })?;
        }
        if self.saved.elapsed() > self.saving.interval.max(TIMES_A_SAVE * self.save_took) {
            self.save()?;
        }
        Ok(())
    }

    /// The members that are still trained, with their logs.
    fn logged(&mut self) -> Vec<(&mut Member<L>, &mut StepLog)> {
        let patience = self.trainer.patience;
        let logged = self.trainer.members.iter_mut().zip(&mut self.logs);
        logged.filter(|(member, _)| !member.standing.is_out_of_patience(patience)).collect()
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
        self.logs.iter().try_for_each(StepLog::sync)?;
        checkpoint::save(dir, fingerprint, state)?;
        self.saved = Instant::now();
        self.save_took = begun.elapsed();
        Ok(())
    }

    /// Scores the present weights of each member that is still trained on the validation rows;
    /// `None` if that was interrupted.
    fn validate(&mut self, epoch: usize) -> Result<Option<Vec<L::Scores>>, TrainError> {
        let validation = self.validation.clone();
        let total_items = validation.num_items();
        self.slot.set(None);
        self.tell_validation(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let devices = self.trainer.devices.clone();
        let num_devices = devices.num_devices();
        let members = self.trainer.active();
        // Without autodiff.
        let valid = |nth| members.iter().map(|member| member.on_device(nth).valid()).collect();
        let models: Vec<Vec<L>> = (0..num_devices).map(valid).collect();
        let models: Vec<Vec<&L>> = models.iter().map(|models| models.iter().collect()).collect();
        let mut scored: Vec<Scored<L>> = members.into_iter().map(Scored::new).collect();
        let mut batches = validation.iter();
        let (mut iteration, mut is_whole) = (0, true);
        loop {
            let (dealt, progress) = next_batches(&mut *batches, num_devices)?;
            if dealt.is_empty() {
                break;
            }
            let outputs = devices.work_of_members(dealt.len(), &models, |model, nth| {
                InferenceStep::step(model, dealt[nth].clone())
            });
            let made = scored.iter_mut().zip(outputs).collect();
            let counted = side_by_side(made, devices.is_cpu(), |(one, outputs)| {
                one.add(&dealt, outputs, epoch)
            });
            let counted = counted.into_iter().collect::<Result<Vec<_>, _>>()?;
            let shown = counted.into_iter().next().unwrap_or_default();
            for (shown, progress) in shown.into_iter().zip(progress) {
                iteration += 1;
                let item = TrainingItem::new(shown, progress, Some(iteration), None);
                self.tell_validation(LearnerEvent::ProcessedItem(item));
            }
            if self.interrupter.should_stop() {
                is_whole = batches.progress().is_completed();
                break;
            }
        }
        let scores: Option<Vec<L::Scores>> =
            is_whole.then(|| scored.into_iter().map(|one| L::scores(one.tally)).collect());
        self.slot.set(scores.as_ref().and_then(|scores| scores.first().copied()));
        let loss = self.trainer.active().first().map(|member| member.standing.training_loss());
        self.loss_slot.set(loss);
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

/// A member while it is validated.
struct Scored<L: Trainee> {
    name: String,
    section: Section,
    tally: L::Tally,
}

impl<L: Trainee> Scored<L> {
    fn new(member: &mut Member<L>) -> Self {
        let section = member.model.section();
        Self { name: member.name.clone(), section, tally: member.model.tally() }
    }

    /// Adds what was made of batches, with one wait for the device each, and hands it back.
    fn add(
        &mut self,
        batches: &[L::Batch],
        outputs: Vec<<L as InferenceStep>::Output>,
        epoch: usize,
    ) -> Result<Vec<<L as InferenceStep>::Output>, TrainError> {
        for (batch, output) in batches.iter().zip(&outputs) {
            if !L::count(output, &mut self.tally)? {
                let row_ids = batch.row_ids().to_vec();
                let (section, name) = (self.section, &self.name);
                return Err(not_finite::<L>("prediction", section, name, epoch, row_ids));
            }
        }
        Ok(outputs)
    }
}
