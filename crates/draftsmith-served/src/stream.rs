//! Times a server's rounds: several requests side by side, whose tokens arrive as the server makes them.

use std::io::{BufRead, BufReader, Read};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE};

use crate::error::ServedError;
use crate::secret::Secret;

/// The longest line of an answer, in bytes.
const MOST_LINE: u64 = 1 << 20;
/// The most bytes of a list of models or counters.
const MOST_PAGE: u64 = 8 << 20;
/// The gaps after a request's first tokens that are not counted.
const NUM_WARM_UP: usize = 8;
/// The fewest gaps that a median is taken of.
const LEAST_GAPS: usize = 8;
/// The least share of tokens that must arrive one by one.
const LEAST_SINGLE: f64 = 0.9;

/// A server whose rounds are timed.
pub struct TimedServer {
    agent: Agent,
    url: String,
    secret: Secret,
    /// The name of its model.
    pub model: String,
}

/// Rounds of requests side by side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedRounds {
    /// The median time between two tokens of a request, in seconds.
    pub seconds: f64,
    /// The number of gaps.
    pub num_gaps: usize,
}

/// A server's own counts of speculation since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SpeculationCounters {
    /// Rounds with candidates, of one request each.
    pub num_rounds: f64,
    /// Candidates.
    pub num_drafted: f64,
    /// Accepted candidates.
    pub num_accepted: f64,
}

impl SpeculationCounters {
    /// The counts since an earlier moment; `None` if a counter fell, as after a restart.
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        let fell = self.num_rounds < earlier.num_rounds
            || self.num_drafted < earlier.num_drafted
            || self.num_accepted < earlier.num_accepted;
        (!fell).then_some(Self {
            num_rounds: self.num_rounds - earlier.num_rounds,
            num_drafted: self.num_drafted - earlier.num_drafted,
            num_accepted: self.num_accepted - earlier.num_accepted,
        })
    }
}

impl TimedServer {
    /// A server by its address up to `/v1`, and its model: the given one, or the first of its list.
    ///
    /// # Errors
    /// If it cannot be reached, or lists no model.
    pub fn open(
        url: &str,
        model: Option<&str>,
        secret: Secret,
        timeout: Duration,
    ) -> Result<Self, ServedError> {
        let config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("draftsmith/", env!("CARGO_PKG_VERSION")))
            .build();
        let url = url.trim_end_matches('/').to_owned();
        let mut server = Self { agent: config.new_agent(), url, secret, model: String::new() };
        let page = server.get(&format!("{}/models", server.url))?;
        let listed: Value = serde_json::from_str(&page).unwrap_or_default();
        let listed = listed["data"].as_array().cloned().unwrap_or_default();
        let mut names = listed.iter().filter_map(|model| model["id"].as_str());
        let found = match model {
            Some(wanted) => names.find(|name| *name == wanted),
            None => names.next(),
        };
        server.model = match found {
            Some(name) => name.to_owned(),
            None => {
                let what = match model {
                    Some(wanted) => format!("lists no model `{wanted}`"),
                    None => "lists no model".to_owned(),
                };
                return Err(server.failed(&what, "check the address, which usually ends in `/v1`"));
            }
        };
        Ok(server)
    }

    /// The time between tokens while all prompts are answered side by side, each with this many tokens.
    ///
    /// # Errors
    /// If the server fails, ends answers early, or sends several tokens at once.
    pub fn time_rounds(
        &self,
        prompts: &[String],
        num_tokens: usize,
    ) -> Result<TimedRounds, ServedError> {
        let start = Barrier::new(prompts.len());
        let arrivals = std::thread::scope(|scope| {
            let ask = |prompt: &'_ String| {
                let (prompt, start) = (prompt.clone(), &start);
                scope.spawn(move || {
                    start.wait();
                    self.arrivals(&prompt, num_tokens)
                })
            };
            let asked: Vec<_> = prompts.iter().map(ask).collect();
            let answered =
                asked.into_iter().map(|it| it.join().map_err(|_| ServedError::Panicked)?);
            answered.collect::<Result<Vec<Vec<Instant>>, ServedError>>()
        })?;
        for times in &arrivals {
            if (times.len() as f64) < LEAST_SINGLE * num_tokens as f64 {
                let what = format!("sent {num_tokens} tokens in {} parts", times.len());
                return Err(self.failed(
                    &what,
                    "rounds can be timed only if no candidate is accepted and every token is streamed by itself: \
                     use an untrained drafter or the server's synthetic acceptance of 0",
                ));
            }
        }
        // Only while all of them are being answered.
        let from = arrivals.iter().filter_map(|times| times.first()).max().copied();
        let to = arrivals.iter().filter_map(|times| times.last()).min().copied();
        let mut gaps: Vec<f64> = Vec::new();
        for times in &arrivals {
            let within = times.iter().filter(|at| Some(**at) >= from && Some(**at) <= to);
            let within: Vec<&Instant> = within.skip(NUM_WARM_UP).collect();
            gaps.extend(within.windows(2).map(|pair| (*pair[1] - *pair[0]).as_secs_f64()));
        }
        if gaps.len() < LEAST_GAPS * prompts.len() {
            let what = format!("did not answer {} requests side by side", prompts.len());
            return Err(self.failed(
                &what,
                "raise its batch size (llama.cpp: `--parallel`, vLLM: `--max-num-seqs`) or measure smaller batches",
            ));
        }
        gaps.sort_by(f64::total_cmp);
        Ok(TimedRounds { seconds: gaps[gaps.len() / 2], num_gaps: gaps.len() })
    }

    /// When each part of an answer arrives.
    fn arrivals(&self, prompt: &str, num_tokens: usize) -> Result<Vec<Instant>, ServedError> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens,
            "temperature": 0, "ignore_eos": true, "stream": true, "cache_prompt": false,
        });
        let mut request = self.agent.post(format!("{}/completions", self.url));
        request = request.header(CONTENT_TYPE, "application/json");
        if let Some(token) = self.secret.header() {
            request = request.header(AUTHORIZATION, token);
        }
        let mut response =
            request.send(body.to_string()).map_err(|error| self.unanswered(&error))?;
        let status = response.status().as_u16();
        let mut lines = BufReader::new(response.body_mut().as_reader());
        if !(200..=299).contains(&status) {
            let mut said = Vec::new();
            let _ = lines.take(4096).read_to_end(&mut said);
            return Err(self.refused(status, &said));
        }
        let mut times = Vec::with_capacity(num_tokens);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = (&mut lines).take(MOST_LINE).read_until(b'\n', &mut line);
            let now = Instant::now();
            match read {
                Ok(0) => return Err(self.failed("ended an answer without `[DONE]`", TRY_AGAIN)),
                Ok(read) if read as u64 == MOST_LINE => {
                    return Err(self.failed("sent a line of over 1 MB", NO_STREAM));
                }
                Ok(_) => {}
                Err(error) => return Err(self.unanswered(&error.into())),
            }
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                return Ok(times);
            }
            let part: Value = serde_json::from_slice(data).map_err(|_| {
                let said = self.secret.quote(data, true);
                self.failed(&format!("sent a part that is not JSON: {said}"), NO_STREAM)
            })?;
            let said = part["choices"][0]["text"].as_str().unwrap_or_default();
            let is_over = !part["choices"][0]["finish_reason"].is_null();
            if !said.is_empty() || !is_over {
                times.push(now);
            }
            if times.len() > 2 * num_tokens {
                return Err(self.failed("sent more tokens than requested", NO_STREAM));
            }
        }
    }

    /// The server's own counts of speculation; `None` if it shows none.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub fn counters(&self) -> Result<Option<SpeculationCounters>, ServedError> {
        let base = self.url.trim_end_matches("/v1");
        for path in ["metrics", "prometheus/metrics"] {
            match self.get(&format!("{base}/{path}")) {
                Ok(page) if page.contains("spec_decode_num_draft") => {
                    return Ok(Some(counted(&page)));
                }
                Ok(_) | Err(ServedError::Server { status: Some(_), .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn get(&self, url: &str) -> Result<String, ServedError> {
        let mut request = self.agent.get(url);
        if let Some(token) = self.secret.header() {
            request = request.header(AUTHORIZATION, token);
        }
        let mut response = request.call().map_err(|error| self.unanswered(&error))?;
        let status = response.status().as_u16();
        let mut page = Vec::new();
        let reader = response.body_mut().as_reader();
        let read = reader.take(MOST_PAGE).read_to_end(&mut page);
        read.map_err(|error| self.unanswered(&error.into()))?;
        if !(200..=299).contains(&status) {
            return Err(self.refused(status, &page));
        }
        Ok(String::from_utf8_lossy(&page).into_owned())
    }

    fn refused(&self, status: u16, said: &[u8]) -> ServedError {
        let said = self.secret.quote(said, said.len() >= 4096);
        let problem = format!("answered {status}: {said}");
        let hint = match status {
            401 | 403 => "give a valid key with `--key-env NAME`",
            404 | 405 => "check the address, which usually ends in `/v1`",
            _ => TRY_AGAIN,
        };
        self.error(problem, hint, Some(status))
    }

    fn unanswered(&self, error: &ureq::Error) -> ServedError {
        match error {
            ureq::Error::Timeout(_) => self
                .failed("did not answer in time", "raise `--timeout`, or measure smaller batches"),
            error => {
                let (what, hint) = super::client::unanswered_text(error);
                self.failed(&what, hint)
            }
        }
    }

    fn failed(&self, what: &str, hint: &str) -> ServedError {
        self.error(what.to_owned(), hint, None)
    }

    fn error(&self, what: String, hint: &str, status: Option<u16>) -> ServedError {
        let problem = self.secret.clean(&format!("the server `{}` {what}", self.url));
        ServedError::Server { problem: format!("{problem}; hint: {hint}"), status }
    }
}

const TRY_AGAIN: &str = "check that it is running, and run the same command again";
const NO_STREAM: &str = "check that it streams OpenAI's `/v1/completions`";

/// The sums over all labels of the counters of vLLM, llama.cpp and TensorRT-LLM.
fn counted(page: &str) -> SpeculationCounters {
    let mut counters = SpeculationCounters::default();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, value)) = line.rsplit_once(' ') else { continue };
        let name = name.split('{').next().unwrap_or_default();
        let Ok(value) = value.parse::<f64>() else { continue };
        match name.rsplit(':').next().unwrap_or_default().trim_start_matches("trtllm_") {
            "spec_decode_num_drafts_total" => counters.num_rounds += value,
            "spec_decode_num_draft_tokens_total" => counters.num_drafted += value,
            "spec_decode_num_accepted_tokens_total" => counters.num_accepted += value,
            _ => {}
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_labels_in_each_servers_names() {
        let page = "# HELP x\nvllm:spec_decode_num_drafts_total{engine=\"0\"} 10\n\
                    vllm:spec_decode_num_drafts_total{engine=\"1\"} 5.0\n\
                    vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} 45\n\
                    llamacpp:spec_decode_num_accepted_tokens_total 3\n\
                    vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"} 9\n\
                    trtllm_spec_decode_num_draft_tokens_total 1e1\nnonsense\n";
        let expected =
            SpeculationCounters { num_rounds: 15.0, num_drafted: 55.0, num_accepted: 3.0 };
        assert_eq!(counted(page), expected);
        let later = SpeculationCounters { num_rounds: 20.0, ..expected };
        assert_eq!(later.since(&expected).map(|it| it.num_rounds), Some(5.0));
        assert_eq!(expected.since(&later), None, "the server was started again");
    }
}
