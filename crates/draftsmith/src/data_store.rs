//! Built data in an object store (`s3://`, `gs://`, `az://`, or `file://` for a directory), of which
//! `data/NAME` is this machine's copy.
//!
//! Objects have the names of the files. A shard is put where there is none, and nowhere else
//! (`If-None-Match: *`): that is to objects what renaming is to files, since a put is whole or absent by
//! itself. One that is there already must be the same, bytes and all.
//!
//! `data_store/cloud.rs` speaks with stores, and is built with the feature `object-store` only;
//! `data_store/directory.rs` is a directory.

#[cfg(feature = "object-store")]
mod cloud;
mod directory;
mod objects;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use draftsmith_data::{MANIFEST, is_record_name, record_name, shard_name, write_manifest};
use draftsmith_files::write_whole;

use self::directory::Directory;
use self::objects::Objects;
pub(crate) use self::objects::Put;
use crate::shard::Shard;

/// A place in an object store.
pub(crate) struct DataStore {
    url: String,
    objects: Box<dyn Objects>,
}

impl DataStore {
    /// Opens the place that a URL names.
    ///
    /// # Errors
    /// If the URL names none, or the environment's settings for it make no sense.
    pub(crate) fn open(url: &str) -> Result<Self> {
        let objects: Box<dyn Objects> = match url.strip_prefix("file://") {
            Some(dir) if Path::new(dir).is_absolute() => Box::new(Directory::open(dir)),
            _ => remote(url)?,
        };
        Ok(Self { url: url.to_owned(), objects })
    }

    /// Copies to `dir` what a process needs before it builds: its own shards with what was written of
    /// them, as far as they are not there, or all of them where they are `distrusted`; and where it has
    /// none, one of another process, which tells the settings.
    ///
    /// # Errors
    /// If the store cannot be read, or the directory written.
    pub(crate) fn pull_own(
        &self,
        dir: &Path,
        num_shards: usize,
        shard: Shard,
        distrusted: bool,
    ) -> Result<()> {
        let objects = self.objects.list()?;
        let is_there = |index: &usize| objects.contains_key(&shard_name(*index));
        let (own, others): (Vec<usize>, Vec<usize>) =
            (0..num_shards).filter(is_there).partition(|index| shard.builds(*index));
        let one_other = others.first().filter(|_| own.is_empty());
        for index in own.iter().chain(one_other) {
            for name in [shard_name(*index), record_name(*index)] {
                self.pull(dir, &name, &objects, distrusted)?;
            }
        }
        self.pull(dir, MANIFEST, &objects, distrusted)
    }

    /// Copies all of the data to `dir`, as far as it is not there.
    ///
    /// # Errors
    /// If the store cannot be read, or the directory written.
    pub(crate) fn pull_all(&self, dir: &Path) -> Result<()> {
        let objects = self.objects.list()?;
        objects.keys().try_for_each(|name| self.pull(dir, name, &objects, false))
    }

    /// Puts a shard that is in `dir`, and what was written of it.
    ///
    /// # Errors
    /// If it cannot be put, or there is another one.
    pub(crate) fn push(&self, dir: &Path, index: usize, put: Put) -> Result<()> {
        self.put(dir, &shard_name(index), put)?;
        if dir.join(record_name(index)).exists() {
            self.put(dir, &record_name(index), Put::Over)?;
        }
        Ok(())
    }

    /// Puts those of the shards in `dir` that the store lacks, as a process leaves them that was killed
    /// before it could, or built without a store.
    ///
    /// # Errors
    /// If one cannot be put.
    pub(crate) fn push_missing(
        &self,
        dir: &Path,
        indices: impl IntoIterator<Item = usize>,
    ) -> Result<()> {
        let objects = self.objects.list()?;
        let mut missing = indices.into_iter().filter(|at| !objects.contains_key(&shard_name(*at)));
        missing.try_for_each(|index| self.push(dir, index, Put::New))
    }

    /// How many shards other processes have still to build. Where all are there, whoever finds it out
    /// puts the manifest, in the store and in `dir`. One that is there already is not read where it is
    /// `distrusted`.
    ///
    /// # Errors
    /// If the store cannot be read or written.
    pub(crate) fn finish(&self, dir: &Path, num_shards: usize, distrusted: bool) -> Result<usize> {
        let objects = self.objects.list()?;
        let is_missing = |index: &usize| !objects.contains_key(&shard_name(*index));
        let num_left = (0..num_shards).filter(is_missing).count();
        if num_left > 0 {
            return Ok(num_left);
        }
        // Records first: one that is taken away meanwhile is in the manifest, which is read after it.
        let records = || objects.keys().filter(|name| is_record_name(name));
        for name in records() {
            self.pull(dir, name, &objects, true)?;
        }
        let there = if distrusted { None } else { self.objects.get(MANIFEST)? };
        if let Some(bytes) = &there {
            write_whole(&dir.join(MANIFEST), bytes)?;
        } else {
            // Shards that were put without a record are read to make one.
            for index in (0..num_shards).filter(|at| !objects.contains_key(&record_name(*at))) {
                self.pull(dir, &shard_name(index), &objects, false)?;
            }
        }
        write_manifest(dir, num_shards)?;
        if there != std::fs::read(dir.join(MANIFEST)).ok() {
            self.put(dir, MANIFEST, Put::Over)?;
        }
        for name in records() {
            // Whoever else finds all shards there may have taken it.
            let _ = self.objects.remove(name);
        }
        Ok(0)
    }

    /// Copies an object that is there to a file that is not, or has another size.
    fn pull(
        &self,
        dir: &Path,
        name: &str,
        objects: &BTreeMap<String, u64>,
        always: bool,
    ) -> Result<()> {
        let Some(size) = objects.get(name) else { return Ok(()) };
        let path = dir.join(name);
        let is_there = std::fs::metadata(&path).is_ok_and(|file| file.len() == *size);
        if always || !is_there {
            // It may be gone: records are, once there is a manifest.
            self.objects.get(name)?.map_or(Ok(()), |bytes| write_whole(&path, bytes))?;
        }
        Ok(())
    }

    fn put(&self, dir: &Path, name: &str, put: Put) -> Result<()> {
        let path = dir.join(name);
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        let is_put = self.objects.put(name, &bytes, put)?;
        if is_put || self.objects.get(name)?.is_none_or(|there| there == bytes) {
            return Ok(());
        }
        bail!(
            "`{}/{name}` is there, and is not what was built here: of other settings, or by a machine \
             that computes otherwise; hint: build with `--repair` to replace it, or change `data.store`",
            self.url
        )
    }
}

/// What a URL names beyond this machine's directories.
#[cfg(feature = "object-store")]
fn remote(url: &str) -> Result<Box<dyn Objects>> {
    Ok(Box::new(cloud::Cloud::open(url).with_context(|| expected(url))?))
}

#[cfg(not(feature = "object-store"))]
fn remote(url: &str) -> Result<Box<dyn Objects>> {
    bail!(
        "{}; hint: all but `file://` is for builds with `cargo build --release --features object-store`",
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

    /// A store in a directory, and a directory beside it.
    fn store(root: &Path) -> DataStore {
        std::fs::create_dir_all(root.join("store")).expect("made");
        DataStore::open(&format!("file://{}", root.join("store").display())).expect("a store")
    }

    #[test]
    fn a_shard_is_put_once_and_another_one_is_refused() {
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
    fn a_url_that_names_no_store_is_told() {
        for url in ["", "bucket/path", "ftp://host/path", "s3:"] {
            let error = DataStore::open(url).err().map(|error| error.to_string());
            assert!(error.is_some_and(|error| error.contains("`data.store`")), "{url}");
        }
    }
}
