//! The state of a training on disk, from which a run resumes exactly.
//!
//! A state is the directory `checkpoint/epoch-E-step-S/` under the training's directory. It
//! contains `state.toml` and burn records of the weights, the optimizer's moments and the best
//! weights (safetensors lacks the parameter ids that identify optimizer state). If several members
//! are trained side by side, each has a directory for its records. `state.toml` is written last; a
//! directory without it is ignored. It contains a checksum of each record and, on its first line,
//! of itself, so a file that has changed causes an error. burn-train's own checkpoints are not
//! used: it writes three separate files, and only at the ends of epochs.
//!
//! Training resumes exactly: the state holds everything that a step changes. It is taken only between
//! steps, when no gradients are pending. The order of rows and their mixtures are functions of (seed,
//! epoch, row id), and the learning rate is a function of the step. The fingerprint covers everything
//! else that a training depends on. State that a new feature changes during a step must be added to
//! `progress.rs`, and settings that it reads to the fingerprint.

use std::fs;
use std::path::{Path, PathBuf};

use draftsmith_files::{hash_bytes, if_present, paths_in, write_whole};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError, file_error};
use crate::run::progress::{MemberProgress, RunProgress};

/// The state of a training.
#[derive(Debug)]
pub(crate) struct TrainingState<S> {
    pub(crate) progress: RunProgress,
    pub(crate) members: Vec<MemberState<S>>,
}

/// The state of a member. `R` is the type of burn records: their bytes, or in `state.toml` their
/// SHA-256 hashes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemberState<S, R = Vec<u8>> {
    /// The member's directory within the state's directory.
    pub(crate) name: String,
    pub(crate) model: R,
    pub(crate) optimizer: R,
    /// The weights of the best epoch; `None` before the end of the first epoch.
    pub(crate) best: Option<R>,
    pub(crate) progress: MemberProgress<S>,
}

impl<S, R> MemberState<S, R> {
    /// Converts each record, with the name of its file.
    fn try_map<T>(self, each: impl Fn(&str, R) -> Result<T>) -> Result<MemberState<S, T>> {
        let Self { name, model, optimizer, best, progress } = self;
        let (model, optimizer) = (each(MODEL, model)?, each(OPTIMIZER, optimizer)?);
        let best = best.map(|best| each(BEST, best)).transpose()?;
        Ok(MemberState { name, model, optimizer, best, progress })
    }
}

/// The contents of `state.toml`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainingStateFile<S> {
    fingerprint: String,
    progress: RunProgress,
    members: Vec<MemberState<S, String>>,
}

/// The part of `state.toml` that is read first.
#[derive(Debug, Deserialize)]
struct Fingerprint {
    fingerprint: String,
}

/// The point at which a run would begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumption {
    /// The beginning of the training: there is no saved state.
    Nothing,
    /// The beginning of the training: the saved state has another fingerprint.
    Other,
    /// The point after this many optimizer steps, where a saved state ends.
    After(usize),
}

impl Resumption {
    /// Finds out where a run would begin, from the states saved in `checkpoint_dir`.
    ///
    /// # Errors
    /// If a state cannot be read, or has changed since it was saved.
    pub fn find(checkpoint_dir: &Path, fingerprint: &str) -> Result<Self> {
        let Some(dir) = latest(checkpoint_dir)? else { return Ok(Self::Nothing) };
        let state = read_state::<IgnoredAny>(&dir, fingerprint)?;
        Ok(state.map_or(Self::Other, |state| Self::After(state.progress.num_steps)))
    }
}

/// Removes the state of a training, once its result is saved elsewhere. Its metrics remain.
///
/// # Errors
/// If it cannot be removed.
pub fn discard(checkpoint_dir: &Path) -> Result<()> {
    remove_dir(&checkpoint_dir.join(STATES))
}

const STATES: &str = "checkpoint";
pub(crate) const MODEL: &str = "model.bpk";
pub(crate) const OPTIMIZER: &str = "optimizer.bpk";
pub(crate) const BEST: &str = "best.bpk";
const STATE: &str = "state.toml";
/// The prefix of the fingerprint in `state.toml`, which identifies the form of the state: the
/// optimizer's moments are stored as one row. Earlier versions stored them by parameter.
const FORM: &str = "row ";
/// The beginning of the first line of `state.toml`, which contains the checksum of the rest.
const CHECKSUM: &str = "checksum = \"";

/// Writes a state, and removes earlier states.
pub(crate) fn save<S: Serialize>(
    checkpoint_dir: &Path,
    fingerprint: &str,
    state: TrainingState<S>,
) -> Result<()> {
    let TrainingState { progress, members } = state;
    let name = format!("epoch-{}-step-{}", progress.epoch, progress.epoch_steps);
    let dir = checkpoint_dir.join(STATES).join(name);
    let members = members.into_iter().map(|member| {
        let dir = dir.join(&member.name);
        member.try_map(|file, record| {
            write_whole(&dir.join(file), &record)?;
            Ok(hash_bytes(&record))
        })
    });
    let members = members.collect::<Result<_>>()?;
    let file = TrainingStateFile { fingerprint: format!("{FORM}{fingerprint}"), progress, members };
    let text = toml::to_string(&file).expect("numbers and names are TOML");
    write_whole(&dir.join(STATE), format!("{CHECKSUM}{}\"\n{text}", hash_bytes(text.as_bytes())))?;
    for (_, other) in states(checkpoint_dir)? {
        if other != dir {
            remove_dir(&other)?;
        }
    }
    Ok(())
}

/// Reads the latest state, and returns it with its directory. `None` if there is no complete state
/// or it has another fingerprint.
pub(crate) fn load<S: DeserializeOwned>(
    checkpoint_dir: &Path,
    fingerprint: &str,
) -> Result<Option<(TrainingState<S>, PathBuf)>> {
    let Some(dir) = latest(checkpoint_dir)? else { return Ok(None) };
    let Some(file) = read_state::<S>(&dir, fingerprint)? else { return Ok(None) };
    let members = file.members.into_iter().map(|member| {
        let dir = dir.join(&member.name);
        member.try_map(|file, hash: String| read_record(&dir.join(file), &hash))
    });
    let members = members.collect::<Result<_>>()?;
    Ok(Some((TrainingState { progress: file.progress, members }, dir)))
}

/// The number of an epoch, and the number of steps taken in it.
type Position = (usize, usize);

/// Lists the directories of complete and incomplete states, with their positions.
fn states(checkpoint_dir: &Path) -> Result<Vec<(Position, PathBuf)>> {
    let root = checkpoint_dir.join(STATES);
    let paths = if root.exists() { paths_in(&root)? } else { Vec::new() };
    let position = |path: &Path| position_of(path.file_name()?.to_str()?);
    Ok(paths.into_iter().filter_map(|path| Some((position(&path)?, path))).collect())
}

/// Parses a position: (2, 7) for `epoch-2-step-7`.
fn position_of(name: &str) -> Option<Position> {
    let (epoch, step) = name.strip_prefix("epoch-")?.split_once("-step-")?;
    Some((epoch.parse().ok()?, step.parse().ok()?))
}

/// Finds the latest complete state. The one before it may still exist.
fn latest(checkpoint_dir: &Path) -> Result<Option<PathBuf>> {
    let states = states(checkpoint_dir)?.into_iter();
    Ok(states.filter(|(_, dir)| dir.join(STATE).is_file()).max().map(|(_, dir)| dir))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|error| broken(path, error.to_string()))
}

/// Reads a record and verifies its hash.
fn read_record(path: &Path, hash: &str) -> Result<Vec<u8>> {
    let record = read(path)?;
    if hash_bytes(&record) == hash { Ok(record) } else { Err(changed(path)) }
}

/// Reads the `state.toml` of a state and verifies its checksum. `None` if it has another fingerprint.
fn read_state<S: DeserializeOwned>(
    dir: &Path,
    fingerprint: &str,
) -> Result<Option<TrainingStateFile<S>>> {
    let path = dir.join(STATE);
    let text = read(&path)?;
    let text = std::str::from_utf8(&text).map_err(|_| changed(&path))?;
    let (hash, text) = text
        .strip_prefix(CHECKSUM)
        .and_then(|rest| rest.split_once("\"\n"))
        .ok_or_else(|| broken(&path, "there is no checksum on its first line".to_owned()))?;
    if hash_bytes(text.as_bytes()) != hash {
        return Err(changed(&path));
    }
    let invalid = |error: toml::de::Error| broken(&path, error.message().to_owned());
    let found: Fingerprint = toml::from_str(text).map_err(invalid)?;
    if found.fingerprint.strip_prefix(FORM) != Some(fingerprint) {
        return Ok(None);
    }
    toml::from_str(text).map(Some).map_err(invalid)
}

fn changed(path: &Path) -> TrainError {
    broken(path, "the file has changed: its checksum does not match".to_owned())
}

/// Builds the error for a state from which no run can resume.
pub(crate) fn broken(path: &Path, problem: String) -> TrainError {
    TrainError::Invalid(format!(
        "cannot resume from `{}`: {problem}; hint: delete the `checkpoint` directory that contains it to train from the \
         beginning",
        path.display()
    ))
}

fn remove_dir(path: &Path) -> Result<()> {
    if_present(fs::remove_dir_all(path)).map(drop).map_err(file_error("remove", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::progress::EpochScores;

    fn state(epoch: usize, epoch_steps: usize) -> TrainingState<f64> {
        let validation = 0.1 + 0.2;
        let scored = EpochScores { epoch: 1, num_steps: 3, training_loss: 1.0 / 3.0, validation };
        let progress = MemberProgress {
            loss_sum: 5e-324,
            num_steps: 3,
            best: Some(0),
            epochs: vec![scored],
            ..MemberProgress::default()
        };
        let best = Some(vec![3]);
        let member = |name: &str, progress, best| MemberState {
            name: name.to_owned(),
            progress,
            model: vec![1],
            optimizer: vec![2; 9],
            best,
        };
        TrainingState {
            progress: RunProgress { epoch, epoch_steps, num_steps: 7, ..RunProgress::default() },
            members: vec![
                member("", progress, best),
                member("second", MemberProgress::default(), None),
            ],
        }
    }

    #[test]
    fn a_saved_state_is_read_back_and_replaces_the_previous_one() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Resumption::find(dir.path(), "a").unwrap(), Resumption::Nothing);
        assert!(load::<f64>(dir.path(), "a").unwrap().is_none());
        for (epoch, step) in [(1, 9), (2, 0), (2, 10)] {
            save(dir.path(), "a", state(epoch, step)).unwrap();
            let found = load::<f64>(dir.path(), "a").unwrap().unwrap().0;
            let expected = state(epoch, step);
            assert_eq!(found.progress, expected.progress);
            assert_eq!(found.members, expected.members);
            assert_eq!(states(dir.path()).unwrap().len(), 1);
        }
        assert_eq!(Resumption::find(dir.path(), "a").unwrap(), Resumption::After(7));
        assert_eq!(Resumption::find(dir.path(), "b").unwrap(), Resumption::Other);
        assert!(load::<f64>(dir.path(), "b").unwrap().is_none());
        discard(dir.path()).unwrap();
        assert_eq!(Resumption::find(dir.path(), "a").unwrap(), Resumption::Nothing);
    }

    #[test]
    fn unfinished_states_are_ignored_and_errors_name_a_broken_one() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), "a", state(1, 9)).unwrap();
        let half = dir.path().join("checkpoint/epoch-1-step-10");
        fs::create_dir_all(&half).unwrap();
        fs::write(half.join(MODEL), "half").unwrap();
        let found = load::<f64>(dir.path(), "a").unwrap().unwrap().0;
        assert_eq!(found.progress.epoch_steps, 9);
        fs::write(half.join(STATE), "fingerprint = 1").unwrap();
        for message in [
            load::<f64>(dir.path(), "a").unwrap_err().to_string(),
            Resumption::find(dir.path(), "a").unwrap_err().to_string(),
        ] {
            assert!(message.contains("epoch-1-step-10/state.toml"), "{message}");
            assert!(message.contains("hint: delete"), "{message}");
        }
    }

    #[test]
    fn any_changed_inserted_or_removed_byte_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), "a", state(2, 7)).unwrap();
        let state = dir.path().join("checkpoint/epoch-2-step-7");
        for name in [STATE, MODEL, OPTIMIZER, BEST, "second/optimizer.bpk"] {
            let whole = fs::read(state.join(name)).unwrap();
            let spoilt = (0..whole.len()).flat_map(|at| {
                let (mut changed, mut longer, mut shorter) =
                    (whole.clone(), whole.clone(), whole.clone());
                changed[at] ^= 1;
                longer.insert(at, b' ');
                shorter.remove(at);
                [changed, longer, shorter]
            });
            for bytes in spoilt {
                fs::write(state.join(name), bytes).unwrap();
                let message = load::<f64>(dir.path(), "a").unwrap_err().to_string();
                assert!(message.contains(&format!("epoch-2-step-7/{name}`")), "{message}");
                assert!(message.contains("checksum") && message.contains("hint: "), "{message}");
            }
            fs::write(state.join(name), whole).unwrap();
            load::<f64>(dir.path(), "a").unwrap().unwrap();
        }
    }
}
