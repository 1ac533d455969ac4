//! The table `[data.server]`: servers that write the responses.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use draftsmith_theory::Decoding;
use draftsmith_train::{HeadLabels, HeadTraining, Teaching};
use serde::{Deserialize, Serialize};

use super::Recipe;
use super::checks::{require, toml_error};

/// The most requests at once, and the most seconds that one may take.
const MOST_AT_ONCE: usize = 1024;
const MOST_SECONDS: f64 = 86_400.0;
/// The most probable tokens that are asked for.
const MOST_LOGPROBS: usize = 1000;

/// Servers that speak OpenAI's API, all of one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServerRecipe {
    /// Their addresses up to the `/v1`: what `/completions` is put behind.
    pub(crate) urls: Vec<String>,
    /// The name that they know the target by.
    pub(crate) model: String,
    /// The environment variable that holds the bearer token; none is sent if absent.
    #[serde(default)]
    pub(crate) api_key_env: Option<String>,
    /// The most requests at once, of all servers together.
    #[serde(default = "default_concurrency")]
    pub(crate) concurrency: usize,
    /// How often a request that failed is sent again.
    #[serde(default = "default_retries")]
    pub(crate) retries: usize,
    /// The longest that a request may take, in seconds.
    #[serde(default = "default_timeout")]
    pub(crate) timeout_s: f64,
    /// What labels are made of.
    #[serde(default)]
    pub(crate) labels: ServerLabels,
    /// Of how many of the most probable tokens log-probabilities are asked for, where responses are
    /// sampled and labels are made of them.
    #[serde(default = "default_logprobs")]
    pub(crate) logprobs: usize,
    /// A response is left out whose probabilities may be off by more, on average over its tokens.
    #[serde(default = "default_max_outside_mass")]
    pub(crate) max_outside_mass: f64,
}

/// What the labels of served responses are made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ServerLabels {
    /// What the server said: a greedy response itself, or a sampled one's log-probabilities. The
    /// target's weights are not read.
    #[default]
    Server,
    /// The target's weights, which are here too.
    Weights,
}

fn default_logprobs() -> usize {
    20
}

fn default_max_outside_mass() -> f64 {
    0.1
}

fn default_concurrency() -> usize {
    16
}

fn default_retries() -> usize {
    8
}

fn default_timeout() -> f64 {
    600.0
}

impl ServerRecipe {
    /// Of how many tokens log-probabilities are asked for, with responses that are decoded so.
    pub(crate) fn log_probs(&self, decoding: &Decoding) -> Option<usize> {
        let are_needed = self.labels == ServerLabels::Server && !decoding.is_greedy();
        are_needed.then_some(self.logprobs)
    }

    /// Reads the keys of the table from a file of their own.
    ///
    /// # Errors
    /// If it cannot be read, or a key is unknown or makes no sense.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let named = || format!("server `{}`", path.display());
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the server's keys `{}`", path.display()))?;
        let server: Self = toml::from_str(&text).map_err(|e| toml_error(&e)).with_context(named)?;
        server.check().with_context(named)?;
        Ok(server)
    }

    /// Whether labels are made with the target's weights.
    pub(crate) fn takes_weights(&self) -> bool {
        self.labels == ServerLabels::Weights
    }

    /// The longest that a request may take.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s)
    }

    /// Checks every key.
    ///
    /// # Errors
    /// If one does not hold.
    pub(super) fn check(&self) -> Result<()> {
        require(!self.urls.is_empty(), "data.server.urls", "is empty; hint: name a server")?;
        for url in &self.urls {
            let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
            let host = rest.and_then(|rest| rest.split('/').next()).unwrap_or_default();
            // Not told what it is: it may hold a password.
            require(
                !host.is_empty() && !url.contains(['?', '#', ' ']),
                "data.server.urls",
                "has one that is no address; expected such as `http://localhost:8000/v1`",
            )?;
            require(
                !host.contains('@'),
                "data.server.urls",
                "has one with a name or a password in it, which would be written beside outputs; \
                 hint: put a token into an environment variable and name that in \
                 `data.server.api_key_env`",
            )?;
        }
        require(
            !self.model.is_empty(),
            "data.server.model",
            "is empty; hint: see the server's `/v1/models`",
        )?;
        require(
            (1..=MOST_AT_ONCE).contains(&self.concurrency),
            "data.server.concurrency",
            &format!("is {}, expected 1 to {MOST_AT_ONCE}", self.concurrency),
        )?;
        require(
            self.timeout_s > 0.0 && self.timeout_s <= MOST_SECONDS,
            "data.server.timeout_s",
            &format!("is {}, expected more than 0 and at most {MOST_SECONDS}", self.timeout_s),
        )?;
        require(
            (1..=MOST_LOGPROBS).contains(&self.logprobs),
            "data.server.logprobs",
            &format!("is {}, expected 1 to {MOST_LOGPROBS}", self.logprobs),
        )?;
        require(
            self.max_outside_mass > 0.0 && self.max_outside_mass <= 1.0,
            "data.server.max_outside_mass",
            &format!("is {}, expected more than 0 and at most 1", self.max_outside_mass),
        )
    }
}

/// Checks that nothing in a recipe needs the target's weights, which are not read.
///
/// # Errors
/// If something does.
pub(super) fn check_without_weights(recipe: &Recipe) -> Result<()> {
    const WEIGHTS: &str =
        "the target's weights, which are not read where `data.server.labels` is `server`";
    let teacher = recipe.adapter.as_ref().map(|adapter| adapter.teacher);
    require(
        teacher != Some(Teaching::Target),
        "adapter.teacher",
        &format!(
            "is `target`, which takes {WEIGHTS}; hint: `response` takes the layers before the exit alone"
        ),
    )?;
    let heads = [("head", &recipe.head), ("adapter_head", &recipe.adapter_head)];
    heads.into_iter().try_for_each(|(section, head)| match head {
        Some(head) => check_head(recipe, section, head, WEIGHTS),
        None => Ok(()),
    })
}

fn check_head(recipe: &Recipe, section: &str, head: &HeadTraining, weights: &str) -> Result<()> {
    let is_greedy = recipe.data.as_ref().is_some_and(|data| data.decoding().is_greedy());
    let length = head.rollout_length;
    require(
        is_greedy || head.labels != HeadLabels::Rollouts || length == 1,
        &format!("{section}.rollout_length"),
        &format!("is {length}, and labels behind a rejected candidate take {weights}"),
    )
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
    fn what_makes_no_sense_is_told_by_its_key() {
        let url = "urls = ['http://gpu:8000/v1', 'https://other/v1/']";
        check_server(url).expect("a server");
        let refused = |told: Result<(), String>, expected: &str| {
            let told = told.expect_err("refused");
            assert!(told.contains(expected), "{told}");
            assert!(!told.contains("secret"), "{told}");
        };
        refused(check("responses = 'server'"), "there is no table `[data.server]`");
        let table = format!("[data.server]\nmodel = 'm'\n{url}");
        refused(check(&table), "but `data.responses` is not `server`");
        refused(check_server("urls = []"), "`data.server.urls` is empty");
        for url in ["gpu:8000", "http://", "ftp://a/v1", "http://a/v1?key=secret"] {
            refused(check_server(&format!("urls = ['{url}']")), "`data.server.urls` has one that");
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
    fn what_takes_weights_is_refused_by_its_key() {
        let refused = |more: &str, expected: &str| {
            let text = format!(
                "name = 'a'\n[models]\ntarget = 't'\ndraft = 'd'\n[data]\nprompts = ['p']\n\
                 responses = 'server'\n[data.server]\nurls = ['http://a/v1']\nmodel = 'm'\n{more}"
            );
            let recipe: Recipe = toml::from_str(&text).expect("a recipe");
            let told = recipe.check().expect_err("refused").to_string();
            assert!(told.contains(expected) && told.contains("`data.server.labels`"), "{told}");
        };
        refused("[adapter]\n", "`adapter.teacher` is `target`");
        let of_adapter = "[adapter]\nteacher = 'response'\n[adapter_head]\nlabels = 'rollouts'\n";
        refused(&format!("{of_adapter}rollout_length = 2\n"), "`adapter_head.rollout_length` is 2");
        let rollouts = "[head]\nlabels = 'rollouts'\nrollout_length = 3\n";
        refused(rollouts, "`head.rollout_length` is 3");
    }
}
