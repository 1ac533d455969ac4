//! Finds models by their name on the Hugging Face Hub: `org/name` or `org/name@revision`.
//!
//! We look in the cache that Python's `huggingface_hub` uses, and download what is missing into it: only
//! configuration, tokenizer, chat template and weights, and never code. The crate `hf-hub` has no
//! time-outs, so it downloads on a separate thread, which we abandon if it stalls. A later run resumes the
//! download. Only this file, `served/client.rs` and `data_store/cloud.rs` use the network.
//!
//! The environment variables are those of `huggingface_hub`: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
//! `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use draftsmith_data::hash_file;
use draftsmith_files::check_room;
use draftsmith_model::{WEIGHT_NAMES, weight_files};
use hf_hub::api::Progress as Watcher;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};

/// How long a download may stall if the environment sets no limit.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How often to check for an interrupt.
const TICK: Duration = Duration::from_millis(100);
/// How often an interrupted download is resumed.
const NUM_RETRIES: usize = 3;

/// Which files of a model are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    All,
    AllButWeights,
}

/// The directory of a model given as a directory or as a name on the Hub.
///
/// # Errors
/// If it is not a directory, looks like a name on the Hub, and is neither cached nor downloadable.
pub(crate) fn model_dir(given: &Path, wanted: Wanted, console: &Console) -> Result<PathBuf> {
    match HubModel::parse(given) {
        Some(model) if !given.exists() => Hub::from_env()?.dir(&model, wanted, console),
        // A missing directory is reported when it is read.
        _ => Ok(given.to_path_buf()),
    }
}

/// A model on the Hub.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HubModel {
    /// `org/name`.
    id: String,
    /// A branch, a tag or a commit.
    revision: String,
}

impl fmt::Display for HubModel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}@{}", self.id, self.revision)
    }
}

impl HubModel {
    /// Parses a text that has the form of a name on the Hub.
    fn parse(given: &Path) -> Option<Self> {
        let text = given.to_str()?;
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        let is_part = |part: &str| {
            let is_known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(is_known)
        };
        let (org, name) = id.split_once('/')?;
        let is_revision = revision.split('/').all(is_part);
        (is_part(org) && is_part(name) && is_revision)
            .then(|| Self { id: id.to_owned(), revision: revision.to_owned() })
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(self.id.clone(), RepoType::Model, self.revision.clone())
    }
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
    fn dir(&self, model: &HubModel, wanted: Wanted, console: &Console) -> Result<PathBuf> {
        match self.cached(model) {
            Some(dir) if is_whole(&dir, wanted) => Ok(dir),
            // The reader names a missing file, which may be intended.
            Some(dir) if self.is_offline => Ok(dir),
            _ if self.is_offline => bail!(
                "`{model}` is neither a directory nor in the cache `{}`, and `HF_HUB_OFFLINE` is \
                 set; hint: download it with a network, or give its directory",
                self.cache.display()
            ),
            _ => self.download(model, wanted, console),
        }
    }

    /// The cached snapshot of a model's revision.
    fn cached(&self, model: &HubModel) -> Option<PathBuf> {
        let root = self.cache.join(model.repo().folder_name());
        let reference = std::fs::read_to_string(root.join("refs").join(&model.revision));
        let commit = reference.unwrap_or_else(|_| model.revision.clone());
        let dir = root.join("snapshots").join(commit.trim());
        dir.is_dir().then_some(dir)
    }

    fn download(&self, model: &HubModel, wanted: Wanted, console: &Console) -> Result<PathBuf> {
        let events = self.start_download(model, wanted)?;
        let cannot = || {
            format!(
                "`{model}` is not a directory, and downloading it from the Hugging Face Hub failed; \
                 hint: check the name and the network; a private model needs `HF_TOKEN`"
            )
        };
        let mut shown = Shown { console, bar: None, num_bytes: 0 };
        let mut last = Instant::now();
        let dir = loop {
            if console.is_interrupted() {
                return Err(Interrupted.into());
            }
            let event = match events.recv_timeout(TICK) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if last.elapsed() < self.timeout => continue,
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = self.timeout.as_secs();
                    let file = shown.bar.as_ref().map(|(name, _)| format!(" of `{name}`"));
                    let file = file.unwrap_or_default();
                    return Err(anyhow!(
                        "received nothing for {seconds} s{file}; the next run resumes the download"
                    ))
                    .with_context(cannot);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{}: cannot read the Hub's answer", cannot())
                }
            };
            last = Instant::now();
            match event {
                Event::File { name, num_bytes } => {
                    check_room(&format!("`{name}`"), &self.cache, num_bytes)?;
                    shown.begin(name, num_bytes);
                }
                Event::Bytes(num_bytes) => shown.advance(num_bytes),
                Event::Done(done) => break done.with_context(cannot)?,
            }
        };
        if let Some((_, bar)) = shown.bar {
            bar.clear();
        }
        console.note(format!("download: `{model}` is in `{}`", dir.display()));
        Ok(dir)
    }

    /// Starts the download on a thread, which is abandoned if it stalls, as `hf-hub` cannot cancel.
    fn start_download(&self, model: &HubModel, wanted: Wanted) -> Result<Receiver<Event>> {
        let mut builder = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_token(self.token.clone())
            .with_retries(NUM_RETRIES)
            .with_user_agent("draftsmith", env!("CARGO_PKG_VERSION"))
            .with_progress(false);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        let repo = builder.build().context("cannot set up a connection")?.repo(model.repo());
        let snapshots = self.cache.join(model.repo().folder_name()).join("snapshots");
        let (sender, events) = mpsc::channel();
        std::thread::spawn(move || {
            let done = download_missing(&repo, wanted, &snapshots, &sender);
            // Fails only if the receiver has given up.
            let _ = sender.send(Event::Done(done));
        });
        Ok(events)
    }
}

/// The progress bar of the file being downloaded.
struct Shown<'a> {
    console: &'a Console,
    bar: Option<(String, Progress)>,
    /// Bytes received of the file.
    num_bytes: u64,
}

impl Shown<'_> {
    /// Shows a bar for a file, or resets it if the file's download restarts.
    fn begin(&mut self, name: String, num_bytes: u64) {
        self.num_bytes = 0;
        match &self.bar {
            Some((file, bar)) if *file == name => bar.skip_to(0),
            _ => {
                let total = megabytes(num_bytes).max(1);
                let bar = Progress::new(self.console, "download", "MB", total);
                bar.message(&name);
                if let Some((_, done)) = self.bar.replace((name, bar)) {
                    done.clear();
                }
            }
        }
    }

    fn advance(&mut self, num_bytes: u64) {
        let before = megabytes(self.num_bytes);
        self.num_bytes += num_bytes;
        if let Some((_, bar)) = &self.bar {
            bar.advance(megabytes(self.num_bytes) - before);
        }
    }
}

fn megabytes(num_bytes: u64) -> u64 {
    num_bytes / 1_000_000
}

/// What the download thread reports.
enum Event {
    /// A file's download starts or restarts.
    File { name: String, num_bytes: u64 },
    /// More bytes of the file arrived.
    Bytes(u64),
    /// The download ended, with the model's directory.
    Done(Result<PathBuf>),
}

/// Reports a file's download as events.
struct EventSender<'a>(&'a Sender<Event>);

impl Watcher for EventSender<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        let (name, num_bytes) = (filename.to_owned(), size as u64);
        let _ = self.0.send(Event::File { name, num_bytes });
    }

    fn update(&mut self, size: usize) {
        let _ = self.0.send(Event::Bytes(size as u64));
    }

    fn finish(&mut self) {}
}

/// Downloads a model's missing files and returns its directory in `snapshots`.
fn download_missing(
    repo: &ApiRepo,
    wanted: Wanted,
    snapshots: &Path,
    sender: &Sender<Event>,
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
            .download_with_progress(name, EventSender(sender))
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
    if wanted == Wanted::AllButWeights {
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

/// Whether a snapshot has every file that we read.
fn is_whole(dir: &Path, wanted: Wanted) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    let has_weights = wanted == Wanted::AllButWeights
        || weight_files(dir).is_ok_and(|files| files.iter().all(|file| has(file)));
    has("config.json") && has("tokenizer.json") && has_weights
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
