//! The state of a training on disk, from which a run resumes as if it had never stopped.
//!
//! A state is a directory of its own, `checkpoint/epoch-E-step-S/` under the training's: weights,
//! optimizer and best weights as burn's records (safetensors has no parameter ids, by which the
//! optimizer's state is kept), in a directory for each member if there are several, and
//! `state.toml`, written last: a directory without it does not count. It has the checksum of each
//! record, and its own on its first line: what was changed since is refused, not trained on.
//! States are taken between steps only, when no gradients are pending. The order of rows and their
//! mixtures are functions of (seed, epoch, row id), and the learning rate one of the step, so that
//! nothing else need be kept. burn-train's own checkpoints are taken at the ends of epochs, in
//! three files that can tear.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn::tensor::Bytes;
use draftsmith_data::hash_bytes;
use draftsmith_files::write_whole;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::run::progress::{MemberProgress, RunProgress};

/// A state as it is kept.
#[derive(Debug)]
pub(crate) struct State<S> {
    pub(crate) progress: RunProgress,
    pub(crate) members: Vec<MemberState<S>>,
}

/// A member's part of it.
#[derive(Debug, PartialEq)]
pub(crate) struct MemberState<S> {
    /// Its directory in the state's.
    pub(crate) name: String,
    pub(crate) progress: MemberProgress<S>,
    /// burn's records.
    pub(crate) model: Vec<u8>,
    pub(crate) optimizer: Vec<u8>,
    /// That of the best epoch's weights, where there is one.
    pub(crate) best: Option<Vec<u8>>,
}

/// `state.toml`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile<S> {
    fingerprint: String,
    progress: RunProgress,
    members: Vec<MemberEntry<S>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemberEntry<S> {
    name: String,
    /// The records' SHA-256.
    model: String,
    optimizer: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<String>,
    progress: MemberProgress<S>,
}

/// The part of it that [`Resumption::find`] reads.
#[derive(Debug, Deserialize)]
struct Summary {
    fingerprint: String,
    progress: ProgressSummary,
}

#[derive(Debug, Deserialize)]
struct ProgressSummary {
    num_steps: usize,
}

/// What a run would begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumption {
    /// No state is there: it would begin anew.
    Nothing,
    /// The state of a training with another fingerprint is there: it would begin anew, without it.
    Other,
    /// It would resume after so many optimizer steps.
    After(usize),
}

impl Resumption {
    /// Looks into a training's directory.
    ///
    /// # Errors
    /// If a state cannot be read, or is not as it was saved.
    pub fn find(checkpoint_dir: &Path, fingerprint: &str) -> Result<Self, TrainError> {
        let Some(dir) = latest(checkpoint_dir)? else { return Ok(Self::Nothing) };
        let found: Summary = parse(&dir, &read_checked(&dir)?)?;
        let is_ours = found.fingerprint == fingerprint;
        Ok(if is_ours { Self::After(found.progress.num_steps) } else { Self::Other })
    }
}

/// Removes a training's state, once what it led to is safe elsewhere. Its metrics stay.
///
/// # Errors
/// If it cannot be removed.
pub fn discard(checkpoint_dir: &Path) -> Result<(), TrainError> {
    remove_dir(&checkpoint_dir.join(STATES))
}

const STATES: &str = "checkpoint";
pub(crate) const MODEL: &str = "model.bpk";
pub(crate) const OPTIMIZER: &str = "optimizer.bpk";
pub(crate) const BEST: &str = "best.bpk";
const STATE: &str = "state.toml";
/// What the line begins with that has the checksum of all that follows it.
const CHECKSUM: &str = "checksum = \"";

/// Writes a state, and removes those before it.
pub(crate) fn save<S: Serialize>(
    checkpoint_dir: &Path,
    fingerprint: &str,
    state: State<S>,
) -> Result<(), TrainError> {
    let State { progress, members } = state;
    let name = format!("epoch-{}-step-{}", progress.epoch, progress.epoch_steps);
    let dir = checkpoint_dir.join(STATES).join(name);
    let mut entries = Vec::with_capacity(members.len());
    for MemberState { name, progress, model, optimizer, best } in members {
        let dir = dir.join(&name);
        fs::create_dir_all(&dir).map_err(|source| TrainError::CheckpointDir {
            action: "create",
            path: dir.clone(),
            source,
        })?;
        let write = |file, record: &[u8]| {
            write_whole(&dir.join(file), record)?;
            Ok::<_, TrainError>(hash_bytes(record))
        };
        entries.push(MemberEntry {
            name,
            model: write(MODEL, &model)?,
            optimizer: write(OPTIMIZER, &optimizer)?,
            best: best.map(|best| write(BEST, &best)).transpose()?,
            progress,
        });
    }
    let file = StateFile { fingerprint: fingerprint.to_owned(), progress, members: entries };
    let text = toml::to_string(&file).expect("numbers and names are TOML");
    write_whole(&dir.join(STATE), format!("{CHECKSUM}{}\"\n{text}", hash_bytes(text.as_bytes())))?;
    for (other, _) in states(checkpoint_dir)? {
        if other != dir {
            remove_dir(&other)?;
        }
    }
    Ok(())
}

/// Reads the latest state and its directory, if it has this fingerprint.
pub(crate) fn load<S: DeserializeOwned>(
    checkpoint_dir: &Path,
    fingerprint: &str,
) -> Result<Option<(State<S>, PathBuf)>, TrainError> {
    let Some(dir) = latest(checkpoint_dir)? else { return Ok(None) };
    let text = read_checked(&dir)?;
    let summary: Summary = parse(&dir, &text)?;
    if summary.fingerprint != fingerprint {
        return Ok(None);
    }
    let file: StateFile<S> = parse(&dir, &text)?;
    let members = file.members.into_iter().map(|entry| {
        let dir = dir.join(&entry.name);
        Ok(MemberState {
            model: read_record(&dir.join(MODEL), &entry.model)?,
            optimizer: read_record(&dir.join(OPTIMIZER), &entry.optimizer)?,
            best: entry.best.map(|hash| read_record(&dir.join(BEST), &hash)).transpose()?,
            name: entry.name,
            progress: entry.progress,
        })
    });
    let members = members.collect::<Result<_, TrainError>>()?;
    Ok(Some((State { progress: file.progress, members }, dir)))
}

/// A record's bytes as burn reads them.
pub(crate) fn record(bytes: Vec<u8>) -> Bytes {
    Bytes::from_bytes_vec(bytes)
}

/// An epoch, and the steps taken in it.
type Position = (usize, usize);

/// The directories of whole and broken-off states, with their positions.
fn states(checkpoint_dir: &Path) -> Result<Vec<(PathBuf, Position)>, TrainError> {
    let root = checkpoint_dir.join(STATES);
    let failed = |source| TrainError::CheckpointDir { action: "read", path: root.clone(), source };
    let entries = match fs::read_dir(&root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        if let Some(position) = path.file_name().and_then(|name| position_of(name.to_str()?)) {
            found.push((path, position));
        }
    }
    Ok(found)
}

/// (2, 7) for `epoch-2-step-7`.
fn position_of(name: &str) -> Option<Position> {
    let (epoch, step) = name.strip_prefix("epoch-")?.split_once("-step-")?;
    Some((epoch.parse().ok()?, step.parse().ok()?))
}

/// The whole state that is furthest on: the one before it may still be there.
fn latest(checkpoint_dir: &Path) -> Result<Option<PathBuf>, TrainError> {
    let states = states(checkpoint_dir)?.into_iter();
    let whole = states.filter(|(dir, _)| dir.join(STATE).is_file());
    Ok(whole.max_by_key(|(_, position)| *position).map(|(dir, _)| dir))
}

fn read(path: &Path) -> Result<Vec<u8>, TrainError> {
    fs::read(path).map_err(|error| broken(path, error.to_string()))
}

/// A record, if it is the one that was saved.
fn read_record(path: &Path, hash: &str) -> Result<Vec<u8>, TrainError> {
    let record = read(path)?;
    if hash_bytes(&record) == hash { Ok(record) } else { Err(changed(path)) }
}

/// A state's `state.toml` without its first line, if it is as it was saved.
fn read_checked(dir: &Path) -> Result<String, TrainError> {
    let path = dir.join(STATE);
    let text = read(&path)?;
    let text = std::str::from_utf8(&text).map_err(|_| changed(&path))?;
    let (hash, text) = text
        .strip_prefix(CHECKSUM)
        .and_then(|rest| rest.split_once("\"\n"))
        .ok_or_else(|| broken(&path, "it has no checksum on its first line".to_owned()))?;
    if hash_bytes(text.as_bytes()) == hash { Ok(text.to_owned()) } else { Err(changed(&path)) }
}

fn parse<T: DeserializeOwned>(dir: &Path, text: &str) -> Result<T, TrainError> {
    toml::from_str(text).map_err(|error| broken(&dir.join(STATE), error.message().to_owned()))
}

fn changed(path: &Path) -> TrainError {
    broken(path, "it is not what was saved: its checksum is another".to_owned())
}

/// The error of a state from which no run can resume.
pub(crate) fn broken(path: &Path, problem: String) -> TrainError {
    TrainError::State { path: path.to_path_buf(), problem }
}

fn remove_dir(path: &Path) -> Result<(), TrainError> {
    match fs::remove_dir_all(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(TrainError::CheckpointDir { action: "clear", path: path.to_path_buf(), source })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::progress::EpochScores;

    fn state(epoch: usize, epoch_steps: usize) -> State<f64> {
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
        State {
            progress: RunProgress { epoch, epoch_steps, num_steps: 7, ..RunProgress::default() },
            members: vec![
                member("", progress, best),
                member("second", MemberProgress::default(), None),
            ],
        }
    }

    #[test]
    fn a_state_comes_back_whole_and_replaces_the_one_before() {
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
    fn a_state_that_was_not_finished_does_not_count_and_a_broken_one_is_named() {
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
    fn a_byte_changed_or_put_in_anywhere_is_refused_by_name() {
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
