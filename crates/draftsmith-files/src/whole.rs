//! How files reach the disk: whole or not at all.
//!
//! A file is written under a temporary name beside its own (`.NAME.tmp`), synced and renamed, and
//! then its directory is synced: the path holds what it held before or everything that was written,
//! whenever the process is killed or the power fails. A temporary file that a killed process left is
//! overwritten by the next; one that another process is writing is left to it (`temporary.rs`).

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::file_error::FileError;
use crate::temporary::{self, Temporary};

/// Writes a file whole or not at all, making its directory where there is none.
///
/// # Errors
/// What creating, writing, syncing or renaming the file met.
pub fn write_whole(path: &Path, bytes: impl AsRef<[u8]>) -> Result<(), FileError> {
    write_whole_with(path, |file| {
        file.write_all(bytes.as_ref()).map_err(|source| FileError::new("write", path, source))
    })
}

/// The same, of what `write` writes.
///
/// # Errors
/// What `write` returns, or what creating, syncing or renaming the file met; the temporary file is
/// then removed.
pub fn write_whole_with<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(|source| FileError::new("create", dir, source))?;
    let mut temporary = Temporary::open(path)?;
    let written = write_and_rename(path, &mut temporary, write);
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary.path);
        return written;
    }
    // The file is whole either way, so a file system that cannot sync directories is no error.
    if let Ok(dir) = File::open(dir) {
        let _ = dir.sync_all();
    }
    written
}

fn write_and_rename<E: From<FileError>>(
    path: &Path,
    temporary: &mut Temporary,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let Temporary { path: from, file } = temporary;
    write(file)?;
    file.sync_all().map_err(|source| FileError::new("write", path, source))?;
    // Still locked, so that nobody takes for abandoned what has its last name already.
    fs::rename(from, path).map_err(|source| FileError::new("write", path, source))?;
    Ok(())
}

/// Removes the temporary files in a directory that killed processes left, as far as that can be told.
pub fn remove_abandoned(dir: &Path) {
    temporary::remove_abandoned(dir);
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;

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
        let path = dir.path().join("made/on/the/way/a.json");
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
    fn a_path_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.json");
        write_whole(&file, "x").unwrap();
        let error = write_whole(&file.join("b.json"), "x").unwrap_err().to_string();
        assert!(error.starts_with("cannot create `") && error.contains("a.json`"), "{error}");
        assert!(write_whole(Path::new("/"), "x").is_err());
    }
}
