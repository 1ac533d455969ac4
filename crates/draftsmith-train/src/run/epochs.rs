//! The loop over epochs: it trains, validates, keeps the best weights, saves states and stops.
//!
//! All members see the same batches and take their steps at the same time. burn-train's events and metrics
//! show the first member that is still being trained. The interrupter and `should_stop` (Ctrl-C, a time
//! limit) are checked between batches.
//!
//! burn-train's own loop is not used: it counts batches to find the end of a step, drops the labels of
//! validation batches, keeps no best model in memory, cannot return our errors, and saves only at the ends
//! of epochs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, LearnerEvent,
    SupervisedTrainingEventProcessor, TrainStep, TrainingItem,
};

use crate::data::{BatchSource, Loaders, VALIDATION_EPOCH};
use crate::error::TrainError;
use crate::log::event_file::VALIDATION;
use crate::log::metrics::{ScoreSlot, TRAINING_LOSS};
use crate::log::{StepLog, StepMetrics};
use crate::run::checkpoint;
use crate::run::devices::side_by_side;
use crate::run::member::{Member, StepNumbers, Trainee, count_step};
use crate::run::trainer::Trainer;

/// Saving a state must take at most 1/50 of the time since the previous save.
const SAVE_RARITY: u32 = 50;

/// The trainer after a run.
pub(crate) struct History<L: Trainee> {
    pub(crate) trainer: Trainer<L>,
    /// Whether the run stopped before the end of its last epoch, with active members.
    pub(crate) interrupted: bool,
}

/// Everything that the loop needs.
pub(crate) struct EpochLoop<L: Trainee, S> {
    pub(crate) trainer: Trainer<L>,
    pub(crate) loaders: Loaders<S>,
    /// One for each member.
    pub(crate) logs: Vec<StepLog>,
    pub(crate) scores: ScoreSlot,
    pub(crate) saving: Saving,
    pub(crate) max_steps: Option<usize>,
    pub(crate) should_stop: ShouldStop,
}

/// Returns whether the run should stop. Called between batches.
pub(crate) type ShouldStop = Box<dyn Fn() -> bool + Send + Sync>;

/// burn-train's receiver of the loop's events.
pub(crate) type Events<L> = SupervisedTrainingEventProcessor<L>;

/// Where and how often states are saved.
#[derive(Debug, Clone)]
pub(crate) struct Saving {
    pub(crate) dir: PathBuf,
    pub(crate) fingerprint: String,
    pub(crate) interval: Duration,
}

impl<L: Trainee, S: BatchSource<Content = L::Content>> EpochLoop<L, S> {
    /// Runs the remaining epochs and saves the state.
    pub(crate) fn run(
        self,
        events: Events<L>,
        interrupter: Interrupter,
    ) -> (Result<History<L>, TrainError>, Events<L>, L) {
        let mut run = Run {
            steps_before: self.trainer.progress.num_steps,
            duration_before: self.trainer.progress.duration,
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

/// The running loop.
struct Run<L: Trainee, S> {
    setup: EpochLoop<L, S>,
    events: Events<L>,
    interrupter: Interrupter,
    steps_before: usize,
    duration_before: Duration,
    begun: Instant,
    saved: Instant,
    save_took: Duration,
}

/// The batches of an unfinished step.
#[derive(Default)]
struct Pending {
    num_supervised: usize,
    /// The rows of each batch.
    row_ids: Vec<Vec<String>>,
}

impl<L: Trainee, S: BatchSource<Content = L::Content>> Run<L, S> {
    /// Runs the remaining epochs and saves the state. False if stopped before the end.
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

    /// Runs the rest of an epoch. False if the run stops in it.
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
            log.events.push_numbers(VALIDATION, num_steps, &numbers)?;
            member.end_epoch(epoch, num_steps, validation);
        }
        let progress = &mut self.setup.trainer.progress;
        progress.epoch += 1;
        progress.epoch_steps = 0;
        self.notify_training(LearnerEvent::EndEpoch(epoch));
        self.interrupter.fail_on_error(self.events.flush());
        self.check_learner()?;
        Ok(true)
    }

    /// Trains on the rest of an epoch's batches. False if interrupted; the gradients of an unfinished step
    /// are then dropped, and a resumed run repeats that step.
    fn train(&mut self, epoch: usize) -> Result<bool, TrainError> {
        let total_items = self.setup.loaders.training.num_rows();
        self.notify_training(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
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
            let (next, progress) = batches.next_of_step(num_devices);
            let Some(last) = next.last() else { break };
            let ends_step = last.ends_step;
            for batch in &next {
                pending.num_supervised += batch.num_supervised;
                pending.row_ids.push(batch.row_ids.clone());
            }
            let trainer = &mut self.setup.trainer;
            if ends_step {
                rate = trainer.rates.at(trainer.progress.num_steps);
            }
            let shown = trainer.train(&next, ends_step.then_some(rate));
            if ends_step {
                self.end_step(epoch, rate, std::mem::take(&mut pending))?;
            }
            for (shown, progress) in shown.into_iter().zip(progress) {
                iteration += 1;
                let rate = Some(rate.into());
                let item = TrainingItem::new(shown, progress, Some(iteration), rate);
                self.notify_training(LearnerEvent::ProcessedItem(item));
            }
        }
        self.notify_training(LearnerEvent::EndSplit(epoch));
        Ok(is_whole)
    }

    /// Counts and logs a step, and saves the state if it is time.
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
        if self.saved.elapsed() > self.setup.saving.interval.max(SAVE_RARITY * self.save_took) {
            self.save()?;
        }
        Ok(())
    }

    /// The active members with their logs.
    fn logged(&mut self) -> Vec<(&mut Member<L>, &mut StepLog)> {
        let patience = self.setup.trainer.patience;
        let logged = self.setup.trainer.members.iter_mut().zip(&mut self.setup.logs);
        logged.filter(|(member, _)| !member.progress.is_out_of_patience(patience)).collect()
    }

    /// Whether the caller or the dashboard wants the run to stop.
    fn is_to_stop(&self) -> bool {
        if (self.setup.should_stop)() {
            self.interrupter.stop(None);
        }
        self.interrupter.should_stop()
    }

    /// Whether this run has taken `max_steps` steps.
    fn is_out_of_steps(&self) -> bool {
        let num_taken = self.setup.trainer.progress.num_steps - self.steps_before;
        self.setup.max_steps.is_some_and(|max_steps| num_taken >= max_steps)
    }

    /// Saves the current state, unless burn-train has failed.
    fn save(&mut self) -> Result<(), TrainError> {
        self.check_learner()?;
        let begun = Instant::now();
        self.setup.trainer.progress.duration =
            self.duration_before.saturating_add(self.begun.elapsed());
        let Saving { dir, fingerprint, .. } = &self.setup.saving;
        let state = self.setup.trainer.state().map_err(|e| TrainError::Device(e.to_string()))?;
        self.setup.logs.iter().try_for_each(StepLog::sync)?;
        checkpoint::save(dir, fingerprint, state)?;
        self.saved = Instant::now();
        self.save_took = begun.elapsed();
        Ok(())
    }

    /// Scores each active member on the validation rows. `None` if interrupted.
    fn validate(&mut self, epoch: usize) -> Result<Option<Vec<L::Scores>>, TrainError> {
        let total_items = self.setup.loaders.validation.num_rows();
        self.set_scores(None);
        self.notify_validation(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
        let devices = self.setup.trainer.devices.clone();
        let num_devices = devices.num_devices();
        let members = self.setup.trainer.active();
        // Without autodiff.
        let valid = |nth| members.iter().map(|member| member.on_device(nth).valid()).collect();
        let models: Vec<Vec<L>> = (0..num_devices).map(valid).collect();
        let models: Vec<Vec<&L>> = models.iter().map(|models| models.iter().collect()).collect();
        let mut tallies: Vec<L::Tally> =
            members.iter().map(|member| member.model.tally()).collect();
        let mut batches = self.setup.loaders.validation.batches(VALIDATION_EPOCH, 0);
        let (mut iteration, mut is_whole) = (0, true);
        loop {
            let (next, progress) = batches.next_of_step(num_devices);
            if next.is_empty() {
                break;
            }
            let outputs = devices.work_of_members(next.len(), &models, |model, nth| {
                InferenceStep::step(model, next[nth].clone())
            });
            let counting = tallies.iter_mut().zip(&outputs).collect();
            let failures = side_by_side(counting, devices.is_cpu(), |(tally, outputs)| {
                count::<L>(outputs, tally)
            });
            for (member, failure) in self.setup.trainer.active().into_iter().zip(failures) {
                if let Some(nth) = failure? {
                    return Err(member.not_finite("prediction", epoch, next[nth].row_ids.clone()));
                }
            }
            let shown = outputs.into_iter().next().unwrap_or_default();
            for (shown, progress) in shown.into_iter().zip(progress) {
                iteration += 1;
                let item = TrainingItem::new(shown, progress, Some(iteration), None);
                self.notify_validation(LearnerEvent::ProcessedItem(item));
            }
            if self.is_to_stop() {
                is_whole = batches.progress().is_completed();
                break;
            }
        }
        let scores: Option<Vec<L::Scores>> =
            is_whole.then(|| tallies.into_iter().map(L::scores).collect());
        self.set_scores(scores.as_ref().and_then(|scores| scores.first()));
        self.notify_validation(LearnerEvent::EndSplit(epoch));
        Ok(scores)
    }

    /// Sets the scores that the metrics read: those of the first active member, and its training loss.
    fn set_scores(&mut self, validation: Option<&L::Scores>) {
        let first = self.setup.trainer.active();
        let loss = first.first().map(|member| (TRAINING_LOSS, member.progress.training_loss()));
        let scores = validation.into_iter().flat_map(|validation| {
            L::SCORES.iter().map(move |score| (score.name, (score.pick)(validation)))
        });
        *self.setup.scores.lock().expect("nothing panics while it holds the scores") =
            scores.chain(loss).collect();
    }

    fn notify_training(&mut self, event: LearnerEvent<<L as TrainStep>::Output>) {
        self.interrupter.fail_on_error(self.events.process_train(event));
    }

    fn notify_validation(&mut self, event: LearnerEvent<<L as InferenceStep>::Output>) {
        self.interrupter.fail_on_error(self.events.process_valid(event));
    }

    /// The error with which a burn-train thread stopped the run, if any.
    fn check_learner(&self) -> Result<(), TrainError> {
        self.interrupter.error().map_or(Ok(()), |error| Err(TrainError::Learner(error)))
    }
}

/// Adds validation outputs to a tally, waiting for the device once per batch. Returns the index of the
/// first batch with a prediction that is not finite, if there is one.
fn count<L: Trainee>(
    outputs: &[<L as InferenceStep>::Output],
    tally: &mut L::Tally,
) -> Result<Option<usize>, TrainError> {
    for (nth, output) in outputs.iter().enumerate() {
        if !L::count(output, tally)? {
            return Ok(Some(nth));
        }
    }
    Ok(None)
}
