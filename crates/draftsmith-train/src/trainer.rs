//! All that training changes, and its way to a state on disk and back.

use std::path::Path;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::{ModuleRecord, RecordError};

use crate::checkpoint::{BEST, MODEL, OPTIMIZER, Standing, State, broken, record};
use crate::epochs::Trainee;
use crate::error::TrainError;
use crate::optimiser::Optimiser;
use crate::schedule::WarmedUp;

/// All that a step or a validation changes. burn-train's learner would not hand out its optimiser.
pub(crate) struct Trainer<L: Trainee> {
    /// On the device, with autodiff.
    pub(crate) model: L,
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) schedule: WarmedUp,
    pub(crate) standing: Standing<L::Scores>,
    pub(crate) best: Option<L::Part>,
}

impl<L: Trainee> Trainer<L> {
    /// One of `num_steps` steps that has not begun.
    pub(crate) fn new(model: L, optimiser: &Optimiser, num_steps: usize) -> Self {
        Self {
            model,
            optimizer: optimiser.adam_w(),
            schedule: optimiser.rates(num_steps),
            standing: Standing::default(),
            best: None,
        }
    }

    /// The same training as far as `state`, which was read from `dir`.
    pub(crate) fn resumed(self, state: State<L::Scores>, dir: &Path) -> Result<Self, TrainError> {
        let State { standing, model, optimizer, best } = state;
        let failed =
            |name: &'static str| move |e: RecordError| broken(&dir.join(name), e.to_string());
        let best = match best {
            Some(bytes) => {
                let part = self.model.valid().part();
                let read = ModuleRecord::from_bytes(record(bytes));
                Some(read.and_then(|read| part.try_load_record(read)).map_err(failed(BEST))?)
            }
            None => None,
        };
        let model = ModuleRecord::from_bytes(record(model))
            .and_then(|read| self.model.try_load_record(read))
            .map_err(failed(MODEL))?;
        let optimizer = self.optimizer.from_bytes(record(optimizer)).map_err(failed(OPTIMIZER))?;
        let schedule = self.schedule.after(standing.num_steps);
        Ok(Self { model, optimizer, schedule, standing, best })
    }

    /// What resumes it; between steps only.
    pub(crate) fn state(&self) -> Result<State<L::Scores>, RecordError> {
        let best = self.best.clone().map(|best| best.into_record().into_bytes()).transpose()?;
        Ok(State {
            standing: self.standing.clone(),
            model: self.model.clone().into_record().into_bytes()?.to_vec(),
            optimizer: self.optimizer.into_bytes()?.to_vec(),
            best: best.map(|bytes| bytes.to_vec()),
        })
    }
}
