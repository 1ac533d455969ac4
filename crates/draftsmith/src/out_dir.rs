//! A directory that is there whole or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// A directory in the making: it lies beside its place, under another name, until it is whole.
pub(crate) struct OutDir {
    out: PathBuf,
    partial: PathBuf,
}

impl OutDir {
    /// Begins one for `out`, where nothing is lost: a place that is free, or an empty directory.
    ///
    /// # Errors
    /// If there is something, or the directory cannot be made.
    pub(crate) fn begin(out: &Path) -> Result<Self> {
        let Some(name) = out.file_name() else {
            bail!("`{}` is no name for a directory to write", out.display());
        };
        let is_free = match fs::read_dir(out) {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if !is_free {
            bail!(
                "`{}` is there already; hint: give another directory, or remove it first",
                out.display()
            );
        }
        let partial = out.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        // What a run left that was killed.
        let _ = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create `{}`", partial.display()))?;
        Ok(Self { out: out.to_path_buf(), partial })
    }

    /// Where its files are written.
    pub(crate) fn path(&self) -> &Path {
        &self.partial
    }

    /// Puts it in its place.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn finish(self) -> Result<()> {
        // An empty one; not every system renames over it.
        let _ = fs::remove_dir(&self.out);
        fs::rename(&self.partial, &self.out)
            .with_context(|| format!("cannot write `{}`", self.out.display()))
    }
}

/// Copies a file of one directory into another, if it is there.
///
/// # Errors
/// If it cannot be copied.
pub(crate) fn copy_if_there(from: &Path, to: &Path, name: &str) -> Result<()> {
    let from = from.join(name);
    if !from.is_file() {
        return Ok(());
    }
    fs::copy(&from, to.join(name))
        .map(drop)
        .with_context(|| format!("cannot copy `{}`", from.display()))
}

impl Drop for OutDir {
    fn drop(&mut self) {
        // It is elsewhere by now, or was not finished.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_there_whole_or_not_at_all_and_nothing_is_lost() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let out = place.path().join("new").join("out");
        let names = || fs::read_dir(place.path().join("new")).expect("listed").count();
        let half = OutDir::begin(&out).expect("it is free");
        fs::write(half.path().join("a"), "1").expect("written");
        assert!(!out.exists());
        drop(half);
        assert_eq!(names(), 0, "nothing is left");
        fs::create_dir(&out).expect("an empty directory is in no one's way");
        let whole = OutDir::begin(&out).expect("it is empty");
        fs::write(whole.path().join("a"), "1").expect("written");
        copy_if_there(place.path(), whole.path(), "absent").expect("nothing to copy");
        whole.finish().expect("put in its place");
        assert_eq!(fs::read_to_string(out.join("a")).expect("read"), "1");
        assert_eq!(names(), 1);
        let refused = OutDir::begin(&out).err().expect("it is not empty").to_string();
        assert!(refused.contains("is there already"), "{refused}");
        assert!(OutDir::begin(&out.join("a")).is_err(), "a file");
    }
}
