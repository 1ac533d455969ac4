//! Atomic file writes: a path holds either its old contents or the complete new ones, no matter when
//! the process is killed or the power fails.
//!
//! A file is written under a temporary name beside the final one (`.NAME.tmp`), synced and renamed, and
//! then its directory is synced. `temporary.rs` keeps two processes from writing the same temporary
//! file.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::FileError;
use crate::temporary::Temporary;

/// Writes a file atomically, and creates its directory if necessary.
///
/// # Errors
/// If the file cannot be created, written, synced or renamed.
pub fn write_whole(path: &Path, bytes: impl AsRef<[u8]>) -> Result<(), FileError> {
    write_whole_with(path, |file| {
        file.write_all(bytes.as_ref()).map_err(|source| FileError::new("write", path, source))
    })
}

/// Writes a value as indented JSON that ends with a newline, as [`write_whole`] does.
///
/// # Errors
/// As for [`write_whole`], or if the value cannot be represented in JSON.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FileError> {
    let text = serde_json::to_string_pretty(value);
    write_whole(path, text.map_err(|error| FileError::new("write", path, error.into()))? + "\n")
}

/// Writes a file as [`write_whole`] does, with contents written by a closure.
///
/// # Errors
/// The closure's error, or that of creating, syncing or renaming the file. The temporary file is then
/// removed.
pub fn write_whole_with<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let Temporary { path: from, mut file } = create(path)?;
    let written = write(&mut file).and_then(|()| {
        // `file` stays locked until the rename is done, so that no process takes it for abandoned.
        let renamed = file.sync_all().and_then(|()| fs::rename(&from, path));
        Ok(renamed.map_err(|source| FileError::new("write", path, source))?)
    });
    match written {
        Ok(()) => sync_dir(path),
        Err(_) => drop(fs::remove_file(&from)),
    }
    written
}

/// Checks before a long job that a file can be written, and creates its directory if necessary.
///
/// # Errors
/// If it is a directory, or no file can be created there.
pub fn check_place(path: &Path) -> Result<(), FileError> {
    if path.is_dir() {
        return Err(FileError::new("write", path, ErrorKind::IsADirectory.into()));
    }
    let place = create(path)?;
    let _ = fs::remove_file(&place.path);
    Ok(())
}

/// Lists the paths of everything in a directory, sorted.
///
/// # Errors
/// If the directory cannot be read.
pub fn paths_in(dir: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = fs::read_dir(dir).and_then(|all| all.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = entries.map_err(|source| FileError::new("read", dir, source))?;
    paths.sort();
    Ok(paths)
}

/// Opens a temporary file for `path`, whose directory it creates if necessary.
fn create(path: &Path) -> Result<Temporary, FileError> {
    let dir = dir_of(path);
    fs::create_dir_all(dir).map_err(|source| FileError::new("create", dir, source))?;
    Temporary::open(path)
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs the directory of a file. Errors are ignored: the file is complete either way, and not every
/// file system can sync a directory.
fn sync_dir(path: &Path) {
    if let Ok(dir) = File::open(dir_of(path)) {
        let _ = dir.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;
    use crate::temporary::remove_abandoned;
    use crate::temporary::tests::names;

    #[test]
    fn a_file_is_written_and_replaced_without_leftovers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/directories/a.json");
        write_whole(&path, "first").unwrap();
        let dir = path.parent().unwrap();
        fs::write(dir.join(".a.json.tmp"), "left by a killed process, and longer").unwrap();
        for text in ["second", "third"] {
            write_whole(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(names(dir), ["a.json"]);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_whole(&path, "old").unwrap();
        let failed = write_whole_with(&path, |file| {
            file.write_all(b"half").unwrap();
            Err(FileError::new("encode", &path, Error::other("half a number")))
        });
        assert!(failed.unwrap_err().to_string().starts_with("cannot encode `"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn a_place_is_checked_without_a_trace() {
        let dir = tempfile::tempdir().unwrap();
        check_place(&dir.path().join("new/a.json")).unwrap();
        assert_eq!(names(&dir.path().join("new")), [""; 0]);
        write_whole(&dir.path().join("old"), "old").unwrap();
        check_place(&dir.path().join("old")).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("old")).unwrap(), "old");
        for (name, problem) in [("old/a.json", "cannot create `"), ("new", "cannot write `")] {
            let error = check_place(&dir.path().join(name)).unwrap_err().to_string();
            assert!(error.starts_with(problem), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        write_whole(&file, "x").unwrap();
        let error = write_whole(&file.join("b.json"), "x").unwrap_err().to_string();
        assert!(error.starts_with("cannot create `") && error.contains("a.json`"), "{error}");
        assert!(write_whole(Path::new("/"), "x").is_err());
    }

    #[test]
    fn concurrent_writers_leave_a_complete_file() {
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
