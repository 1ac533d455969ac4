//! One command at a time writes what a recipe makes: a second one is refused, and told who is there.
//!
//! The lock is the operating system's, on files beside the recipe's directories (`data/.NAME.lock`,
//! `checkpoints/.NAME.lock`). It ends with the process that holds it, however that ends. The files
//! stay: they say who held the lock last, and keep nobody out by being there. Commands that only
//! read, as `generate` and `check` do, need none; those that build shards of one data set share one.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::recipe::Recipe;

/// Held for as long as this lives.
#[derive(Debug)]
pub(crate) struct RecipeLock {
    _files: Vec<File>,
}

impl RecipeLock {
    /// Takes the lock of a recipe's directories.
    ///
    /// # Errors
    /// If another process has it.
    pub(crate) fn take(recipe: &Recipe) -> Result<Self> {
        Self::of(recipe, Keeping::All)
    }

    /// Takes part in the lock of a recipe's directories, beside others that do: those that build shards
    /// of its data.
    ///
    /// # Errors
    /// If another process has it for itself.
    pub(crate) fn share(recipe: &Recipe) -> Result<Self> {
        Self::of(recipe, Keeping::ThoseWhoDoNotShare)
    }

    fn of(recipe: &Recipe, out: Keeping) -> Result<Self> {
        // Always in this order: of two that begin at once, one gets both.
        let dirs = [recipe.data_dir(), recipe.checkpoint_dir()];
        let files = dirs.iter().map(|dir| lock(dir, out)).collect::<Result<Vec<_>>>()?;
        Ok(Self { _files: files.into_iter().flatten().collect() })
    }
}

/// Whom a lock keeps out.
#[derive(Debug, Clone, Copy)]
enum Keeping {
    All,
    ThoseWhoDoNotShare,
}

/// Locks what is written to a directory; nothing where nobody could write to it.
fn lock(dir: &Path, out: Keeping) -> Result<Option<File>> {
    let path = lock_path(dir);
    let Some(mut file) = open(&path)? else { return Ok(None) };
    let locked = match out {
        Keeping::All => file.try_lock(),
        Keeping::ThoseWhoDoNotShare => file.try_lock_shared(),
    };
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => bail!("{}", in_use(dir, &mut file)),
        // A file system without locks: it is as if there were none.
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {
            return Ok(None);
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock `{}`", path.display()));
        }
    }
    let command = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let command: Vec<String> = command.collect();
    let holder = format!("{}\n{}\n", std::process::id(), command.join(" "));
    // Only others' messages depend on it.
    let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
    Ok(Some(file))
}

/// `data/.NAME.lock` for `data/NAME`.
fn lock_path(dir: &Path) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    dir.with_file_name(format!(".{name}.lock"))
}

/// Opens the file to lock; none where nothing can be written, and so nothing needs a lock.
fn open(path: &Path) -> Result<Option<File>> {
    if let Some(parent) = path.parent()
        && let Err(error) = std::fs::create_dir_all(parent)
    {
        return unwritable(error).with_context(|| format!("cannot create `{}`", parent.display()));
    }
    // Not cut before it is locked: it names whoever has it.
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    match file {
        Ok(file) => Ok(Some(file)),
        Err(error) => {
            unwritable(error).with_context(|| format!("cannot open `{}`", path.display()))
        }
    }
}

/// Nothing where an error says that nothing can be written there.
fn unwritable(error: std::io::Error) -> std::io::Result<Option<File>> {
    match error.kind() {
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => Ok(None),
        _ => Err(error),
    }
}

/// Who has the lock, as far as the file tells.
fn in_use(dir: &Path, file: &mut File) -> String {
    let mut holder = String::new();
    let read = file.rewind().and_then(|()| file.read_to_string(&mut holder));
    let dir = dir.display();
    match (read, holder.split_once('\n')) {
        (Ok(_), Some((id, command))) => format!(
            "`{dir}` is in use by process {id}, `{}`; hint: wait until it has ended, or stop it with \
             `kill {id}`, which keeps what it has done",
            command.trim_end()
        ),
        _ => format!("`{dir}` is in use by another process; hint: wait until it has ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_one_is_told_who_has_it_until_the_first_lets_go() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().join("data/mine");
        let lock = |dir: &Path| lock(dir, Keeping::All);
        let first = lock(&dir).expect("free").expect("it can be locked");
        let message = lock(&dir).expect_err("held").to_string();
        let id = format!("process {}", std::process::id());
        assert!(message.contains("data/mine`") && message.contains(&id), "{message}");
        drop(first);
        // What is left of it keeps nobody out.
        assert!(lock_path(&dir).exists());
        lock(&dir).expect("free again").expect("it can be locked");
        assert!(lock(&dir.with_file_name("other")).is_ok());
    }

    #[test]
    fn those_who_share_it_keep_out_the_others_and_they_them() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().join("data/mine");
        let share = || lock(&dir, Keeping::ThoseWhoDoNotShare);
        let (one, other) = (share().expect("free"), share().expect("shared"));
        assert!(lock(&dir, Keeping::All).is_err());
        drop((one, other));
        let all = lock(&dir, Keeping::All).expect("free again");
        assert!(share().is_err());
        drop(all);
    }

    #[test]
    fn what_cannot_be_written_needs_no_lock() {
        for kind in [ErrorKind::ReadOnlyFilesystem, ErrorKind::PermissionDenied] {
            assert!(unwritable(kind.into()).expect("no error").is_none());
        }
        assert!(unwritable(ErrorKind::StorageFull.into()).is_err());
    }
}
