//! The servers' responses in `served.jsonl` beside the shards, one line each. A response is written before
//! it is used, so a killed job never requests one twice. If there are several processes, each writes one
//! journal, such as `served-2-of-16.jsonl`, and reads all.
//!
//! The key of a response is a hash of everything that it depends on, so a journal may hold responses for
//! several settings. Truncated and unreadable lines are skipped. Lines are not synced one by one; a
//! response lost in a power cut is requested again.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use draftsmith_data::FinishReason;
use draftsmith_files::FileError;
use serde::{Deserialize, Serialize};

use super::HELD;
use super::known::{KnownTokens, SLACK};

/// The prefix and suffix of journals' names.
const NAMES: (&str, &str) = ("served", ".jsonl");
/// The reason of a response that the server's content filter stopped.
const FILTERED: &str = "content_filter";

/// A response in a journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The id of its row, for people who read the file.
    pub(super) id: String,
    /// The hash of everything that it depends on.
    pub(super) request: String,
    pub(super) response_ids: Vec<u32>,
    pub(super) finish_reason: String,
    /// The known tokens of each position, most probable first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) known: Option<Vec<KnownTokens>>,
}

impl Entry {
    /// The entry of a response that the server's content filter stopped, so that it is not requested
    /// again.
    pub(super) fn filtered(id: &str, request: String) -> Self {
        let (id, finish_reason) = (id.to_owned(), FILTERED.to_owned());
        Self { id, request, response_ids: Vec::new(), finish_reason, known: None }
    }

    /// Whether the server's content filter stopped the response.
    pub(super) fn is_filtered(&self) -> bool {
        self.finish_reason == FILTERED
    }

    /// Whether a target with this vocabulary can have produced it. The file may have been edited.
    pub(super) fn is_sound(&self, vocab_size: usize) -> bool {
        let knows = |id: &u32| (*id as usize) < vocab_size;
        let is_log_prob = |(id, log_prob): &(u32, f32)| {
            knows(id) && log_prob.is_finite() && f64::from(*log_prob) <= SLACK
        };
        let is_known = self.known.as_ref().is_none_or(|known| {
            known.len() == self.response_ids.len() && known.iter().flatten().all(is_log_prob)
        });
        if self.is_filtered() {
            return self.response_ids.is_empty() && is_known;
        }
        let is_response = !self.response_ids.is_empty() && self.response_ids.iter().all(knows);
        is_response && is_known && FinishReason::parse(&self.finish_reason).is_some()
    }
}

/// A journal open for appending, and the journals beside it.
#[derive(Default)]
pub(super) struct Journal {
    path: PathBuf,
    /// This process's journal, then the others.
    files: Vec<Mutex<File>>,
    /// The line of each request: index of the file, offset and length in bytes.
    lines: HashMap<String, (usize, u64, usize)>,
    /// Length of this process's journal in bytes.
    len: u64,
    /// The number of unreadable lines.
    pub(super) num_broken: usize,
}

impl Journal {
    /// Opens or creates the journal at a path, and reads those beside it.
    ///
    /// # Errors
    /// If a journal cannot be read, or this one cannot be written.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let dir = path.parent().expect("a journal is in a directory");
        std::fs::create_dir_all(dir).map_err(|error| FileError::new("create", dir, error))?;
        let cannot = |what| move |error| FileError::new(what, path, error);
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let mut file = options.open(path).map_err(cannot("open"))?;
        let mut journal = Self { path: path.to_path_buf(), ..Self::default() };
        let is_whole = journal.read(&mut file, path)?;
        journal.len = file.seek(SeekFrom::End(0)).map_err(cannot("read"))?;
        if !is_whole {
            // The next entry must start on a new line.
            file.write_all(b"\n").map_err(cannot("write"))?;
            journal.len += 1;
        }
        journal.files.push(Mutex::new(file));
        let cannot = |error| FileError::new("read", dir, error);
        let mut others = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(cannot)? {
            let other = entry.map_err(cannot)?.path();
            let name = other.file_name().unwrap_or_default().to_string_lossy();
            if other != path && name.starts_with(NAMES.0) && name.ends_with(NAMES.1) {
                others.push(other);
            }
        }
        others.sort();
        for other in others {
            let mut file =
                File::open(&other).map_err(|error| FileError::new("read", &other, error))?;
            journal.read(&mut file, &other)?;
            journal.files.push(Mutex::new(file));
        }
        Ok(journal)
    }

    /// Indexes the lines of the next file. Returns whether the last line is complete.
    fn read(&mut self, file: &mut File, path: &Path) -> Result<bool, FileError> {
        let number = self.files.len();
        let (mut at, mut line) = (0, Vec::new());
        let mut reader = BufReader::new(file);
        loop {
            let is_whole = line.is_empty() || line.ends_with(b"\n");
            line.clear();
            let num_bytes = reader
                .read_until(b'\n', &mut line)
                .map_err(|error| FileError::new("read", path, error))?;
            if num_bytes == 0 {
                return Ok(is_whole);
            }
            match serde_json::from_slice::<Entry>(&line) {
                Ok(entry) => drop(self.lines.insert(entry.request, (number, at, num_bytes))),
                Err(_) => self.num_broken += 1,
            }
            at += num_bytes as u64;
        }
    }

    /// The requests that have responses.
    pub(super) fn requests(&self) -> impl Iterator<Item = &str> {
        self.lines.keys().map(String::as_str)
    }

    /// Appends a response.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(super) fn append(&mut self, entry: &Entry) -> Result<(), FileError> {
        let mut line = serde_json::to_vec(entry).expect("an entry is JSON");
        line.push(b'\n');
        let mut file = self.files[0].lock().expect(HELD);
        file.write_all(&line).map_err(|error| FileError::new("write", &self.path, error))?;
        self.lines.insert(entry.request.clone(), (0, self.len, line.len()));
        self.len += line.len() as u64;
        Ok(())
    }

    /// A request's response, if there is one.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn get(&self, request: &str) -> Result<Option<Entry>, FileError> {
        let Some(&(number, at, num_bytes)) = self.lines.get(request) else { return Ok(None) };
        let mut line = vec![0; num_bytes];
        let mut file = self.files[number].lock().expect(HELD);
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut line));
        let entry = read.and_then(|()| Ok(serde_json::from_slice(&line)?));
        entry.map(Some).map_err(|error| FileError::new("read", &self.path, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(journal: &Journal, request: &str) -> bool {
        journal.requests().any(|known| known == request)
    }

    fn entry(request: &str) -> Entry {
        Entry {
            id: "set#0".to_owned(),
            request: request.to_owned(),
            response_ids: vec![3, 4, 2],
            finish_reason: "eos".to_owned(),
            known: Some(vec![vec![(3, -0.125), (4, -2.3)], Vec::new(), vec![(2, -9999.0)]]),
        }
    }

    #[test]
    fn entries_are_read_back_and_truncated_lines_are_skipped() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("served.jsonl");
        let mut journal = Journal::open(&path).expect("opens");
        for request in ["a", "b", "c"] {
            journal.append(&entry(request)).expect("written");
        }
        assert_eq!(journal.get("b").expect("reads"), Some(entry("b")));
        drop(journal);
        let whole = std::fs::read(&path).expect("there");
        let lines = whole.split_inclusive(|byte| *byte == b'\n').collect::<Vec<_>>();
        let (first, second) = (lines[0].len(), lines[0].len() + lines[1].len());
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).expect("written");
            let mut journal = Journal::open(&path).expect("opens");
            // A line without its newline is complete.
            assert_eq!(has(&journal, "a"), len >= first - 1);
            assert_eq!(has(&journal, "b"), len >= second - 1);
            assert_eq!(
                journal.num_broken,
                usize::from(
                    ![0, first - 1, first, second - 1, second, whole.len() - 1, whole.len()]
                        .contains(&len)
                )
            );
            journal.append(&entry("d")).expect("written");
            drop(journal);
            let journal = Journal::open(&path).expect("opens");
            assert_eq!(journal.get("d").expect("reads"), Some(entry("d")), "{len}");
            assert_eq!(has(&journal, "b"), len >= second - 1);
        }
    }

    #[test]
    fn each_process_reads_all_journals() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| dir.path().join(name);
        let mut one = Journal::open(&path("served-0-of-2.jsonl")).expect("opens");
        one.append(&entry("a")).expect("written");
        let mut other = Journal::open(&path("served-1-of-2.jsonl")).expect("opens");
        assert!(has(&other, "a"));
        other.append(&entry("b")).expect("written");
        std::fs::write(path("set.jsonl"), "another format").expect("written");
        let whole = Journal::open(&path("served.jsonl")).expect("opens");
        assert_eq!(whole.num_broken, 0);
        for request in ["a", "b"] {
            assert_eq!(whole.get(request).expect("reads"), Some(entry(request)));
        }
    }

    #[test]
    fn edited_entries_that_the_target_cannot_produce_are_unsound() {
        let sound = entry("a");
        assert!(sound.is_sound(5) && !sound.is_sound(4));
        let with = |change: fn(&mut Entry)| {
            let mut entry = entry("a");
            change(&mut entry);
            entry.is_sound(5)
        };
        assert!(with(|entry| entry.known = None));
        assert!(with(|entry| *entry = Entry::filtered("set#0", "a".to_owned())));
        assert!(!with(|entry| entry.finish_reason = FILTERED.to_owned()));
        assert!(!with(|entry| entry.response_ids.clear()));
        assert!(!with(|entry| entry.response_ids.push(4)));
        assert!(!with(|entry| entry.finish_reason = "because".to_owned()));
        assert!(!with(|entry| entry.known = Some(vec![vec![(3, f32::NEG_INFINITY)]; 3])));
        assert!(!with(|entry| entry.known = Some(vec![vec![(3, 0.5)]; 3])));
        assert!(!with(|entry| entry.known = Some(vec![vec![(9, -0.5)]; 3])));
    }
}
