//! The whole mutable part of a training, and its conversion to and from a saved state.

use std::path::Path;

use burn::module::Module;
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Bytes, Device};
use draftsmith_data::caught;

use crate::data::TrainingBatch;
use crate::error::Result;
use crate::run::checkpoint::{BEST, MODEL, MemberState, OPTIMIZER, TrainingState, broken};
use crate::run::devices::{PerDevice, side_by_side};
use crate::run::member::{Trainee, TrainingMember};
use crate::run::optimizer::{LearningRates, OptimizerSettings};
use crate::run::progress::RunProgress;

/// The whole state of a training that a step or a validation changes.
pub(crate) struct Trainer<L: Trainee> {
    /// The models trained side by side. There is at least one.
    pub(crate) members: Vec<TrainingMember<L>>,
    /// The devices of the trained models, with autodiff.
    pub(crate) devices: PerDevice<Device>,
    pub(crate) rates: LearningRates,
    pub(crate) progress: RunProgress,
    /// The number of epochs without a better score after which a member stops.
    pub(crate) patience: Option<usize>,
}

impl<L: Trainee> Trainer<L> {
    /// Sets up a training of named models, before the first of `num_steps` steps.
    pub(crate) fn new(
        models: Vec<(String, L)>,
        devices: PerDevice<Device>,
        optimizer: &OptimizerSettings,
        num_steps: usize,
    ) -> Self {
        let member = |(name, model)| TrainingMember::new(name, model, optimizer);
        Self {
            members: models.into_iter().map(member).collect(),
            devices,
            rates: optimizer.rates(num_steps),
            progress: RunProgress::default(),
            patience: optimizer.patience,
        }
    }

    /// Returns the members whose training has not stopped early.
    pub(crate) fn active(&mut self) -> Vec<&mut TrainingMember<L>> {
        let patience = self.patience;
        let members = self.members.iter_mut();
        members.filter(|member| !member.progress.is_out_of_patience(patience)).collect()
    }

    /// Begins the training half of an epoch for every active member, and drops the batches of an
    /// unfinished step.
    pub(crate) fn begin(&mut self) {
        let devices = self.devices.clone();
        self.active().into_iter().for_each(|member| member.begin(&devices));
    }

    /// Trains every active member on batches of a step, at most one per device. If given a learning
    /// rate, it then takes the optimizer step.
    pub(crate) fn train(
        &mut self,
        batches: &[TrainingBatch<L::Content>],
        learning_rate: Option<f64>,
    ) {
        let devices = self.devices.clone();
        let members = self.active();
        let models = |nth| members.iter().map(|member| member.on_device(nth)).collect();
        let models: Vec<Vec<&L>> = (0..devices.num_devices()).map(models).collect();
        let steps = devices
            .work_of_members(batches.len(), &models, |model, nth| model.train_step(&batches[nth]));
        let members = members.into_iter().zip(steps).collect();
        side_by_side(members, devices.is_cpu(), |(member, steps)| {
            member.add(steps, learning_rate, &devices);
        });
    }

    /// Restores the training from `state`, which was read from `dir`.
    pub(crate) fn resumed(self, state: TrainingState<L::Scores>, dir: &Path) -> Result<Self> {
        let TrainingState { progress, members: states } = state;
        let names = states.iter().map(|state| &state.name);
        if !names.eq(self.members.iter().map(|member| &member.name)) {
            return Err(broken(dir, "it has other members".to_owned()));
        }
        let members = self.members.into_iter().zip(states);
        let members = members.map(|(member, state)| member.resumed(state, dir));
        Ok(Self { members: members.collect::<Result<_, _>>()?, progress, ..self })
    }

    /// Collects the state to save. Called only between steps.
    pub(crate) fn state(&self) -> Result<TrainingState<L::Scores>, RecordError> {
        let members = self.members.iter().map(TrainingMember::state).collect::<Result<_, _>>()?;
        Ok(TrainingState { progress: self.progress.clone(), members })
    }
}

impl<L: Trainee> TrainingMember<L> {
    fn resumed(mut self, state: MemberState<L::Scores>, dir: &Path) -> Result<Self> {
        let MemberState { name, progress, model, optimizer, best } = state;
        let dir = dir.join(&name);
        let epochs = progress.epochs.len();
        if progress.best.is_some() != best.is_some()
            || progress.best.is_some_and(|best| best >= epochs)
        {
            let problem = format!("the best of its {epochs} epochs is {:?}", progress.best);
            return Err(broken(&dir, problem));
        }
        let best = best.map(|best| read_module(&dir.join(BEST), self.model.valid().part(), best));
        self.best = best.transpose()?;
        self.model = read_module(&dir.join(MODEL), self.model, model)?;
        read(&dir.join(OPTIMIZER), || self.updates.read_record(optimizer))?;
        self.progress = progress;
        Ok(self)
    }

    fn state(&self) -> Result<MemberState<L::Scores>, RecordError> {
        let best = self.best.clone().map(|best| best.into_record().into_bytes()).transpose()?;
        Ok(MemberState {
            name: self.name.clone(),
            progress: self.progress.clone(),
            model: self.model.clone().into_record().into_bytes()?.to_vec(),
            optimizer: self.updates.to_record()?,
            best: best.map(|bytes| bytes.to_vec()),
        })
    }
}

fn read_module<M: Module>(path: &Path, module: M, record: Vec<u8>) -> Result<M> {
    read(path, || {
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(record))?;
        module.try_load_record(record)
    })
}

/// Reads a burn record, and turns a panic into an error: burn 0.22 panics if a parameter has no
/// name.
fn read<T>(path: &Path, read: impl FnOnce() -> Result<T, RecordError>) -> Result<T> {
    let read = caught(read).map_err(|panic| broken(path, panic))?;
    read.map_err(|error| broken(path, error.to_string()))
}
