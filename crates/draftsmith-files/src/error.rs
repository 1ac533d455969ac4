//! The error of a file operation, and opening files for reading.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The largest file that is read into memory, in bytes.
const MAX_BYTES: u64 = 1 << 30;

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
    open_regular(path).map_err(|source| FileError::new("read", path, source))
}

/// Reads a regular file into memory, up to 1 GiB.
///
/// # Errors
/// As for [`open_file`], or if the file is larger or reading fails.
pub fn read_file(path: &Path) -> Result<Vec<u8>, FileError> {
    read_bytes(path).map_err(|source| FileError::new("read", path, source))
}

/// [`open_file`] for callers that name the path themselves.
///
/// # Errors
/// As for [`open_file`].
pub fn open_regular(path: impl AsRef<Path>) -> std::io::Result<File> {
    match fs::metadata(&path)?.is_file() {
        true => File::open(path),
        false => Err(Error::other("it is not a regular file")),
    }
}

/// [`read_file`] for callers that name the path themselves.
///
/// # Errors
/// As for [`read_file`].
pub fn read_bytes(path: impl AsRef<Path>) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MAX_BYTES {
        true => Err(Error::other("it is larger than 1 GiB, more than any such file needs")),
        false => Ok(bytes),
    }
}

/// [`read_bytes`] for text in UTF-8.
///
/// # Errors
/// As for [`read_file`], or if the file is not UTF-8.
pub fn read_text(path: impl AsRef<Path>) -> std::io::Result<String> {
    let not_text = |_| Error::new(ErrorKind::InvalidData, "it is not text in UTF-8");
    String::from_utf8(read_bytes(path)?).map_err(not_text)
}

/// Turns the error of a file that does not exist into `None`.
///
/// # Errors
/// Any other error.
pub fn if_present<T>(found: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
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
        let device = read_text(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(device.contains("not a regular file"), "{device}");
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text(&path).unwrap_err().to_string(), "it is not text in UTF-8");
        File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        let large = read_file(&path).unwrap_err().to_string();
        assert!(large.contains("larger than 1 GiB"), "{large}");
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
