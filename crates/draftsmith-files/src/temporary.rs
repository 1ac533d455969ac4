//! Temporary files: each is written by one process at a time, wherever else processes write files of the
//! same name.
//!
//! Whoever writes one holds the operating system's lock on it, which ends with the process. So one that
//! is not locked was left by a process that was killed, and is written over; one that is, is left alone,
//! and the next name is taken. Between opening a file and locking it, its owner may have renamed it:
//! what was locked then has another name, and is let go of again.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::Error;
use std::path::{Path, PathBuf};

use crate::file_error::FileError;

/// What temporary files' names end in.
const SUFFIX: &str = ".tmp";

/// A file that nobody else writes to.
#[derive(Debug)]
pub(crate) struct Temporary {
    pub(crate) path: PathBuf,
    /// Empty.
    pub(crate) file: File,
}

impl Temporary {
    /// Opens a temporary file beside `path`.
    ///
    /// # Errors
    /// If none can be created, or `path` names no file.
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let mut number = 0;
        loop {
            let temporary = temporary_path(path, number)?;
            let error = |source| FileError::new("create", &temporary, source);
            // Not cut before it is known to be nobody else's.
            let file = File::options().write(true).create(true).truncate(false).open(&temporary);
            let file = file.map_err(error)?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => number += 1,
                Ok(()) if !is_at(&file, &temporary) => {}
                // Where there are no locks, it is as if nobody else wrote there.
                Ok(()) | Err(TryLockError::Error(_)) => {
                    if file.metadata().is_ok_and(|metadata| metadata.len() > 0) {
                        file.set_len(0).map_err(error)?;
                    }
                    return Ok(Self { path: temporary, file });
                }
            }
        }
    }
}

/// Removes the temporary files in a directory that are nobody's any more.
pub(crate) fn remove_abandoned(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_temporary = name.to_str().is_some_and(|n| n.starts_with('.') && n.ends_with(SUFFIX));
        let path = entry.path();
        if is_temporary
            && let Ok(file) = File::options().write(true).open(&path)
            && file.try_lock().is_ok()
            && is_at(&file, &path)
        {
            // Whoever opened it meanwhile finds that it is gone, and makes another.
            let _ = fs::remove_file(&path);
        }
    }
}

/// `DIR/.NAME.tmp` for `DIR/NAME`, then `DIR/.NAME.1.tmp` and on.
fn temporary_path(path: &Path, number: usize) -> Result<PathBuf, FileError> {
    let name = path
        .file_name()
        .ok_or_else(|| FileError::new("create", path, Error::other("the path has no file name")))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    if number > 0 {
        temporary.push(format!(".{number}"));
    }
    temporary.push(SUFFIX);
    Ok(path.with_file_name(temporary))
}

/// Whether an open file is still the one of that name.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => is_same(&open, &named),
        _ => false,
    }
}

#[cfg(unix)]
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Elsewhere an open file cannot be renamed by another process.
#[cfg(not(unix))]
fn is_same(_: &Metadata, _: &Metadata) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write_whole;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_another_writes_is_left_to_it_and_what_nobody_writes_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let first = Temporary::open(&path).unwrap();
        let second = Temporary::open(&path).unwrap();
        assert_eq!(names(dir.path()), [".a.json.1.tmp", ".a.json.tmp"]);
        write_whole(&path, "third").unwrap();
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), [".a.json.1.tmp", ".a.json.tmp", "a.json"]);
        drop(second);
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), [".a.json.tmp", "a.json"]);
        drop(first);
        // What is left is taken over, and cut.
        fs::write(dir.path().join(".a.json.tmp"), "left by a killed process").unwrap();
        let taken = Temporary::open(&path).unwrap();
        assert_eq!(taken.path, dir.path().join(".a.json.tmp"));
        assert_eq!(taken.file.metadata().unwrap().len(), 0);
        drop(taken);
        fs::write(dir.path().join("other.tmp"), "not ours").unwrap();
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), ["a.json", "other.tmp"]);
    }

    #[test]
    fn many_who_write_one_file_leave_it_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let text = |writer: usize| format!("{writer}").repeat(50_000 + 1000 * writer);
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || (0..25).for_each(|_| write_whole(path, text(writer)).unwrap()));
            }
            for _ in 0..200 {
                let found = fs::read_to_string(&path).unwrap_or_else(|_| text(0));
                assert!((0..4).any(|writer| found == text(writer)), "{} bytes", found.len());
            }
        });
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), ["a.json"]);
    }
}
