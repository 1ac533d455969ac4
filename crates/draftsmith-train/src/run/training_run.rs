//! One run of a training, which resumes what an earlier one left: its settings, how it is put
//! together, and its result.

use std::path::Path;
use std::time::Duration;

use burn::tensor::Device;
use burn_train::metric::{Adaptor, LossInput};
use burn_train::renderer::MetricsRenderer;
use burn_train::{InferenceStep, Interrupter, TrainStep};

use draftsmith_files::check_room;

use crate::data::batches::{BatchSource, Loaders};
use crate::error::TrainError;
use crate::log::metrics::ScoreSlot;
use crate::log::renderer::{EndRenderer, ListeningRenderer};
use crate::log::step_log::StepLog;
use crate::run::burn_train::launch;
use crate::run::checkpoint;
use crate::run::devices::PerDevice;
use crate::run::epochs::{EpochLoop, History, Saving, ShouldStop};
use crate::run::member::Member;
use crate::run::optimizer::OptimizerSettings;
use crate::run::progress::MemberProgress;
use crate::run::trainee::Trainee;
use crate::run::trainer::Trainer;
use crate::states::FeatureDir;

/// The least time between two saved states by default.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// Bytes of a weight on the disk: itself and AdamW's two moments, as long as a new state is beside the
/// last one, and itself in the best weights so far and their successor.
const BYTES_A_WEIGHT: u64 = (2 * 3 + 2) * 4;

/// One run of a training: where its state is kept, how far it may go, where it computes, and what
/// shows its progress.
pub struct TrainingRun<'a> {
    /// The directory of the training's state and metrics.
    pub checkpoint_dir: &'a Path,
    /// Names all that the training depends on: settings, seed, models and rows. A state with
    /// another fingerprint is removed.
    pub fingerprint: &'a str,
    /// The most optimizer steps of this run; no bound if absent.
    pub max_steps: Option<usize>,
    /// The least time between two saved states, where no epoch ends: 60 s. Where saving takes more
    /// than a fiftieth of it, saving is rarer.
    pub save_interval: Duration,
    /// Devices that share the work with the frozen model's own: none. Each gets a copy of the
    /// frozen model, and every so many-th batch of a step; a step with fewer batches than devices
    /// leaves some idle. Sums are taken in the order of the batches, so that the result is a single
    /// device's, bit for bit where all compute alike, and a training may resume on other devices than
    /// it began with.
    pub more_devices: Vec<Device>,
    /// Where hidden states are kept if the settings say so: beside the state.
    pub features: Option<FeatureDir<'a>>,
    /// Shows its progress.
    pub renderer: Box<dyn MetricsRenderer>,
    /// Ends the renderer after the last step: it is dropped. burn-train's dashboard waits there for
    /// a thread of its own.
    pub end_renderer: EndRenderer,
    /// Stops it from outside: what a dashboard is given.
    pub interrupter: Interrupter,
    /// Whether it is to stop, asked after each batch: never.
    pub should_stop: ShouldStop,
    /// Told before it begins how large it is.
    pub begins: Box<dyn FnOnce(TrainingSize) + 'a>,
}

/// How large a training is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingSize {
    /// Optimizer steps from the first to the last planned one.
    pub num_steps: usize,
    /// What is trained, in weights.
    pub num_weights: usize,
    /// The most bytes that its state and what is exported take on the disk.
    pub num_bytes: u64,
}

impl<'a> TrainingRun<'a> {
    /// To the training's end, silently.
    pub fn new(checkpoint_dir: &'a Path, fingerprint: &'a str) -> Self {
        Self {
            checkpoint_dir,
            fingerprint,
            max_steps: None,
            save_interval: SAVE_INTERVAL,
            more_devices: Vec::new(),
            features: None,
            renderer: Box::new(ListeningRenderer::new(())),
            end_renderer: drop,
            interrupter: Interrupter::new(),
            should_stop: Box::new(|| false),
            begins: Box::new(|_| ()),
        }
    }

    /// Where hidden states are kept.
    pub(crate) fn feature_dir(&self) -> FeatureDir<'a> {
        self.features.clone().unwrap_or_else(|| FeatureDir {
            dir: self.checkpoint_dir,
            name: "frozen".to_owned(),
            models: self.fingerprint.to_owned(),
            tell: &|_| (),
        })
    }

    /// Trains `models` side by side, from the state that was saved if there is one, and makes with
    /// `trained` what the caller wants of each, given its place among them. Several have names,
    /// which are directories; a single one's is not used.
    pub(crate) fn train<S, L, T>(
        self,
        setup: Setup<S>,
        models: Vec<(String, L)>,
        trained: impl FnMut(usize, BestOf<L>) -> T,
    ) -> Result<Ending<Vec<T>>, TrainError>
    where
        S: BatchSource<Batch = L::Batch>,
        L: Trainee,
        <L as TrainStep>::Output: Adaptor<LossInput> + Adaptor<()>,
        <L as InferenceStep>::Output: Adaptor<LossInput> + Adaptor<()>,
    {
        let Setup { loaders, devices, optimizer, label } = setup;
        let models = match <[_; 1]>::try_from(models) {
            Ok([(_, model)]) => vec![(String::new(), model)],
            Err(models) => models,
        };
        let num_weights: usize = models.iter().map(|(_, model)| model.num_params()).sum();
        let num_steps = loaders.num_steps;
        let num_bytes = num_weights as u64 * BYTES_A_WEIGHT;
        check_room("a training's state", self.checkpoint_dir, num_bytes)?;
        (self.begins)(TrainingSize { num_steps, num_weights, num_bytes });
        let trainer = Trainer::new(models, devices, &optimizer, num_steps);
        let dir = self.checkpoint_dir;
        let trainer = match checkpoint::load(dir, self.fingerprint)? {
            Some((state, state_dir)) => trainer.resumed(state, &state_dir)?,
            None => {
                checkpoint::discard(dir)?;
                trainer
            }
        };
        let logs = trainer.members.iter().map(|member| {
            let dir = dir.join(&member.name);
            create_dir(&dir)?;
            StepLog::open(&dir, member.progress.num_steps, member.progress.epochs.len())
        });
        let logs = logs.collect::<Result<Vec<_>, _>>()?;
        let epochs = EpochLoop {
            trainer,
            loaders,
            logs,
            slot: ScoreSlot::default(),
            loss_slot: ScoreSlot::default(),
            saving: Saving {
                dir: dir.to_path_buf(),
                fingerprint: self.fingerprint.to_owned(),
                interval: self.save_interval,
            },
            max_steps: self.max_steps,
            should_stop: self.should_stop,
        };
        let (renderer, outcome) = launch(epochs, label, self.renderer, self.interrupter);
        (self.end_renderer)(renderer);
        let history = outcome?;
        Ok(Ending::of_members(history, num_steps, trained))
    }
}

/// What a run needs besides what it trains.
pub(crate) struct Setup<S> {
    pub(crate) loaders: Loaders<S>,
    /// With autodiff.
    pub(crate) devices: PerDevice<Device>,
    pub(crate) optimizer: OptimizerSettings,
    /// What is trained, for logs.
    pub(crate) label: &'static str,
}

/// What a run leaves.
#[derive(Debug)]
pub enum Ending<T> {
    /// It reached its end.
    Finished(T),
    /// It was stopped before; a state from which it resumes is saved.
    Stopped {
        /// What is best so far; none before an epoch was whole.
        best: Option<T>,
        /// Optimizer steps taken, since training began.
        num_steps: usize,
        /// Those of the whole training.
        num_planned_steps: usize,
    },
}

/// A member's weights after its best epoch, and how they came about.
pub(crate) struct BestOf<L: Trainee> {
    pub(crate) part: L::Part,
    /// The place of their epoch in `progress.epochs`.
    pub(crate) place: usize,
    pub(crate) progress: MemberProgress<L::Scores>,
    /// Whether the training was stopped while this member was still trained.
    pub(crate) interrupted: bool,
    /// The time of the whole training so far.
    pub(crate) duration: Duration,
}

impl<T> Ending<Vec<T>> {
    /// What a run of `num_planned_steps` left, of which `trained` makes what the caller wants of
    /// each member, given its place among them.
    pub(crate) fn of_members<L: Trainee>(
        history: History<L>,
        num_planned_steps: usize,
        mut trained: impl FnMut(usize, BestOf<L>) -> T,
    ) -> Self {
        let History { trainer, interrupted } = history;
        let num_steps = trainer.progress.num_steps;
        let duration = Duration::from_secs_f64(trainer.progress.seconds);
        let members = trainer.members.into_iter().enumerate();
        let best = members.map(|(nth, Member { progress, best, .. })| {
            let (part, place) = best.zip(progress.best)?;
            let interrupted = interrupted && !progress.is_out_of_patience(trainer.patience);
            Some(trained(nth, BestOf { part, place, progress, interrupted, duration }))
        });
        let best: Option<Vec<T>> = best.collect();
        if interrupted {
            return Self::Stopped { best, num_steps, num_planned_steps };
        }
        Self::Finished(best.expect("an epoch that was run to its end was validated"))
    }
}

impl<T> Ending<T> {
    /// The same of something else.
    pub fn map<U>(self, then: impl FnOnce(T) -> U) -> Ending<U> {
        match self {
            Self::Finished(best) => Ending::Finished(then(best)),
            Self::Stopped { best, num_steps, num_planned_steps } => {
                Ending::Stopped { best: best.map(then), num_steps, num_planned_steps }
            }
        }
    }

    /// What is best, finished or not.
    pub fn best(self) -> Option<T> {
        match self {
            Self::Finished(best) => Some(best),
            Self::Stopped { best, .. } => best,
        }
    }
}

fn create_dir(path: &Path) -> Result<(), TrainError> {
    std::fs::create_dir_all(path).map_err(|source| TrainError::CheckpointDir {
        action: "create",
        path: path.to_path_buf(),
        source,
    })
}
