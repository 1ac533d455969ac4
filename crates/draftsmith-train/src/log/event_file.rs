//! Event files for TensorBoard beside `metrics.jsonl`: the numbers of each step, and the scores of
//! each validation.
//!
//! Each call of a trainer begins a file of its own, as a TensorBoard that is watching reads on in a
//! file that comes later in the order of names, but not in one that was replaced. The steps of
//! earlier files that it is to take again are cut off, so that no step is there twice, and it
//! begins with a session's start at its first step, at which TensorBoard forgets what it read of
//! them before. Wall times are of the moment, and the only thing in a training's directory that
//! another run does not repeat.

mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use draftsmith_data::DataError;

use self::record::{Event, SessionLog, SessionStatus, Summary, Value, What, decode, encode};
use crate::error::TrainError;

/// What TensorBoard knows event files by, and orders them by after it.
const PREFIX: &str = "events.out.tfevents.";
/// What a number's name begins with if it is a validation's.
const VALIDATION: &str = "validation/";

/// A file, open for steps to come.
#[derive(Debug)]
pub(crate) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a file for a training that has taken `num_steps` and was validated `num_validations`
    /// times. What the files in `dir` have beyond that is cut off.
    pub(crate) fn begin(
        dir: &Path,
        num_steps: usize,
        num_validations: usize,
    ) -> Result<Self, TrainError> {
        let number = cut(dir, num_steps, num_validations)?;
        let path = dir.join(format!("{PREFIX}{number:010}.draftsmith"));
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(|error| DataError::io("create", &path, error))?;
        let mut begun = Self { path, file };
        begun.push(0, What::FileVersion("brain.Event:2".to_owned()))?;
        let start = SessionLog { status: SessionStatus::Start.into() };
        begun.push(num_steps + 1, What::SessionLog(start))?;
        Ok(begun)
    }

    /// Appends a step's numbers, with their names.
    pub(crate) fn push_step(
        &mut self,
        step: usize,
        numbers: &[(&str, f64)],
    ) -> Result<(), TrainError> {
        self.push_numbers("train/", step, numbers)
    }

    /// Appends the scores of a validation after a step, with their names.
    pub(crate) fn push_validation(
        &mut self,
        step: usize,
        scores: &[(&str, f64)],
    ) -> Result<(), TrainError> {
        self.push_numbers(VALIDATION, step, scores)
    }

    /// Waits until every event is on the disk.
    pub(crate) fn sync(&self) -> Result<(), TrainError> {
        self.done(self.file.sync_data())
    }

    fn push_numbers(
        &mut self,
        group: &str,
        step: usize,
        numbers: &[(&str, f64)],
    ) -> Result<(), TrainError> {
        let value = |(name, number): &(&str, f64)| Value {
            tag: format!("{group}{name}"),
            simple_value: Some(*number as f32),
        };
        self.push(step, What::Summary(Summary { values: numbers.iter().map(value).collect() }))
    }

    fn push(&mut self, step: usize, what: What) -> Result<(), TrainError> {
        let wall_time = SystemTime::now().duration_since(UNIX_EPOCH);
        // A clock set before 1970 orders nothing either.
        let wall_time = wall_time.map_or(0.0, |time| time.as_secs_f64());
        let event = Event { wall_time, step: step as i64, what: Some(what) };
        let written = self.file.write_all(&encode(&event));
        self.done(written)
    }

    fn done(&self, result: std::io::Result<()>) -> Result<(), TrainError> {
        Ok(result.map_err(|error| DataError::io("write", &self.path, error))?)
    }
}

/// Cuts off what the files in `dir` have after `num_steps` steps and `num_validations` validations,
/// and what is not whole. Gives the number of the next file.
fn cut(dir: &Path, num_steps: usize, num_validations: usize) -> Result<usize, TrainError> {
    let mut files = files(dir)?;
    files.sort();
    let mut next = 0;
    let mut validations_left = num_validations;
    let mut is_past = false;
    for (number, path) in files {
        let bytes = fs::read(&path).map_err(|error| DataError::io("read", &path, error))?;
        let (mut kept, mut has_numbers) = (0, false);
        while !is_past && let Some((event, length)) = decode(&bytes[kept..]) {
            if let Some(What::Summary(summary)) = &event.what {
                let is_validation =
                    summary.values.iter().any(|value| value.tag.starts_with(VALIDATION));
                is_past = event.step > num_steps as i64 || (is_validation && validations_left == 0);
                if is_past {
                    break;
                }
                validations_left -= usize::from(is_validation);
                has_numbers = true;
            }
            kept += length;
        }
        let done = if !has_numbers {
            fs::remove_file(&path)
        } else if kept < bytes.len() {
            let file = OpenOptions::new().write(true).open(&path);
            file.and_then(|file| file.set_len(kept as u64))
        } else {
            Ok(())
        };
        done.map_err(|error| DataError::io("cut", &path, error))?;
        if has_numbers {
            next = number + 1;
        }
    }
    Ok(next)
}

/// Our event files in a directory, with their numbers.
fn files(dir: &Path) -> Result<Vec<(usize, PathBuf)>, TrainError> {
    let failed = |error| DataError::io("read", dir, error);
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error).into()),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let number = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.strip_suffix(".draftsmith"))
            .and_then(|number| number.parse().ok());
        files.extend(number.map(|number| (number, path)));
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
