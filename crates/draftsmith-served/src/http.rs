//! The HTTP client for all requests to servers. It sends the bearer token, applies the timeout,
//! follows no redirects and describes errors.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use ureq::http::Response;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE};
use ureq::{Agent, Body};

use crate::error::{Result, ServedError};
use crate::secret::Secret;
use crate::settings::ServerHints;

/// The maximum number of bytes that an [`Endpoint`] reads of an answer.
const MOST_PAGE: u64 = 8 << 20;
/// The answer length in bytes from which a quote counts as cut off.
const MOST_QUOTED: usize = 4096;

pub(crate) const UNREACHABLE: &str = "check that it is running, and run the same command again";

/// An HTTP client that sends a bearer token, if there is one.
pub(crate) struct HttpClient {
    agent: Agent,
    pub(crate) secret: Secret,
}

impl HttpClient {
    pub(crate) fn new(timeout: Duration, secret: Secret) -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            // A redirect could send the token to another host.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("draftsmith/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.new_agent(), secret }
    }

    /// Posts a JSON body. vLLM names its files of a request by `name`, if there is one.
    pub(crate) fn post(
        &self,
        url: String,
        body: &[u8],
        name: Option<&str>,
    ) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.post(url).header(CONTENT_TYPE, "application/json");
        if let Some(name) = name {
            request = request.header("x-request-id", name);
        }
        if let Some(token) = self.secret.header() {
            request = request.header(AUTHORIZATION, token);
        }
        request.send(body)
    }

    fn get(&self, url: String) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = self.secret.header() {
            request = request.header(AUTHORIZATION, token);
        }
        request.call()
    }
}

/// Describes why a server did not answer, with a hint. `too_slow` is the hint for a timeout.
pub(crate) fn unanswered(error: &ureq::Error, too_slow: &'static str) -> (String, &'static str) {
    match error {
        ureq::Error::Timeout(_) => ("did not answer in time".to_owned(), too_slow),
        ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            ("refuses connections".to_owned(), UNREACHABLE)
        }
        ureq::Error::Io(error) => (format!("broke the connection ({error})"), UNREACHABLE),
        error => (format!("cannot be reached ({error})"), UNREACHABLE),
    }
}

/// A client of the one server that a command gets by `--server URL`.
pub struct Endpoint {
    client: HttpClient,
    url: String,
    hints: ServerHints,
}

impl Endpoint {
    /// Creates the client of the server at `url`, which usually ends in `/v1`. `timeout` applies to
    /// each request.
    pub fn new(url: &str, secret: Secret, timeout: Duration, hints: ServerHints) -> Self {
        let url = url.trim_end_matches('/').to_owned();
        Self { client: HttpClient::new(timeout, secret), url, hints }
    }

    /// Sends a GET request for a path below the base URL, such as `/models`, and returns the body.
    ///
    /// # Errors
    /// If the server does not answer, or answers with an error.
    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        self.page(self.client.get(format!("{}{path}", self.url)))
    }

    /// Sends a GET request for a path outside `/v1`, such as `/metrics`, and returns the body.
    ///
    /// # Errors
    /// If the server does not answer, or answers with an error.
    pub fn get_beside(&self, path: &str) -> Result<Vec<u8>> {
        self.page(self.client.get(format!("{}{path}", self.url.trim_end_matches("/v1"))))
    }

    /// Posts JSON to a path below the base URL, such as `/completions`, and returns the body.
    ///
    /// # Errors
    /// If the server does not answer, or answers with an error.
    pub fn post(&self, path: &str, body: &str) -> Result<Vec<u8>> {
        self.page(self.client.post(format!("{}{path}", self.url), body.as_bytes(), None))
    }

    fn page(&self, response: Result<Response<Body>, ureq::Error>) -> Result<Vec<u8>> {
        let unanswered = |error: ureq::Error| {
            let (what, hint) = unanswered(&error, self.hints.too_slow);
            self.failed(&what, hint)
        };
        let mut response = response.map_err(unanswered)?;
        let status = response.status().as_u16();
        let mut page = Vec::new();
        let read = response.body_mut().as_reader().take(MOST_PAGE).read_to_end(&mut page);
        read.map_err(|error| unanswered(error.into()))?;
        if (200..=299).contains(&status) {
            return Ok(page);
        }
        let hint = match status {
            401 | 403 => self.hints.token,
            404 | 405 => "check the address, which usually ends in `/v1`",
            _ => UNREACHABLE,
        };
        Err(self.error(&format!("answered {status}: {}", self.quoted(&page)), hint, Some(status)))
    }

    /// Quotes the beginning of an answer, with the bearer token masked.
    pub fn quoted(&self, said: &[u8]) -> String {
        self.client.secret.quote(said, said.len() >= MOST_QUOTED)
    }

    /// Returns whether a text of the server contains the bearer token.
    pub fn repeats_token(&self, said: &str) -> bool {
        self.client.secret.is_in(said)
    }

    /// Creates an error from a description of what the server did and a hint.
    pub fn failed(&self, what: &str, hint: &str) -> ServedError {
        self.error(what, hint, None)
    }

    fn error(&self, what: &str, hint: &str, status: Option<u16>) -> ServedError {
        let problem = self.client.secret.clean(&format!("the server `{}` {what}", self.url));
        ServedError::Server { problem: format!("{problem}; hint: {hint}"), status }
    }
}
