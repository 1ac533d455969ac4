//! The table `[data.server]`: servers that write the responses.
//!
//! URLs and tokens may be secret, so messages do not repeat them.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use draftsmith_theory::Decoding;
use draftsmith_train::{HeadLabels, HeadTraining, Teaching};
use serde::{Deserialize, Serialize};
use ureq::http::Uri;

use super::{Recipe, read_keys, require};

/// Upper limits of `concurrency` and of `timeout_s`, in seconds.
const MOST_AT_ONCE: usize = 1024;
const MOST_SECONDS: f64 = 86_400.0;
/// Upper limit of `logprobs`.
const MOST_LOGPROBS: usize = 1000;

/// Servers with OpenAI's API that all serve the same model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ServerRecipe {
    /// Base URLs up to `/v1`, to which `/completions` is appended.
    pub(crate) urls: Vec<String>,
    /// The servers' name for the target.
    pub(crate) model: String,
    /// The environment variable with the bearer token; no token is sent if absent.
    pub(crate) api_key_env: Option<String>,
    /// The most concurrent requests to all servers together.
    pub(crate) concurrency: usize,
    /// The number of retries of a failed request.
    pub(crate) retries: usize,
    /// Timeout of a request, in seconds.
    pub(crate) timeout_s: f64,
    /// The source of labels.
    pub(crate) labels: ServerLabels,
    /// The number of most probable tokens whose log-probabilities are requested, if responses are
    /// sampled and labels come from the server.
    pub(crate) logprobs: usize,
    /// The most probability mass per token outside the requested log-probabilities, averaged over a
    /// response; responses with more are left out.
    pub(crate) max_outside_mass: f64,
}

/// The source of the labels of served responses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ServerLabels {
    /// The server: a greedy response itself, or the log-probabilities of a sampled one. The target's
    /// weights are not read.
    #[default]
    Server,
    /// The target's weights, read on this machine.
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
        }
    }
}

impl ServerRecipe {
    /// The number of log-probabilities to request per token with this decoding; None if labels do not
    /// need them.
    pub(crate) fn log_probs(&self, decoding: &Decoding) -> Option<usize> {
        let are_needed = self.labels == ServerLabels::Server && !decoding.is_greedy();
        are_needed.then_some(self.logprobs)
    }

    /// Reads the keys of the table from a file.
    ///
    /// # Errors
    /// If the file cannot be read, or a key is unknown or has an invalid value.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        read_keys("server", path, Self::check)
    }

    /// Whether labels come from the target's weights.
    pub(crate) fn takes_weights(&self) -> bool {
        self.labels == ServerLabels::Weights
    }

    /// Timeout of a request.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s)
    }

    /// Checks every key.
    ///
    /// # Errors
    /// If a value is invalid.
    pub(super) fn check(&self) -> Result<()> {
        require(!self.urls.is_empty(), "data.server.urls", "is empty; hint: name a server")?;
        self.urls.iter().try_for_each(|url| check_url(url))?;
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

/// Checks a server's URL without repeating it.
fn check_url(url: &str) -> Result<()> {
    let parsed = url.parse::<Uri>().ok().filter(|_| !url.contains(['?', '#']));
    let is_http = |uri: &&Uri| matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = parsed.as_ref().filter(is_http).and_then(Uri::authority);
    let is_server = authority.is_some_and(|authority| {
        let has_host = !authority.host().is_empty();
        let has_no_port = authority.as_str() == authority.host();
        has_host && (has_no_port || authority.port_u16().is_some_and(|port| port > 0))
    });
    require(
        authority.is_none_or(|authority| !authority.as_str().contains('@')),
        "data.server.urls",
        "has a URL with a user name or password, which would be written beside outputs; hint: put a token \
         into an environment variable and name it in `data.server.api_key_env`",
    )?;
    require(
        is_server,
        "data.server.urls",
        "has an entry that is not a server's URL; expected one such as `http://localhost:8000/v1`, with a \
         port of at most 65535",
    )
}

/// Checks that nothing in the recipe needs the target's weights, which are not read.
///
/// # Errors
/// If a key needs them.
pub(super) fn check_without_weights(recipe: &Recipe) -> Result<()> {
    const WEIGHTS: &str =
        "the target's weights, which are not read where `data.server.labels` is `server`";
    let teacher = recipe.adapter.as_ref().map(|adapter| adapter.teacher);
    require(
        teacher != Some(Teaching::Target),
        "adapter.teacher",
        &format!(
            "is `target`, which needs {WEIGHTS}; hint: `response` needs only the layers before the exit"
        ),
    )?;
    let heads = [("head", &recipe.head), ("adapter_head", &recipe.adapter_head)];
    let is_greedy = recipe.data.as_ref().is_some_and(|data| data.decoding().is_greedy());
    for (section, head) in heads {
        let Some(HeadTraining { labels, rollout_length: length, .. }) = head else { continue };
        require(
            is_greedy || *labels != HeadLabels::Rollouts || *length == 1,
            &format!("{section}.rollout_length"),
            &format!("is {length}, and labels after a rejected candidate need {WEIGHTS}"),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(more: &str) -> Result<(), String> {
        let text = format!("name = 'a'\n[models]\ntarget = 't'\n[data]\nprompts = ['p']\n{more}");
        let recipe: Recipe = toml::from_str(&text).map_err(|error| error.to_string())?;
        recipe.data.expect("a section").check().map_err(|error| format!("{error:#}"))
    }

    fn check_server(keys: &str) -> Result<(), String> {
        let model = if keys.contains("model") { "" } else { "model = 'm'" };
        check(&format!("responses = 'server'\n[data.server]\n{model}\n{keys}"))
    }

    #[test]
    fn messages_name_the_invalid_key() {
        let url = "urls = ['http://gpu:8000/v1', 'https://other/v1/']";
        check_server(url).expect("a server");
        let refused = |checked: Result<(), String>, expected: &str| {
            let message = checked.expect_err("refused");
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains("secret"), "{message}");
        };
        refused(check("responses = 'server'"), "there is no table `[data.server]`");
        let table = format!("[data.server]\nmodel = 'm'\n{url}");
        refused(check(&table), "but `data.responses` is not `server`");
        refused(check_server("urls = []"), "`data.server.urls` is empty");
        let strange = [
            "gpu:8000",
            "gpu",
            "/v1",
            "",
            "http://",
            "http:///v1",
            "http://:8000/v1",
            "ftp://a/v1",
            "http://a/v1?key=secret",
            "http://a/v1#secret",
            "http://a b/v1",
            "http://gpu:99999/v1",
            "http://gpu:65536/v1",
            "http://gpu:0/v1",
            "http://gpu:/v1",
            "http://gpu:x/v1",
            "http://gpu:-1/v1",
            "http://[::1",
            "http://[::1/v1",
            "http://[::1]:99999/v1",
            "http://[::1]secret/v1",
        ];
        for url in strange {
            refused(check_server(&format!("urls = ['{url}']")), "`data.server.urls` has an entry");
        }
        refused(check_server("urls = [\"http://gpu:8000/v1\\nhost: secret\"]"), "has an entry");
        for url in
            ["http://[::1]:8000/v1", "http://[::1]", "https://gpu:65535/v1/", "http://10.0.0.1:1"]
        {
            check_server(&format!("urls = ['{url}']")).expect("a server");
        }
        refused(check_server("urls = ['http://me:secret@a/v1']"), "`data.server.api_key_env`");
        let with = |key: &str| check_server(&format!("{url}\n{key}"));
        refused(with("model = ''"), "`data.server.model` is empty");
        refused(with("concurrency = 0"), "`data.server.concurrency` is 0");
        refused(with("timeout_s = 0"), "`data.server.timeout_s` is 0");
        refused(with("timeout_s = nan"), "`data.server.timeout_s` is NaN");
        refused(with("logprobs = 0"), "`data.server.logprobs` is 0");
        refused(with("max_outside_mass = 0"), "`data.server.max_outside_mass` is 0");
        refused(with("api_key = 'x'"), "api_key");
    }

    #[test]
    fn keys_that_need_weights_are_refused() {
        let refused = |more: &str, expected: &str| {
            let text = format!(
                "name = 'a'\n[models]\ntarget = 't'\ndraft = 'd'\n[data]\nprompts = ['p']\n\
                 responses = 'server'\n[data.server]\nurls = ['http://a/v1']\nmodel = 'm'\n{more}"
            );
            let recipe: Recipe = toml::from_str(&text).expect("a recipe");
            let message = recipe.check().expect_err("refused").to_string();
            let names = message.contains(expected) && message.contains("`data.server.labels`");
            assert!(names, "{message}");
        };
        refused("[adapter]\n", "`adapter.teacher` is `target`");
        let of_adapter = "[adapter]\nteacher = 'response'\n[adapter_head]\nlabels = 'rollouts'\n";
        refused(&format!("{of_adapter}rollout_length = 2\n"), "`adapter_head.rollout_length` is 2");
        let rollouts = "[head]\nlabels = 'rollouts'\nrollout_length = 3\n";
        refused(rollouts, "`head.rollout_length` is 3");
    }
}
