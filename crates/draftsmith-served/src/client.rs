//! Sending of requests to several servers. Each goes to the least busy server, failed ones are
//! retried, and a server that fails gets no requests for a while.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use draftsmith_theory::SeededDraws;
use serde_json::json;
use ureq::Body;
use ureq::http::header::{LOCATION, RETRY_AFTER};
use ureq::http::{HeaderName, HeaderValue, Response};

use super::http::{HttpClient, UNREACHABLE};
use super::protocol::{Ask, Terms};
use super::reply::{BoundedBody, Unusable, most_bytes, read};
use super::response::Received;
use super::secret::Secret;
use crate::settings::{ServerHints, ServerRecipe, StatesRecipe};
use crate::states_file::{Untaken, discard, files_of, is_deleted};
use crate::{HELD, TargetSettings, Wait};

/// The maximum number of bytes to read of an error answer.
const ERROR_BYTES: u64 = 4096;
/// The longest sleep between checks whether to stop waiting.
const TICK: Duration = Duration::from_millis(50);

/// The longest pause after a server's first failure. It doubles with each further failure. Tests
/// pause less.
const FIRST_WAIT: Duration = Duration::from_millis(if cfg!(test) { 2 } else { 500 });
/// The upper limit of such a pause, unless the server requests a longer one.
const MOST_WAIT: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 30_000 });

/// The servers that run the target.
pub(super) struct Servers {
    client: HttpClient,
    hints: ServerHints,
    num_retries: usize,
    /// The longest pause that a server can request.
    most_wait: Duration,
    /// The directories of the servers' hidden states, if there are any.
    states: Option<StatesRecipe>,
    /// The start of the names of all requests, which no other process uses.
    name: String,
    num_requests: AtomicUsize,
    servers: Mutex<Vec<ServerState>>,
    /// Whether to stop sending requests.
    is_given_up: AtomicBool,
}

/// The state of one server.
#[derive(Default)]
struct ServerState {
    url: String,
    num_running: usize,
    /// The number of consecutive failures.
    num_failures: u32,
    last_failure: Option<Instant>,
    /// The pause after the last failure, if any. It may be over.
    rest: Option<Wait>,
    /// Whether the server rejects token ids as a prompt, so that text is sent.
    wants_text: bool,
}

/// The failure of a request.
pub(super) struct Failure {
    /// A description of the failure. It may quote the server, so the token must be masked before it
    /// is shown.
    why: String,
    hint: &'static str,
    kind: FailureKind,
}

impl Failure {
    /// Creates a failure that would recur if the request were sent again.
    pub(super) fn permanent(why: String, hint: &'static str) -> Self {
        Self { why, hint, kind: FailureKind::Permanent }
    }
}

impl From<Untaken> for Failure {
    fn from(Untaken { what, hint }: Untaken) -> Self {
        Self::permanent(format!("answered {what}"), hint)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FailureKind {
    /// A failure that may pass, after the wait that the server requests, if any.
    Temporary(Option<Duration>),
    Permanent,
    /// A rejected request, perhaps because the prompt consists of token ids.
    Unreadable,
}

// Callers have different keys and flags, so these hints name none.
const NONSENSE: &str = "check that this is the address of a server with OpenAI's `/v1/completions` that runs \
                        the target";
const NOT_FOUND: &str = "check that the address ends before `/completions`, usually in `/v1`, and that \
                         `/models` lists the model's name";
const NOT_UNDERSTOOD: &str =
    "check the model's name and the other settings against the server's message";
const CUT_SHORT: &str = "raise the server's context, which llama.cpp divides among `--parallel` requests, \
                         and its limit of new tokens, or lower the maximum of new tokens here";
const REDIRECTED: &str = "redirects are not followed, since they could send the token elsewhere; if it is \
                          the right one, give that address instead";

impl Servers {
    pub(super) fn new(recipe: &ServerRecipe, secret: Secret, hints: ServerHints) -> Self {
        let server = |url: &String| {
            let url = url.trim_end_matches('/').to_owned();
            ServerState { url, ..ServerState::default() }
        };
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        Self {
            client: HttpClient::new(recipe.timeout(), secret),
            name: format!("draftsmith-{}-{since:x}", std::process::id()),
            num_requests: AtomicUsize::new(0),
            hints,
            num_retries: recipe.retries,
            most_wait: recipe.timeout(),
            states: recipe.states.clone(),
            servers: Mutex::new(recipe.urls.iter().map(server).collect()),
            is_given_up: AtomicBool::new(false),
        }
    }

    /// Stops sending and retrying. Requests under way continue.
    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::SeqCst);
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::SeqCst)
    }

    /// Deletes the files of hidden states that requests without a usable answer have left, unless a
    /// request is running. Returns a description of those that cannot be deleted, if there are any.
    pub(super) fn sweep(&self) -> Option<String> {
        let dirs = self.states.iter().flat_map(|states| &states.dirs);
        let mut left: Vec<PathBuf> = dirs.flat_map(|dir| files_of(dir, &self.name)).collect();
        if self.servers.lock().expect(HELD).iter().any(|server| server.num_running > 0) {
            return None;
        }
        left.retain(|path| !is_deleted(path));
        left.first().map(|path| {
            format!(
                "{} files of hidden states are left of requests without an answer, since the server has locked them or they \
                 cannot be deleted, such as `{}`; hint: delete them when the server is idle",
                left.len(),
                path.display()
            )
        })
    }

    /// Requests a response from the servers, with retries. The error describes the last failure.
    pub(super) fn complete(
        &self,
        ask: &Ask,
        terms: &Terms,
        target: &TargetSettings,
    ) -> Result<Received, String> {
        let send = |number, url: &str, wants_text| {
            let result = self.send(url, ask, terms, target, wants_text);
            let is_unreadable = |failure: &Failure| failure.kind == FailureKind::Unreadable;
            if wants_text || !result.as_ref().is_err_and(is_unreadable) {
                return result;
            }
            // The server may not accept token ids. If text fails too, the first error is returned.
            let Ok(received) = self.send(url, ask, terms, target, true) else { return result };
            self.update(number, |server| server.wants_text = true);
            Ok(received)
        };
        let mut received = self.with_retries((&ask.id, ask.seed), |number, url, wants_text| {
            let received = send(number, url, wants_text)?;
            if let Some((states, named)) = self.states.as_ref().zip(received.states_path.as_ref()) {
                discard(states, (number, named), self.most_wait)?;
            }
            Ok(received)
        })?;
        let other = received.other_model.take();
        received.other_model = other.map(|model| self.client.secret.clean(&model));
        Ok(received)
    }

    /// Calls `send` until a request succeeds, with the number and URL of a server that is ready, and
    /// whether it needs text. `id` and `seed` identify the request. The error describes the last
    /// failure.
    pub(super) fn with_retries<T>(
        &self,
        (id, seed): (&str, u32),
        send: impl Fn(usize, &str, bool) -> Result<T, Failure>,
    ) -> Result<T, String> {
        let mut draws = SeededDraws::new(seed.into(), &[id, "waiting"]);
        let mut num_failures = 0;
        loop {
            let Some((number, url, wants_text)) = self.wait_for_one() else {
                return Err("the job was given up".to_owned());
            };
            let begun = Instant::now();
            let Failure { why, hint, kind } = match send(number, &url, wants_text) {
                Ok(received) => {
                    self.update(number, ServerState::succeeded);
                    return Ok(received);
                }
                Err(failure) => failure,
            };
            let mut why = self.client.secret.clean(&format!("the server `{url}` {why}"));
            if let FailureKind::Temporary(requested) = kind {
                let most = self.most_wait;
                self.update(number, |server| {
                    server.failed(begun, &why, requested, most, &mut draws)
                });
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
            return Err(format!("{why}; hint: {hint}"));
        }
    }

    /// Returns the pause that ends first if all servers pause; `None` if any server is usable.
    pub(super) fn waiting(&self) -> Option<Wait> {
        let servers = self.servers.lock().expect(HELD);
        let now = Instant::now();
        let rests: Option<Vec<&Wait>> = servers
            .iter()
            .map(|server| server.rest.as_ref().filter(|rest| rest.until > now))
            .collect();
        rests?.into_iter().min_by_key(|rest| rest.until).cloned()
    }

    fn update(&self, number: usize, change: impl FnOnce(&mut ServerState)) {
        change(&mut self.servers.lock().expect(HELD)[number]);
    }

    /// Waits for a usable server. Returns the index and URL of the least busy one, and whether it
    /// needs text; `None` once the job is given up.
    fn wait_for_one(&self) -> Option<(usize, String, bool)> {
        loop {
            if self.is_given_up() {
                return None;
            }
            let now = Instant::now();
            let mut servers = self.servers.lock().expect(HELD);
            let until = |server: &ServerState| server.rest.as_ref().map(|rest| rest.until);
            let ready = servers.iter_mut().enumerate();
            let ready = ready.filter(|(_, server)| until(server).is_none_or(|until| until <= now));
            if let Some((number, server)) = ready.min_by_key(|(_, server)| server.num_running) {
                server.num_running += 1;
                return Some((number, server.url.clone(), server.wants_text));
            }
            let soonest = servers.iter().filter_map(until).min();
            drop(servers);
            let wait = soonest.map_or(TICK, |until| until.saturating_duration_since(now));
            std::thread::sleep(wait.min(TICK));
        }
    }

    /// Sends the prompt as text or token ids.
    fn send(
        &self,
        url: &str,
        ask: &Ask,
        terms: &Terms,
        target: &TargetSettings,
        as_text: bool,
    ) -> Result<Received, Failure> {
        let prompt = if as_text {
            let text = target.tokenizer.decode(&ask.prompt_ids, false);
            json!(text.map_err(|error| Failure {
                why: format!("reads no token ids, and the prompt has no text: {error}"),
                hint: NOT_UNDERSTOOD,
                kind: FailureKind::Unreadable,
            })?)
        } else {
            json!(ask.prompt_ids)
        };
        let mut response = self.post(url, &terms.body(ask, prompt))?;
        let mut body = BoundedBody::new(response.body_mut().as_reader(), most_bytes(ask, terms));
        let received = read(&mut body, ask, terms)
            .and_then(|completion| Received::of(completion, ask, terms, target));
        received.map_err(|problem| self.unusable(problem, &body, ask.max_tokens))
    }

    /// Posts a request for a completion.
    ///
    /// # Errors
    /// If the server does not answer, or not with a status of success.
    pub(super) fn post(&self, url: &str, body: &[u8]) -> Result<Response<Body>, Failure> {
        let number = self.num_requests.fetch_add(1, Ordering::Relaxed);
        let name = self.states.as_ref().map(|_| format!("{}-{number}", self.name));
        let response = self.client.post(format!("{url}/completions"), body, name.as_deref());
        let mut response = response.map_err(|error| unanswered(&error, &self.hints))?;
        let status = response.status().as_u16();
        if (200..=299).contains(&status) {
            return Ok(response);
        }
        let header = |name: HeaderName| response.headers().get(name).map(HeaderValue::as_bytes);
        let location = header(LOCATION).map(|location| self.client.secret.quote(location, false));
        let wait = header(RETRY_AFTER).and_then(|value| requested_wait(value, SystemTime::now()));
        // The status suffices for the error, even if the body does not arrive.
        let mut body = BoundedBody::new(response.body_mut().as_reader(), ERROR_BYTES);
        let _ = body.read_to_end(&mut Vec::new());
        let said = self.quote_start(&body);
        let (why, hint, kind) = match (status, location) {
            (300..=399, Some(location)) => {
                (format!("a redirect to {location}"), REDIRECTED, FailureKind::Permanent)
            }
            (400 | 422, _) => (said, NOT_UNDERSTOOD, FailureKind::Unreadable),
            (401 | 403, _) => (said, self.hints.token, FailureKind::Permanent),
            (404 | 405, _) => (said, NOT_FOUND, FailureKind::Permanent),
            (408 | 425 | 429 | 500.., _) => (said, UNREACHABLE, FailureKind::Temporary(wait)),
            _ => (said, NOT_UNDERSTOOD, FailureKind::Permanent),
        };
        Err(Failure { why: format!("answered {status}: {why}"), hint, kind })
    }

    /// Describes an unusable answer to a request for at most `most` tokens.
    pub(super) fn unusable<R: Read>(
        &self,
        problem: Unusable,
        body: &BoundedBody<R>,
        most: usize,
    ) -> Failure {
        let (what, hint) = match problem {
            Unusable::Broken(error) => return unanswered(&error.into(), &self.hints),
            Unusable::Foreign(what) => (format!("{what}: {}", self.quote_start(body)), NONSENSE),
            Unusable::Invalid(what) => (what, NONSENSE),
            Unusable::CutShort(num) => {
                let what = format!(
                    "{num} of {most} tokens with the `finish_reason` `length`: something else than \
                     `max_tokens` cut them short, such as the server's context"
                );
                (what, CUT_SHORT)
            }
        };
        Failure { why: format!("answered {what}"), hint, kind: FailureKind::Temporary(None) }
    }

    fn quote_start<R: Read>(&self, body: &BoundedBody<R>) -> String {
        let (start, is_cut) = body.start();
        self.client.secret.quote(start, is_cut)
    }
}

impl ServerState {
    fn succeeded(&mut self) {
        self.num_running -= 1;
        (self.num_failures, self.rest) = (0, None);
    }

    /// Records a failed request and pauses the server. Concurrent requests that fail together count
    /// as one failure.
    fn failed(
        &mut self,
        begun: Instant,
        why: &str,
        requested: Option<Duration>,
        most_wait: Duration,
        draws: &mut SeededDraws,
    ) {
        self.num_running -= 1;
        let now = Instant::now();
        if self.last_failure.is_none_or(|last| begun >= last) {
            self.num_failures += 1;
            self.last_failure = Some(now);
        }
        let doubled = FIRST_WAIT.saturating_mul(1 << self.num_failures.saturating_sub(1).min(16));
        // A random part between half and all of it is used, so that waiting threads do not all
        // resume at once.
        let wait = doubled.min(MOST_WAIT).mul_f64(0.5 + 0.5 * draws.uniform());
        let until = now + wait.max(requested.unwrap_or_default().min(most_wait));
        if self.rest.as_ref().is_none_or(|rest| rest.until < until) {
            let requested = requested.filter(|requested| *requested > most_wait);
            self.rest = Some(Wait { until, why: why.to_owned(), requested });
        }
    }
}

/// Parses the wait in a `retry-after` header, which is a number of seconds or a date; `None` if it
/// is malformed.
fn requested_wait(value: &[u8], now: SystemTime) -> Option<Duration> {
    let value = std::str::from_utf8(value).ok()?.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// Converts a connection error or timeout into the failure of the request.
fn unanswered(error: &ureq::Error, hints: &ServerHints) -> Failure {
    let (why, hint) = super::http::unanswered(error, hints.too_slow);
    Failure { why, hint, kind: FailureKind::Temporary(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_requested_wait_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let wait = |value: &str| requested_wait(value.as_bytes(), now).map(|wait| wait.as_secs());
        assert_eq!(wait("0"), Some(0));
        assert_eq!(wait(" 120 "), Some(120));
        assert_eq!(wait("1000000000000000000"), Some(10_u64.pow(18)));
        assert_eq!(wait(&"9".repeat(40)), Some(u64::MAX));
        assert_eq!(wait("Sun, 06 Nov 1994 08:50:37 GMT"), Some(60));
        assert_eq!(wait("Sunday, 06-Nov-94 08:50:37 GMT"), Some(60));
        assert_eq!(wait("Sun, 06 Nov 1994 08:49:00 GMT"), Some(0), "it has passed");
        for invalid in ["", "-1", "1.5", "soon", "6 Nov 1994", "\u{661}"] {
            assert_eq!(wait(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn a_server_rests_no_longer_than_the_timeout() {
        let mut server = ServerState { num_running: 3, ..ServerState::default() };
        let (most, mut draws) = (Duration::from_mins(10), SeededDraws::new(0, &[]));
        let mut rest = |seconds: Option<u64>| {
            let (begun, requested) = (Instant::now(), seconds.map(Duration::from_secs));
            server.failed(begun, "answered 429", requested, most, &mut draws);
            let rest = server.rest.clone().expect("it rests");
            (rest.until - begun, rest.requested)
        };
        let (wait, requested) = rest(None);
        assert!(wait < Duration::from_secs(1) && requested.is_none(), "{wait:?}");
        let (wait, requested) = rest(Some(60));
        assert!(wait >= Duration::from_mins(1) && wait < most && requested.is_none(), "{wait:?}");
        let (wait, requested) = rest(Some(u64::MAX));
        assert!(wait >= most && wait < 2 * most, "{wait:?}");
        assert_eq!(requested, Some(Duration::from_secs(u64::MAX)));
    }
}
