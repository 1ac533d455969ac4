//! One call's share of a training: what a caller says of it, and what it leaves.

use std::path::Path;
use std::time::Duration;

use burn::tensor::Device;
use burn_train::Interrupter;
use burn_train::renderer::MetricsRenderer;

use crate::log::renderer::Told;
use crate::run::epochs::{History, Trainee};
use crate::run::member::{Member, MemberStanding};

/// How long a run goes on by default before it saves its state again.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// One call's share of a training: where its state is kept, how far it may go, where it computes,
/// and whom it tells.
pub struct Stint<'a> {
    /// The directory of the training's state and metrics.
    pub checkpoint_dir: &'a Path,
    /// Names all that the training depends on: settings, seed, models and rows. A state with
    /// another fingerprint is removed.
    pub fingerprint: &'a str,
    /// The most optimiser steps of this call; no bound if absent.
    pub max_steps: Option<usize>,
    /// The least time between two saved states, where no epoch ends: 60 s. Where saving takes more
    /// than a fiftieth of it, saving is rarer.
    pub save_interval: Duration,
    /// Devices that share the work with the frozen model's own: none. Each gets a copy of the
    /// frozen model, and every so many-th batch of a step; a step with fewer batches than devices
    /// leaves some idle. Sums are taken in the order of the batches, so that the result is a single
    /// device's, bit for bit where all compute alike, and a training may go on with other devices
    /// than it began with.
    pub more_devices: Vec<Device>,
    /// Is told of progress.
    pub renderer: Box<dyn MetricsRenderer>,
    /// Stops it.
    pub interrupter: Interrupter,
}

impl<'a> Stint<'a> {
    /// To the training's end, silently.
    pub fn new(checkpoint_dir: &'a Path, fingerprint: &'a str) -> Self {
        Self {
            checkpoint_dir,
            fingerprint,
            max_steps: None,
            save_interval: SAVE_INTERVAL,
            more_devices: Vec::new(),
            renderer: Box::new(Told::new(())),
            interrupter: Interrupter::new(),
        }
    }
}

/// What a call of a trainer leaves.
#[derive(Debug)]
pub enum Ending<T> {
    /// It reached its end.
    Finished(T),
    /// It was stopped before; a state to go on from is saved.
    Stopped {
        /// What is best so far; none before an epoch was whole.
        best: Option<T>,
        /// Optimiser steps taken, since training began.
        num_steps: usize,
        /// Those of the whole training.
        num_planned_steps: usize,
    },
}

/// A member's weights after its best epoch, and how they came about.
pub(crate) struct BestOf<L: Trainee> {
    pub(crate) part: L::Part,
    /// The place of their epoch in `standing.epochs`.
    pub(crate) place: usize,
    pub(crate) standing: MemberStanding<L::Scores>,
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
        let num_steps = trainer.standing.num_steps;
        let duration = Duration::from_secs_f64(trainer.standing.seconds);
        let members = trainer.members.into_iter().enumerate();
        let best = members.map(|(nth, Member { standing, best, .. })| {
            let (part, place) = best.zip(standing.best)?;
            let interrupted = interrupted && !standing.is_out_of_patience(trainer.patience);
            Some(trained(nth, BestOf { part, place, standing, interrupted, duration }))
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
