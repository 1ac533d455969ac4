//! All that training changes, and its way to a state on disk and back.

use std::path::Path;

use burn::module::Module;
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::Device;
use burn_train::TrainStep;
use draftsmith_data::caught;

use crate::error::TrainError;
use crate::run::checkpoint::{BEST, MODEL, MemberState, OPTIMIZER, State, broken, record};
use crate::run::devices::{PerDevice, side_by_side};
use crate::run::member::Member;
use crate::run::optimizer::OptimizerSettings;
use crate::run::progress::RunProgress;
use crate::run::schedule::WarmedUp;
use crate::run::trainee::Trainee;

/// All that a step or a validation changes. burn-train's learner would not hand out its optimizer.
pub(crate) struct Trainer<L: Trainee> {
    /// At least one.
    pub(crate) members: Vec<Member<L>>,
    /// With autodiff.
    pub(crate) devices: PerDevice<Device>,
    pub(crate) schedule: WarmedUp,
    pub(crate) progress: RunProgress,
    /// Epochs without better scores after which a member stops; never if absent.
    pub(crate) patience: Option<usize>,
}

impl<L: Trainee> Trainer<L> {
    /// One of `num_steps` steps that has not begun, of models with names.
    pub(crate) fn new(
        models: Vec<(String, L)>,
        devices: PerDevice<Device>,
        optimizer: &OptimizerSettings,
        num_steps: usize,
    ) -> Self {
        let member = |(name, model)| Member::new(name, model, optimizer.adam_w());
        Self {
            members: models.into_iter().map(member).collect(),
            devices,
            schedule: optimizer.rates(num_steps),
            progress: RunProgress::default(),
            patience: optimizer.patience,
        }
    }

    /// The members that are still trained.
    pub(crate) fn active(&mut self) -> Vec<&mut Member<L>> {
        let patience = self.patience;
        let members = self.members.iter_mut();
        members.filter(|member| !member.progress.is_out_of_patience(patience)).collect()
    }

    /// Begins an epoch's training: what was left of a step is dropped.
    pub(crate) fn begin(&mut self) {
        let devices = self.devices.clone();
        self.active().into_iter().for_each(|member| member.begin(&devices));
    }

    /// Runs batches of a step forward and back, at most one a device, for every member that is
    /// still trained; with a learning rate, also takes the step that they end. What the first of
    /// those members outputs for each batch.
    pub(crate) fn train(
        &mut self,
        batches: &[L::Batch],
        learning_rate: Option<f64>,
    ) -> Vec<<L as TrainStep>::Output> {
        let devices = self.devices.clone();
        let members = self.active();
        let models = |nth| members.iter().map(|member| member.on_device(nth)).collect();
        let models: Vec<Vec<&L>> = (0..devices.num_devices()).map(models).collect();
        let outputs = devices.work_of_members(batches.len(), &models, |model, nth| {
            TrainStep::step(model, batches[nth].clone())
        });
        let members = members.into_iter().zip(outputs).collect();
        let shown = side_by_side(members, devices.is_cpu(), |(member, outputs)| {
            member.add(outputs, learning_rate, &devices)
        });
        shown.into_iter().next().unwrap_or_default()
    }

    /// The same training as far as `state`, which was read from `dir`.
    pub(crate) fn resumed(self, state: State<L::Scores>, dir: &Path) -> Result<Self, TrainError> {
        let State { progress, members: states } = state;
        let names = states.iter().map(|state| &state.name);
        if !names.eq(self.members.iter().map(|member| &member.name)) {
            return Err(broken(dir, "it is of other members".to_owned()));
        }
        let members = self.members.into_iter().zip(states);
        let members = members.map(|(member, state)| member.resumed(state, dir));
        let schedule = self.schedule.after(progress.num_steps);
        Ok(Self { members: members.collect::<Result<_, _>>()?, schedule, progress, ..self })
    }

    /// What resumes it; between steps only.
    pub(crate) fn state(&self) -> Result<State<L::Scores>, RecordError> {
        let members = self.members.iter().map(Member::state).collect::<Result<_, _>>()?;
        Ok(State { progress: self.progress.clone(), members })
    }
}

impl<L: Trainee> Member<L> {
    fn resumed(self, state: MemberState<L::Scores>, dir: &Path) -> Result<Self, TrainError> {
        let MemberState { name, progress, model, optimizer, best } = state;
        let dir = dir.join(&name);
        let epochs = progress.epochs.len();
        if progress.best.is_some() != best.is_some()
            || progress.best.is_some_and(|place| place >= epochs)
        {
            let problem = format!("the best of its {epochs} epochs is {:?}", progress.best);
            return Err(broken(&dir, problem));
        }
        let best = best.map(|bytes| {
            let part = self.model.valid().part();
            read(&dir.join(BEST), || {
                ModuleRecord::from_bytes(record(bytes)).and_then(|read| part.try_load_record(read))
            })
        });
        let best = best.transpose()?;
        let whole = self.model.clone();
        let model = read(&dir.join(MODEL), || {
            ModuleRecord::from_bytes(record(model)).and_then(|read| whole.try_load_record(read))
        })?;
        let optimizer =
            read(&dir.join(OPTIMIZER), || self.optimizer.from_bytes(record(optimizer)))?;
        let mut resumed = Self::new(name, model, optimizer);
        (resumed.progress, resumed.best) = (progress, best);
        Ok(resumed)
    }

    fn state(&self) -> Result<MemberState<L::Scores>, RecordError> {
        let best = self.best.clone().map(|best| best.into_record().into_bytes()).transpose()?;
        Ok(MemberState {
            name: self.name.clone(),
            progress: self.progress.clone(),
            model: self.model.clone().into_record().into_bytes()?.to_vec(),
            optimizer: self.optimizer.into_bytes()?.to_vec(),
            best: best.map(|bytes| bytes.to_vec()),
        })
    }
}

/// Runs a step of burn's reading of a record (0.22), which panics on parameters without a name.
fn read<T>(path: &Path, step: impl FnOnce() -> Result<T, RecordError>) -> Result<T, TrainError> {
    match caught(step) {
        Ok(read) => read.map_err(|error| broken(path, error.to_string())),
        Err(panic) => Err(broken(path, panic)),
    }
}
