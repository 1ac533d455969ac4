//! Sends requests to the Hub and validates its responses, parts of which become file paths.
//!
//! A mirror (`HF_ENDPOINT`) may send anything, and something else each time, so we check every
//! response that names a file: commits and tags may contain only letters, digits, `-` and `_`. We
//! send the token only to the endpoint's scheme, host and port. After a redirect to another host,
//! we do not send it even back to the endpoint, so we follow redirects ourselves. Besides this
//! file, only two files of draftsmith-served use the network.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use draftsmith_files::parse_json;
use serde::Deserialize;
use ureq::http::header::{AUTHORIZATION, RANGE};
use ureq::http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use ureq::{Agent, Body, BodyReader};

/// The maximum number of redirects for one request.
const MOST_REDIRECTS: usize = 5;
/// The maximum length of a repository's description in bytes, enough for 100,000 long file names.
const MOST_INFO_BYTES: u64 = 16_000_000;
/// The maximum length of a commit or tag in characters. File systems allow names of 255 bytes,
/// including our suffixes.
const MOST_WORD_LEN: usize = 128;

/// A response of the Hub that we cannot use.
#[derive(Debug, thiserror::Error)]
pub(super) enum HubError {
    #[error("the Hub {} (HTTP {})", refusal(*.0), .0)]
    Status(u16),
    #[error("the Hub's answer has no `{0}`; hint: check that `HF_ENDPOINT` is a Hub")]
    Absent(&'static str),
    #[error(
        "the Hub's answer has a malformed or unsafe `{name}`, {value:?}; hint: use a Hub that you trust as \
         `HF_ENDPOINT`"
    )]
    Invalid { name: &'static str, value: String },
    #[error("the Hub's answers differ; hint: run the same command again")]
    Changed,
}

impl HubError {
    fn invalid(name: &'static str, value: &[u8]) -> Self {
        let value = String::from_utf8_lossy(value).chars().take(80).collect();
        Self::Invalid { name, value }
    }

    /// Returns whether the same request may succeed later.
    pub(super) fn is_temporary(&self) -> bool {
        matches!(self, Self::Changed | Self::Status(408 | 429 | 500..))
    }
}

fn refusal(status: u16) -> &'static str {
    match status {
        401 | 403 => "denies access",
        404 => "has no such model, revision or file",
        _ => "failed",
    }
}

/// The description of a repository at one revision.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    /// The commit hash, already validated.
    pub(super) sha: String,
    /// All files of the repository. Their names are not validated.
    pub(super) siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Sibling {
    pub(super) rfilename: String,
}

/// The Hub's description of a file. Commit and tag are validated.
#[derive(Debug)]
pub(super) struct Metadata {
    pub(super) commit: String,
    /// The file's name in the cache. For large files, this is the SHA-256 hash.
    pub(super) tag: String,
    pub(super) num_bytes: Option<u64>,
}

impl Metadata {
    /// Reads the metadata from the headers of a response from the endpoint itself.
    fn of(headers: &HeaderMap) -> Result<Self, HubError> {
        let is_linked = headers.contains_key("x-linked-etag");
        Ok(Self {
            commit: word(headers, "x-repo-commit")?,
            tag: word(headers, if is_linked { "x-linked-etag" } else { "etag" })?,
            num_bytes: number(headers, "x-linked-size")?,
        })
    }
}

/// A connection to the Hub or a mirror.
#[derive(Debug)]
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl Client {
    pub(super) fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // `send` follows redirects instead.
            .max_redirects(0)
            // Without compression, `content-length` is the file's length.
            .accept_encoding("identity")
            .user_agent(concat!("draftsmith/", env!("CARGO_PKG_VERSION")))
            .build();
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Self { agent: config.new_agent(), endpoint, token }
    }

    /// Builds the URL of a file. The caller must have validated all three parts.
    pub(super) fn file_url(&self, id: &str, commit: &str, name: &str) -> String {
        format!("{}/{id}/resolve/{commit}/{name}", self.endpoint)
    }

    /// Requests a repository's commit hash and its list of files.
    pub(super) fn info(&self, id: &str, revision: &str) -> Result<Info> {
        let revision = revision.replace('/', "%2F");
        let url = format!("{}/api/models/{id}/revision/{revision}", self.endpoint);
        let (_, response) = self.send(&Method::GET, &url, 0)?;
        let mut text = Vec::new();
        response.into_body().into_reader().take(MOST_INFO_BYTES + 1).read_to_end(&mut text)?;
        ensure!(
            text.len() as u64 <= MOST_INFO_BYTES,
            "the Hub's list of files is longer than {} MB",
            MOST_INFO_BYTES / 1_000_000
        );
        let info: Info = parse_json(Path::new(&url), &text)?;
        checked_word("sha", info.sha.as_bytes())?;
        Ok(info)
    }

    /// Requests a file's metadata from the Hub.
    pub(super) fn metadata(&self, url: &str) -> Result<Metadata> {
        let (headers, response) = self.send(&Method::HEAD, url, 0)?;
        let mut metadata = Metadata::of(&headers)?;
        if metadata.num_bytes.is_none() && response.status().is_success() {
            metadata.num_bytes = number(&headers, "content-length")?;
        }
        Ok(metadata)
    }

    /// Requests a file's bytes from the offset `start` on. Returns the offset of the first byte
    /// sent (0 if the server ignores `start`), the length of the whole file in bytes, and a reader.
    ///
    /// # Errors
    /// If the request fails, or the file has changed since its metadata, `named`, were read.
    pub(super) fn content(
        &self,
        url: &str,
        start: u64,
        named: &Metadata,
    ) -> Result<(u64, u64, BodyReader<'static>)> {
        let (of_hub, response) = self.send(&Method::GET, url, start)?;
        let now = Metadata::of(&of_hub)?;
        let (from, num_bytes) = if response.status() == StatusCode::PARTIAL_CONTENT {
            content_range(response.headers())?
        } else {
            let num_bytes = number(response.headers(), "content-length")?.or(named.num_bytes);
            (0, num_bytes.ok_or(HubError::Absent("content-length"))?)
        };
        let is_other = (&now.commit, &now.tag) != (&named.commit, &named.tag)
            || [now.num_bytes, named.num_bytes].into_iter().flatten().any(|told| told != num_bytes);
        if is_other || (from != start && from != 0) || from > num_bytes {
            return Err(HubError::Changed.into());
        }
        Ok((from, num_bytes, response.into_body().into_reader()))
    }

    /// Sends a request and follows redirects; a `HEAD` request follows them only within the
    /// endpoint. Returns the headers of the last response from the endpoint, and the last response
    /// from any host.
    fn send(&self, method: &Method, url: &str, start: u64) -> Result<(HeaderMap, Response<Body>)> {
        let home: Uri = url.parse().with_context(|| {
            format!("`{url}` is no address; hint: `HF_ENDPOINT` begins with `https://`")
        })?;
        let (mut address, mut is_home, mut of_hub) = (home.clone(), true, HeaderMap::new());
        for _ in 0..=MOST_REDIRECTS {
            let mut request = Request::builder().method(method).uri(&address);
            if let Some(token) = self.token.as_ref().filter(|_| is_home) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let response = self.agent.run(request.body(()).map_err(ureq::Error::from)?)?;
            if is_home {
                of_hub = response.headers().clone();
            }
            address = match response.status().as_u16() {
                200..=299 => return Ok((of_hub, response)),
                301 | 302 | 303 | 307 | 308 => redirect(response.headers(), &address)?,
                // Our partial file is longer than the Hub's file.
                416 => return Err(HubError::Changed.into()),
                status => return Err(HubError::Status(status).into()),
            };
            is_home = is_home && is_same_host(&address, &home);
            if !is_home && method == Method::HEAD {
                return Ok((of_hub, response));
            }
        }
        bail!("the Hub redirects more than {MOST_REDIRECTS} times")
    }
}

/// Returns whether two URLs have the same scheme, host and port. An explicit default port counts as
/// different.
pub(super) fn is_same_host(one: &Uri, other: &Uri) -> bool {
    (one.scheme(), one.authority()) == (other.scheme(), other.authority())
}

/// Reads the URL that a response redirects to; `from` is the URL of the request.
fn redirect(headers: &HeaderMap, from: &Uri) -> Result<Uri, HubError> {
    let location = headers.get("location").ok_or(HubError::Absent("location"))?;
    let scheme = from.scheme_str().unwrap_or_default();
    let host = from.authority().map_or("", |authority| authority.as_str());
    let address = match location.to_str().unwrap_or_default() {
        text if text.starts_with("//") => format!("{scheme}:{text}"),
        text if text.starts_with('/') => format!("{scheme}://{host}{text}"),
        text => text.to_owned(),
    };
    let is_whole = |uri: &Uri| uri.scheme().is_some() && uri.authority().is_some();
    let address = address.parse().ok().filter(is_whole);
    address.ok_or_else(|| HubError::invalid("location", location.as_bytes()))
}

/// Reads a header that becomes a part of a path. Removes quotes and the prefix `W/` of weak tags.
fn word(headers: &HeaderMap, name: &'static str) -> Result<String, HubError> {
    let value = headers.get(name).ok_or(HubError::Absent(name))?.as_bytes();
    let strong = value.strip_prefix(b"W/").unwrap_or(value);
    let bare = strong.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
    checked_word(name, bare.unwrap_or(strong))
}

fn checked_word(name: &'static str, value: &[u8]) -> Result<String, HubError> {
    match std::str::from_utf8(value) {
        Ok(text) if is_word(text) => Ok(text.to_owned()),
        _ => Err(HubError::invalid(name, value)),
    }
}

/// Returns whether a text is a valid commit or tag, and so a safe file name.
pub(super) fn is_word(text: &str) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (1..=MOST_WORD_LEN).contains(&text.len()) && text.chars().all(is_known)
}

fn number(headers: &HeaderMap, name: &'static str) -> Result<Option<u64>, HubError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| HubError::invalid(name, value.as_bytes()))
}

/// Reads START and LENGTH from the header `content-range: bytes START-END/LENGTH`.
fn content_range(headers: &HeaderMap) -> Result<(u64, u64), HubError> {
    let name = "content-range";
    let value = headers.get(name).ok_or(HubError::Absent(name))?;
    let parse = || {
        let (range, num_bytes) = value.to_str().ok()?.strip_prefix("bytes ")?.split_once('/')?;
        Some((range.split_once('-')?.0.parse().ok()?, num_bytes.parse().ok()?))
    };
    parse().ok_or_else(|| HubError::invalid(name, value.as_bytes()))
}
