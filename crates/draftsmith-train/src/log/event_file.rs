//! TensorBoard event files beside `metrics.jsonl`: the numbers of each step, and the scores of each
//! validation.
//!
//! Every run of a training begins a new file, because a running TensorBoard continues with files that
//! come later by name, but not with a file that was replaced. Steps that the run will repeat are cut off
//! the earlier files, so that no step appears twice. The new file begins with a session start at its
//! first step, which makes TensorBoard discard what it has read from that step on. Wall times are the
//! only data in a training's directory that differ between identical runs.

mod record;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use draftsmith_files::paths_in;

use self::record::{
    Event, EventContent, SessionLog, SessionStatus, Summary, Value, decode, encode,
};
use crate::error::{TrainError, file_error};

/// The prefix by which TensorBoard recognises event files. It orders them by the rest of the name.
const PREFIX: &str = "events.out.tfevents.";
/// The prefix of the names of training numbers.
pub(super) const TRAINING: &str = "train/";
/// The prefix of the names of validation scores.
pub(crate) const VALIDATION: &str = "validation/";

/// An open event file.
#[derive(Debug)]
pub(crate) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a file for a training after `num_steps` steps and `num_validations` validations. Later
    /// events are cut off the files in `dir`.
    pub(crate) fn begin(
        dir: &Path,
        num_steps: usize,
        num_validations: usize,
    ) -> Result<Self, TrainError> {
        let number = cut(dir, num_steps, num_validations)?;
        let path = dir.join(format!("{PREFIX}{number:010}.draftsmith"));
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(file_error("create", &path))?;
        let mut begun = Self { path, file };
        begun.push(0, EventContent::FileVersion("brain.Event:2".to_owned()))?;
        let start = SessionLog { status: SessionStatus::Start.into() };
        begun.push(num_steps + 1, EventContent::SessionLog(start))?;
        Ok(begun)
    }

    /// Appends the numbers of a step, or the scores of the validation after it. `group` is [`TRAINING`]
    /// or [`VALIDATION`].
    pub(crate) fn push_numbers(
        &mut self,
        group: &str,
        step: usize,
        numbers: &[(&str, f64)],
    ) -> Result<(), TrainError> {
        let value = |(name, number): &(&str, f64)| Value {
            tag: format!("{group}{name}"),
            simple_value: Some(*number as f32),
        };
        self.push(
            step,
            EventContent::Summary(Summary { values: numbers.iter().map(value).collect() }),
        )
    }

    /// Syncs the file to the disk.
    pub(crate) fn sync(&self) -> Result<(), TrainError> {
        self.file.sync_data().map_err(file_error("write", &self.path))
    }

    fn push(&mut self, step: usize, content: EventContent) -> Result<(), TrainError> {
        let wall_time = SystemTime::now().duration_since(UNIX_EPOCH);
        // The clock may be set before 1970.
        let wall_time = wall_time.map_or(0.0, |time| time.as_secs_f64());
        let event = Event { wall_time, step: step as i64, content: Some(content) };
        self.file.write_all(&encode(&event)).map_err(file_error("write", &self.path))
    }
}

/// Cuts off incomplete events and those after `num_steps` steps or `num_validations` validations from
/// the files in `dir`. Returns the number of the next file.
fn cut(dir: &Path, num_steps: usize, num_validations: usize) -> Result<usize, TrainError> {
    let mut files = files(dir)?;
    files.sort();
    let mut next = 0;
    let mut validations_left = num_validations;
    let mut is_past = false;
    for (number, path) in files {
        let bytes = fs::read(&path).map_err(file_error("read", &path))?;
        let (mut kept, mut has_numbers) = (0, false);
        while !is_past && let Some((event, length)) = decode(&bytes[kept..]) {
            if let Some(EventContent::Summary(summary)) = &event.content {
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
        done.map_err(file_error("cut", &path))?;
        if has_numbers {
            next = number + 1;
        }
    }
    Ok(next)
}

/// Lists the event files in a directory that this program wrote, with their numbers.
fn files(dir: &Path) -> Result<Vec<(usize, PathBuf)>, TrainError> {
    let number_of = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(PREFIX)?.strip_suffix(".draftsmith")?.parse().ok()
    };
    let paths = paths_in(dir)?.into_iter();
    Ok(paths.filter_map(|path| Some((number_of(&path)?, path))).collect())
}

#[cfg(test)]
mod tests;
