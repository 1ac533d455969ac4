//! Builds requests and reads answers: OpenAI's `/completions` with the extensions of vLLM, SGLang and
//! llama.cpp.
//!
//! All servers get the same request and ignore keys that they do not know. The prompt is token ids; TGI
//! rejects those and then gets text. vLLM and SGLang return ids in `token_ids` (`return_token_ids`),
//! llama.cpp in `__verbose.tokens` (`verbose` and `return_tokens`). vLLM (`return_tokens_as_token_ids`) and
//! llama.cpp return log-probabilities by id, which `served/known.rs` reads.

use draftsmith_data::hash_bytes;
use draftsmith_theory::{Decoding, Sampling};
use serde_json::{Value, json};

use super::known::{KnownTokens, read_ids, read_known};
use crate::recipe::sampling;

/// Most characters of a server's message that we quote.
const MOST_QUOTED: usize = 300;

/// A request for a completion.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    /// The id of its row.
    pub(super) id: String,
    pub(super) prompt_ids: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) seed: u32,
}

/// The settings that all requests share.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// The target's name on the servers.
    pub(super) model: String,
    pub(super) decoding: Decoding,
    /// The tokens that end a response.
    pub(super) eos_token_ids: Vec<u32>,
    /// The strings that end one. They are applied here, because servers leave them out of responses.
    pub(super) stop_strings: Vec<String>,
    /// The target's vocabulary size.
    pub(super) vocab_size: usize,
    /// The number of most probable tokens to request log-probabilities for, if any.
    pub(super) log_probs: Option<usize>,
}

impl Terms {
    /// The request's body, with the prompt as token ids or text.
    pub(super) fn body(&self, ask: &Ask, prompt: Value) -> Vec<u8> {
        let Sampling { temperature, top_p, top_k, min_p } = sampling(&self.decoding);
        let penalty = self.decoding.repetition_penalty;
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "stream": false,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k.map_or(-1, |top_k| top_k as i64),
            "min_p": min_p.unwrap_or(0.0),
            "repetition_penalty": penalty,
            "stop_token_ids": self.eos_token_ids,
            "add_special_tokens": false,
            "skip_special_tokens": false,
            "return_token_ids": true,
            // For llama.cpp: transformers' order of samplers and, below, a penalty over all tokens.
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "return_tokens": true,
            "verbose": true,
        });
        if self.decoding.is_penalised() {
            body["repeat_penalty"] = json!(penalty);
            body["repeat_last_n"] = json!(ask.prompt_ids.len() + ask.max_tokens);
        }
        if let Some(num) = self.log_probs {
            body["logprobs"] = json!(num);
            body["return_tokens_as_token_ids"] = json!(true);
        }
        body.to_string().into_bytes()
    }

    /// A hash of everything that the response depends on.
    pub(super) fn identity(&self, ask: &Ask) -> String {
        let all = json!({
            "request": hash_bytes(&self.body(ask, json!(ask.prompt_ids))),
            "stop_strings": self.stop_strings,
        });
        hash_bytes(all.to_string().as_bytes())
    }
}

/// A server's answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Completion {
    pub(super) tokens: Tokens,
    /// The known tokens of each position, if log-probabilities were requested.
    pub(super) known: Option<Vec<KnownTokens>>,
    /// Whether it ended before the token limit.
    pub(super) is_ended: bool,
    /// The end token that the server names separately, if it does.
    pub(super) ended_by: Option<u32>,
    /// The number of prompt tokens that the server counted, if it says so.
    pub(super) num_prompt_tokens: Option<usize>,
}

/// A completion's tokens as the server sent them.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Tokens {
    Ids(Vec<u32>),
    Text(String),
}

/// Reads a server's answer.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read(bytes: &[u8], terms: &Terms) -> Result<Completion, String> {
    let answer: Value = serde_json::from_slice(bytes)
        .map_err(|_| format!("something other than JSON: {}", excerpt(bytes)))?;
    let choice = match answer.get("choices").and_then(Value::as_array).map(Vec::as_slice) {
        Some([choice, ..]) => choice,
        Some([]) => return Err("an empty list `choices`".to_owned()),
        None => return Err(format!("JSON without `choices`: {}", excerpt(bytes))),
    };
    let is_ended = match choice.get("finish_reason").and_then(Value::as_str) {
        Some("stop" | "eos_token" | "stop_sequence") => true,
        Some("length") => false,
        Some(other) => return Err(format!("a `finish_reason` of `{other}`")),
        None => return Err("no `finish_reason`".to_owned()),
    };
    let ids = choice.get("token_ids").filter(|ids| !ids.is_null());
    let ids = ids.or_else(|| answer.get("__verbose")?.get("tokens"));
    let tokens = match (ids, choice.get("text").and_then(Value::as_str)) {
        (Some(ids), _) => Tokens::Ids(read_ids(ids, terms.vocab_size)?),
        (None, Some(text)) => Tokens::Text(text.to_owned()),
        (None, None) => return Err("neither `token_ids` nor `text`".to_owned()),
    };
    let known = match (&tokens, terms.log_probs) {
        (_, None) => None,
        (Tokens::Ids(ids), Some(_)) => Some(read_known(choice, ids, terms.vocab_size)?),
        (Tokens::Text(_), Some(_)) => {
            return Err(
                "text without token ids and log-probabilities, which sampled responses need; \
                        vLLM and llama.cpp return them"
                    .to_owned(),
            );
        }
    };
    let is_empty = match &tokens {
        Tokens::Ids(ids) => ids.is_empty(),
        Tokens::Text(text) => text.is_empty(),
    };
    if is_empty && !is_ended {
        return Err("an empty response that had not ended".to_owned());
    }
    // vLLM and SGLang name an end token other than the model's first.
    let ended_by =
        ["stop_reason", "matched_stop"].into_iter().find_map(|key| choice.get(key)?.as_u64());
    let ended_by = ended_by.and_then(|id| u32::try_from(id).ok());
    let num_prompt_tokens = answer.pointer("/usage/prompt_tokens").and_then(Value::as_u64);
    Ok(Completion {
        tokens,
        known,
        is_ended,
        ended_by: ended_by.filter(|id| terms.eos_token_ids.contains(id)),
        num_prompt_tokens: num_prompt_tokens.map(|num| num as usize),
    })
}

/// The start of a server's message, in one line.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MOST_QUOTED)]);
    let words: Vec<&str> = text.split_whitespace().collect();
    let line: String =
        words.join(" ").chars().filter(|c| !c.is_control()).take(MOST_QUOTED).collect();
    format!("`{line}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> Terms {
        Terms {
            model: "m".to_owned(),
            decoding: Decoding::GREEDY,
            eos_token_ids: vec![2, 7],
            stop_strings: Vec::new(),
            vocab_size: 10,
            log_probs: None,
        }
    }

    fn choice(fields: &str) -> String {
        format!(r#"{{"choices":[{{{fields}}}],"usage":{{"prompt_tokens":4}}}}"#)
    }

    #[test]
    fn each_servers_format_of_ids_is_read() {
        let read = |text: &str| read(text.as_bytes(), &terms()).expect("reads");
        let vllm = r#""text":"ab","token_ids":[3,4,7],"finish_reason":"stop","stop_reason":7"#;
        let expected = Completion {
            tokens: Tokens::Ids(vec![3, 4, 7]),
            known: None,
            is_ended: true,
            ended_by: Some(7),
            num_prompt_tokens: Some(4),
        };
        assert_eq!(read(&choice(vllm)), expected);
        let llama_cpp = r#"{"choices":[{"text":"ab","finish_reason":"length"}],
            "__verbose":{"tokens":[3,4]}}"#;
        assert_eq!(read(llama_cpp).tokens, Tokens::Ids(vec![3, 4]));
        let tgi = read(&choice(r#""text":"ab","token_ids":null,"finish_reason":"length""#));
        assert_eq!((tgi.tokens, tgi.ended_by), (Tokens::Text("ab".to_owned()), None));
    }

    #[test]
    fn invalid_answers_are_named() {
        let check = |text: &str, expected: &str| {
            let error = read(text.as_bytes(), &terms()).expect_err("refused");
            assert!(error.contains(expected), "{error}");
        };
        check("<html>\n busy</html>", "other than JSON: `<html> busy</html>`");
        check(r#"{"object":"error"}"#, "without `choices`");
        check(r#"{"choices":[]}"#, "an empty list `choices`");
        check(&choice(r#""text":"a""#), "no `finish_reason`");
        check(&choice(r#""text":"a","finish_reason":"abort""#), "`abort`");
        check(&choice(r#""finish_reason":"stop""#), "neither `token_ids` nor `text`");
        check(&choice(r#""token_ids":[],"finish_reason":"length""#), "an empty response");
        check(&choice(r#""token_ids":[10],"finish_reason":"stop""#), "the token id 10, but");
        check(&choice(r#""token_ids":[-1],"finish_reason":"stop""#), "that is `-1`");
        check(&choice(r#""token_ids":7,"finish_reason":"stop""#), "not a list");
    }

    #[test]
    fn the_identity_depends_on_everything_but_the_id() {
        let ask = Ask { id: "a#0".to_owned(), prompt_ids: vec![1, 2], max_tokens: 9, seed: 5 };
        let terms = terms();
        let identity = terms.identity(&ask);
        assert_eq!(identity, terms.identity(&Ask { id: "b".to_owned(), ..ask.clone() }));
        let others = [
            terms.identity(&Ask { prompt_ids: vec![1], ..ask.clone() }),
            terms.identity(&Ask { seed: 6, ..ask.clone() }),
            terms.identity(&Ask { max_tokens: 8, ..ask.clone() }),
            Terms { model: "n".to_owned(), ..terms.clone() }.identity(&ask),
            Terms { stop_strings: vec!["x".to_owned()], ..terms.clone() }.identity(&ask),
            Terms { decoding: Decoding::GREEDY.penalising(1.1), ..terms }.identity(&ask),
        ];
        assert!(others.iter().all(|other| *other != identity));
    }
}
