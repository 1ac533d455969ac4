//! Requests to one server or several: each goes to the one with the least to do, again where it
//! failed, and a server that fails is passed over for a while.

use std::io::ErrorKind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use draftsmith_theory::SeededDraws;
use serde_json::{Value, json};
use ureq::Agent;

use super::protocol::{Ask, Completion, Terms, excerpt, read};

/// The most bytes of an answer: a long response with its log-probabilities has some megabytes.
const MOST_BYTES: u64 = 1 << 28;
/// How often it is looked up whether waiting is to end.
const TICK: Duration = Duration::from_millis(50);
const HELD: &str = "nobody panics while holding it";

/// How long what failed is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// The most seconds after a first failure; twice as many after each other.
    pub(super) first: Duration,
    /// The most of all, but for what a server asks for.
    pub(super) most: Duration,
    /// The most that a server can ask for.
    pub(super) most_asked: Duration,
}

impl Pace {
    pub(super) const USUAL: Self = Self {
        first: Duration::from_millis(500),
        most: Duration::from_secs(30),
        most_asked: Duration::from_secs(300),
    };

    /// Between half and all of what so many failures in a row make of it, so that those who wait do
    /// not come back together.
    fn wait(&self, num_failures: u32, draws: &mut SeededDraws) -> Duration {
        let doubled = self.first.saturating_mul(1 << num_failures.saturating_sub(1).min(16));
        doubled.min(self.most).mul_f64(0.5 + 0.5 * draws.uniform())
    }
}

/// Servers of one model.
pub(super) struct Servers {
    agent: Agent,
    /// Sent with each request and told nowhere: this has no `Debug`.
    token: Option<String>,
    num_retries: usize,
    pace: Pace,
    states: Mutex<Vec<State>>,
    /// Whether nothing is to be sent again.
    is_given_up: AtomicBool,
}

/// What is known of a server.
struct State {
    url: String,
    num_running: usize,
    /// Failures in a row.
    num_failures: u32,
    last_failure: Option<Instant>,
    /// It is passed over until then.
    resting_until: Option<Instant>,
    /// It refuses token ids.
    wants_text: bool,
}

/// Why there is no completion.
#[derive(Debug)]
pub(super) struct Refused {
    /// The server, what happened, and what to do.
    pub(super) why: String,
}

/// What became of one request.
enum Attempt {
    Done(Completion),
    /// It may go well another time.
    Failed {
        why: String,
        hint: &'static str,
        wait: Option<Duration>,
    },
    /// It never will.
    Refused {
        why: String,
        hint: &'static str,
    },
    /// The prompt is not what the server expects.
    Unreadable {
        why: String,
    },
}

const UNREACHABLE: &str = "see that it is up, and run the same command again";
const NONSENSE: &str = "see that `data.server.urls` name a server of OpenAI's `/v1/completions`, and \
                        that it serves `models.target`";
const NO_TOKEN: &str =
    "name the environment variable that holds a valid token in `data.server.api_key_env`";
const NOT_FOUND: &str = "an address in `data.server.urls` ends where `/completions` begins, most often \
                         in `/v1`, and `data.server.model` is a name that its `/models` lists";
const NOT_UNDERSTOOD: &str = "see what it says; `data.server.model` and the keys of `[data]` are what it \
                              was asked with";

impl Servers {
    /// Servers at addresses, each up to the `/v1`.
    pub(super) fn new(
        urls: &[String],
        token: Option<String>,
        num_retries: usize,
        timeout: Duration,
        pace: Pace,
    ) -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            // A token goes where it was meant for.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("draftsmith/", env!("CARGO_PKG_VERSION")))
            .build();
        let state = |url: &String| State {
            url: url.trim_end_matches('/').to_owned(),
            num_running: 0,
            num_failures: 0,
            last_failure: None,
            resting_until: None,
            wants_text: false,
        };
        Self {
            agent: config.new_agent(),
            token,
            num_retries,
            pace,
            states: Mutex::new(urls.iter().map(state).collect()),
            is_given_up: AtomicBool::new(false),
        }
    }

    /// Lets what is under way end, and sends nothing again.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::SeqCst);
    }

    /// A completion, or why there is none after all retries. `prompt_text` is the prompt for servers
    /// that read no ids.
    pub(super) fn complete(
        &self,
        ask: &Ask,
        terms: &Terms,
        prompt_text: &dyn Fn() -> Result<String, String>,
    ) -> Result<Completion, Refused> {
        let mut draws = SeededDraws::new(ask.seed.into(), &[&ask.id, "waiting"]);
        let mut num_failures = 0;
        loop {
            let Some((number, url, wants_text)) = self.wait_for_one() else {
                return Err(Refused { why: "it was given up".to_owned() });
            };
            let begun = Instant::now();
            let attempt = match wants_text {
                true => self.send_text(&url, ask, terms, prompt_text),
                false => match self.send(&url, ask, terms, json!(ask.prompt_ids)) {
                    // Ids may be what it does not read.
                    Attempt::Unreadable { why } => {
                        match self.send_text(&url, ask, terms, prompt_text) {
                            Attempt::Done(completion) => {
                                self.state(number, |state| state.wants_text = true);
                                Attempt::Done(completion)
                            }
                            _ => Attempt::Refused { why, hint: NOT_UNDERSTOOD },
                        }
                    }
                    other => other,
                },
            };
            match attempt {
                Attempt::Done(completion) => {
                    self.state(number, State::worked);
                    return Ok(completion);
                }
                Attempt::Failed { why, hint, wait } => {
                    self.state(number, |state| state.failed(begun, wait, self.pace, &mut draws));
                    num_failures += 1;
                    if num_failures > self.num_retries || self.is_given_up.load(Ordering::SeqCst) {
                        let tries = match num_failures {
                            1 => String::new(),
                            many => format!(", the last of {many} times"),
                        };
                        let why = format!("the server `{url}` {why}{tries}; hint: {hint}");
                        return Err(Refused { why });
                    }
                }
                Attempt::Refused { why, hint } => {
                    self.state(number, |state| state.num_running -= 1);
                    return Err(Refused { why: format!("the server `{url}` {why}; hint: {hint}") });
                }
                Attempt::Unreadable { why } => {
                    self.state(number, |state| state.num_running -= 1);
                    let why = format!("the server `{url}` {why}; hint: {NOT_UNDERSTOOD}");
                    return Err(Refused { why });
                }
            }
        }
    }

    fn state(&self, number: usize, change: impl FnOnce(&mut State)) {
        change(&mut self.states.lock().expect(HELD)[number]);
    }

    /// The server with the least to do among those that are not passed over, once there is one; None
    /// where that is given up.
    fn wait_for_one(&self) -> Option<(usize, String, bool)> {
        loop {
            if self.is_given_up.load(Ordering::SeqCst) {
                return None;
            }
            let now = Instant::now();
            let mut states = self.states.lock().expect(HELD);
            let ready = states.iter_mut().enumerate();
            let ready =
                ready.filter(|(_, state)| state.resting_until.is_none_or(|until| until <= now));
            if let Some((number, state)) = ready.min_by_key(|(_, state)| state.num_running) {
                state.num_running += 1;
                return Some((number, state.url.clone(), state.wants_text));
            }
            let soonest = states.iter().filter_map(|state| state.resting_until).min();
            drop(states);
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
    ) -> Attempt {
        match prompt_text() {
            Ok(text) => self.send(url, ask, terms, json!(text)),
            Err(why) => Attempt::Unreadable { why: format!("reads no token ids, and {why}") },
        }
    }

    fn send(&self, url: &str, ask: &Ask, terms: &Terms, prompt: Value) -> Attempt {
        let body = terms.body(ask, prompt);
        let mut request = self
            .agent
            .post(format!("{url}/completions"))
            .header("content-type", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = match request.send(&body[..]) {
            Ok(response) => response,
            Err(error) => return failed(&error),
        };
        let status = response.status().as_u16();
        let asked = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
        let asked = asked.and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
        let bytes = match response.body_mut().with_config().limit(MOST_BYTES).read_to_vec() {
            Ok(bytes) => bytes,
            Err(error) => return failed(&error),
        };
        let why = || format!("answered {status}: {}", excerpt(&bytes));
        match status {
            200..=299 => match read(&bytes, terms) {
                Ok(completion) => Attempt::Done(completion),
                Err(what) => {
                    let why = format!("answered {what}");
                    Attempt::Failed { why, hint: NONSENSE, wait: None }
                }
            },
            400 | 422 => Attempt::Unreadable { why: why() },
            401 | 403 => Attempt::Refused { why: why(), hint: NO_TOKEN },
            404 | 405 => Attempt::Refused { why: why(), hint: NOT_FOUND },
            408 | 425 | 429 | 500.. => {
                Attempt::Failed { why: why(), hint: UNREACHABLE, wait: asked }
            }
            _ => Attempt::Refused { why: why(), hint: NOT_UNDERSTOOD },
        }
    }
}

impl State {
    fn worked(&mut self) {
        self.num_running -= 1;
        (self.num_failures, self.resting_until) = (0, None);
    }

    /// A request that began then failed. Those that ran beside one another when it stopped working
    /// are one failure.
    fn failed(
        &mut self,
        begun: Instant,
        asked: Option<Duration>,
        pace: Pace,
        draws: &mut SeededDraws,
    ) {
        self.num_running -= 1;
        if self.last_failure.is_none_or(|last| begun >= last) {
            self.num_failures += 1;
            self.last_failure = Some(Instant::now());
        }
        let wait = pace.wait(self.num_failures, draws);
        let asked = asked.unwrap_or_default().min(pace.most_asked);
        let until = Instant::now() + wait.max(asked);
        self.resting_until = self.resting_until.max(Some(until));
    }
}

/// A request without an answer.
fn failed(error: &ureq::Error) -> Attempt {
    let (why, hint) = match error {
        ureq::Error::Timeout(_) => (
            "did not answer in time".to_owned(),
            "raise `data.server.timeout_s`, or lower `data.server.concurrency`",
        ),
        ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            ("takes no connection".to_owned(), UNREACHABLE)
        }
        ureq::Error::Io(error) => (format!("broke off ({error})"), UNREACHABLE),
        error => (format!("could not be asked ({error})"), UNREACHABLE),
    };
    Attempt::Failed { why, hint, wait: None }
}
