//! Sends each request to the least busy server, retries failed ones, and avoids a failing server for a
//! while.

use std::io::ErrorKind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use draftsmith_theory::SeededDraws;
use serde_json::{Value, json};
use ureq::Agent;

use super::protocol::{Ask, Completion, Terms, excerpt, read};
use crate::recipe::ServerRecipe;

/// Longest answer in bytes. A long response with log-probabilities has some megabytes.
const MOST_BYTES: u64 = 1 << 28;
/// Longest sleep between checks whether to stop waiting.
const TICK: Duration = Duration::from_millis(50);
const HELD: &str = "nobody panics while holding it";

/// Longest wait after a server's first failure, doubled after each further one. Tests wait less.
const FIRST_WAIT: Duration = Duration::from_millis(if cfg!(test) { 2 } else { 500 });
/// Longest wait that we choose.
const MOST_WAIT: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 30_000 });
/// Longest wait that a server can request.
const MOST_REQUESTED: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 300_000 });

/// Servers of one model.
pub(super) struct Servers {
    agent: Agent,
    /// A secret: this type must not implement `Debug`.
    token: Option<String>,
    num_retries: usize,
    servers: Mutex<Vec<ServerState>>,
    /// Whether to stop sending.
    is_given_up: AtomicBool,
}

/// The state of one server.
#[derive(Default)]
struct ServerState {
    url: String,
    num_running: usize,
    /// Failures in a row.
    num_failures: u32,
    last_failure: Option<Instant>,
    /// When we use it again after a failure.
    resting_until: Option<Instant>,
    /// Whether it rejects token ids.
    wants_text: bool,
}

/// Why a request brought no completion.
struct Failure {
    why: String,
    hint: &'static str,
    kind: FailureKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FailureKind {
    /// It may succeed later, after this wait if the server requests one.
    Temporary(Option<Duration>),
    Permanent,
    /// The server does not accept the request, perhaps because the prompt is token ids.
    Unreadable,
}

const UNREACHABLE: &str = "check that it is running, and run the same command again";
const NONSENSE: &str = "check that `data.server.urls` name servers with OpenAI's `/v1/completions` that \
                        serve `models.target`";
const NO_TOKEN: &str =
    "name the environment variable that holds a valid token in `data.server.api_key_env`";
const NOT_FOUND: &str = "check that addresses in `data.server.urls` end before `/completions`, usually in \
                         `/v1`, and that `/models` lists `data.server.model`";
const NOT_UNDERSTOOD: &str =
    "check `data.server.model` and the keys of `[data]` against the server's message";

impl Servers {
    pub(super) fn new(recipe: &ServerRecipe, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(recipe.timeout()))
            .http_status_as_error(false)
            // A redirect could send the token to another host.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("draftsmith/", env!("CARGO_PKG_VERSION")))
            .build();
        let server = |url: &String| {
            let url = url.trim_end_matches('/').to_owned();
            ServerState { url, ..ServerState::default() }
        };
        Self {
            agent: config.new_agent(),
            token,
            num_retries: recipe.retries,
            servers: Mutex::new(recipe.urls.iter().map(server).collect()),
            is_given_up: AtomicBool::new(false),
        }
    }

    /// Stops sending and retrying. Requests under way finish.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::SeqCst);
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::SeqCst)
    }

    /// A completion, or after all retries why there is none. `prompt_text` gives the prompt for servers
    /// that read no token ids.
    pub(super) fn complete(
        &self,
        ask: &Ask,
        terms: &Terms,
        prompt_text: &dyn Fn() -> Result<String, String>,
    ) -> Result<Completion, String> {
        let mut draws = SeededDraws::new(ask.seed.into(), &[&ask.id, "waiting"]);
        let mut num_failures = 0;
        loop {
            let Some((number, url, wants_text)) = self.wait_for_one() else {
                return Err("the job was given up".to_owned());
            };
            let begun = Instant::now();
            let mut result = match wants_text {
                true => self.send_text(&url, ask, terms, prompt_text),
                false => self.send(&url, ask, terms, json!(ask.prompt_ids)),
            };
            let is_unreadable = |failure: &Failure| failure.kind == FailureKind::Unreadable;
            if !wants_text && result.as_ref().is_err_and(is_unreadable) {
                // The server may not read token ids. If text fails too, the first error counts.
                let as_text = self.send_text(&url, ask, terms, prompt_text);
                if as_text.is_ok() {
                    self.update(number, |server| server.wants_text = true);
                    result = as_text;
                }
            }
            let Failure { mut why, hint, kind } = match result {
                Ok(completion) => {
                    self.update(number, ServerState::succeeded);
                    return Ok(completion);
                }
                Err(failure) => failure,
            };
            if let FailureKind::Temporary(wait) = kind {
                self.update(number, |server| server.failed(begun, wait, &mut draws));
                num_failures += 1;
                if num_failures <= self.num_retries && !self.is_given_up() {
                    continue;
                }
                if num_failures > 1 {
                    why += &format!(", the last of {num_failures} times");
                }
            } else {
                self.update(number, |server| server.num_running -= 1);
            }
            return Err(format!("the server `{url}` {why}; hint: {hint}"));
        }
    }

    fn update(&self, number: usize, change: impl FnOnce(&mut ServerState)) {
        change(&mut self.servers.lock().expect(HELD)[number]);
    }

    /// Waits for a usable server and returns the least busy one; `None` once the job is given up.
    fn wait_for_one(&self) -> Option<(usize, String, bool)> {
        loop {
            if self.is_given_up() {
                return None;
            }
            let now = Instant::now();
            let mut servers = self.servers.lock().expect(HELD);
            let ready = servers.iter_mut().enumerate();
            let ready =
                ready.filter(|(_, server)| server.resting_until.is_none_or(|until| until <= now));
            if let Some((number, server)) = ready.min_by_key(|(_, server)| server.num_running) {
                server.num_running += 1;
                return Some((number, server.url.clone(), server.wants_text));
            }
            let soonest = servers.iter().filter_map(|server| server.resting_until).min();
            drop(servers);
            let wait = soonest.map_or(TICK, |until| until.saturating_duration_since(now));
            std::thread::sleep(wait.min(TICK));
        }
    }

    fn send_text(
        &self,
        url: &str,
        ask: &Ask,
        terms: &Terms,
        prompt_text: &dyn Fn() -> Result<String, String>,
    ) -> Result<Completion, Failure> {
        let text = prompt_text().map_err(|why| Failure {
            why: format!("reads no token ids, and the prompt has no text: {why}"),
            hint: NOT_UNDERSTOOD,
            kind: FailureKind::Unreadable,
        })?;
        self.send(url, ask, terms, json!(text))
    }

    fn send(
        &self,
        url: &str,
        ask: &Ask,
        terms: &Terms,
        prompt: Value,
    ) -> Result<Completion, Failure> {
        let body = terms.body(ask, prompt);
        let mut request = self
            .agent
            .post(format!("{url}/completions"))
            .header("content-type", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request.send(&body[..]).map_err(|error| unanswered(&error))?;
        let status = response.status().as_u16();
        let wait = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
        let wait = wait.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let bytes = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
        let bytes = bytes.map_err(|error| unanswered(&error))?;
        if (200..=299).contains(&status) {
            return read(&bytes, terms).map_err(|what| Failure {
                why: format!("answered {what}"),
                hint: NONSENSE,
                kind: FailureKind::Temporary(None),
            });
        }
        let (hint, kind) = match status {
            400 | 422 => (NOT_UNDERSTOOD, FailureKind::Unreadable),
            401 | 403 => (NO_TOKEN, FailureKind::Permanent),
            404 | 405 => (NOT_FOUND, FailureKind::Permanent),
            408 | 425 | 429 | 500.. => (UNREACHABLE, FailureKind::Temporary(wait)),
            _ => (NOT_UNDERSTOOD, FailureKind::Permanent),
        };
        Err(Failure { why: format!("answered {status}: {}", excerpt(&bytes)), hint, kind })
    }
}

impl ServerState {
    fn succeeded(&mut self) {
        self.num_running -= 1;
        (self.num_failures, self.resting_until) = (0, None);
    }

    /// Counts a failed request. Requests that were running together when the server failed count as one
    /// failure.
    fn failed(&mut self, begun: Instant, asked: Option<Duration>, draws: &mut SeededDraws) {
        self.num_running -= 1;
        if self.last_failure.is_none_or(|last| begun >= last) {
            self.num_failures += 1;
            self.last_failure = Some(Instant::now());
        }
        let doubled = FIRST_WAIT.saturating_mul(1 << self.num_failures.saturating_sub(1).min(16));
        // Between half and all of it, so that waiting threads do not return together.
        let wait = doubled.min(MOST_WAIT).mul_f64(0.5 + 0.5 * draws.uniform());
        let asked = asked.unwrap_or_default().min(MOST_REQUESTED);
        let until = Instant::now() + wait.max(asked);
        self.resting_until = self.resting_until.max(Some(until));
    }
}

/// A request that got no answer.
fn unanswered(error: &ureq::Error) -> Failure {
    let (why, hint) = match error {
        ureq::Error::Timeout(_) => (
            "did not answer in time".to_owned(),
            "raise `data.server.timeout_s`, or lower `data.server.concurrency`",
        ),
        ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            ("refuses connections".to_owned(), UNREACHABLE)
        }
        ureq::Error::Io(error) => (format!("broke the connection ({error})"), UNREACHABLE),
        error => (format!("cannot be reached ({error})"), UNREACHABLE),
    };
    Failure { why, hint, kind: FailureKind::Temporary(None) }
}
