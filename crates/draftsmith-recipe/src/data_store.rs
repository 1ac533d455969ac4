//! Built data in an object store (`s3://`, `gs://`, `az://`, or `file://` for a directory), with
//! `data/NAME` as the local copy.
//!
//! Objects have the files' names. A put is atomic, and a shard is put only if it does not exist
//! (`If-None-Match: *`), so objects are complete or absent as our files are. An existing shard must equal
//! the one built here byte for byte.
//!
//! `data_store/cloud.rs` talks to cloud stores and needs the feature `object-store`;
//! `data_store/directory.rs` stores in a directory.

#[cfg(feature = "object-store")]
mod cloud;
mod directory;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_data::{MANIFEST, is_record_name, record_name, shard_name, write_manifest};
use draftsmith_files::{remove_abandoned, write_whole};

use self::directory::Directory;
use crate::shard::Shard;

/// Whether an object may replace another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// Nothing may be there.
    New,
    /// What is there is replaced.
    Over,
}

/// A store of named objects, each of them complete or absent.
trait Objects: Send + Sync {
    /// The names and sizes of all objects.
    fn list(&self) -> Result<BTreeMap<String, u64>>;

    /// An object's bytes; `None` if it does not exist.
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Writes an object. False if it was to be new and exists. Only one of several concurrent new puts
    /// succeeds.
    fn put(&self, name: &str, bytes: &[u8], put: Put) -> Result<bool>;

    /// Removes an object, ignoring errors.
    fn remove(&self, name: &str);
}

/// A place in an object store.
pub struct DataStore {
    url: String,
    objects: Box<dyn Objects>,
}

impl DataStore {
    /// Opens the store at a URL.
    ///
    /// # Errors
    /// If the URL or the environment's settings for the store are invalid.
    pub fn open(url: &str) -> Result<Self> {
        let objects: Box<dyn Objects> = match url.strip_prefix("file://") {
            Some(dir) if Path::new(dir).is_absolute() => {
                // Temporary files of killed processes.
                remove_abandoned(Path::new(dir));
                Box::new(Directory(dir.into()))
            }
            _ => remote(url)?,
        };
        Ok(Self { url: url.to_owned(), objects })
    }

    /// Copies to `dir` what a process needs before it builds: the missing ones of its shards with their
    /// records, or all of them if the local copies are `distrusted`. If it has no shards yet, it gets one
    /// of another process, to compare settings.
    ///
    /// # Errors
    /// If the store cannot be read or the directory written.
    pub fn pull_own(
        &self,
        dir: &Path,
        num_shards: usize,
        shard: Shard,
        distrusted: bool,
    ) -> Result<()> {
        let objects = self.objects.list()?;
        let exists = |index: &usize| objects.contains_key(&shard_name(*index));
        let (own, others): (Vec<usize>, Vec<usize>) =
            (0..num_shards).filter(exists).partition(|index| shard.builds(*index));
        let one_other = others.first().filter(|_| own.is_empty());
        for index in own.iter().chain(one_other) {
            for name in [shard_name(*index), record_name(*index)] {
                self.pull(dir, &name, &objects, distrusted)?;
            }
        }
        self.pull(dir, MANIFEST, &objects, distrusted)
    }

    /// Copies all missing files of the data to `dir`.
    ///
    /// # Errors
    /// If the store cannot be read or the directory written.
    pub fn pull_all(&self, dir: &Path) -> Result<()> {
        let objects = self.objects.list()?;
        objects.keys().try_for_each(|name| self.pull(dir, name, &objects, false))
    }

    /// Puts a shard in `dir` and its record.
    ///
    /// # Errors
    /// If it cannot be put, or the store has a different one.
    pub fn push(&self, dir: &Path, index: usize, put: Put) -> Result<()> {
        self.put(dir, &shard_name(index), put)?;
        if dir.join(record_name(index)).exists() {
            self.put(dir, &record_name(index), Put::Over)?;
        }
        Ok(())
    }

    /// Puts those shards in `dir` that the store lacks, because a process was killed before it put them or
    /// built without a store.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_missing(&self, dir: &Path, indices: impl IntoIterator<Item = usize>) -> Result<()> {
        let objects = self.objects.list()?;
        let mut missing = indices.into_iter().filter(|at| !objects.contains_key(&shard_name(*at)));
        missing.try_for_each(|index| self.push(dir, index, Put::New))
    }

    /// The number of shards that other processes have yet to build. The process that finds all shards
    /// writes the manifest to the store and to `dir`. An existing manifest is ignored if `distrusted`.
    ///
    /// # Errors
    /// If the store cannot be read or written.
    pub fn finish(&self, dir: &Path, num_shards: usize, distrusted: bool) -> Result<usize> {
        let objects = self.objects.list()?;
        let is_missing = |index: &usize| !objects.contains_key(&shard_name(*index));
        let num_left = (0..num_shards).filter(is_missing).count();
        if num_left > 0 {
            return Ok(num_left);
        }
        // Records come first: a record that another process removes meanwhile is in the manifest, which
        // we read afterwards.
        let records = || objects.keys().filter(|name| is_record_name(name));
        for name in records() {
            self.pull(dir, name, &objects, true)?;
        }
        let manifest = if distrusted { None } else { self.objects.get(MANIFEST)? };
        if let Some(bytes) = &manifest {
            write_whole(&dir.join(MANIFEST), bytes)?;
        } else {
            // Shards without a record are read to make one.
            for index in (0..num_shards).filter(|at| !objects.contains_key(&record_name(*at))) {
                self.pull(dir, &shard_name(index), &objects, false)?;
            }
        }
        write_manifest(dir, num_shards)?;
        if manifest != std::fs::read(dir.join(MANIFEST)).ok() {
            self.put(dir, MANIFEST, Put::Over)?;
        }
        // Another process that found all shards may have removed them.
        records().for_each(|name| self.objects.remove(name));
        Ok(0)
    }

    /// Copies an existing object to a file, if the file is missing or has another size, or `always`.
    fn pull(
        &self,
        dir: &Path,
        name: &str,
        objects: &BTreeMap<String, u64>,
        always: bool,
    ) -> Result<()> {
        let Some(size) = objects.get(name) else { return Ok(()) };
        let path = dir.join(name);
        let is_copied = std::fs::metadata(&path).is_ok_and(|file| file.len() == *size);
        if always || !is_copied {
            // A record may be gone: it is removed once there is a manifest.
            self.objects.get(name)?.map_or(Ok(()), |bytes| write_whole(&path, bytes))?;
        }
        Ok(())
    }

    fn put(&self, dir: &Path, name: &str, put: Put) -> Result<()> {
        let path = dir.join(name);
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        let is_put = self.objects.put(name, &bytes, put)?;
        if is_put || self.objects.get(name)?.is_none_or(|stored| stored == bytes) {
            return Ok(());
        }
        bail!(
            "`{}/{name}` differs from what was built here: it has other settings, or a machine with \
             different arithmetic built it; hint: build with `--repair` to replace it, or change \
             `data.store`",
            self.url
        )
    }
}

#[cfg(feature = "object-store")]
fn remote(url: &str) -> Result<Box<dyn Objects>> {
    Ok(Box::new(cloud::Cloud::open(url).with_context(|| expected(url))?))
}

#[cfg(not(feature = "object-store"))]
fn remote(url: &str) -> Result<Box<dyn Objects>> {
    bail!(
        "{}; hint: for other stores than `file://`, build with \
         `cargo build --release --features object-store`",
        expected(url)
    )
}

fn expected(url: &str) -> String {
    format!(
        "key `data.store` is `{url}`, expected `s3://BUCKET/PATH`, `gs://…`, `az://…` or \
         `file:///DIRECTORY`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(root: &Path) -> DataStore {
        std::fs::create_dir_all(root.join("store")).expect("made");
        DataStore::open(&format!("file://{}", root.join("store").display())).expect("a store")
    }

    #[test]
    fn a_shard_is_put_once_and_a_different_one_fails() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let store = store(root.path());
        let dir = root.path().join("data");
        let write = |text: &str| write_whole(&dir.join(shard_name(3)), text).expect("written");
        write("rows");
        for _ in 0..2 {
            store.push(&dir, 3, Put::New).expect("put, or the same");
        }
        assert_eq!(store.objects.list().expect("listed"), [(shard_name(3), 4)].into());
        write("others");
        let error = store.push(&dir, 3, Put::New).expect_err("refused").to_string();
        assert!(error.contains(&shard_name(3)) && error.contains("`--repair`"), "{error}");
        assert_eq!(store.objects.get(&shard_name(3)).expect("read").as_deref(), Some(&b"rows"[..]));
        store.push(&dir, 3, Put::Over).expect("replaced");
        assert_eq!(
            store.objects.get(&shard_name(3)).expect("read").as_deref(),
            Some(&b"others"[..])
        );
        let copy = root.path().join("copy");
        store.pull_all(&copy).expect("copied");
        assert_eq!(std::fs::read(copy.join(shard_name(3))).expect("there"), b"others");
    }

    #[test]
    fn invalid_urls_name_the_key() {
        for url in ["", "bucket/path", "ftp://host/path", "s3:"] {
            let error = DataStore::open(url).err().map(|error| error.to_string());
            assert!(error.is_some_and(|error| error.contains("`data.store`")), "{url}");
        }
    }
}
