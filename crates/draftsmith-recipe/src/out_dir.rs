//! Writes an output directory completely or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// An output directory that is being written, under a temporary name beside its final one.
pub struct OutDir {
    out: PathBuf,
    partial: PathBuf,
}

impl OutDir {
    /// Creates the temporary directory for `out`, which must be absent or an empty directory.
    ///
    /// # Errors
    /// If `out` exists and is no empty directory, or the temporary one cannot be created.
    pub fn begin(out: &Path) -> Result<Self> {
        let Some(name) = out.file_name() else {
            bail!("`{}` cannot name an output directory", out.display());
        };
        // A link is not replaced, even if it leads to an empty directory.
        let is_free = match fs::symlink_metadata(out) {
            Ok(found) if found.is_dir() => {
                fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none())
            }
            Ok(_) => false,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if !is_free {
            bail!(
                "`{}` already exists; hint: give another directory, or remove it first",
                out.display()
            );
        }
        let partial = out.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        // A killed earlier run may have left the directory behind.
        let _ = fs::remove_dir_all(&partial);
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create `{}`", partial.display()))?;
        Ok(Self { out: out.to_path_buf(), partial })
    }

    /// Returns the temporary directory to write files to.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Renames the directory to its final name.
    ///
    /// # Errors
    /// If the rename fails.
    pub fn finish(self) -> Result<()> {
        // Some systems cannot rename over an empty directory.
        let _ = fs::remove_dir(&self.out);
        fs::rename(&self.partial, &self.out)
            .with_context(|| format!("cannot write `{}`", self.out.display()))
    }
}

/// Copies a file from one directory into another, if the file exists.
///
/// # Errors
/// If the file cannot be copied.
pub fn copy_if_there(from: &Path, to: &Path, name: &str) -> Result<()> {
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
        // This removes an unfinished directory. After `finish`, there is nothing to remove.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_appears_complete_and_never_overwrites() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let out = place.path().join("new").join("out");
        let names = || fs::read_dir(place.path().join("new")).expect("listed").count();
        let half = OutDir::begin(&out).expect("it is free");
        fs::write(half.path().join("a"), "1").expect("written");
        assert!(!out.exists());
        drop(half);
        assert_eq!(names(), 0, "nothing is left");
        fs::create_dir(&out).expect("created");
        let whole = OutDir::begin(&out).expect("it is empty");
        fs::write(whole.path().join("a"), "1").expect("written");
        copy_if_there(place.path(), whole.path(), "absent").expect("nothing to copy");
        whole.finish().expect("put in its place");
        assert_eq!(fs::read_to_string(out.join("a")).expect("read"), "1");
        assert_eq!(names(), 1);
        let refused = OutDir::begin(&out).err().expect("it is not empty").to_string();
        assert!(refused.contains("already exists"), "{refused}");
        assert!(OutDir::begin(&out.join("a")).is_err(), "a file");
        #[cfg(unix)]
        {
            let (empty, link) = (place.path().join("empty"), place.path().join("link"));
            fs::create_dir(&empty).expect("created");
            std::os::unix::fs::symlink(&empty, &link).expect("linked");
            let refused = OutDir::begin(&link).err().expect("a link").to_string();
            assert!(refused.contains("link` already exists"), "{refused}");
        }
    }
}
