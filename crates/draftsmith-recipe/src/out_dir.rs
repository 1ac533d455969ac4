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
        // A link is not replaced, even if it leads to an empty directory.
        let is_free = match fs::symlink_metadata(out) {
            Ok(found) if found.is_dir() => {
                fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none())
            }
            Ok(_) => false,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if is_free { Self::begin_again(out) } else { Err(exists(out)) }
    }

    /// Creates the temporary directory for `out`, which may also be what [`Self::finish`] will put
    /// there.
    ///
    /// # Errors
    /// If the temporary directory cannot be created.
    pub fn begin_again(out: &Path) -> Result<Self> {
        let Some(name) = out.file_name() else {
            bail!("`{}` cannot name an output directory", out.display());
        };
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

    /// Renames the directory to its final name. Keeps a directory with the same files.
    ///
    /// # Errors
    /// If the final name is taken by anything else, or the rename fails.
    pub fn finish(self) -> Result<()> {
        // Some systems cannot rename over an empty directory.
        let _ = fs::remove_dir(&self.out);
        match fs::symlink_metadata(&self.out) {
            Ok(found) if found.is_dir() && have_same_files(&self.partial, &self.out) => {
                return Ok(());
            }
            Ok(_) => return Err(exists(&self.out)),
            Err(_) => {}
        }
        fs::rename(&self.partial, &self.out)
            .with_context(|| format!("cannot write `{}`", self.out.display()))
    }
}

fn exists(out: &Path) -> anyhow::Error {
    let text =
        "already exists, with other content; hint: give another directory, or remove it first";
    anyhow::anyhow!("`{}` {text}", out.display())
}

/// Returns whether two directories of files have the same names and bytes.
fn have_same_files(one: &Path, other: &Path) -> bool {
    let files = |dir: &Path| -> std::io::Result<Vec<(std::ffi::OsString, Vec<u8>)>> {
        let entries = fs::read_dir(dir)?.collect::<std::io::Result<Vec<_>>>()?;
        let read = |entry: fs::DirEntry| Ok((entry.file_name(), fs::read(entry.path())?));
        let mut files = entries.into_iter().map(read).collect::<std::io::Result<Vec<_>>>()?;
        files.sort();
        Ok(files)
    };
    matches!((files(one), files(other)), (Ok(one), Ok(other)) if one == other)
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
        // The same again changes nothing, and anything else is refused.
        for (text, is_same) in [("1", true), ("2", false)] {
            let again = OutDir::begin_again(&out).expect("it may be the same");
            fs::write(again.path().join("a"), text).expect("written");
            assert_eq!(again.finish().is_ok(), is_same);
            assert_eq!(fs::read_to_string(out.join("a")).expect("read"), "1");
        }
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
