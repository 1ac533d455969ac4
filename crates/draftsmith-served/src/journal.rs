//! The journal of the servers' responses: a file of JSON lines, `served.jsonl`, beside the data
//! shards. A response is written before it is used, so a killed job does not request it again.
//!
//! The key of a response is a hash of everything that it depends on, so one journal can hold
//! responses for several settings. Truncated and unreadable lines are skipped. Lines are not synced
//! to disk one by one. A response that a power cut loses is requested again.

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

/// The `finish_reason` of a response that the server's content filter stopped.
pub(super) const FILTERED: &str = "content_filter";
/// The `finish_reason` of a response whose tokens the server's text does not give.
pub(super) const INEXACT: &str = "inexact_text";

/// One line of the journal: a response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The id of the response's row, only for people who read the file.
    pub(super) id: String,
    /// The hash of everything that the response depends on.
    pub(super) request: String,
    pub(super) response_ids: Vec<u32>,
    pub(super) finish_reason: String,
    /// For each token of the response, the known log-probabilities at its position, most probable
    /// token first; `None` if they were not requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) known: Option<Vec<KnownTokens>>,
}

impl Entry {
    /// Creates an entry for a response that is left out because it is [`FILTERED`] or [`INEXACT`].
    /// The entry prevents another request.
    pub(super) fn left_out(id: &str, request: String, why: &str) -> Self {
        let (id, finish_reason) = (id.to_owned(), why.to_owned());
        Self { id, request, response_ids: Vec::new(), finish_reason, known: None }
    }

    /// Returns whether the response is left out.
    pub(super) fn is_left_out(&self) -> bool {
        [FILTERED, INEXACT].contains(&&*self.finish_reason)
    }

    /// Returns whether a target with this vocabulary can have produced the response. The file may
    /// have been edited.
    pub(super) fn is_sound(&self, vocab_size: usize) -> bool {
        let knows = |id: &u32| (*id as usize) < vocab_size;
        let is_log_prob = |(id, log_prob): &(u32, f32)| {
            knows(id) && log_prob.is_finite() && f64::from(*log_prob) <= SLACK
        };
        let is_known = self.known.as_ref().is_none_or(|known| {
            known.len() == self.response_ids.len() && known.iter().flatten().all(is_log_prob)
        });
        if self.is_left_out() {
            return self.response_ids.is_empty() && is_known;
        }
        let is_response = !self.response_ids.is_empty() && self.response_ids.iter().all(knows);
        is_response && is_known && FinishReason::parse(&self.finish_reason).is_some()
    }
}

/// A journal open for appending.
pub(super) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    /// The byte offset and byte length of each request's line, by request hash.
    lines: HashMap<String, (u64, usize)>,
    /// The length of the file in bytes.
    len: u64,
    /// The number of unreadable lines.
    pub(super) num_broken: usize,
}

impl Journal {
    /// Opens or creates the journal at a path.
    ///
    /// # Errors
    /// If it cannot be read or written.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let dir = path.parent().expect("a journal is in a directory");
        std::fs::create_dir_all(dir).map_err(|error| FileError::new("create", dir, error))?;
        let cannot = |what| move |error| FileError::new(what, path, error);
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let mut file = options.open(path).map_err(cannot("open"))?;
        let (mut lines, mut num_broken) = (HashMap::new(), 0);
        let (mut len, mut line, mut reader) = (0, Vec::new(), BufReader::new(&mut file));
        loop {
            let is_whole = line.is_empty() || line.ends_with(b"\n");
            line.clear();
            let num_bytes = reader.read_until(b'\n', &mut line).map_err(cannot("read"))?;
            if num_bytes == 0 {
                if !is_whole {
                    // The next entry must start on a new line.
                    file.write_all(b"\n").map_err(cannot("write"))?;
                    len += 1;
                }
                let path = path.to_path_buf();
                return Ok(Self { path, file: Mutex::new(file), lines, len, num_broken });
            }
            match serde_json::from_slice::<Entry>(&line) {
                Ok(entry) => drop(lines.insert(entry.request, (len, num_bytes))),
                Err(_) => num_broken += 1,
            }
            len += num_bytes as u64;
        }
    }

    /// Iterates over the hashes of the requests that have responses.
    pub(super) fn requests(&self) -> impl Iterator<Item = &str> {
        self.lines.keys().map(String::as_str)
    }

    /// Appends a response to the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn append(&mut self, entry: &Entry) -> Result<(), FileError> {
        let mut line = serde_json::to_vec(entry).expect("an entry is JSON");
        line.push(b'\n');
        let mut file = self.file.lock().expect(HELD);
        file.write_all(&line).map_err(|error| FileError::new("write", &self.path, error))?;
        self.lines.insert(entry.request.clone(), (self.len, line.len()));
        self.len += line.len() as u64;
        Ok(())
    }

    /// Reads the response to the request with this hash; `None` if the journal has none.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn get(&self, request: &str) -> Result<Option<Entry>, FileError> {
        let Some(&(at, num_bytes)) = self.lines.get(request) else { return Ok(None) };
        let mut line = vec![0; num_bytes];
        let mut file = self.file.lock().expect(HELD);
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
    fn edited_entries_that_the_target_cannot_produce_are_unsound() {
        let sound = entry("a");
        assert!(sound.is_sound(5) && !sound.is_sound(4));
        let with = |change: fn(&mut Entry)| {
            let mut entry = entry("a");
            change(&mut entry);
            entry.is_sound(5)
        };
        assert!(with(|entry| entry.known = None));
        assert!(with(|entry| *entry = Entry::left_out("set#0", "a".to_owned(), INEXACT)));
        assert!(!with(|entry| entry.finish_reason = FILTERED.to_owned()));
        assert!(!with(|entry| entry.response_ids.clear()));
        assert!(!with(|entry| entry.response_ids.push(4)));
        assert!(!with(|entry| entry.finish_reason = "because".to_owned()));
        assert!(!with(|entry| entry.known = Some(vec![vec![(3, f32::NEG_INFINITY)]; 3])));
        assert!(!with(|entry| entry.known = Some(vec![vec![(3, 0.5)]; 3])));
        assert!(!with(|entry| entry.known = Some(vec![vec![(9, -0.5)]; 3])));
    }
}
