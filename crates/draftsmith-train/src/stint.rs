//! One call's share of a training: what a caller says of it, and what it leaves.

use std::path::Path;
use std::time::Duration;

use burn_train::Interrupter;
use burn_train::renderer::MetricsRenderer;

use crate::checkpoint::Standing;
use crate::epochs::{History, Trainee};
use crate::renderer::SilentRenderer;

/// How long a run goes on by default before it saves its state again.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// One call's share of a training: where its state is kept, how far it may go, and whom it tells.
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
            renderer: Box::new(SilentRenderer),
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

impl<T> Ending<T> {
    /// What a run of `num_planned_steps` left, of which `trained` makes what the caller wants, given
    /// the best weights and their place among the epochs.
    pub(crate) fn new<L: Trainee>(
        history: History<L>,
        num_planned_steps: usize,
        trained: impl FnOnce(L::Part, usize, Standing<L::Scores>, bool) -> T,
    ) -> Self {
        let History { standing, best, interrupted } = history;
        let num_steps = standing.num_steps;
        let best = best
            .zip(standing.best)
            .map(|(part, place)| trained(part, place, standing, interrupted));
        if interrupted {
            return Self::Stopped { best, num_steps, num_planned_steps };
        }
        Self::Finished(best.expect("an epoch that was run to its end was validated"))
    }

    /// What is best, finished or not.
    pub fn best(self) -> Option<T> {
        match self {
            Self::Finished(best) => Some(best),
            Self::Stopped { best, .. } => best,
        }
    }
}
