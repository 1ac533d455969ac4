//! The error of a file operation, and opening files for reading.

use std::fs::{self, File};
use std::io::{Error, Read};
use std::path::{Path, PathBuf};

/// An I/O error, with the operation and the path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{path}`: {source}")]
pub struct FileError {
    /// The operation, such as `create` or `write`.
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The operating system's error.
    pub source: Error,
}

impl FileError {
    /// Wraps an I/O error.
    pub fn new(action: &'static str, path: &Path, source: Error) -> Self {
        Self { action, path: path.to_path_buf(), source }
    }
}

/// Opens a regular file for reading. Opening anything else, such as a named pipe, could wait forever.
///
/// # Errors
/// If it cannot be opened or is not a regular file.
pub fn open_file(path: &Path) -> Result<File, FileError> {
    let error = |source| FileError::new("read", path, source);
    if !fs::metadata(path).map_err(error)?.is_file() {
        return Err(error(Error::other("it is not a regular file")));
    }
    File::open(path).map_err(error)
}

/// Reads a regular file.
///
/// # Errors
/// As for [`open_file`], or if reading fails.
pub fn read_file(path: &Path) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    let mut file = open_file(path)?;
    file.read_to_end(&mut bytes).map_err(|source| FileError::new("read", path, source))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "text").unwrap();
        assert_eq!(read_file(&path).unwrap(), b"text");
        let message = read_file(dir.path()).unwrap_err().to_string();
        assert!(message.contains("not a regular file"), "{message}");
        let absent = read_file(&dir.path().join("b")).unwrap_err();
        assert_eq!(absent.source.kind(), std::io::ErrorKind::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn a_named_pipe_without_a_writer_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let message = read_file(&pipe).unwrap_err().to_string();
        assert!(message.contains("pipe`: it is not a regular file"), "{message}");
    }
}
