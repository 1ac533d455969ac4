//! The log of optimizer steps: `metrics.jsonl`, one line of numbers per step.
//!
//! A resumed training first removes the steps that were logged after its saved state. So
//! `metrics.jsonl` does not depend on interruptions.

pub mod renderer;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use draftsmith_files::{if_present, read_text, write_whole};
use serde::Serialize;

use crate::error::{Result, file_error};

/// The numbers that are logged for one optimizer step.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct StepMetrics {
    /// The number of the step, counted from 1 over all epochs.
    pub(crate) step: usize,
    /// The number of the epoch, counted from 1.
    pub(crate) epoch: usize,
    /// The mean loss of the step's batches, computed before the weights change.
    pub(crate) loss: f64,
    pub(crate) learning_rate: f64,
    /// The global norm of the step's gradients before clipping.
    pub(crate) gradient_norm: f64,
}

/// The open log file.
#[derive(Debug)]
pub(crate) struct StepLog {
    path: PathBuf,
    file: File,
}

impl StepLog {
    const NAME: &str = "metrics.jsonl";

    /// Opens the log of a training that has taken `num_steps` steps. Later steps are removed from
    /// it: a killed run logged them but did not save their state.
    pub(crate) fn open(dir: &Path, num_steps: usize) -> Result<Self> {
        let path = dir.join(Self::NAME);
        let text = if_present(read_text(&path)).map_err(file_error("read", &path))?;
        let text = text.unwrap_or_default();
        let kept: String = text.split_inclusive('\n').take(num_steps).collect();
        if kept.len() < text.len() {
            write_whole(&path, &kept)?;
        }
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let file = file.map_err(file_error("create", &path))?;
        Ok(Self { path, file })
    }

    /// Appends the numbers of a step.
    pub(crate) fn push(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_string(metrics).expect("numbers are JSON");
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(file_error("write", &self.path))
    }

    /// Syncs the log to the disk. This comes before the state of its last step is saved.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(file_error("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_that_names_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = StepLog::open(dir.path(), 0).unwrap();
        log.file = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let metrics =
            StepMetrics { step: 1, epoch: 1, loss: 0.5, learning_rate: 1e-3, gradient_norm: 2.0 };
        let message = log.push(&metrics).unwrap_err().to_string();
        assert!(message.contains("metrics.jsonl`: No space left"), "{message}");
    }

    #[test]
    fn steps_after_the_saved_state_are_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let push = |log: &mut StepLog, step| {
            let loss = 0.1 + 0.2;
            log.push(&StepMetrics { step, epoch: 1, loss, learning_rate: 1e-3, gradient_norm: 2.0 })
        };
        let mut log = StepLog::open(dir.path(), 0).unwrap();
        (1..=5).for_each(|step| push(&mut log, step).unwrap());
        log.sync().unwrap();
        let read = || std::fs::read_to_string(dir.path().join(StepLog::NAME)).unwrap();
        let whole = read();
        assert_eq!(
            whole.lines().next().unwrap(),
            r#"{"step":1,"epoch":1,"loss":0.30000000000000004,"learning_rate":0.001,"gradient_norm":2.0}"#
        );
        // The process was killed while it wrote a line.
        std::fs::write(dir.path().join(StepLog::NAME), &whole[..whole.len() - 9]).unwrap();
        let mut log = StepLog::open(dir.path(), 3).unwrap();
        assert_eq!(read().lines().count(), 3);
        (4..=5).for_each(|step| push(&mut log, step).unwrap());
        assert_eq!(read(), whole);
    }
}
