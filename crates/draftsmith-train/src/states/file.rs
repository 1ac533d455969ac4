//! A file with the hidden states of many rows, each either stored or absent.
//!
//! The header identifies the model, format and rows; a file with another header is replaced by an
//! empty one. After the header, every row has a fixed place: a CRC-32C, then the states. The length
//! of the file is thus known in advance. A row is stored if its checksum matches. The zeros of a
//! row that was never written do not match, nor does a row whose write was interrupted, so no index
//! is necessary.

use std::collections::HashMap;
use std::fmt::Debug;
use std::fs::OpenOptions;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use draftsmith_files::{in_bytes, open_regular};

use super::format::FeatureFormat;
use crate::error::{Result, TrainError, file_error};

/// The first line of the header.
const MAGIC: &str = "draftsmith hidden states 1\n";
/// The minimum length of the header, in bytes.
const HEADER_LEN: usize = 4096;
/// The size of a checksum, in bytes.
const CHECKSUM: usize = 4;

/// The layout of a file.
#[derive(Debug)]
pub(super) struct FilePlan {
    path: PathBuf,
    header: Vec<u8>,
    format: FeatureFormat,
    /// The number of values in one hidden state.
    width: usize,
    spans: HashMap<String, RowSpan>,
    /// The length of the file, in bytes.
    pub(super) num_bytes: u64,
}

/// The place of a row's states in the file.
#[derive(Debug, Clone, Copy)]
struct RowSpan {
    /// The offset of the row's checksum in the file, in bytes.
    offset: u64,
    /// The length of the row's states, in bytes.
    num_bytes: usize,
}

impl FilePlan {
    /// Plans the layout of a file. Each entry of `rows` is a row's id and its number of states.
    pub(super) fn new(
        path: PathBuf,
        identity: &str,
        format: FeatureFormat,
        width: usize,
        rows: Vec<(String, usize)>,
    ) -> Self {
        let mut header = format!("{MAGIC}{identity}\n").into_bytes();
        header.resize(HEADER_LEN.max(header.len()), 0);
        let mut offset = header.len() as u64;
        let mut spans = HashMap::with_capacity(rows.len());
        for (id, num_states) in rows {
            let num_bytes = num_states * format.bytes_per_state(width);
            spans.insert(id, RowSpan { offset, num_bytes });
            offset += (CHECKSUM + num_bytes) as u64;
        }
        Self { path, header, format, width, spans, num_bytes: offset }
    }

    /// Returns whether a file with this header and length exists.
    fn exists(&self) -> bool {
        let mut header = vec![0; self.header.len()];
        let Ok(mut file) = open_regular(&self.path) else { return false };
        let has_len = file.metadata().is_ok_and(|metadata| metadata.len() == self.num_bytes);
        has_len && file.read_exact(&mut header).is_ok() && header == self.header
    }

    /// Counts the bytes for which the disk has no blocks yet.
    pub(super) fn num_missing_bytes(&self) -> u64 {
        let allocated = if self.exists() { allocated_bytes(&self.path) } else { 0 };
        self.num_bytes.saturating_sub(allocated)
    }

    /// Opens the file, or creates it without any rows.
    ///
    /// # Errors
    /// If it cannot be created.
    pub(super) fn open(self) -> Result<StateFile> {
        let exists = self.exists();
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir).map_err(file_error("create", dir))?;
        }
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(!exists);
        let mut file = options.open(&self.path).map_err(file_error("open", &self.path))?;
        if !exists {
            let written = file.write_all(&self.header).and_then(|()| file.set_len(self.num_bytes));
            written.map_err(file_error("write", &self.path))?;
        }
        Ok(self.opened(Box::new(file)))
    }

    /// Keeps the states in memory instead of in the file.
    ///
    /// # Errors
    /// If the memory is too small.
    pub(super) fn open_in_memory(self) -> Result<StateFile> {
        let mut bytes = Vec::new();
        let num_bytes = usize::try_from(self.num_bytes).unwrap_or(usize::MAX);
        bytes.try_reserve_exact(num_bytes).map_err(|_| {
            TrainError::States(format!(
                "{} of hidden states do not fit into memory; hint: keep them on the disk \
                 (`data.server.states.keep = \"disk\"`), or store them with `features_format = \"int8\"`",
                in_bytes(self.num_bytes)
            ))
        })?;
        bytes.resize(num_bytes, 0);
        Ok(self.opened(Box::new(Cursor::new(bytes))))
    }

    fn opened(self, medium: Box<dyn Medium>) -> StateFile {
        let open = OpenStates { medium, num_unfit: 0, is_read_only: false, problem: None };
        StateFile { plan: self, open: Mutex::new(open) }
    }
}

/// Returns the number of bytes that a file occupies on its disk. It is less than the file's length
/// if the file is sparse.
#[cfg(unix)]
fn allocated_bytes(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

#[cfg(not(unix))]
fn allocated_bytes(_path: &Path) -> u64 {
    0
}

/// An open file of states.
#[derive(Debug)]
pub(crate) struct StateFile {
    plan: FilePlan,
    open: Mutex<OpenStates>,
}

/// The place of the states: a file, or memory.
trait Medium: Read + Write + Seek + Debug + Send {}

impl<T: Read + Write + Seek + Debug + Send> Medium for T {}

#[derive(Debug)]
struct OpenStates {
    medium: Box<dyn Medium>,
    /// The number of times that a row's states did not fit the number format.
    num_unfit: usize,
    /// Whether a write has failed. No further rows are written after that.
    is_read_only: bool,
    /// A description of the first read or write error.
    problem: Option<String>,
}

impl StateFile {
    fn open(&self) -> MutexGuard<'_, OpenStates> {
        self.open.lock().expect("nothing panics while it holds the file")
    }

    /// Reads a row's states, token by token. Returns `None` if they are not stored or cannot be
    /// read.
    pub(crate) fn read(&self, id: &str) -> Option<Vec<f32>> {
        let FilePlan { path, format, width, spans, .. } = &self.plan;
        let RowSpan { offset, num_bytes } = *spans.get(id)?;
        let mut bytes = vec![0; CHECKSUM + num_bytes];
        let mut open = self.open();
        let at_row = open.medium.seek(SeekFrom::Start(offset));
        if let Err(error) = at_row.and_then(|_| open.medium.read_exact(&mut bytes)) {
            let problem = || format!("cannot read `{}`: {error}", path.display());
            open.problem.get_or_insert_with(problem);
            return None;
        }
        drop(open);
        let (checksum, states) = bytes.split_at(CHECKSUM);
        let is_stored = checksum == crc32c::crc32c(states).to_le_bytes();
        is_stored.then(|| format.decode(states, *width))
    }

    /// Stores a row's states, and returns them with the rounding that later reads will have. States
    /// that the format cannot represent are not stored, and are returned unchanged.
    ///
    /// # Panics
    /// If the number of states differs from the plan.
    pub(crate) fn store(&self, id: &str, states: Vec<f32>) -> Vec<f32> {
        let FilePlan { path, format, width, spans, .. } = &self.plan;
        let Some(bytes) = format.encode(&states, *width) else {
            self.open().num_unfit += 1;
            return states;
        };
        let RowSpan { offset, num_bytes } = *spans.get(id).expect("every row is planned");
        assert_eq!(num_bytes, bytes.len(), "`{id}` has another number of states than planned");
        let record = [&crc32c::crc32c(&bytes).to_le_bytes()[..], &bytes].concat();
        let mut open = self.open();
        let at_row = open.medium.seek(SeekFrom::Start(offset));
        if !open.is_read_only
            && let Err(error) = at_row.and_then(|_| open.medium.write_all(&record))
        {
            open.is_read_only = true;
            open.problem.get_or_insert_with(|| {
                format!(
                    "cannot write `{}`: {error}; missing states are computed in each epoch",
                    path.display()
                )
            });
        }
        drop(open);
        format.decode(&bytes, *width)
    }

    /// Returns how many times a row's states did not fit the number format.
    pub(super) fn num_unfit(&self) -> usize {
        self.open().num_unfit
    }

    /// Returns a description of the first read or write error, if any.
    pub(super) fn problem(&self) -> Option<String> {
        self.open().problem.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 3;

    fn plan(path: &Path, identity: &str) -> FilePlan {
        let rows = [("a", 2), ("b", 1), ("c", 4)];
        let rows = rows.map(|(id, num_states)| (id.to_owned(), num_states)).to_vec();
        FilePlan::new(path.to_path_buf(), identity, FeatureFormat::F16, WIDTH, rows)
    }

    fn states(num: usize, first: f32) -> Vec<f32> {
        (0..num * WIDTH).map(|nth| first + nth as f32).collect()
    }

    #[test]
    fn stored_rows_are_read_back_and_others_are_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/features.bin");
        let num_bytes = plan(&path, "model").num_bytes;
        assert_eq!(num_bytes, (HEADER_LEN + 3 * CHECKSUM + 7 * 2 * WIDTH) as u64);
        assert_eq!(plan(&path, "model").num_missing_bytes(), num_bytes);
        let file = plan(&path, "model").open().unwrap();
        assert_eq!((file.read("a"), file.read("none")), (None, None));
        for (id, num, first) in [("a", 2, 1.0), ("c", 4, 100.0)] {
            assert_eq!(file.store(id, states(num, first)), states(num, first));
        }
        drop(file);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), num_bytes);
        let file = plan(&path, "model").open().unwrap();
        assert_eq!(file.read("a"), Some(states(2, 1.0)));
        assert_eq!((file.read("b"), file.read("c")), (None, Some(states(4, 100.0))));
        // A row with any changed byte counts as absent.
        let whole = std::fs::read(&path).unwrap();
        let end = HEADER_LEN + CHECKSUM + 2 * 2 * WIDTH;
        for at in HEADER_LEN..end {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            std::fs::write(&path, changed).unwrap();
            let file = plan(&path, "model").open().unwrap();
            assert_eq!((file.read("a"), file.read("c")), (None, Some(states(4, 100.0))), "{at}");
        }
        // A file with another identity or length is replaced.
        assert_eq!(plan(&path, "other").open().unwrap().read("c"), None);
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(plan(&path, "model").open().unwrap().read("a"), None);
    }

    #[test]
    fn states_that_do_not_fit_are_returned_unrounded() {
        let dir = tempfile::tempdir().unwrap();
        let file = plan(&dir.path().join("features.bin"), "model").open().unwrap();
        let large = vec![1e5; WIDTH];
        assert_eq!(file.store("b", large.clone()), large);
        assert_eq!((file.read("b"), file.num_unfit()), (None, 1));
        assert_eq!(file.problem(), None);
    }
}
