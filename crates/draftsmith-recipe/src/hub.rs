//! Finds models by their name on the Hugging Face Hub: `org/name` or `org/name@revision`.
//!
//! We look in the cache that Python's `huggingface_hub` uses, and download what is missing into it: only
//! configuration, tokenizer, chat template and weights, and never code. The crate `hf-hub` has no
//! time-outs, so it downloads on a separate thread, which we abandon if it stalls. A later run resumes the
//! download. Only this file and `draftsmith-served/client.rs` use the network.
//!
//! The environment variables are those of `huggingface_hub`: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
//! `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use draftsmith_data::hash_file;
use draftsmith_files::check_room;
use draftsmith_model::{WEIGHT_NAMES, weight_files};
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::watch::Progress;
use crate::watch::Watch;

/// How long a download may stall if the environment sets no limit.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How often to check for an interrupt.
const TICK: Duration = Duration::from_millis(100);
/// How often an interrupted download is resumed.
const NUM_RETRIES: usize = 3;
const HELD: &str = "nobody panics while holding it";

/// The directory of a model given as a directory or as a name on the Hub, with or without weights.
///
/// # Errors
/// If it is not a directory, looks like a name on the Hub, and is neither cached nor downloadable.
pub fn model_dir(given: &Path, with_weights: bool, watch: &dyn Watch) -> Result<PathBuf> {
    match parse_name(given) {
        Some(model) if !given.exists() => Hub::from_env()?.dir(&model, with_weights, watch),
        // A missing directory is reported when it is read.
        _ => Ok(given.to_path_buf()),
    }
}

/// Parses a text that has the form of a name on the Hub: `org/name` with a branch, a tag or a commit.
fn parse_name(given: &Path) -> Option<Repo> {
    let text = given.to_str()?;
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    let is_part = |part: &str| {
        let is_known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(is_known)
    };
    let (org, name) = id.split_once('/')?;
    let is_name = is_part(org) && is_part(name) && revision.split('/').all(is_part);
    is_name.then(|| Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned()))
}

/// The name of a model as messages show it.
fn shown_name(model: &Repo) -> String {
    format!("{}@{}", model.url(), model.revision())
}

/// The Hub and its cache.
#[derive(Debug)]
struct Hub {
    cache: PathBuf,
    endpoint: Option<String>,
    token: Option<String>,
    is_offline: bool,
    timeout: Duration,
}

impl Hub {
    fn from_env() -> Result<Self> {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let home = match var("HF_HOME") {
            Some(home) => PathBuf::from(home),
            None => std::env::home_dir()
                .context(
                    "there is no home directory for the Hub's cache; \
                     hint: set `HF_HOME`, or give the model's directory",
                )?
                .join(".cache/huggingface"),
        };
        let token_file = var("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        let saved = || Some(std::fs::read_to_string(token_file).ok()?.trim().to_owned());
        let seconds = var("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok());
        let is_set = |value: String| {
            ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str())
        };
        Ok(Self {
            cache: var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            endpoint: var("HF_ENDPOINT"),
            token: var("HF_TOKEN").or_else(saved).filter(|token| !token.is_empty()),
            is_offline: var("HF_HUB_OFFLINE").is_some_and(is_set),
            timeout: seconds.map_or(TIMEOUT, Duration::from_secs),
        })
    }

    /// A model's directory in the cache, after downloading missing files.
    fn dir(&self, model: &Repo, with_weights: bool, watch: &dyn Watch) -> Result<PathBuf> {
        let is_whole = |dir: &Path| {
            let has = |name: &str| dir.join(name).is_file();
            let has_weights = || weight_files(dir).is_ok_and(|files| files.iter().all(|f| has(f)));
            has("config.json") && has("tokenizer.json") && (!with_weights || has_weights())
        };
        match self.cached(model) {
            Some(dir) if is_whole(&dir) => Ok(dir),
            // The reader names a missing file, which may be intended.
            Some(dir) if self.is_offline => Ok(dir),
            _ if self.is_offline => bail!(
                "`{}` is neither a directory nor in the cache `{}`, and `HF_HUB_OFFLINE` is set; hint: \
                 download it with a network, or give its directory",
                shown_name(model),
                self.cache.display()
            ),
            _ => self.download(model, with_weights, watch),
        }
    }

    /// The cached snapshot of a model's revision.
    fn cached(&self, model: &Repo) -> Option<PathBuf> {
        let root = self.cache.join(model.folder_name());
        let reference = std::fs::read_to_string(root.join("refs").join(model.revision()));
        let commit = reference.unwrap_or_else(|_| model.revision().to_owned());
        let dir = root.join("snapshots").join(commit.trim());
        dir.is_dir().then_some(dir)
    }

    fn download(&self, model: &Repo, with_weights: bool, watch: &dyn Watch) -> Result<PathBuf> {
        let transfer = Arc::new(Mutex::new(Transfer::new("", 0)));
        let mut builder = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_token(self.token.clone())
            .with_retries(NUM_RETRIES)
            .with_user_agent("draftsmith", env!("CARGO_PKG_VERSION"))
            .with_progress(false);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        let repo = builder.build().context("cannot set up a connection")?.repo(model.clone());
        let snapshots = self.cache.join(model.folder_name()).join("snapshots");
        let (sender, finished) = mpsc::channel();
        let shared = transfer.clone();
        // The thread is abandoned if the download stalls, as `hf-hub` cannot cancel.
        std::thread::spawn(move || {
            // Fails only if the receiver has given up.
            let _ = sender.send(download_missing(&repo, with_weights, &snapshots, &shared));
        });
        let name = shown_name(model);
        let cannot = || {
            format!(
                "`{name}` is not a directory, and downloading it from the Hugging Face Hub failed; \
                 hint: check the name and the network; a private model needs `HF_TOKEN`"
            )
        };
        let (mut bar, mut shown): (Option<Progress>, Transfer) = (None, Transfer::new("", 0));
        let dir = loop {
            watch.check_interrupted()?;
            match finished.recv_timeout(TICK) {
                Ok(done) => break done.with_context(cannot)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{}: cannot read the Hub's answer", cannot())
                }
            }
            let now = transfer.lock().expect(HELD).clone();
            if now.last.elapsed() >= self.timeout {
                let seconds = self.timeout.as_secs();
                let file =
                    if now.file.is_empty() { String::new() } else { format!(" of `{}`", now.file) };
                return Err(anyhow!(
                    "received nothing for {seconds} s{file}; the next run resumes the download"
                ))
                .with_context(cannot);
            }
            if now.file != shown.file {
                check_room(&format!("`{}`", now.file), &self.cache, now.num_bytes)?;
                let total = megabytes(now.num_bytes).max(1);
                let new = Progress::new(watch, "download", "MB", total);
                new.message(&now.file);
                bar = Some(new);
            }
            if let Some(bar) = &bar {
                bar.move_to(megabytes(now.num_received));
            }
            shown = now;
        };
        drop(bar);
        watch.note(format!("download: `{name}` is in `{}`", dir.display()));
        Ok(dir)
    }
}

fn megabytes(num_bytes: u64) -> u64 {
    num_bytes / 1_000_000
}

/// The download of one file, shared with the thread that downloads.
#[derive(Debug, Clone)]
struct Transfer {
    file: String,
    num_bytes: u64,
    num_received: u64,
    /// When something was last received.
    last: Instant,
}

impl Transfer {
    fn new(file: &str, num_bytes: u64) -> Self {
        Self { file: file.to_owned(), num_bytes, num_received: 0, last: Instant::now() }
    }
}

/// Updates a transfer.
struct Watcher<'a>(&'a Mutex<Transfer>);

impl hf_hub::api::Progress for Watcher<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        *self.0.lock().expect(HELD) = Transfer::new(filename, size as u64);
    }

    fn update(&mut self, size: usize) {
        let mut transfer = self.0.lock().expect(HELD);
        transfer.num_received += size as u64;
        transfer.last = Instant::now();
    }

    fn finish(&mut self) {}
}

/// Downloads a model's missing files and returns its directory in `snapshots`.
fn download_missing(
    repo: &ApiRepo,
    with_weights: bool,
    snapshots: &Path,
    transfer: &Mutex<Transfer>,
) -> Result<PathBuf> {
    let known = repo.info().map_err(refusal)?;
    let dir = snapshots.join(&known.sha);
    let known: BTreeSet<String> = known.siblings.into_iter().map(|file| file.rfilename).collect();
    let get = |name: &str| -> Result<PathBuf> {
        let path = dir.join(name);
        if path.is_file() {
            return Ok(path);
        }
        let path = repo
            .download_with_progress(name, Watcher(transfer))
            .map_err(refusal)
            .with_context(|| format!("`{name}`"))?;
        check_hash(&path).with_context(|| format!("`{name}`"))?;
        if path.parent() != Some(&dir) {
            bail!("the repository changed during the download; hint: run the same command again");
        }
        Ok(path)
    };
    // The configuration comes first, so that an unsupported model fails before a long download.
    for name in small_files(&known) {
        get(name)?;
    }
    if !with_weights {
        return Ok(dir);
    }
    let is_there = |(one, index): &(&str, &str)| known.contains(*one) || known.contains(*index);
    match WEIGHT_NAMES.into_iter().find(is_there) {
        Some((one, _)) if known.contains(one) => drop(get(one)?),
        Some((_, index)) => {
            get(index)?;
            for name in weight_files(&dir)? {
                get(&name)?;
            }
        }
        None => bail!("it has neither `{}` nor `{}`", WEIGHT_NAMES[0].0, WEIGHT_NAMES[0].1),
    }
    Ok(dir)
}

/// The files we read besides the weights. Code and files in subdirectories are never downloaded.
fn small_files(known: &BTreeSet<String>) -> impl Iterator<Item = &str> {
    let names = known.iter().map(String::as_str);
    names.filter(|name| {
        let is_json = name.ends_with(".json") && !name.ends_with(".index.json");
        !name.contains('/') && (is_json || *name == "chat_template.jinja")
    })
}

/// Checks a large file against its name in the cache, which is its SHA-256 hash.
fn check_hash(path: &Path) -> Result<()> {
    let blob = path.canonicalize().with_context(|| format!("cannot read `{}`", path.display()))?;
    let name = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_hash = name.len() == 64 && name.chars().all(|c| c.is_ascii_hexdigit());
    if is_hash && hash_file(&blob)? != name.to_ascii_lowercase() {
        // Otherwise the next run would use it.
        for path in [path, &blob] {
            let _ = std::fs::remove_file(path);
        }
        bail!("the download was damaged and is removed; hint: run the same command again");
    }
    Ok(())
}

/// The Hub's error, explained.
fn refusal(error: ApiError) -> anyhow::Error {
    let text = error.to_string();
    let why = |status: &str| text.contains(&format!("status: {status}"));
    if why("401") || why("403") {
        anyhow!("the Hub denies access ({text})")
    } else if why("404") {
        anyhow!("the Hub has no such model, revision or file ({text})")
    } else {
        anyhow::Error::from(error)
    }
}
