//! Finds models by name on the Hugging Face Hub: `org/name` or `org/name@revision`.
//!
//! We look in the cache that Python's `huggingface_hub` uses, and download missing files into it.
//! We download only configuration, tokenizer, chat template and weights, never code. `client.rs`
//! sends requests and validates responses; `download.rs` fills the cache on a separate thread. We
//! abandon that thread if it stalls, and a later run resumes the download.
//!
//! We read the environment variables of `huggingface_hub`: `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
//! `HF_TOKEN_PATH`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `HF_HUB_DOWNLOAD_TIMEOUT`.

mod client;
mod download;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use draftsmith_files::{check_room, read_text};
use draftsmith_model::{ModelError, end_weight_files, is_gguf, weight_files};

use crate::watch::{Bar, Watch};
use client::{Client, is_word};
use download::{Download, Transfer};

/// The time without progress after which a download fails, unless `HF_HUB_DOWNLOAD_TIMEOUT` is set.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The time between two checks for a user interrupt.
const TICK: Duration = Duration::from_millis(100);
const ENDPOINT: &str = "https://huggingface.co";

/// The weight files of a model to download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubWeights {
    /// None, and of the other files only `config.json`.
    Config,
    /// None.
    Without,
    /// Those with the embeddings, the final norm and the LM head.
    Ends,
    /// All.
    All,
}

impl HubWeights {
    /// Lists the names of the files, given a directory that has the index, if there is one.
    fn files(self, dir: &Path) -> Result<Vec<String>, ModelError> {
        match self {
            Self::Config | Self::Without => Ok(Vec::new()),
            Self::Ends => end_weight_files(dir),
            Self::All => weight_files(dir),
        }
    }
}

/// Returns the directory of a model that is given as a directory or as a name on the Hub. Downloads
/// missing files from the Hub.
///
/// # Errors
/// If the model is a name on the Hub that is neither cached nor downloadable.
pub fn model_dir(given: &Path, weights: HubWeights, watch: &dyn Watch) -> Result<PathBuf> {
    match parse_name(given) {
        Some(model) if !given.exists() && !is_gguf(given) => {
            Hub::from_env()?.dir(&model, weights, watch)
        }
        // A missing directory is reported by the code that reads it.
        _ => Ok(given.to_path_buf()),
    }
}

/// A model on the Hub. Both fields are safe as parts of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Repo {
    /// The name `org/name`.
    id: String,
    /// A branch, a tag or a commit.
    revision: String,
}

impl Repo {
    /// Returns the name of the model's directory in the cache.
    fn folder_name(&self) -> String {
        format!("models--{}", self.id.replace('/', "--"))
    }
}

/// Parses a name on the Hub: `org/name`, with an optional branch, tag or commit after `@`. `None`
/// if the text has another form.
fn parse_name(given: &Path) -> Option<Repo> {
    let text = given.to_str()?;
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    let (org, name) = id.split_once('/')?;
    let is_name = [org, name].into_iter().chain(revision.split('/')).all(is_plain_name);
    is_name.then(|| Repo { id: id.to_owned(), revision: revision.to_owned() })
}

/// Returns whether a name is safe as a part of a path and of a URL.
fn is_plain_name(name: &str) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(is_known)
}

/// Formats a model's name for messages: `org/name@revision`.
fn shown_name(model: &Repo) -> String {
    format!("{}@{}", model.id, model.revision)
}

/// The Hub's settings and the local cache.
#[derive(Debug)]
struct Hub {
    cache: PathBuf,
    endpoint: String,
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
        let saved = || Some(read_text(token_file).ok()?.trim().to_owned());
        let seconds = var("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.parse().ok());
        let is_set = |value: String| {
            ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str())
        };
        Ok(Self {
            cache: var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()),
            token: var("HF_TOKEN").or_else(saved).filter(|token| !token.is_empty()),
            is_offline: var("HF_HUB_OFFLINE").is_some_and(is_set),
            timeout: seconds.map_or(TIMEOUT, Duration::from_secs),
        })
    }

    /// Returns a model's directory in the cache, after downloading missing files.
    fn dir(&self, model: &Repo, weights: HubWeights, watch: &dyn Watch) -> Result<PathBuf> {
        let is_whole = |dir: &Path| {
            let has = |name: &str| dir.join(name).is_file();
            let has_weights = || weights.files(dir).is_ok_and(|files| files.iter().all(|f| has(f)));
            let is_alone = weights == HubWeights::Config;
            has("config.json") && (is_alone || has("tokenizer.json")) && has_weights()
        };
        match self.cached(model) {
            Some(dir) if is_whole(&dir) => Ok(dir),
            // The file may be left out on purpose. Otherwise its reader reports it.
            Some(dir) if self.is_offline => Ok(dir),
            _ if self.is_offline => bail!(
                "`{}` is neither a directory nor in the cache `{}`, and `HF_HUB_OFFLINE` is set; hint: \
                 download it with a network, or give its directory",
                shown_name(model),
                self.cache.display()
            ),
            _ => self.download(model, weights, watch),
        }
    }

    /// Finds the cached snapshot of a model's revision; `None` if the cache has none.
    fn cached(&self, model: &Repo) -> Option<PathBuf> {
        let root = self.cache.join(model.folder_name());
        let reference = read_text(root.join("refs").join(&model.revision)).ok();
        let commit = reference.map(|text| text.trim().to_owned()).filter(|text| is_word(text));
        let dir = root.join("snapshots").join(commit.as_ref().unwrap_or(&model.revision));
        dir.is_dir().then_some(dir)
    }

    fn download(&self, model: &Repo, weights: HubWeights, watch: &dyn Watch) -> Result<PathBuf> {
        let (watcher, transfers) = mpsc::channel();
        let client = Client::new(&self.endpoint, self.token.clone());
        let (cache, to_load) = (self.cache.clone(), model.clone());
        let download = Download { client, cache, model: to_load, watcher };
        // An abandoned thread ends at the next bytes that it receives.
        let thread = std::thread::spawn(move || download.run(weights));
        let name = shown_name(model);
        let cannot = || {
            format!(
                "`{name}` is not a directory, and downloading it from the Hugging Face Hub failed; \
                 hint: check the name and the network; a private model needs `HF_TOKEN`"
            )
        };
        let (mut bar, mut shown): (Option<Box<dyn Bar>>, _) = (None, Transfer::default());
        let mut last_received = Instant::now();
        loop {
            watch.check_interrupted()?;
            let now = match transfers.recv_timeout(TICK) {
                Ok(now) => now,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    // A completely received file is being hashed, which sends no progress.
                    if shown.is_complete() || last_received.elapsed() < self.timeout {
                        continue;
                    }
                    let seconds = self.timeout.as_secs();
                    let of_file = match shown.file.as_str() {
                        "" => String::new(),
                        file => format!(" of `{file}`"),
                    };
                    return Err(anyhow!(
                        "received nothing for {seconds} s{of_file}; the next run resumes the download"
                    ))
                    .with_context(cannot);
                }
            };
            last_received = Instant::now();
            if (&now.file, now.num_bytes) != (&shown.file, shown.num_bytes) {
                let num_missing = now.num_bytes - now.num_received;
                check_room(&format!("`{}`", now.file), &self.cache, num_missing)?;
                let new = watch.bar("download", "MB", megabytes(now.num_bytes).max(1));
                new.message(&now.file);
                bar = Some(new);
            }
            if let Some(bar) = &bar {
                bar.move_to(megabytes(now.num_received));
            }
            shown = now;
        }
        let done = thread.join().unwrap_or_else(|_| bail!("cannot read the Hub's answer"));
        let dir = done.with_context(cannot)?;
        drop(bar);
        watch.note(format!("download: `{name}` is in `{}`", dir.display()));
        Ok(dir)
    }
}

fn megabytes(num_bytes: u64) -> u64 {
    num_bytes / 1_000_000
}
