//! Times a server's rounds under several concurrent requests, each for the same number of tokens.
//!
//! Answers are not streamed, because sending and parsing chunks takes time from a server on the
//! same machine. The round time is the difference between long and short answers, which cancels
//! network and prefill times. For a single request, we use the time per token that the server
//! reports (llama.cpp). With concurrent requests, that time would include the prefill of the other
//! prompts.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use draftsmith_served::{Endpoint, Secret, ServedError};
use serde_json::{Value, json};

/// The number of tokens in a short answer.
const NUM_SHORT: usize = 8;
/// The minimum ratio of the shortest to the longest response time of concurrent requests.
const FIRST_OF_LAST: f64 = 0.7;

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
    pub num_rounds: f64,
    /// The number of drafted candidates.
    pub num_drafted: f64,
    /// The number of accepted candidates.
    pub num_accepted: f64,
}

impl SpeculationCounters {
    /// Subtracts earlier counters; `None` if a counter has decreased, as after a restart.
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
    /// Connects to a server by its URL up to `/v1`, for the given model or the first in its list.
    ///
    /// # Errors
    /// If the server cannot be reached, or lists no model.
    pub fn open(
        url: &str,
        model: Option<&str>,
        secret: Secret,
        timeout: Duration,
    ) -> Result<Self, ServedError> {
        let endpoint = Endpoint::new(url, secret, timeout);
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
        let long = self.answer_all(prompts, num_tokens)?;
        let most =
            |answers: &[TimedAnswer]| answers.iter().map(|it| it.elapsed).max().unwrap_or_default();
        let least = long.iter().map(|it| it.elapsed).min().unwrap_or_default();
        if least.as_secs_f64() < FIRST_OF_LAST * most(&long).as_secs_f64() {
            let what = format!("did not answer {} requests side by side", prompts.len());
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
        let start = Barrier::new(prompts.len());
        std::thread::scope(|scope| {
            let ask = |prompt: &'_ String| {
                let (prompt, start) = (prompt.clone(), &start);
                scope.spawn(move || {
                    start.wait();
                    self.answer(&prompt, num_tokens)
                })
            };
            let asked: Vec<_> = prompts.iter().map(ask).collect();
            asked.into_iter().map(|it| it.join().map_err(|_| ServedError::Panicked)?).collect()
        })
    }

    fn answer(&self, prompt: &str, num_tokens: usize) -> Result<TimedAnswer, ServedError> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens,
            "temperature": 0, "ignore_eos": true, "stream": false, "cache_prompt": false,
        });
        let begun = Instant::now();
        let page = self.endpoint.post("/completions", &body.to_string())?;
        let elapsed = begun.elapsed();
        let answer: Value = serde_json::from_slice(&page).map_err(|_| {
            let said = self.endpoint.quoted(&page);
            self.endpoint.failed(&format!("answered something other than JSON: {said}"), NOT_OPENAI)
        })?;
        let Some(given) = answer["usage"]["completion_tokens"].as_u64() else {
            return Err(self
                .endpoint
                .failed("answered without `usage.completion_tokens`", NOT_OPENAI));
        };
        if given as usize != num_tokens {
            let what = format!("ended an answer after {given} of {num_tokens} tokens");
            return Err(self.endpoint.failed(
                &what,
                "it ignores `ignore_eos`, or its context is too small for the prompts",
            ));
        }
        // In llama.cpp, the first token comes from the prefill.
        let timings = &answer["timings"];
        let rounds = timings["predicted_n"].as_f64().map(|num| num - 1.0).filter(|num| *num > 0.0);
        let token_seconds =
            timings["predicted_ms"].as_f64().zip(rounds).map(|(ms, rounds)| ms / 1e3 / rounds);
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
        for path in ["/metrics", "/prometheus/metrics"] {
            let page = self.endpoint.get_beside(path);
            match page.map(|page| String::from_utf8_lossy(&page).into_owned()) {
                Ok(page) if page.contains("spec_decode_num_draft") => {
                    return Ok(Some(counted(&page)));
                }
                Ok(_) | Err(ServedError::Server { status: Some(_), .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

const NOT_OPENAI: &str = "check that the address is that of OpenAI's `/v1`";

/// Sums the counters of vLLM, llama.cpp and TensorRT-LLM over all metric labels.
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
