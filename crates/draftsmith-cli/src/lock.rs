//! Locks a recipe's directories and the file of `costs`, so that only one command at a time writes
//! them. A second command fails and names the first.
//!
//! We use the operating system's file locks on `data/.NAME.lock` and `checkpoints/.NAME.lock`, so a
//! lock ends with its process, even if that is killed. The files remain and name the last holder,
//! but an existing file does not mean that it is locked. Commands that only read, such as
//! `generate` and `check`, take no lock.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use draftsmith_recipe::Recipe;

/// The lock of a recipe's directories, released on drop.
#[derive(Debug)]
pub(crate) struct RecipeLock {
    _files: Vec<File>,
}

impl RecipeLock {
    /// Locks both directories of a recipe.
    ///
    /// # Errors
    /// If another process holds the lock.
    pub(crate) fn take(recipe: &Recipe) -> Result<Self> {
        // In a fixed order, one of two processes that start together gets both locks.
        let dirs = [recipe.data_dir(), recipe.checkpoint_dir()];
        let files = dirs.iter().map(|dir| lock(dir)).collect::<Result<Vec<_>>>()?;
        Ok(Self { _files: files.into_iter().flatten().collect() })
    }
}

/// Locks a directory or file against other writers; `None` if it is not writable anyway.
pub(crate) fn lock(output: &Path) -> Result<Option<File>> {
    let path = lock_path(output);
    let Some(mut file) = open(&path)? else { return Ok(None) };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => bail!("{}", in_use(output, &mut file)),
        // This file system does not support locks, so we continue without one.
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {
            return Ok(None);
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock `{}`", path.display()));
        }
    }
    let command: Vec<_> =
        std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let holder = format!("{}\n{}\n", std::process::id(), command.join(" "));
    // If this fails, other processes only get a vaguer message.
    let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
    Ok(Some(file))
}

/// Returns the path of the lock file of a directory or file: `data/.NAME.lock` for `data/NAME`.
fn lock_path(dir: &Path) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    dir.with_file_name(format!(".{name}.lock"))
}

/// Opens the lock file; `None` if the directory is not writable, so that no lock is needed.
fn open(path: &Path) -> Result<Option<File>> {
    // The file is truncated only after locking, because it names the current holder.
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let created = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    match created.and_then(|()| options.open(path)) {
        Err(error) if is_unwritable(error.kind()) => Ok(None),
        opened => opened.map(Some).with_context(|| format!("cannot open `{}`", path.display())),
    }
}

fn is_unwritable(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied)
}

/// Describes the lock's holder, if the lock file names it.
fn in_use(dir: &Path, file: &mut File) -> String {
    let mut holder = String::new();
    let read = file.rewind().and_then(|()| file.read_to_string(&mut holder));
    let dir = dir.display();
    match (read, holder.split_once('\n')) {
        (Ok(_), Some((id, command))) => format!(
            "`{dir}` is in use by process {id}, `{}`; hint: wait for it to end, or stop it with \
             `kill {id}`, which keeps its progress",
            command.trim_end()
        ),
        _ => format!("`{dir}` is in use by another process; hint: wait for it to end"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lock_fails_and_names_the_holder_until_the_first_is_dropped() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().join("data/mine");
        let first = lock(&dir).expect("free").expect("it can be locked");
        let message = lock(&dir).expect_err("held").to_string();
        let id = format!("process {}", std::process::id());
        assert!(message.contains("data/mine`") && message.contains(&id), "{message}");
        drop(first);
        // The remaining file is not locked.
        assert!(lock_path(&dir).exists());
        lock(&dir).expect("free again").expect("it can be locked");
        assert!(lock(&dir.with_file_name("other")).is_ok());
    }

    #[test]
    fn unwritable_directories_need_no_lock() {
        assert!(is_unwritable(ErrorKind::ReadOnlyFilesystem));
        assert!(is_unwritable(ErrorKind::PermissionDenied));
        assert!(!is_unwritable(ErrorKind::StorageFull));
    }
}
