//! Models by their name on the Hugging Face Hub: `org/name`, or `org/name@revision`.
//!
//! A model is looked for in the cache that Python's `huggingface_hub` keeps, and downloaded into it
//! where it is not whole: configuration, tokenizer, chat template and weights, no code and nothing
//! else. `hf-hub` speaks with the Hub, on a thread of its own: it knows no time-outs, so here a
//! download that stands still for too long is given up. What came is kept, and resumed.
//!
//! The environment is read as `huggingface_hub` reads it: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
//! `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HUB_DOWNLOAD_TIMEOUT`.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use draftsmith_data::hash_file;
use draftsmith_files::check_room;
use draftsmith_model::{WEIGHT_NAMES, weight_files};
use hf_hub::api::Progress as Watcher;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::console::progress::Progress;
use crate::console::{Console, Interrupted};

/// How long a download may stand still, where the environment does not say.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How often Ctrl-C is looked for meanwhile.
const TICK: Duration = Duration::from_millis(100);
/// How often a download that broke off is resumed.
const NUM_RETRIES: usize = 3;
/// What is wanted of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    All,
    /// What is read without its weights.
    AllButWeights,
}

/// The directory of a model that is given as one, or by its name on the Hub.
///
/// # Errors
/// If it has a name of the Hub's form, is no directory, and is neither in the cache nor can be
/// downloaded.
pub(crate) fn model_dir(given: &Path, wanted: Wanted, console: &Console) -> Result<PathBuf> {
    match HubModel::parse(given) {
        Some(model) if !given.exists() => Hub::from_env()?.dir(&model, wanted, console),
        // What is not there is told of where it is read.
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
    /// A text that can be a name of the Hub's.
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
                    "there is no home directory for models of the Hub; \
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

    /// A model's directory in the cache, which it is downloaded into where it is not whole.
    fn dir(&self, model: &HubModel, wanted: Wanted, console: &Console) -> Result<PathBuf> {
        match self.cached(model) {
            Some(dir) if is_whole(&dir, wanted) => Ok(dir),
            // What is missing is named where it is read; it may be meant so.
            Some(dir) if self.is_offline => Ok(dir),
            _ if self.is_offline => bail!(
                "`{model}` is neither a directory nor in the cache `{}`, and `HF_HUB_OFFLINE` is \
                 set; hint: download it where there is a network, or give its directory",
                self.cache.display()
            ),
            _ => self.download(model, wanted, console),
        }
    }

    /// The snapshot that a revision of a model stands for.
    fn cached(&self, model: &HubModel) -> Option<PathBuf> {
        let root = self.cache.join(model.repo().folder_name());
        let reference = std::fs::read_to_string(root.join("refs").join(&model.revision));
        let commit = reference.unwrap_or_else(|_| model.revision.clone());
        let dir = root.join("snapshots").join(commit.trim());
        dir.is_dir().then_some(dir)
    }

    fn download(&self, model: &HubModel, wanted: Wanted, console: &Console) -> Result<PathBuf> {
        let builder = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_token(self.token.clone())
            .with_retries(NUM_RETRIES)
            .with_user_agent("draftsmith", env!("CARGO_PKG_VERSION"))
            .with_progress(false);
        let builder = match &self.endpoint {
            Some(endpoint) => builder.with_endpoint(endpoint.trim_end_matches('/').to_owned()),
            None => builder,
        };
        let repo = builder.build().context("cannot set up a connection")?.repo(model.repo());
        let snapshots = self.cache.join(model.repo().folder_name()).join("snapshots");
        let (sender, events) = mpsc::channel();
        // Left behind where it stands still: no call of it can be broken off.
        std::thread::spawn(move || {
            let done = files_of(&repo, wanted, &snapshots, &sender);
            // Nobody listens any more where it was given up.
            let _ = sender.send(Event::Done(done));
        });
        let explained = || {
            format!(
                "`{model}` is not a directory, and could not be had from the Hugging Face Hub; \
                 hint: check the name and the network; a private model needs `HF_TOKEN`"
            )
        };
        let mut shown: Option<(String, Progress)> = None;
        let (mut last, mut in_progress) = (Instant::now(), 0);
        let dir = loop {
            if console.is_interrupted() {
                return Err(Interrupted.into());
            }
            match events.recv_timeout(TICK) {
                Ok(event) => {
                    last = Instant::now();
                    match event {
                        Event::File { name, num_bytes } => {
                            in_progress = 0;
                            check_room(&format!("`{name}`"), &self.cache, num_bytes)?;
                            match &shown {
                                Some((file, progress)) if *file == name => progress.skip_to(0),
                                _ => {
                                    let total = megabytes(num_bytes).max(1);
                                    let bar = Progress::new(console, "download", "MB", total);
                                    bar.message(&name);
                                    if let Some((_, done)) = shown.replace((name, bar)) {
                                        done.clear();
                                    }
                                }
                            }
                        }
                        Event::Bytes(num_bytes) => {
                            let before = megabytes(in_progress);
                            in_progress += num_bytes;
                            if let Some((_, progress)) = &shown {
                                progress.advance(megabytes(in_progress) - before);
                            }
                        }
                        Event::Done(done) => break done.with_context(explained)?,
                    }
                }
                Err(RecvTimeoutError::Timeout) if last.elapsed() < self.timeout => {}
                Err(RecvTimeoutError::Timeout) => {
                    let file = shown.as_ref().map_or("", |(name, _)| name);
                    return Err(anyhow::anyhow!(
                        "nothing came for {} s{}; what came is kept and resumed",
                        self.timeout.as_secs(),
                        if file.is_empty() { String::new() } else { format!(" of `{file}`") }
                    )
                    .context(explained()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{}: the Hub's answer is not one that can be read", explained())
                }
            }
        };
        if let Some((_, done)) = shown {
            done.clear();
        }
        console.note(format!("download: `{model}` is in `{}`", dir.display()));
        Ok(dir)
    }
}

fn megabytes(num_bytes: u64) -> u64 {
    num_bytes / 1_000_000
}

/// What the thread that downloads tells.
enum Event {
    /// A file begins, or begins again.
    File { name: String, num_bytes: u64 },
    /// More of it came.
    Bytes(u64),
    /// It ended: the directory.
    Done(Result<PathBuf>),
}

/// Tells of a file as it comes.
struct Teller<'a>(&'a Sender<Event>);

impl Watcher for Teller<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        let (name, num_bytes) = (filename.to_owned(), size as u64);
        let _ = self.0.send(Event::File { name, num_bytes });
    }

    fn update(&mut self, size: usize) {
        let _ = self.0.send(Event::Bytes(size as u64));
    }

    fn finish(&mut self) {}
}

/// Downloads what is missing of a model, and returns its directory, one of `snapshots`.
fn files_of(
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
            .download_with_progress(name, Teller(sender))
            .map_err(refusal)
            .with_context(|| format!("`{name}`"))?;
        check_hash(&path).with_context(|| format!("`{name}`"))?;
        if path.parent() != Some(&dir) {
            bail!("it was changed while it was downloaded; hint: run the same command again");
        }
        Ok(path)
    };
    // Configuration before weights: a model that cannot be read is known before a long download.
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
        None => bail!("it has no `{}` and no `{}`", WEIGHT_NAMES[0].0, WEIGHT_NAMES[0].1),
    }
    Ok(dir)
}

/// What is read of a model beside its weights: no program is, and nothing in a directory.
fn small_files(known: &BTreeSet<String>) -> impl Iterator<Item = &str> {
    let names = known.iter().map(String::as_str);
    names.filter(|name| {
        let is_json = name.ends_with(".json") && !name.ends_with(".index.json");
        !name.contains('/') && (is_json || *name == "chat_template.jinja")
    })
}

/// Whether a snapshot has all that a model is read from.
fn is_whole(dir: &Path, wanted: Wanted) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    let has_weights = wanted == Wanted::AllButWeights
        || weight_files(dir).is_ok_and(|files| files.iter().all(|file| has(file)));
    has("config.json") && has("tokenizer.json") && has_weights
}

/// Checks a file against its name in the cache, which is its hash where it is a large one.
fn check_hash(path: &Path) -> Result<()> {
    let blob = path.canonicalize().with_context(|| format!("cannot read `{}`", path.display()))?;
    let name = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_hash = name.len() == 64 && name.chars().all(|c| c.is_ascii_hexdigit());
    if is_hash && hash_file(&blob)? != name.to_ascii_lowercase() {
        // Else it would be taken for whole the next time.
        for path in [path, &blob] {
            let _ = std::fs::remove_file(path);
        }
        bail!("it came damaged and was removed; hint: run the same command again");
    }
    Ok(())
}

/// What the Hub refused, in its users' words.
fn refusal(error: ApiError) -> anyhow::Error {
    let text = error.to_string();
    let why = |status: &str| text.contains(&format!("status: {status}"));
    if why("401") || why("403") {
        anyhow::anyhow!("the Hub says that this is not allowed ({text})")
    } else if why("404") {
        anyhow::anyhow!("the Hub has no such model, revision or file ({text})")
    } else {
        anyhow::Error::from(error)
    }
}
