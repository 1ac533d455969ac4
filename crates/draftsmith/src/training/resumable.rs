//! Runs a training that can be watched, interrupted and resumed.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use draftsmith_data::{Provenance, ResponseRow, hash_bytes, write_shard};
use draftsmith_train::renderer::{EndRenderer, ListeningRenderer};
use draftsmith_train::{
    Ending, Interrupter, Resumption, TrainError, TrainingRun, TrainingSize, discard,
};

use super::progress::EpochProgress;
use crate::console::Console;
use crate::console::dashboard;

/// The optimizer steps left of `--steps`, over all trainings of a command; `None` for no limit.
pub(crate) type StepsLeft = Option<usize>;

/// The file beside the state for a batch whose loss was not finite.
const NOT_FINITE: &str = "not-finite.parquet";

/// A training that continues where an earlier run stopped.
pub(super) struct Resumable<'a> {
    console: &'a Console,
    /// The command, for notes.
    command: &'static str,
    checkpoint_dir: PathBuf,
    fingerprint: String,
    num_steps_before: usize,
}

impl<'a> Resumable<'a> {
    /// Finds and notes an earlier run's state in `checkpoint_dir`. `fingerprint` covers everything that the
    /// training depends on.
    pub(super) fn find(
        console: &'a Console,
        command: &'static str,
        checkpoint_dir: PathBuf,
        fingerprint: &str,
    ) -> Result<Self> {
        let fingerprint = hash_bytes(fingerprint.as_bytes());
        let num_steps_before = match Resumption::find(&checkpoint_dir, &fingerprint)? {
            Resumption::Nothing => 0,
            Resumption::After(num_steps) => {
                console.note(format!("{command}: resuming after step {num_steps}"));
                num_steps
            }
            Resumption::Other => {
                console.note(format!(
                    "{command}: the state in `{}` is of other settings or data; starting over",
                    checkpoint_dir.display()
                ));
                0
            }
        };
        Ok(Self { console, command, checkpoint_dir, fingerprint, num_steps_before })
    }

    /// Runs `train` with the dashboard or `progress` until it ends or is interrupted, and subtracts its steps
    /// from `steps_left`. `None` if it was interrupted before the first epoch ended.
    pub(super) fn train<T>(
        &self,
        steps_left: &mut StepsLeft,
        progress: EpochProgress,
        (rows, provenance): (&[ResponseRow], &Provenance),
        begins: &dyn Fn(TrainingSize),
        train: impl FnOnce(TrainingRun<'_>) -> Result<Ending<T>, TrainError>,
    ) -> Result<Option<T>> {
        let interrupter = Interrupter::new();
        let train = |renderer, end_renderer: EndRenderer| {
            let console = self.console.clone();
            let ending = train(TrainingRun {
                max_steps: *steps_left,
                renderer,
                end_renderer,
                interrupter: interrupter.clone(),
                should_stop: Box::new(move || console.is_interrupted()),
                begins: Box::new(begins),
                ..TrainingRun::new(&self.checkpoint_dir, &self.fingerprint)
            });
            ending.map_err(|error| self.explain(error, rows, provenance))
        };
        let ending = if dashboard::is_wanted(self.console) {
            dashboard::watched(self.console, &interrupter, train)
        } else {
            train(Box::new(ListeningRenderer::new(progress)), drop)
        };
        self.end(ending?, steps_left)
    }

    /// Subtracts this run's steps from `steps_left`, and notes where it was interrupted.
    fn end<T>(&self, ending: Ending<T>, steps_left: &mut StepsLeft) -> Result<Option<T>> {
        if let Resumption::After(num_steps) =
            Resumption::find(&self.checkpoint_dir, &self.fingerprint)?
        {
            let num_taken = num_steps.saturating_sub(self.num_steps_before);
            *steps_left = steps_left.map(|left| left.saturating_sub(num_taken));
        }
        if let Ending::Stopped { num_steps, num_planned_steps, .. } = &ending {
            self.console.note(format!(
                "{}: stopped after step {num_steps} of {num_planned_steps}; its state is in `{}`",
                self.command,
                self.checkpoint_dir.display()
            ));
        }
        Ok(ending.best())
    }

    /// The training's error. A batch whose loss was not finite is saved for inspection.
    fn explain(
        &self,
        error: TrainError,
        rows: &[ResponseRow],
        provenance: &Provenance,
    ) -> anyhow::Error {
        let TrainError::NotFinite { row_ids, .. } = &error else { return error.into() };
        let batch: Vec<ResponseRow> =
            rows.iter().filter(|row| row_ids.contains(&row.id)).cloned().collect();
        let path = self.checkpoint_dir.join(NOT_FINITE);
        match write_shard(&path, &batch, provenance, None) {
            Ok(()) => anyhow!("{error}; the rows are saved in `{}`", path.display()),
            Err(unsaved) => anyhow!("{error}; the rows could not be saved: {unsaved}"),
        }
    }

    /// Removes the state and the batch of an earlier failure, once the exports are written.
    pub(super) fn discard(&self) -> Result<()> {
        discard(&self.checkpoint_dir)?;
        // It rarely exists.
        let _ = std::fs::remove_file(self.checkpoint_dir.join(NOT_FINITE));
        Ok(())
    }
}
