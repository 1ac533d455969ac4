//! Lets one command at a time write a recipe's directories. A second one fails and names the first.
//!
//! We use the operating system's file locks on `data/.NAME.lock` and `checkpoints/.NAME.lock`, so a lock
//! ends with its process, even if that is killed. The files stay and name the last holder; their presence
//! locks nothing. Commands that only read, such as `generate` and `check`, take no lock. Processes that
//! build shards of one data set share one, and [`SharedSettings`] holds them to the same settings.

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
    /// Takes the exclusive lock with [`File::try_lock`], or with [`File::try_lock_shared`] the lock that
    /// processes share when each builds shards of the recipe's data.
    ///
    /// # Errors
    /// If another process holds the lock.
    pub(crate) fn take(recipe: &Recipe, try_lock: TryLock) -> Result<Self> {
        // The fixed order ensures that one of two processes that start together gets both locks.
        let dirs = [recipe.data_dir(), recipe.checkpoint_dir()];
        let files = dirs.iter().map(|dir| lock(dir, try_lock)).collect::<Result<Vec<_>>>()?;
        Ok(Self { _files: files.into_iter().flatten().collect() })
    }
}

type TryLock = fn(&File) -> Result<(), TryLockError>;

/// The settings that all processes building shards of one data set share. The first process records a hash
/// of them in `data/.NAME.shards.lock`; processes with other settings are refused while it builds.
///
/// Comparing with existing shards is not enough, because processes that start together find none.
#[derive(Debug)]
pub(crate) struct SharedSettings {
    _file: Option<File>,
}

impl SharedSettings {
    /// Joins the processes that build shards in `dir`, with a hash of this process's settings.
    ///
    /// # Errors
    /// If another process builds shards there with other settings.
    pub(crate) fn join(dir: &Path, settings: &str) -> Result<Self> {
        let path = lock_path(dir).with_extension("shards.lock");
        let Some(mut file) = open(&path)? else { return Ok(Self { _file: None }) };
        let cannot = || format!("cannot lock `{}`", path.display());
        match file.try_lock() {
            // Nobody else builds here, so earlier settings no longer count.
            Ok(()) => {
                let written = file.set_len(0).and_then(|()| file.write_all(settings.as_bytes()));
                written.with_context(|| format!("cannot write `{}`", path.display()))?;
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {
                return Ok(Self { _file: None });
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(cannot),
        }
        // The holder of the exclusive lock is about to share it. Another process may have become first
        // while this one changed from the one lock to the other, so all compare.
        file.lock_shared().with_context(cannot)?;
        let mut recorded = String::new();
        let read = file.rewind().and_then(|()| file.read_to_string(&mut recorded));
        read.with_context(|| format!("cannot read `{}`", path.display()))?;
        if recorded != settings {
            bail!(
                "another process is building shards in `{}` with other settings; hint: give this \
                 recipe another `name`, or start all processes with the same recipe and flags",
                dir.display()
            );
        }
        Ok(Self { _file: Some(file) })
    }
}

/// Locks a directory against other writers; `None` if it cannot be written anyway.
fn lock(dir: &Path, try_lock: TryLock) -> Result<Option<File>> {
    let path = lock_path(dir);
    let Some(mut file) = open(&path)? else { return Ok(None) };
    match try_lock(&file) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => bail!("{}", in_use(dir, &mut file)),
        // This file system has no locks, so we go without.
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
    // A failure only makes other processes' messages vaguer.
    let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
    Ok(Some(file))
}

/// `data/.NAME.lock` for `data/NAME`.
fn lock_path(dir: &Path) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    dir.with_file_name(format!(".{name}.lock"))
}

/// Opens the lock file; `None` if nothing can be written there, so that no lock is needed.
fn open(path: &Path) -> Result<Option<File>> {
    // Truncated only after locking, because it names the current holder.
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

/// The message that names the lock's holder, if the lock file does.
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
        let lock = |dir: &Path| lock(dir, File::try_lock);
        let first = lock(&dir).expect("free").expect("it can be locked");
        let message = lock(&dir).expect_err("held").to_string();
        let id = format!("process {}", std::process::id());
        assert!(message.contains("data/mine`") && message.contains(&id), "{message}");
        drop(first);
        // The file that remains locks nothing.
        assert!(lock_path(&dir).exists());
        lock(&dir).expect("free again").expect("it can be locked");
        assert!(lock(&dir.with_file_name("other")).is_ok());
    }

    #[test]
    fn shared_and_exclusive_locks_exclude_each_other() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().join("data/mine");
        let share = || lock(&dir, File::try_lock_shared);
        let (one, other) = (share().expect("free"), share().expect("shared"));
        assert!(lock(&dir, File::try_lock).is_err());
        drop((one, other));
        let _exclusive = lock(&dir, File::try_lock).expect("free again");
        assert!(share().is_err());
    }

    #[test]
    fn processes_that_build_shards_together_have_the_same_settings() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().join("data/mine");
        let first = SharedSettings::join(&dir, "a").expect("the first");
        let second = SharedSettings::join(&dir, "a").expect("the same settings");
        let message = SharedSettings::join(&dir, "b").expect_err("others").to_string();
        assert!(message.contains("data/mine`") && message.contains("`name`"), "{message}");
        drop(first);
        SharedSettings::join(&dir, "b").expect_err("the second still builds");
        drop(second);
        // The settings of processes that have ended bind nobody.
        let third = SharedSettings::join(&dir, "b").expect("nobody else builds");
        assert!(SharedSettings::join(&dir.with_file_name("other"), "a").is_ok());
        drop(third);
    }

    #[test]
    fn unwritable_directories_need_no_lock() {
        assert!(is_unwritable(ErrorKind::ReadOnlyFilesystem));
        assert!(is_unwritable(ErrorKind::PermissionDenied));
        assert!(!is_unwritable(ErrorKind::StorageFull));
    }
}
