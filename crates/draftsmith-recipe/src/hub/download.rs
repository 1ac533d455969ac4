//! Downloads a model's missing files into the cache, in the layout of Python's `huggingface_hub`.
//!
//! A model's directory contains `refs/REVISION` (a commit hash), `blobs/TAG` (the bytes of a file)
//! and `snapshots/COMMIT/NAME` (a relative link to a blob). We write bytes to `blobs/TAG.part`, so
//! that a later run can resume, and rename the file when it is complete and its hash matches. A
//! lock file prevents two processes from downloading the same file.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
#[cfg(unix)]
use std::os::unix::fs::symlink;
#[cfg(windows)]
use std::os::windows::fs::symlink_file as symlink;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use draftsmith_files::{FileError, hash_file, write_whole};
use draftsmith_model::WEIGHT_NAMES;

use super::client::{Client, HubError, Metadata};
use super::{HubWeights, Repo, TICK, is_plain_name};

/// The maximum number of retries for a file.
const NUM_RETRIES: usize = 3;
/// The delay before a retry, shorter in tests.
const WAIT: Duration = Duration::from_millis(if cfg!(test) { 2 } else { 300 });
/// The number of bytes received at a time.
const CHUNK_BYTES: usize = 1 << 16;

/// The progress of one file's download.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) file: String,
    /// The file's length in bytes; 0 while unknown.
    pub(super) num_bytes: u64,
    pub(super) num_received: u64,
}

impl Transfer {
    pub(super) fn is_complete(&self) -> bool {
        self.num_bytes > 0 && self.num_received == self.num_bytes
    }
}

/// The download of one model.
pub(super) struct Download {
    pub(super) client: Client,
    pub(super) cache: PathBuf,
    pub(super) model: Repo,
    /// The channel for progress. The download ends when the receiver is gone.
    pub(super) watcher: Sender<Transfer>,
}

impl Download {
    /// Downloads the model's missing files and returns its directory.
    pub(super) fn run(&self, weights: HubWeights) -> Result<PathBuf> {
        let info = self.client.info(&self.model.id, &self.model.revision)?;
        let (root, commit) = (self.cache.join(self.model.folder_name()), info.sha.as_str());
        let dir = root.join("snapshots").join(commit);
        let known: BTreeSet<String> = info.siblings.into_iter().map(|one| one.rfilename).collect();
        if self.model.revision != commit {
            write_whole(&root.join("refs").join(&self.model.revision), commit)?;
        }
        let get = |name: &str| {
            let is_there = dir.join(name).is_file();
            if is_there { Ok(()) } else { self.get(&root, commit, name) }
        };
        if weights == HubWeights::Config {
            get("config.json")?;
            return Ok(dir);
        }
        // The configuration comes first, so that an unsupported model fails before a long download.
        small_files(&known).try_for_each(get)?;
        if weights == HubWeights::Without {
            return Ok(dir);
        }
        let is_there = |(one, index): &(&str, &str)| known.contains(*one) || known.contains(*index);
        match WEIGHT_NAMES.into_iter().find(is_there) {
            Some((one, _)) if known.contains(one) => get(one)?,
            Some((_, index)) => {
                get(index)?;
                weights.files(&dir)?.iter().try_for_each(|name| get(name))?;
            }
            None => bail!("it has neither `{}` nor `{}`", WEIGHT_NAMES[0].0, WEIGHT_NAMES[0].1),
        }
        Ok(dir)
    }

    /// Downloads a file, with retries.
    fn get(&self, root: &Path, commit: &str, name: &str) -> Result<()> {
        ensure!(
            is_plain_name(name),
            "a file is named {name:?}, expected letters, digits, `-`, `_` and `.` only"
        );
        let mut num_failures = 0;
        loop {
            match self.try_get(root, commit, name) {
                Err(error) if num_failures < NUM_RETRIES && is_temporary(&error) => {
                    num_failures += 1;
                    std::thread::sleep(WAIT);
                }
                done => return done.with_context(|| format!("`{name}`")),
            }
        }
    }

    fn try_get(&self, root: &Path, commit: &str, name: &str) -> Result<()> {
        self.report(name, 0, 0)?;
        let url = self.client.file_url(&self.model.id, commit, name);
        let named = self.client.metadata(&url)?;
        if named.commit != commit {
            return Err(HubError::Changed.into());
        }
        let _lock = self.lock(name, &named.tag)?;
        let (blobs, snapshot) = (root.join("blobs"), root.join("snapshots").join(commit));
        let (blob, part) = (blobs.join(&named.tag), blobs.join(format!("{}.part", named.tag)));
        let link = snapshot.join(name);
        if link.is_file() {
            return Ok(());
        }
        if !blob.is_file() || !self.is_intact(name, &blob, &named)? {
            create_dir(&blobs)?;
            self.receive(name, &url, &named, &part)?;
            if !self.is_intact(name, &part, &named)? {
                // We remove the file, so that the next run does not resume it.
                let _ = fs::remove_file(&part);
                bail!("the download was damaged and is removed; hint: run the same command again");
            }
            fs::rename(&part, &blob).map_err(|error| FileError::new("write", &blob, error))?;
        }
        create_dir(&snapshot)?;
        Ok(link_to(&blob, &named.tag, &link)
            .map_err(|error| FileError::new("write", &link, error))?)
    }

    /// Waits until no other process is downloading this file.
    fn lock(&self, name: &str, tag: &str) -> Result<File> {
        let dir = self.cache.join(".locks").join(self.model.folder_name());
        // Python deletes `TAG.lock`, so we use another name.
        let path = dir.join(format!("{tag}.part.lock"));
        create_dir(&dir)?;
        let file = open_to_write(&path)?;
        // On systems without lock support, we assume that no other process writes here.
        while let Err(TryLockError::WouldBlock) = file.try_lock() {
            self.report(name, 0, 0)?;
            std::thread::sleep(TICK);
        }
        Ok(file)
    }

    /// Downloads the bytes of a file that `part` does not contain yet.
    fn receive(&self, name: &str, url: &str, named: &Metadata, part: &Path) -> Result<()> {
        let failed = |error| FileError::new("write", part, error);
        let mut file = open_to_write(part)?;
        let num_kept = file.metadata().map_err(failed)?.len();
        if named.num_bytes != Some(num_kept) {
            self.report(name, 0, 0)?;
            let content = self.client.content(url, num_kept, named);
            if let Err(error) = &content
                && let Some(HubError::Changed) = error.downcast_ref()
            {
                // The next attempt starts from the first byte.
                fs::remove_file(part).map_err(failed)?;
            }
            let (start, num_bytes, body) = content?;
            file.set_len(start).map_err(failed)?;
            file.seek(SeekFrom::Start(start)).map_err(failed)?;
            let (mut num_received, mut chunk) = (start, vec![0; CHUNK_BYTES]);
            let mut body = body.take(num_bytes - start);
            loop {
                self.report(name, num_bytes, num_received)?;
                let num = body.read(&mut chunk)?;
                if num == 0 {
                    break;
                }
                file.write_all(&chunk[..num]).map_err(failed)?;
                num_received += num as u64;
            }
            if num_received < num_bytes {
                return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(file.sync_all().map_err(failed)?)
    }

    /// Returns whether a file has the Hub's length, and its hash if the tag is a SHA-256 hash.
    fn is_intact(&self, name: &str, path: &Path, named: &Metadata) -> Result<bool> {
        let metadata = fs::metadata(path).map_err(|error| FileError::new("read", path, error))?;
        let num_bytes = metadata.len();
        self.report(name, num_bytes, num_bytes)?;
        let is_hash = named.tag.len() == 64 && named.tag.chars().all(|c| c.is_ascii_hexdigit());
        Ok(named.num_bytes.is_none_or(|named| named == num_bytes)
            && (!is_hash || hash_file(path)? == named.tag.to_ascii_lowercase()))
    }

    fn report(&self, name: &str, num_bytes: u64, num_received: u64) -> Result<()> {
        let transfer = Transfer { file: name.to_owned(), num_bytes, num_received };
        self.watcher.send(transfer).map_err(|_| anyhow!("nobody waits for the download"))
    }
}

/// Returns whether the same request may succeed later.
fn is_temporary(error: &anyhow::Error) -> bool {
    // File system errors of our own have another type.
    error.is::<ureq::Error>()
        || error.is::<io::Error>()
        || error.downcast_ref::<HubError>().is_some_and(HubError::is_temporary)
}

/// Adds a blob to a snapshot as a link, or moves it there if links are not supported.
fn link_to(blob: &Path, tag: &str, link: &Path) -> io::Result<()> {
    // The old link may point to a deleted blob.
    if link.symlink_metadata().is_ok() {
        fs::remove_file(link)?;
    }
    symlink(Path::new("../../blobs").join(tag), link).or_else(|_| fs::rename(blob, link))
}

fn create_dir(dir: &Path) -> Result<(), FileError> {
    fs::create_dir_all(dir).map_err(|error| FileError::new("create", dir, error))
}

/// Opens a file for writing without truncating it.
fn open_to_write(path: &Path) -> Result<File, FileError> {
    let file = File::options().write(true).create(true).truncate(false).open(path);
    file.map_err(|error| FileError::new("create", path, error))
}

/// Selects the files to download besides the weights: the JSON files and the chat template. Code
/// and files in subdirectories are never downloaded.
pub(super) fn small_files(known: &BTreeSet<String>) -> impl Iterator<Item = &str> {
    let names = known.iter().map(String::as_str);
    names.filter(|name| {
        let is_json = name.ends_with(".json") && !name.ends_with(".index.json");
        is_plain_name(name) && (is_json || *name == "chat_template.jinja")
    })
}
