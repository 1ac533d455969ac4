//! Construction of requests for OpenAI's `/completions`, with the extensions of vLLM, SGLang and
//! llama.cpp. `reply.rs` parses the answers.
//!
//! All servers get the same request and ignore keys that they do not know. The prompt consists of
//! token ids. TGI rejects them and is then sent text. vLLM and SGLang return ids in `token_ids`
//! (`return_token_ids`), llama.cpp in `__verbose.tokens` (`verbose` and `return_tokens`). vLLM
//! (`return_tokens_as_token_ids`) and llama.cpp return log-probabilities by id, which `known.rs`
//! reads.

use draftsmith_data::hash_bytes;
use draftsmith_theory::{Decoding, Sampling};
use serde_json::{Value, json};

/// A request for a completion.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    /// The id of the prompt's row.
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
    /// The end-of-sequence token ids.
    pub(super) eos_token_ids: Vec<u32>,
    /// The strings that end a response. We apply them to the received tokens, because servers would
    /// remove them from the response.
    pub(super) stop_strings: Vec<String>,
    /// The target's vocabulary size.
    pub(super) vocab_size: usize,
    /// The number of most probable tokens whose log-probabilities are requested; `None` to request
    /// none.
    pub(super) log_probs: Option<usize>,
}

impl Terms {
    /// Builds the request's body, with the prompt as token ids or text.
    pub(super) fn body(&self, ask: &Ask, prompt: Value) -> Vec<u8> {
        let Sampling { temperature, top_p, top_k, min_p } = self.decoding.sampling();
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
            // For llama.cpp: the samplers in the order of Hugging Face transformers. The penalty
            // set further below covers all tokens.
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

    /// Hashes everything that the response depends on.
    pub(super) fn identity(&self, ask: &Ask) -> String {
        let all = json!({
            "request": hash_bytes(&self.body(ask, json!(ask.prompt_ids))),
            "stop_strings": self.stop_strings,
        });
        hash_bytes(all.to_string().as_bytes())
    }
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
