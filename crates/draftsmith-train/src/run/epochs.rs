//! The loop over epochs: it resumes or begins, trains, validates, keeps the best weights, saves states and
//! stops.
//!
//! All members see the same batches and take their steps at the same time. The listener is shown the first
//! member that is still being trained. `should_stop` (Ctrl-C, a time limit, a dashboard) is called between
//! batches.

use std::time::{Duration, Instant};

use draftsmith_files::check_room;

use crate::data::{BatchSource, Loaders, VALIDATION_EPOCH};
use crate::error::{Result, TrainError, file_error};
use crate::log::renderer::{Half, LEARNING_RATE, LOSS, RunStart, TRAINING_LOSS};
use crate::log::{StepLog, StepMetrics};
use crate::run::devices::side_by_side;
use crate::run::member::{Trainee, TrainingMember, count_step};
use crate::run::progress::RunProgress;
use crate::run::trained::Outcome;
use crate::run::trainer::Trainer;
use crate::run::{Ending, Setup, TrainingRun, TrainingSize, checkpoint};

/// The minimum time between two saves, as a multiple of the time that the last save took.
const SAVE_RARITY: u32 = 50;

/// The space on the disk per trained weight, in bytes. While a new state is written, the previous
/// one still exists. Each contains four f32 numbers per weight: the weight, AdamW's two moments,
/// and the best weight.
const BYTES_PER_WEIGHT: u64 = (2 * 3 + 2) * 4;

impl TrainingRun<'_> {
    /// Trains named models side by side, and resumes from the saved state if there is one.
    /// `trained` converts each model's best weights, given the model's index. If there are several
    /// models, each has a directory of its name; the name of a single model is not used.
    pub(crate) fn train<S, L, T>(
        self,
        setup: Setup<S>,
        models: Vec<(String, L)>,
        trained: impl FnMut(usize, L::Part, Outcome<L::Scores>) -> T,
    ) -> Result<Ending<Vec<T>>>
    where
        S: BatchSource<Content = L::Content>,
        L: Trainee,
    {
        let mut epochs = EpochLoop::begin(self, setup, models)?;
        let finished = epochs.finish();
        epochs.run.listener.end();
        let EpochLoop { trainer, loaders, .. } = epochs;
        Ok(Ending::of_members(trainer, !finished?, loaders.num_steps, loaders.rows, trained))
    }
}

/// The state of the training loop.
struct EpochLoop<'a, L: Trainee, S> {
    run: TrainingRun<'a>,
    loaders: Loaders<S>,
    trainer: Trainer<L>,
    /// The log of each member.
    logs: Vec<StepLog>,
    /// The number of steps in earlier runs, and the time that these took.
    before: (usize, Duration),
    begun: Instant,
    saved: Instant,
    save_took: Duration,
}

/// The batches of an unfinished step.
#[derive(Default)]
struct Pending {
    num_supervised: usize,
    /// The ids of each batch's rows.
    row_ids: Vec<Vec<String>>,
}

impl<'a, L: Trainee, S: BatchSource<Content = L::Content>> EpochLoop<'a, L, S> {
    /// Resumes from the saved state, or begins a new training if there is none.
    fn begin(mut run: TrainingRun<'a>, setup: Setup<S>, models: Vec<(String, L)>) -> Result<Self> {
        let Setup { loaders, devices, optimizer, label } = setup;
        let models = match <[_; 1]>::try_from(models) {
            Ok([(_, model)]) => vec![(String::new(), model)],
            Err(models) => models,
        };
        let num_weights: usize = models.iter().map(|(_, model)| model.num_params()).sum();
        let num_steps = loaders.num_steps;
        let num_bytes = num_weights as u64 * BYTES_PER_WEIGHT;
        let dir = run.checkpoint_dir;
        check_room("a training's state", dir, num_bytes)?;
        (run.begins)(TrainingSize { num_steps, num_weights, num_bytes });
        let trainer = Trainer::new(models, devices, &optimizer, num_steps);
        let trainer = match checkpoint::load(dir, run.fingerprint)? {
            Some((state, state_dir)) => trainer.resumed(state, &state_dir)?,
            None => {
                checkpoint::discard(dir)?;
                trainer
            }
        };
        let logs = trainer.members.iter().map(|member| {
            let dir = dir.join(&member.name);
            std::fs::create_dir_all(&dir).map_err(file_error("create", &dir))?;
            StepLog::open(&dir, member.progress.num_steps)
        });
        let logs = logs.collect::<Result<_, _>>()?;
        let RunProgress { epoch, num_steps, duration, .. } = trainer.progress;
        let num_epochs = loaders.num_epochs;
        let scores = L::SCORES.iter().map(|score| (score.name, score.higher_is_better));
        let scores = [(TRAINING_LOSS, false)].into_iter().chain(scores).collect();
        run.listener.start(&RunStart { label, epoch, num_epochs, scores });
        let (before, now) = ((num_steps, duration), Instant::now());
        let save_took = Duration::ZERO;
        Ok(Self { run, loaders, trainer, logs, before, begun: now, saved: now, save_took })
    }

    /// Runs the remaining epochs and saves the state. Returns false if stopped before the end.
    fn finish(&mut self) -> Result<bool> {
        while self.trainer.progress.epoch <= self.loaders.num_epochs
            && !self.trainer.active().is_empty()
        {
            let validation = if self.train()? { self.validate()? } else { None };
            let is_whole = validation.is_some();
            if let Some(validation) = validation {
                self.end_epoch(validation);
            }
            self.save()?;
            if !is_whole {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Trains on the remaining batches of the epoch. Returns false if stopped. The gradients of an
    /// unfinished step are then dropped, and a resumed run repeats that step.
    fn train(&mut self) -> Result<bool> {
        let RunProgress { epoch, epoch_steps, .. } = self.trainer.progress;
        self.run.listener.start_half(Half::Training, self.loaders.training.num_rows());
        let mut batches = self.loaders.training.batches(epoch as u64, epoch_steps);
        self.trainer.begin();
        let mut pending = Pending::default();
        let is_whole = loop {
            if (self.run.should_stop)() || self.is_out_of_steps() {
                break batches.progress().is_completed();
            }
            let (next, progress) = batches.next_of_step(self.trainer.devices.num_devices());
            let Some(last) = next.last() else { break true };
            for batch in &next {
                pending.num_supervised += batch.num_supervised;
                pending.row_ids.push(batch.row_ids.clone());
            }
            let step = self.trainer.progress.num_steps;
            let learning_rate = last.ends_step.then(|| self.trainer.rates.at(step));
            self.trainer.train(&next, learning_rate);
            if let Some(learning_rate) = learning_rate {
                self.end_step(learning_rate, std::mem::take(&mut pending))?;
            }
            for progress in progress {
                self.run.listener.processed(progress.items_processed);
            }
        };
        self.run.listener.end_half();
        Ok(is_whole)
    }

    /// Counts, shows and logs a step, and saves the state if enough time has passed since the last
    /// save.
    fn end_step(&mut self, learning_rate: f64, pending: Pending) -> Result<()> {
        let Pending { num_supervised, row_ids } = pending;
        let epoch = self.trainer.progress.epoch;
        // The only point in a step that waits for the device.
        let numbers = count_step(&mut self.trainer.active(), num_supervised, epoch, &row_ids)?;
        for loss in &numbers[0].losses {
            self.run.listener.number(Half::Training, LOSS, *loss);
            self.run.listener.number(Half::Training, LEARNING_RATE, learning_rate);
        }
        let progress = &mut self.trainer.progress;
        progress.num_steps += 1;
        progress.epoch_steps += 1;
        let step = progress.num_steps;
        for ((_, log), numbers) in self.logged().into_iter().zip(numbers) {
            let (loss, gradient_norm) = (numbers.loss(), numbers.gradient_norm);
            log.push(&StepMetrics { step, epoch, loss, learning_rate, gradient_norm })?;
        }
        if self.saved.elapsed() > self.run.save_interval.max(SAVE_RARITY * self.save_took) {
            self.save()?;
        }
        Ok(())
    }

    /// Scores each active member on the validation rows. Returns `None` if stopped.
    fn validate(&mut self) -> Result<Option<Vec<L::Scores>>> {
        let epoch = self.trainer.progress.epoch;
        self.run.listener.start_half(Half::Validation, self.loaders.validation.num_rows());
        let devices = self.trainer.devices.clone();
        let members = self.trainer.active();
        // Validation needs no autodiff.
        let valid = |nth| members.iter().map(|member| member.on_device(nth).valid()).collect();
        let models: Vec<Vec<L>> = (0..devices.num_devices()).map(valid).collect();
        let models: Vec<Vec<&L>> = models.iter().map(|models| models.iter().collect()).collect();
        let mut tallies: Vec<L::Tally> =
            members.iter().map(|member| member.model.tally()).collect();
        let mut batches = self.loaders.validation.batches(VALIDATION_EPOCH, 0);
        let is_whole = loop {
            let (next, progress) = batches.next_of_step(devices.num_devices());
            if next.is_empty() {
                break true;
            }
            let outputs = devices.work_of_members(next.len(), &models, |model, nth| {
                model.validation_step(&next[nth])
            });
            let counting = tallies.iter_mut().zip(outputs).collect();
            let losses = side_by_side(counting, devices.is_cpu(), |(tally, outputs)| {
                let losses = outputs.into_iter().map(|output| L::count(output, tally));
                losses.collect::<Result<Vec<Option<f64>>, _>>()
            });
            let losses = losses.into_iter().collect::<Result<Vec<_>, _>>()?;
            for (member, losses) in self.trainer.active().into_iter().zip(&losses) {
                if let Some(nth) = losses.iter().position(Option::is_none) {
                    return Err(member.not_finite("prediction", epoch, next[nth].row_ids.clone()));
                }
            }
            for (loss, progress) in losses[0].iter().flatten().zip(progress) {
                self.run.listener.number(Half::Validation, LOSS, *loss);
                self.run.listener.processed(progress.items_processed);
            }
            if (self.run.should_stop)() {
                break batches.progress().is_completed();
            }
        };
        let scores: Option<Vec<L::Scores>> =
            is_whole.then(|| tallies.into_iter().map(L::scores).collect());
        if let Some(scores) = &scores {
            let training_loss = self.trainer.active()[0].progress.training_loss();
            let shown =
                [(TRAINING_LOSS, training_loss)].into_iter().chain(numbers::<L>(&scores[0]));
            shown.for_each(|(name, score)| {
                self.run.listener.number(Half::Validation, name, score);
            });
        }
        self.run.listener.end_half();
        Ok(scores)
    }

    /// Records the scores of the active members, and keeps their best weights.
    fn end_epoch(&mut self, validation: Vec<L::Scores>) {
        let RunProgress { epoch, num_steps, .. } = self.trainer.progress;
        for (member, validation) in self.trainer.active().into_iter().zip(validation) {
            member.end_epoch(epoch, num_steps, validation);
        }
        self.trainer.progress.epoch += 1;
        self.trainer.progress.epoch_steps = 0;
        self.run.listener.end_epoch(epoch);
    }

    /// Saves the current state.
    fn save(&mut self) -> Result<()> {
        let begun = Instant::now();
        let (_, duration_before) = self.before;
        self.trainer.progress.duration = duration_before.saturating_add(self.begun.elapsed());
        let state = self.trainer.state().map_err(|e| TrainError::Device(e.to_string()))?;
        self.logs.iter().try_for_each(StepLog::sync)?;
        checkpoint::save(self.run.checkpoint_dir, self.run.fingerprint, state)?;
        self.saved = Instant::now();
        self.save_took = begun.elapsed();
        Ok(())
    }

    /// Returns the active members with their logs.
    fn logged(&mut self) -> Vec<(&mut TrainingMember<L>, &mut StepLog)> {
        let patience = self.trainer.patience;
        let logged = self.trainer.members.iter_mut().zip(&mut self.logs);
        logged.filter(|(member, _)| !member.progress.is_out_of_patience(patience)).collect()
    }

    /// Returns whether this run has taken `max_steps` steps.
    fn is_out_of_steps(&self) -> bool {
        let (steps_before, _) = self.before;
        let num_taken = self.trainer.progress.num_steps - steps_before;
        self.run.max_steps.is_some_and(|max_steps| num_taken >= max_steps)
    }
}

/// Lists the names and values of the scores that are shown and logged.
fn numbers<L: Trainee>(scores: &L::Scores) -> impl Iterator<Item = (&'static str, f64)> {
    L::SCORES.iter().map(|score| (score.name, (score.pick)(scores)))
}
