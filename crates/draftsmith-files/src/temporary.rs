//! Temporary files, each written by one process at a time.
//!
//! The writer holds the operating system's lock on the file; the lock ends with the process. An
//! unlocked temporary file was therefore left by a killed process and can be overwritten. If a file
//! is locked, the next writer uses the next name. It can happen that the owner renames its file
//! after another process has opened it but before that process locks it. [`is_at`] detects this,
//! and the other process tries again.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::Error;
use std::path::{Path, PathBuf};

use crate::error::FileError;

const SUFFIX: &str = ".tmp";

/// A temporary file that only this process writes to.
#[derive(Debug)]
pub(crate) struct Temporary {
    pub(crate) path: PathBuf,
    /// The open file, empty and locked.
    pub(crate) file: File,
}

impl Temporary {
    /// Creates a temporary file beside `path`.
    ///
    /// # Errors
    /// If it cannot be created, or `path` has no file name.
    pub(crate) fn open(path: &Path) -> Result<Self, FileError> {
        let mut number = 0;
        loop {
            let temporary = temporary_path(path, number)?;
            let error = |source| FileError::new("create", &temporary, source);
            // Another process may own the file, so it is truncated only after locking.
            let file = File::options().write(true).create(true).truncate(false).open(&temporary);
            let file = file.map_err(error)?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => number += 1,
                Ok(()) if !is_at(&file, &temporary) => {}
                // If locks are not supported, we assume that no other process writes here.
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

/// Removes the temporary files that killed processes left in a directory. Errors are ignored.
pub fn remove_abandoned(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_temporary = name.to_str().is_some_and(|n| n.starts_with('.') && n.ends_with(SUFFIX));
        let path = entry.path();
        if is_temporary
            && let Ok(file) = File::options().write(true).open(&path)
            && file.try_lock().is_ok()
            && is_at(&file, &path)
        {
            // A process that has opened the file meanwhile notices that it is gone.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Returns `DIR/.NAME.tmp` for `DIR/NAME`, then `DIR/.NAME.1.tmp` and so on.
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

/// Returns whether an open file still has this path.
fn is_at(file: &File, path: &Path) -> bool {
    let (open, named) = (file.metadata(), fs::metadata(path));
    open.is_ok_and(|open| named.is_ok_and(|named| is_same(&open, &named)))
}

#[cfg(unix)]
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Returns true. On systems other than Unix, another process cannot rename an open file.
#[cfg(not(unix))]
fn is_same(_: &Metadata, _: &Metadata) -> bool {
    true
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Lists the names of the files in a directory, sorted.
    pub(crate) fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn locked_files_are_kept_and_abandoned_ones_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let first = Temporary::open(&path).unwrap();
        let second = Temporary::open(&path).unwrap();
        assert_eq!(names(dir.path()), [".a.json.1.tmp", ".a.json.tmp"]);
        let third = Temporary::open(&path).unwrap();
        fs::rename(&third.path, &path).unwrap();
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), [".a.json.1.tmp", ".a.json.tmp", "a.json"]);
        drop(second);
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), [".a.json.tmp", "a.json"]);
        drop(first);
        // An abandoned file is reused and truncated.
        fs::write(dir.path().join(".a.json.tmp"), "left by a killed process").unwrap();
        let taken = Temporary::open(&path).unwrap();
        assert_eq!(taken.path, dir.path().join(".a.json.tmp"));
        assert_eq!(taken.file.metadata().unwrap().len(), 0);
        drop(taken);
        fs::write(dir.path().join("other.tmp"), "not ours").unwrap();
        remove_abandoned(dir.path());
        assert_eq!(names(dir.path()), ["a.json", "other.tmp"]);
    }
}
