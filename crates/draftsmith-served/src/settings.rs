//! The settings in `[data.server]`: the servers that generate the responses.
//!
//! URLs and tokens may be secret, so error messages do not repeat them.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use draftsmith_theory::Decoding;
use serde::{Deserialize, Serialize};
use ureq::http::Uri;

use super::{Result, ServedError};

/// Upper limits of `concurrency` and of `timeout_s`, in seconds.
const MOST_AT_ONCE: usize = 1024;
const MOST_SECONDS: f64 = 86_400.0;
/// Upper limit of `logprobs`.
const MOST_LOGPROBS: usize = 1000;

/// The servers that generate responses. All have OpenAI's API and serve the same model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerRecipe {
    /// The base URLs up to `/v1`, to which `/completions` is appended.
    pub urls: Vec<String>,
    /// The servers' name for the target.
    pub model: String,
    /// The name of the environment variable with the bearer token. If absent, no token is sent.
    pub api_key_env: Option<String>,
    /// The maximum number of concurrent requests to all servers together.
    pub concurrency: usize,
    /// The number of retries of a failed request.
    pub retries: usize,
    /// The timeout of a request, in seconds.
    pub timeout_s: f64,
    /// The source of the labels.
    pub labels: ServerLabels,
    /// The number of most probable tokens per position whose log-probabilities are requested. Used
    /// only if responses are sampled and labels come from the server.
    pub logprobs: usize,
    /// The maximum probability mass per token that the requested log-probabilities may leave out,
    /// averaged over a response. Responses above it are dropped.
    pub max_outside_mass: f64,
    /// The directories of the servers' hidden states; `None` if they give none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub states: Option<StatesRecipe>,
}

/// The hints for failures that a key or flag mends, which the caller knows.
#[derive(Debug, Clone, Copy)]
pub struct ServerHints {
    /// The name of the key or flag with the servers' addresses.
    pub url: &'static str,
    /// The hint for a missing or invalid token.
    pub token: &'static str,
    /// The hint for requests that time out.
    pub too_slow: &'static str,
}

impl ServerHints {
    /// The hints for a recipe.
    pub const OF_RECIPE: Self = Self {
        url: "`data.server.urls`",
        token: "name the environment variable that holds a valid token in `data.server.api_key_env`",
        too_slow: "raise `data.server.timeout_s`, or lower `data.server.concurrency`",
    };
}

/// The source of the labels of served responses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerLabels {
    /// The server. A greedy response is its own label, and a sampled one is labelled by its
    /// log-probabilities. The target's weights are not read.
    #[default]
    Server,
    /// The target's weights, which are loaded locally.
    Weights,
}

impl Default for ServerRecipe {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            model: String::new(),
            api_key_env: None,
            concurrency: 16,
            retries: 8,
            timeout_s: 600.0,
            labels: ServerLabels::default(),
            logprobs: 20,
            max_outside_mass: 0.1,
            states: None,
        }
    }
}

impl ServerRecipe {
    /// Returns the number of log-probabilities to request per token under this decoding; `None` if
    /// labels do not need them.
    pub fn log_probs(&self, decoding: &Decoding) -> Option<usize> {
        let are_needed = self.labels == ServerLabels::Server && !decoding.is_greedy();
        are_needed.then_some(self.logprobs)
    }

    /// Returns whether labels come from the target's weights.
    pub fn takes_weights(&self) -> bool {
        self.labels == ServerLabels::Weights
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s)
    }

    /// Checks the values of all keys.
    ///
    /// # Errors
    /// If a value is invalid.
    pub fn check(&self) -> Result<()> {
        require(!self.urls.is_empty(), "data.server.urls", "is empty; hint: name a server")?;
        self.urls.iter().try_for_each(|url| check_url(url))?;
        self.states.iter().try_for_each(|states| states.check(self.urls.len()))?;
        require(
            !self.model.is_empty(),
            "data.server.model",
            "is empty; hint: see the server's `/v1/models`",
        )?;
        let counts = [
            ("data.server.concurrency", self.concurrency, MOST_AT_ONCE),
            ("data.server.logprobs", self.logprobs, MOST_LOGPROBS),
        ];
        for (key, value, most) in counts {
            let problem = format!("is {value}, expected 1 to {most}");
            require((1..=most).contains(&value), key, &problem)?;
        }
        let numbers = [
            ("data.server.timeout_s", self.timeout_s, MOST_SECONDS),
            ("data.server.max_outside_mass", self.max_outside_mass, 1.0),
        ];
        numbers.into_iter().try_for_each(|(key, value, most)| {
            let problem = format!("is {value}, expected more than 0 and at most {most}");
            require(value > 0.0 && value <= most, key, &problem)
        })
    }
}

/// The table `[data.server.states]`: the directories of the servers' files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatesRecipe {
    /// For each server of `urls`, the directory on this machine in which its files appear.
    pub dirs: Vec<PathBuf>,
    /// The servers' own names of these directories. If empty, they are the same.
    #[serde(default)]
    pub server_dirs: Vec<PathBuf>,
    /// The number of rows whose states are compared with the server's log-probabilities at every
    /// position. All other rows are compared at the last one.
    #[serde(default = "StatesRecipe::default_proof")]
    pub proof: usize,
    /// The place where a training keeps the states.
    #[serde(default)]
    pub keep: KeptIn,
}

/// The place where a training keeps the hidden states of a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeptIn {
    /// Files beside the data, which later trainings read again.
    #[default]
    Disk,
    /// The memory, until the training ends.
    Memory,
    /// Nowhere. Each batch is requested while the one before it is trained on, in every epoch.
    Nowhere,
}

impl StatesRecipe {
    fn default_proof() -> usize {
        16
    }

    /// Checks the values of all keys, for a list of `num_servers` URLs.
    ///
    /// # Errors
    /// If a value is invalid.
    pub(crate) fn check(&self, num_servers: usize) -> Result<()> {
        let lists = [
            ("data.server.states.dirs", &self.dirs),
            ("data.server.states.server_dirs", &self.server_dirs),
        ];
        for (key, dirs) in lists {
            if dirs.len() != num_servers && !(dirs.is_empty() && key.ends_with("server_dirs")) {
                let problem = format!(
                    "has {} entries, expected one for each of the {num_servers} in `data.server.urls`",
                    dirs.len()
                );
                return Err(ServedError::setting(key, problem));
            }
            if let Some(dir) = dirs.iter().find(|dir| !dir.is_absolute()) {
                let problem = format!("has `{}`, expected an absolute path", dir.display());
                return Err(ServedError::setting(key, problem));
            }
        }
        let problem = "is 0, expected 1 or more: states are used only if they are proved";
        require(self.proof > 0, "data.server.states.proof", problem)
    }

    /// Returns the local path of a file that a server names.
    ///
    /// # Errors
    /// If the file is not directly in the server's directory, with the expected description.
    pub(crate) fn local_path(&self, place: (usize, &str)) -> Result<PathBuf, String> {
        let (server, named) = place;
        let theirs = self.server_dirs.get(server).unwrap_or(&self.dirs[server]);
        let is_plain = |name: &str| {
            name.ends_with(".safetensors")
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        let inside = Path::new(named).strip_prefix(theirs).ok();
        let mut parts = inside.into_iter().flat_map(Path::components);
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(name)), None) if name.to_str().is_some_and(is_plain) => {
                Ok(self.dirs[server].join(name))
            }
            _ => Err(format!(
                "the path `{}` of its states, which is no plain file name in `{}`",
                named.escape_debug(),
                theirs.display()
            )),
        }
    }
}

/// Checks a server's URL of a recipe without repeating it.
fn check_url(url: &str) -> Result<()> {
    require_server(url, ServerHints::OF_RECIPE.token)
        .map_err(|problem| ServedError::setting("data.server.urls", problem))
}

/// Checks a URL that a flag gave to a command, without repeating it.
///
/// # Errors
/// If it is not the address of a server, or contains a user name or password.
pub fn check_given_url(url: &str, hints: &ServerHints) -> Result<()> {
    require_server(url, hints.token)
        .map_err(|problem| ServedError::Invalid(format!("{} {problem}", hints.url)))
}

/// Checks a server's URL. `hint` says how to give a token.
fn require_server(url: &str, hint: &str) -> Result<(), String> {
    let parsed = url.parse::<Uri>().ok().filter(|_| !url.contains(['?', '#']));
    let is_http = |uri: &&Uri| matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = parsed.as_ref().filter(is_http).and_then(Uri::authority);
    if authority.is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(format!(
            "has a URL with a user name or password, which would be written beside outputs; hint: {hint}"
        ));
    }
    let is_server = authority.is_some_and(|authority| {
        let has_host = !authority.host().is_empty();
        let has_no_port = authority.as_str() == authority.host();
        has_host && (has_no_port || authority.port_u16().is_some_and(|port| port > 0))
    });
    let problem = "has an entry that is not a server's URL; expected one such as `http://localhost:8000/v1`, with a \
                   port of at most 65535 and nothing after the path";
    is_server.then_some(()).ok_or_else(|| problem.to_owned())
}

/// Returns an error about `key` unless the condition `holds`.
fn require(holds: bool, key: &str, problem: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(ServedError::setting(key, problem)) }
}
