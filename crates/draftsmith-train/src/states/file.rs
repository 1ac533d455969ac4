//! The states of many rows in one file, of which each row's are there or not.
//!
//! A header says whose states they are; a file with another is begun anew. Behind it every row has a
//! place of its own, so that the length is known before anything is written: a CRC-32C, and states. A
//! row is there if its sum is right. What was never written is zeros, whose sum is not, and neither is
//! that of a row which was cut by a kill or a power cut: so nothing else says which rows are there.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use super::format::FeatureFormat;
use crate::error::TrainError;

const HELD: &str = "nobody panics while holding it";
/// What a file begins with, and how long its header is.
const MAGIC: &str = "draftsmith hidden states 1\n";
const HEADER: usize = 4096;
/// Bytes of a sum.
const SUM: usize = 4;

/// A row of a file that is to be.
pub(super) struct RowPlan {
    pub(super) id: String,
    pub(super) num_states: usize,
}

/// A file that is to be.
pub(super) struct Plan {
    path: PathBuf,
    header: Vec<u8>,
    format: FeatureFormat,
    width: usize,
    places: HashMap<String, Place>,
    num_bytes: u64,
}

/// Where a row's states are.
#[derive(Clone, Copy)]
struct Place {
    at: u64,
    num_bytes: usize,
}

impl Plan {
    pub(super) fn new(
        path: PathBuf,
        identity: &str,
        format: FeatureFormat,
        width: usize,
        rows: Vec<RowPlan>,
    ) -> Self {
        let mut header = format!("{MAGIC}{identity}\n").into_bytes();
        header.resize(HEADER.max(header.len()), 0);
        let mut at = header.len() as u64;
        let mut places = HashMap::with_capacity(rows.len());
        for RowPlan { id, num_states } in rows {
            let num_bytes = num_states * format.bytes_a_state(width);
            places.insert(id, Place { at, num_bytes });
            at += (SUM + num_bytes) as u64;
        }
        Self { path, header, format, width, places, num_bytes: at }
    }

    /// Its bytes, when it is whole.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Whether a file with this header and of this length is there.
    fn is_there(&self) -> bool {
        let mut header = vec![0; self.header.len()];
        let Ok(mut file) = File::open(&self.path) else { return false };
        let has_len = file.metadata().is_ok_and(|metadata| metadata.len() == self.num_bytes);
        has_len && file.read_exact(&mut header).is_ok() && header == self.header
    }

    /// The bytes that the disk has not given it yet.
    pub(super) fn num_missing_bytes(&self) -> u64 {
        let given = if self.is_there() { given_bytes(&self.path) } else { 0 };
        self.num_bytes.saturating_sub(given)
    }

    /// Opens it, empty where there is none that is as planned.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn open(self) -> Result<StateFile, TrainError> {
        let wrong = |action| {
            let path = self.path.clone();
            move |source| TrainError::CheckpointDir { action, path, source }
        };
        let is_there = self.is_there();
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir).map_err(wrong("create"))?;
        }
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(!is_there);
        let mut file = options.open(&self.path).map_err(wrong("open"))?;
        if !is_there {
            file.write_all(&self.header).map_err(wrong("write"))?;
            file.set_len(self.num_bytes).map_err(wrong("write"))?;
        }
        Ok(StateFile {
            path: self.path,
            file: Mutex::new(file),
            format: self.format,
            width: self.width,
            places: self.places,
            num_unfit: AtomicUsize::new(0),
            is_full: AtomicBool::new(false),
            problem: OnceLock::new(),
        })
    }
}

/// The bytes that a file takes on its disk: fewer than its length where it has holes.
#[cfg(unix)]
fn given_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

#[cfg(not(unix))]
fn given_bytes(_path: &Path) -> u64 {
    0
}

/// A file of states, some of which are there.
#[derive(Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
    file: Mutex<File>,
    format: FeatureFormat,
    /// Numbers of a token's state.
    width: usize,
    places: HashMap<String, Place>,
    num_unfit: AtomicUsize,
    /// Whether writing failed: then nothing more is written.
    is_full: AtomicBool,
    problem: OnceLock<String>,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.at, self.num_bytes)
    }
}

impl StateFile {
    /// A row's states, token by token, if they are there.
    pub(crate) fn read(&self, id: &str) -> Option<Vec<f32>> {
        let Place { at, num_bytes } = *self.places.get(id)?;
        let mut bytes = vec![0; SUM + num_bytes];
        let mut file = self.file.lock().expect(HELD);
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut bytes));
        drop(file);
        if let Err(error) = read {
            let problem = || format!("cannot read `{}`: {error}", self.path.display());
            self.problem.get_or_init(problem);
            return None;
        }
        let (sum, states) = bytes.split_at(SUM);
        let is_there = sum == crc32c::crc32c(states).to_le_bytes();
        is_there.then(|| self.format.decode(states, self.width))
    }

    /// Keeps a row's states, and gives them as they are read from now on.
    ///
    /// # Panics
    /// If there are more or fewer than was planned.
    pub(crate) fn keep(&self, id: &str, states: Vec<f32>) -> Vec<f32> {
        let Some(bytes) = self.format.encode(&states, self.width) else {
            self.num_unfit.fetch_add(1, Ordering::Relaxed);
            return states;
        };
        let place = self.places.get(id);
        assert_eq!(place.map(|place| place.num_bytes), Some(bytes.len()), "`{id}` is planned");
        let at = place.map_or(0, |place| place.at);
        if !self.is_full.load(Ordering::Relaxed) {
            let sum = crc32c::crc32c(&bytes).to_le_bytes();
            let all = [&sum[..], &bytes].concat();
            let mut file = self.file.lock().expect(HELD);
            if let Err(error) = file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(&all)) {
                self.is_full.store(true, Ordering::Relaxed);
                self.problem.get_or_init(|| {
                    format!(
                        "cannot write `{}`: {error}; what it lacks is computed in each epoch",
                        self.path.display()
                    )
                });
            }
        }
        self.format.decode(&bytes, self.width)
    }

    /// How often states were to be kept that the format cannot hold.
    pub(super) fn num_unfit(&self) -> usize {
        self.num_unfit.load(Ordering::Relaxed)
    }

    /// What went wrong first.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.get().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 3;

    fn plan(path: &Path, identity: &str) -> Plan {
        let rows = [("a", 2), ("b", 1), ("c", 4)];
        let row = |(id, num_states): (&str, usize)| RowPlan { id: id.to_owned(), num_states };
        let rows = rows.into_iter().map(row).collect();
        Plan::new(path.to_path_buf(), identity, FeatureFormat::F16, WIDTH, rows)
    }

    fn states(num: usize, first: f32) -> Vec<f32> {
        (0..num * WIDTH).map(|nth| first + nth as f32).collect()
    }

    #[test]
    fn rows_are_there_once_they_were_kept_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/features.bin");
        let told = plan(&path, "model").num_bytes();
        assert_eq!(told, (HEADER + 3 * SUM + 7 * 2 * WIDTH) as u64);
        assert_eq!(plan(&path, "model").num_missing_bytes(), told);
        let file = plan(&path, "model").open().unwrap();
        assert_eq!((file.read("a"), file.read("none")), (None, None));
        for (id, num, first) in [("a", 2, 1.0), ("c", 4, 100.0)] {
            assert_eq!(file.keep(id, states(num, first)), states(num, first));
        }
        drop(file);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), told);
        let file = plan(&path, "model").open().unwrap();
        assert_eq!(file.read("a"), Some(states(2, 1.0)));
        assert_eq!((file.read("b"), file.read("c")), (None, Some(states(4, 100.0))));
        // A row that is changed or was cut is not there, wherever.
        let whole = std::fs::read(&path).unwrap();
        let end = HEADER + SUM + 2 * 2 * WIDTH;
        for at in HEADER..end {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            std::fs::write(&path, changed).unwrap();
            let file = plan(&path, "model").open().unwrap();
            assert_eq!((file.read("a"), file.read("c")), (None, Some(states(4, 100.0))), "{at}");
        }
        // Another model's, or other rows', are begun anew.
        assert_eq!(plan(&path, "other").open().unwrap().read("c"), None);
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(plan(&path, "model").open().unwrap().read("a"), None);
    }

    #[test]
    fn what_does_not_fit_is_given_back_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = plan(&dir.path().join("features.bin"), "model").open().unwrap();
        let large = vec![1e5; WIDTH];
        assert_eq!(file.keep("b", large.clone()), large);
        assert_eq!((file.read("b"), file.num_unfit()), (None, 1));
        assert_eq!(file.problem(), None);
    }
}
