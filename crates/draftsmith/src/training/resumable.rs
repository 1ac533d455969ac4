//! A training that is watched, stopped and resumed.

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

/// The optimizer steps that `--steps` leaves, over all trainings of a command; no bound if absent.
pub(crate) type StepsLeft = Option<usize>;

/// The file of a batch that training failed at, beside the state.
const NOT_FINITE: &str = "not-finite.parquet";

/// A training that resumes where it was stopped.
pub(super) struct Resumable<'a> {
    console: &'a Console,
    /// The command, which notes begin with.
    command: &'static str,
    checkpoint_dir: PathBuf,
    fingerprint: String,
    num_steps_before: usize,
}

impl<'a> Resumable<'a> {
    /// Finds what an earlier run left in `checkpoint_dir` and says so. `fingerprint` names all that
    /// the training depends on.
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
                console.note(format!("{command}: resumes after step {num_steps}"));
                num_steps
            }
            Resumption::Other => {
                console.note(format!(
                    "{command}: `{}` holds a training that was stopped, with other settings or data; \
                     training begins anew",
                    checkpoint_dir.display()
                ));
                0
            }
        };
        Ok(Self { console, command, checkpoint_dir, fingerprint, num_steps_before })
    }

    /// Runs `train`, which Ctrl-C and the end of `--hours` stop, with the dashboard or with
    /// `progress`, and takes its steps off `steps_left`;
    /// `None` if it was stopped before anything came of it.
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

    /// Takes the steps of this run off `steps_left`, and tells where it was stopped.
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

    /// What training failed with. A batch that no number came of is saved, for a look at it.
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
            Ok(()) => anyhow!("{error}; they are saved in `{}`", path.display()),
            Err(unsaved) => anyhow!("{error}; they could not be saved: {unsaved}"),
        }
    }

    /// Removes the state, and the batch of an earlier failure: what was trained is written.
    pub(super) fn discard(&self) -> Result<()> {
        discard(&self.checkpoint_dir)?;
        // Nearly always there is none.
        let _ = std::fs::remove_file(self.checkpoint_dir.join(NOT_FINITE));
        Ok(())
    }
}
