//! How files reach the disk: whole or not at all.
//!
//! A file is written under a temporary name beside its own (`.NAME.tmp`), synced and renamed, and
//! then its directory is synced: the path holds what it held before or everything that was written,
//! whenever the process is killed or the power fails. A temporary file that a killed process left is
//! overwritten by the next; one that another process is writing is left to it (`temporary.rs`).

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
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

/// Writes a file whole where there is none; false where there is one. Of several that do so at once,
/// one does.
///
/// # Errors
/// As [`write_whole`].
pub fn write_new(path: &Path, bytes: impl AsRef<[u8]>) -> Result<bool, FileError> {
    let error = |source| FileError::new("write", path, source);
    fs::create_dir_all(dir_of(path)).map_err(|source| FileError::new("create", path, source))?;
    let Temporary { path: from, mut file } = Temporary::open(path)?;
    let written = file.write_all(bytes.as_ref()).and_then(|()| file.sync_all());
    // A name is made where there is none, which a rename does not ask about.
    let linked = written.and_then(|()| fs::hard_link(&from, path));
    // Whatever happened, its first name is of no use any more.
    let _ = fs::remove_file(&from);
    match linked {
        Ok(()) => sync_dir(path),
        Err(source) if source.kind() == ErrorKind::AlreadyExists => return Ok(false),
        Err(source) => return Err(error(source)),
    }
    Ok(true)
}

/// The same as [`write_whole`], of what `write` writes.
///
/// # Errors
/// What `write` returns, or what creating, syncing or renaming the file met; the temporary file is
/// then removed.
pub fn write_whole_with<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(), E>,
) -> Result<(), E> {
    let dir = dir_of(path);
    fs::create_dir_all(dir).map_err(|source| FileError::new("create", dir, source))?;
    let mut temporary = Temporary::open(path)?;
    let written = write_and_rename(path, &mut temporary, write);
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary.path);
        return written;
    }
    sync_dir(path);
    written
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs the directory of a file. That is whole either way, so a file system that cannot is no error.
fn sync_dir(path: &Path) {
    if let Ok(dir) = File::open(dir_of(path)) {
        let _ = dir.sync_all();
    }
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
    fn a_new_file_is_written_where_there_is_none_by_one_of_many() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/a.json");
        let texts: Vec<String> = (0..8).map(|writer| format!("{writer}").repeat(10_000)).collect();
        let to = &path;
        let is_written = std::thread::scope(|scope| {
            let all: Vec<_> = texts
                .iter()
                .map(|text| scope.spawn(move || write_new(to, text).unwrap()))
                .collect();
            all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<bool>>()
        });
        let winner = is_written.iter().position(|written| *written).unwrap();
        assert_eq!(is_written.iter().filter(|written| **written).count(), 1);
        assert_eq!(fs::read_to_string(&path).unwrap(), texts[winner]);
        assert_eq!(names(path.parent().unwrap()), ["a.json"]);
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
