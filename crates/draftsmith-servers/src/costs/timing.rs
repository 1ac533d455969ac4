//! Times a server's rounds under several concurrent requests, each for the same number of tokens.
//!
//! Answers are not streamed, because sending and parsing chunks takes time from a server on the
//! same machine. The round time is the difference between long and short answers, which cancels
//! network and prefill times. For a single request, we use the time per token that the server
//! reports (llama.cpp). With concurrent requests, that time would include the prefill of the other
//! prompts.

use std::thread::Builder;
use std::time::{Duration, Instant};

use draftsmith_served::{
    Endpoint, Secret, ServedError, ServerHints, check_given_url, side_by_side,
};
use serde_json::{Value, json};

use super::MOST_AGAIN;

/// The number of tokens in a short answer.
const NUM_SHORT: usize = 8;
/// The minimum ratio of the shortest to the longest response time of concurrent requests.
const FIRST_OF_LAST: f64 = 0.7;

/// The hints of `server costs` and `server certify`.
pub const SERVER_FLAGS: ServerHints = ServerHints {
    url: "`--server` or `--reference`",
    token: "name the environment variable that holds a valid key with `--key-env`",
    too_slow: "raise `--timeout`, or lower `--concurrency`",
};

/// A server whose rounds are timed.
pub struct TimedServer {
    endpoint: Endpoint,
    /// The model's name on the server.
    pub model: String,
}

/// A timed response.
struct TimedAnswer {
    elapsed: Duration,
    /// The seconds per token as reported by the server; `None` if it reports none.
    token_seconds: Option<f64>,
    /// The number of prompt tokens; `None` if the server does not report it.
    prompt_tokens: Option<f64>,
}

/// The times of a server's rounds and prefill.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedRounds {
    /// The time of a round in seconds.
    pub round: f64,
    /// The prefill time per prompt in seconds: the total divided by the number of prompts.
    pub prompt: f64,
    /// The mean number of tokens in a prompt; `None` if the server does not report it.
    pub prompt_tokens: Option<f64>,
}

/// A server's speculation counters since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SpeculationCounters {
    /// The number of rounds with candidates, counted per request.
    pub num_rounds: Option<f64>,
    /// The number of drafted candidates.
    pub num_drafted: f64,
    /// The number of accepted candidates.
    pub num_accepted: f64,
}

impl SpeculationCounters {
    /// Reads the counters of vLLM, llama.cpp, SGLang's router and TensorRT-LLM from a page of metrics, summed over all
    /// labels. `None` if the page lacks the candidates or the accepted ones, or a count is not a number.
    pub fn read(page: &str) -> Option<Self> {
        let total = |name: &str| -> Option<f64> {
            let of_name = |found: &str| {
                let found = found.rsplit(':').next().unwrap_or_default();
                found.trim_start_matches("trtllm_") == name
            };
            let values = page.lines().filter_map(sample).filter(|(found, _)| of_name(found));
            let values: Vec<f64> = values.map(|(_, value)| value).collect();
            let is_known = !values.is_empty() && values.iter().all(|it| it.is_finite());
            is_known.then(|| values.iter().sum())
        };
        Some(Self {
            num_rounds: total("spec_decode_num_drafts_total"),
            num_drafted: total("spec_decode_num_draft_tokens_total")?,
            num_accepted: total("spec_decode_num_accepted_tokens_total")?,
        })
    }

    /// Subtracts the counts at an earlier moment; `None` if a counter fell, as after a restart.
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        let rounds = self.num_rounds.zip(earlier.num_rounds);
        let fell = rounds.is_some_and(|(now, before)| now < before)
            || self.num_drafted < earlier.num_drafted
            || self.num_accepted < earlier.num_accepted;
        (!fell).then_some(Self {
            num_rounds: rounds.map(|(now, before)| now - before),
            num_drafted: self.num_drafted - earlier.num_drafted,
            num_accepted: self.num_accepted - earlier.num_accepted,
        })
    }
}

/// Reads the accepted candidates by position in a round from a page of metrics, summed over other labels;
/// empty if the server does not count them.
pub(crate) fn accepted_by_position(page: &str) -> Vec<f64> {
    let mut counts = Vec::new();
    for line in page.lines().filter(|line| line.contains("num_accepted_tokens_per_pos_total{")) {
        let position = line.split("position=\"").nth(1).and_then(|rest| rest.split('"').next());
        let position = position.and_then(|it| it.parse::<usize>().ok()).filter(|it| *it < 1024);
        if let (Some(position), Some((_, count))) = (position, sample(line)) {
            counts.resize(counts.len().max(position + 1), 0.0);
            counts[position] += count;
        }
    }
    counts
}

/// Reads the sum of a metric over its labels; `None` if the page does not have it.
pub(crate) fn metric(page: &str, name: &str) -> Option<f64> {
    let of_name = page.lines().filter_map(sample).filter(|(found, _)| *found == name);
    of_name.map(|(_, value)| value).reduce(|sum, value| sum + value)
}

/// Returns the first name on a page of metrics that is one of speculation, whether or not it can be
/// read.
pub(super) fn speculation_name(page: &str) -> Option<&str> {
    let names =
        page.lines().filter_map(|line| line.split(['{', ' ', '\t']).find(|it| !it.is_empty()));
    names.into_iter().find(|name| name.contains("spec_decode"))
}

/// Reads a sample of Prometheus' exposition format: a name, labels in braces or none, a value, and a timestamp or
/// none. `None` for comments, empty lines and anything else.
fn sample(line: &str) -> Option<(&str, f64)> {
    let line = line.trim();
    let end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, mut rest) = line.split_at(end);
    if name.is_empty() || name.starts_with('#') {
        return None;
    }
    if let Some(labels) = rest.strip_prefix('{') {
        // A brace inside a label's value ends nothing.
        let (mut is_quoted, mut is_escaped) = (false, false);
        let close = labels.find(|c: char| {
            let was_escaped = is_escaped;
            is_escaped = c == '\\' && !was_escaped;
            let is_plain = !was_escaped;
            is_quoted ^= c == '"' && is_plain;
            c == '}' && !is_quoted
        })?;
        rest = &labels[close + 1..];
    }
    let mut parts = rest.split_whitespace();
    let value = parts.next()?.parse().ok()?;
    // After the value comes a timestamp, or an exemplar behind `#`.
    let is_sample = parts.next().is_none_or(|it| it == "#" || it.parse::<f64>().is_ok());
    is_sample.then_some((name, value))
}

impl TimedServer {
    /// Connects to a server by its URL up to `/v1`, for the given model or the first in its list.
    ///
    /// # Errors
    /// If the URL is not that of a server or contains a password, the server cannot be reached or
    /// lists no model, or its model is named after the token.
    pub fn open(
        url: &str,
        model: Option<&str>,
        secret: Secret,
        timeout: Duration,
        hints: ServerHints,
    ) -> Result<Self, ServedError> {
        check_given_url(url, &hints)?;
        let endpoint = Endpoint::new(url, secret, timeout, hints);
        let page = endpoint.get("/models")?;
        let listed: Value = serde_json::from_slice(&page).unwrap_or_default();
        let listed = listed["data"].as_array().cloned().unwrap_or_default();
        let mut names = listed.iter().filter_map(|model| model["id"].as_str());
        let found = match model {
            Some(wanted) => names.find(|name| *name == wanted),
            None => names.next(),
        };
        let Some(name) = found else {
            let what = match model {
                Some(wanted) => format!("lists no model `{wanted}`"),
                None => "lists no model".to_owned(),
            };
            let hint = "check the address, which usually ends in `/v1`";
            return Err(endpoint.failed(&what, hint));
        };
        if endpoint.repeats_token(name) {
            let hint =
                "give the server another `--served-model-name`; results would contain the token";
            return Err(endpoint.failed("uses the token as its model's name", hint));
        }
        Ok(Self { model: name.to_owned(), endpoint })
    }

    /// Times rounds and prefill while all prompts are answered concurrently, each with `num_tokens`
    /// tokens and no accepted candidate.
    ///
    /// # Errors
    /// If the server fails, ends answers early, or does not answer concurrently.
    pub fn time_rounds(
        &self,
        prompts: &[String],
        num_tokens: usize,
    ) -> Result<TimedRounds, ServedError> {
        let most =
            |answers: &[TimedAnswer]| answers.iter().map(|it| it.elapsed).max().unwrap_or_default();
        let is_one_by_one = |answers: &[TimedAnswer]| {
            let least = answers.iter().map(|it| it.elapsed).min().unwrap_or_default();
            least.as_secs_f64() < FIRST_OF_LAST * most(answers).as_secs_f64()
        };
        let mut long = self.answer_all(prompts, num_tokens)?;
        // On a busy machine, requests may also begin one after another.
        for _ in 0..MOST_AGAIN {
            if is_one_by_one(&long) {
                long = self.answer_all(prompts, num_tokens)?;
            }
        }
        if is_one_by_one(&long) {
            let what = format!("did not answer {} concurrent requests", prompts.len());
            return Err(self.endpoint.failed(
                &what,
                "raise its batch size (llama.cpp: `--parallel`, vLLM: `--max-num-seqs`) or measure smaller batches",
            ));
        }
        let round = match long[..] {
            [TimedAnswer { token_seconds: Some(own), .. }] => own,
            _ => {
                let short = self.answer_all(prompts, NUM_SHORT)?;
                let seconds = most(&long).saturating_sub(most(&short)).as_secs_f64();
                if seconds <= 0.0 || num_tokens <= NUM_SHORT {
                    let what =
                        format!("took no longer for {num_tokens} tokens than for {NUM_SHORT}");
                    let hint = "measure on an idle machine, with more `--rounds`";
                    return Err(self.endpoint.failed(&what, hint));
                }
                seconds / (num_tokens - NUM_SHORT) as f64
            }
        };
        // The first token comes from the prefill.
        let reading = most(&long).as_secs_f64() - round * (num_tokens - 1) as f64;
        let tokens: Option<Vec<f64>> = long.iter().map(|it| it.prompt_tokens).collect();
        let num = prompts.len() as f64;
        Ok(TimedRounds {
            round,
            prompt: reading.max(0.0) / num,
            prompt_tokens: tokens.map(|tokens| tokens.iter().sum::<f64>() / num),
        })
    }

    fn answer_all(
        &self,
        prompts: &[String],
        num_tokens: usize,
    ) -> Result<Vec<TimedAnswer>, ServedError> {
        let ask = |prompt: &String| self.answer(prompt, num_tokens);
        side_by_side(Builder::new, prompts, ask)
    }

    fn answer(&self, prompt: &str, num_tokens: usize) -> Result<TimedAnswer, ServedError> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens,
            "temperature": 0, "ignore_eos": true, "stream": false, "cache_prompt": false,
        });
        let begun = Instant::now();
        let page = self.endpoint.post("/completions", &body.to_string())?;
        let elapsed = begun.elapsed();
        let failed = |what: &str, hint: &str| self.endpoint.failed(what, hint);
        let answer: Value = serde_json::from_slice(&page).map_err(|_| {
            let said = self.endpoint.quoted(&page);
            failed(&format!("answered something other than JSON: {said}"), NOT_OPENAI)
        })?;
        let given = answer["usage"]["completion_tokens"].as_f64();
        let given = given
            .ok_or_else(|| failed("answered without `usage.completion_tokens`", NOT_OPENAI))?;
        if given != num_tokens as f64 {
            let what = format!("ended an answer after {given} of {num_tokens} tokens");
            let hint = "it ignores `ignore_eos`, or its context is too small for the prompts";
            return Err(failed(&what, hint));
        }
        // In llama.cpp, the first token comes from the prefill.
        let timings = &answer["timings"];
        let rounds = timings["predicted_n"].as_f64().map(|num| num - 1.0).filter(|num| *num > 0.0);
        let predicted_ms = timings["predicted_ms"].as_f64();
        let took = 1e3 * elapsed.as_secs_f64();
        if let Some(ms) = predicted_ms.filter(|ms| *ms > took) {
            let what = format!("reports a `predicted_ms` of {ms:e} in {took:.1} ms");
            return Err(failed(&what, "check its clock, or update the server"));
        }
        let token_seconds = predicted_ms.zip(rounds).map(|(ms, rounds)| ms / 1e3 / rounds);
        Ok(TimedAnswer {
            elapsed,
            token_seconds: token_seconds.filter(|it| *it > 0.0),
            prompt_tokens: answer["usage"]["prompt_tokens"].as_f64().filter(|num| *num >= 1.0),
        })
    }

    /// Reads the server's speculation counters; `None` if it has none.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub fn counters(&self) -> Result<Option<SpeculationCounters>, ServedError> {
        Ok(self.metrics()?.iter().find_map(|page| SpeculationCounters::read(page)))
    }

    /// Reads the server's pages of metrics; empty if it has none.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub fn metrics(&self) -> Result<Vec<String>, ServedError> {
        let mut pages = Vec::new();
        for path in ["/metrics", "/prometheus/metrics"] {
            match self.endpoint.get_beside(path) {
                Ok(page) => pages.push(String::from_utf8_lossy(&page).into_owned()),
                Err(ServedError::Server { status: Some(_), .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(pages)
    }
}

const NOT_OPENAI: &str = "check that the address is that of OpenAI's `/v1`";

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
            SpeculationCounters { num_rounds: Some(15.0), num_drafted: 55.0, num_accepted: 3.0 };
        assert_eq!(SpeculationCounters::read(page), Some(expected));
        let later = SpeculationCounters { num_rounds: Some(20.0), ..expected };
        assert_eq!(later.since(&expected).map(|it| it.num_rounds), Some(Some(5.0)));
        assert_eq!(expected.since(&later), None, "the server was started again");
    }

    #[test]
    fn samples_are_read_by_the_grammar_of_the_format() {
        for (line, value) in [
            ("a{engine=\"0\"} 18.0 1756736798734", Some(18.0)),
            ("a 18 1756736798734", Some(18.0)),
            ("a{model=\"x} 7\",path=\"q\\\"}\"} 3", Some(3.0)),
            ("  a\t4e1  ", Some(40.0)),
            ("a{} 5 # {trace=\"t\"} 1.0", Some(5.0)),
            ("a +Inf", Some(f64::INFINITY)),
            ("# TYPE a counter", None),
            ("a", None),
            ("a{engine=\"0\" 5", None),
            ("a five", None),
            ("a 5 then more", None),
        ] {
            assert_eq!(sample(line), value.map(|value| ("a", value)), "{line}");
        }
    }

    #[test]
    fn an_absent_counter_is_not_zero() {
        let drafted = "vllm:spec_decode_num_draft_tokens_total 18 1756736798734\n";
        let accepted = "vllm:spec_decode_num_accepted_tokens_total 6\n";
        let both = SpeculationCounters::read(&format!("{drafted}{accepted}")).expect("counters");
        assert_eq!((both.num_rounds, both.num_drafted, both.num_accepted), (None, 18.0, 6.0));
        for page in [
            String::new(),
            drafted.to_owned(),
            accepted.to_owned(),
            // Without `_total` a name is another one.
            format!("{accepted}llamacpp:spec_decode_num_draft_tokens 18\n"),
            format!("{accepted}vllm:spec_decode_num_draft_tokens_total NaN\n"),
        ] {
            assert_eq!(SpeculationCounters::read(&page), None, "{page}");
        }
    }
}
