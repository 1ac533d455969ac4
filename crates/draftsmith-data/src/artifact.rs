//! How artifacts reach the disk: whole or not at all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::error::DataError;

/// Writes a file under a temporary name beside `path` (`.NAME.tmp`), syncs it to the disk and
/// renames it, so that `path` holds either what it held before or everything that `write` wrote.
/// A temporary file left by a process that was killed is overwritten.
///
/// # Errors
/// What `write` returns, or what creating, syncing or renaming the file met; the temporary file is
/// then removed.
pub fn write_atomically<E: From<DataError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let temporary = temporary_path(path)?;
    let written = write_and_rename(path, &temporary, write);
    if written.is_err() {
        // The first error is the one to tell; there may be no file to remove.
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn write_and_rename<E: From<DataError>>(
    path: &Path,
    temporary: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let mut file = File::create(temporary).map_err(|e| DataError::io("create", temporary, e))?;
    write(&mut file)?;
    file.sync_all().map_err(|e| DataError::io("write", temporary, e))?;
    drop(file);
    fs::rename(temporary, path).map_err(|e| DataError::io("write", path, e))?;
    sync_parent(path);
    Ok(())
}

/// `DIR/.NAME.tmp` for `DIR/NAME`.
fn temporary_path(path: &Path) -> Result<PathBuf, DataError> {
    let name = path.file_name().ok_or_else(|| {
        DataError::io("create", path, std::io::Error::other("the path has no file name"))
    })?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(".tmp");
    Ok(path.with_file_name(temporary))
}

/// Makes the rename itself durable where directories can be synced. The file is whole either way,
/// so a file system that refuses is no error.
fn sync_parent(path: &Path) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Ok(directory) = File::open(parent.unwrap_or(Path::new("."))) {
        let _ = directory.sync_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn write_text(path: &Path, text: &str) -> Result<(), DataError> {
        write_atomically(path, |file| {
            file.write_all(text.as_bytes()).map_err(|e| DataError::io("write", path, e))
        })
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn writes_and_replaces_leaving_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        fs::write(dir.path().join(".a.json.tmp"), "left by a killed process, and longer").unwrap();
        for text in ["first", "second"] {
            write_text(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write_text(&path, "old").unwrap();
        let failed = write_atomically(&path, |file| {
            file.write_all(b"half").unwrap();
            Err(DataError::NoUserMessage)
        });
        assert!(matches!(failed, Err(DataError::NoUserMessage)));
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn a_missing_directory_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = write_text(&dir.path().join("none/a.json"), "x").unwrap_err().to_string();
        assert!(error.starts_with("cannot create `"), "{error}");
        assert!(error.contains(".a.json.tmp"), "{error}");
        assert!(write_text(Path::new("/"), "x").is_err());
    }
}
