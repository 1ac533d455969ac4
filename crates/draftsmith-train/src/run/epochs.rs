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
use std::time::{Duration, Instant};

use burn::lr_scheduler::LrScheduler;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, LearnerEvent,
    SupervisedTrainingEventProcessor, TrainStep, TrainingItem,
};

use crate::data::batches::{BatchSource, Loaders, TrainingBatch, VALIDATION_EPOCH};
use crate::error::TrainError;
use crate::log::metrics::ScoreSlot;
use crate::log::step_log::{StepLog, StepMetrics};
use crate::run::checkpoint;
use crate::run::devices::side_by_side;
use crate::run::member::{Member, StepNumbers, count_step, not_finite};
use crate::run::trainee::Trainee;
use crate::run::trainer::Trainer;
use crate::section::Section;

/// The share of the time that saving states may take: none is saved before so many times what the
/// last one took has gone by.
const TIMES_A_SAVE: u32 = 50;

/// What a run leaves behind.
pub(crate) struct History<L: Trainee> {
    pub(crate) trainer: Trainer<L>,
    /// Whether it stopped before the end of its last epoch, with members that are still trained.
    pub(crate) interrupted: bool,
}

/// The loop before it begins.
pub(crate) struct EpochLoop<L: Trainee, S> {
    pub(crate) trainer: Trainer<L>,
    pub(crate) loaders: Loaders<S>,
    /// One for each member.
    pub(crate) logs: Vec<StepLog>,
    pub(crate) slot: ScoreSlot<L::Scores>,
    pub(crate) loss_slot: ScoreSlot<f64>,
    pub(crate) saving: Saving,
    pub(crate) max_steps: Option<usize>,
    pub(crate) should_stop: ShouldStop,
}

/// Whether the caller wants a run to end: asked between batches.
pub(crate) type ShouldStop = Box<dyn Fn() -> bool + Send + Sync>;

/// What the loop tells of its progress.
pub(crate) type Events<L> = SupervisedTrainingEventProcessor<L>;

/// Where and how often states are saved.
#[derive(Debug, Clone)]
pub(crate) struct Saving {
    pub(crate) dir: PathBuf,
    pub(crate) fingerprint: String,
    pub(crate) interval: Duration,
}

impl<L: Trainee, S: BatchSource<Batch = L::Batch>> EpochLoop<L, S> {
    /// Runs the epochs that are left, and leaves a state.
    pub(crate) fn run(
        self,
        events: Events<L>,
        interrupter: Interrupter,
    ) -> (Result<History<L>, TrainError>, Events<L>, L) {
        let mut run = Run {
            steps_before: self.trainer.progress.num_steps,
            seconds_before: self.trainer.progress.seconds,
            setup: self,
            events,
            interrupter,
            begun: Instant::now(),
            saved: Instant::now(),
            save_took: Duration::ZERO,
        };
        let finished = run.epochs();
        let Run { setup: Self { trainer, .. }, events, .. } = run;
        let model = trainer.members[0].model.clone();
        (finished.map(|finished| History { trainer, interrupted: !finished }), events, model)
    }
}

/// The loop while it runs.
struct Run<L: Trainee, S> {
    setup: EpochLoop<L, S>,
    events: Events<L>,
    interrupter: Interrupter,
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

impl<L: Trainee, S: BatchSource<Batch = L::Batch>> Run<L, S> {
    /// Runs the epochs that are left, and leaves a state; false if it was stopped before the end.
    fn epochs(&mut self) -> Result<bool, TrainError> {
        let num_epochs = self.setup.loaders.num_epochs;
        while self.setup.trainer.progress.epoch <= num_epochs
            && !self.setup.trainer.active().is_empty()
        {
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
        let epoch = self.setup.trainer.progress.epoch;
        let is_whole = self.train(epoch)?;
        self.check_learner()?;
        if !is_whole {
            return Ok(false);
        }
        let Some(validation) = self.validate(epoch)? else {
            return self.check_learner().map(|()| false);
        };
        let num_steps = self.setup.trainer.progress.num_steps;
        for ((member, log), validation) in self.logged().into_iter().zip(validation) {
            let numbers: Vec<(&str, f64)> =
                L::SCORES.iter().map(|score| (score.name, (score.pick)(&validation))).collect();
            log.push_validation(num_steps, &numbers)?;
            member.end_epoch(epoch, num_steps, validation);
        }
        let progress = &mut self.setup.trainer.progress;
        progress.epoch += 1;
        progress.epoch_steps = 0;
        self.tell_training(LearnerEvent::EndEpoch(epoch));
        self.interrupter.fail_on_error(self.events.flush());
        self.check_learner()?;
        Ok(true)
    }

    /// Trains on the epoch's batches; false if not all of them were seen. The gradients of a step
    /// that an interruption cuts short are dropped: a resumed run begins that step anew.
    fn train(&mut self, epoch: usize) -> Result<bool, TrainError> {
        let total_items = self.setup.loaders.training.num_rows();
        self.tell_training(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let num_taken = self.setup.trainer.progress.epoch_steps;
        let mut batches = self.setup.loaders.training.batches(epoch as u64, num_taken);
        self.setup.trainer.begin();
        let num_devices = self.setup.trainer.devices.num_devices();
        let mut pending = Pending::default();
        let mut iteration = 0;
        let mut rate = 0.0;
        let mut is_whole = true;
        loop {
            if self.is_to_stop() || self.is_out_of_steps() {
                is_whole = batches.progress().is_completed();
                break;
            }
            let (dealt, progress) = batches.next_of_step(num_devices);
            let Some(last) = dealt.last() else { break };
            let ends_step = last.ends_step();
            for batch in &dealt {
                pending.num_supervised += batch.num_supervised();
                pending.row_ids.push(batch.row_ids().to_vec());
            }
            if ends_step {
                rate = self.setup.trainer.schedule.step();
            }
            let shown = self.setup.trainer.train(&dealt, ends_step.then_some(rate));
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
        let numbers =
            count_step(&mut self.setup.trainer.active(), num_supervised, epoch, &row_ids)?;
        let progress = &mut self.setup.trainer.progress;
        progress.num_steps += 1;
        progress.epoch_steps += 1;
        let step = progress.num_steps;
        for ((_, log), numbers) in self.logged().into_iter().zip(numbers) {
            let StepNumbers { loss, gradient_norm } = numbers;
            log.push(&StepMetrics { step, epoch, loss, learning_rate, gradient_norm })?;
        }
        if self.saved.elapsed() > self.setup.saving.interval.max(TIMES_A_SAVE * self.save_took) {
            self.save()?;
        }
        Ok(())
    }

    /// The members that are still trained, with their logs.
    fn logged(&mut self) -> Vec<(&mut Member<L>, &mut StepLog)> {
        let patience = self.setup.trainer.patience;
        let logged = self.setup.trainer.members.iter_mut().zip(&mut self.setup.logs);
        logged.filter(|(member, _)| !member.progress.is_out_of_patience(patience)).collect()
    }

    /// Whether the caller, or whoever watches, wants the run to end.
    fn is_to_stop(&self) -> bool {
        if (self.setup.should_stop)() {
            self.interrupter.stop(None);
        }
        self.interrupter.should_stop()
    }

    /// Whether this run has taken the steps that it may.
    fn is_out_of_steps(&self) -> bool {
        let num_taken = self.setup.trainer.progress.num_steps - self.steps_before;
        self.setup.max_steps.is_some_and(|max_steps| num_taken >= max_steps)
    }

    /// Saves the present state, unless something failed.
    fn save(&mut self) -> Result<(), TrainError> {
        self.check_learner()?;
        let begun = Instant::now();
        self.setup.trainer.progress.seconds =
            self.seconds_before + self.begun.elapsed().as_secs_f64();
        let Saving { dir, fingerprint, .. } = &self.setup.saving;
        let state = self.setup.trainer.state().map_err(|e| TrainError::Device(e.to_string()))?;
        self.setup.logs.iter().try_for_each(StepLog::sync)?;
        checkpoint::save(dir, fingerprint, state)?;
        self.saved = Instant::now();
        self.save_took = begun.elapsed();
        Ok(())
    }

    /// Scores the present weights of each member that is still trained on the validation rows;
    /// `None` if that was interrupted.
    fn validate(&mut self, epoch: usize) -> Result<Option<Vec<L::Scores>>, TrainError> {
        let total_items = self.setup.loaders.validation.num_rows();
        self.setup.slot.set(None);
        self.tell_validation(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let devices = self.setup.trainer.devices.clone();
        let num_devices = devices.num_devices();
        let members = self.setup.trainer.active();
        // Without autodiff.
        let valid = |nth| members.iter().map(|member| member.on_device(nth).valid()).collect();
        let models: Vec<Vec<L>> = (0..num_devices).map(valid).collect();
        let models: Vec<Vec<&L>> = models.iter().map(|models| models.iter().collect()).collect();
        let mut scored: Vec<Scored<L>> = members.into_iter().map(Scored::new).collect();
        let mut batches = self.setup.loaders.validation.batches(VALIDATION_EPOCH, 0);
        let (mut iteration, mut is_whole) = (0, true);
        loop {
            let (dealt, progress) = batches.next_of_step(num_devices);
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
            if self.is_to_stop() {
                is_whole = batches.progress().is_completed();
                break;
            }
        }
        let scores: Option<Vec<L::Scores>> =
            is_whole.then(|| scored.into_iter().map(|one| L::scores(one.tally)).collect());
        self.setup.slot.set(scores.as_ref().and_then(|scores| scores.first().copied()));
        let loss =
            self.setup.trainer.active().first().map(|member| member.progress.training_loss());
        self.setup.loss_slot.set(loss);
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
