//! Turns the tokenizer and chat template of a GGUF file into `tokenizer.json` and
//! `tokenizer_config.json`.
//!
//! A GGUF file only names the rules that split text before the merges (`tokenizer.ggml.pre`). The
//! rules below are those of the published tokenizers, from which llama.cpp's own differ in rare
//! cases.

use serde_json::{Map, Value, json};

use super::{Gguf, TEMPLATE};
use crate::error::{ModelError, Result};

/// The names of the pre-tokenizers that we know.
const KNOWN: [&str; 5] = ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"];
/// The pattern of Llama 3 and Qwen 2, before and after the number of digits in one part.
const WORDS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
/// The pattern of Mistral's Tekken.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The special tokens that have a name, and the keys of their ids.
const NAMED_TOKENS: [(&str, &str); 4] = [
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
];
/// The types of tokens: an unknown one, a special one, one that a user added, and one without text.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;

impl Gguf {
    /// Rebuilds the contents of `tokenizer.json` and `tokenizer_config.json`, with the tokenizer and
    /// the chat template.
    ///
    /// # Errors
    /// If the file has no byte-level BPE tokenizer, or one with an unknown pre-tokenizer.
    pub fn text_files(&self) -> Result<[String; 2]> {
        let key = |key: &str| self.values.get(&format!("tokenizer.ggml.{key}"));
        let name = |name: &str| key(name).and_then(Value::as_str).unwrap_or_default();
        let (model, pre) = (name("model"), name("pre"));
        if model != "gpt2" || !KNOWN.contains(&pre) {
            let problem = format!("a tokenizer of model `{model}` with pre-tokenizer `{pre}`");
            let known = KNOWN.join("`, `");
            return Err(self.no_tokenizer(format!(
                "it has {problem}, expected model `gpt2` with one of `{known}`"
            )));
        }
        let adds = |token: &str| key(token).and_then(Value::as_bool);
        if adds("add_eos_token") == Some(true) || adds("add_sep_token") == Some(true) {
            return Err(self.no_tokenizer("its tokenizer adds a token after the text"));
        }
        let tokens = self.tokens()?;
        let (vocabulary, added) = self.vocabulary(&tokens)?;
        let token = |id: &str| tokens.get(key(id)?.as_u64()? as usize);
        let ignores_merges = matches!(pre, "llama-bpe" | "tekken");
        let adds_bos = adds("add_bos_token").unwrap_or(ignores_merges);
        let bos = token("bos_token_id").filter(|_| adds_bos);
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": (pre == "qwen2").then(|| json!({ "type": "NFC" })),
            "pre_tokenizer": pre_tokenizer(pre),
            "post_processor": bos.map(|bos| starts_with(bos, key("bos_token_id"))),
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": self.texts("tokenizer.ggml.merges")?,
                "ignore_merges": ignores_merges,
            },
        });
        let named = NAMED_TOKENS.into_iter().filter_map(|(name, id)| Some((name, token(id)?)));
        let mut config: Map<String, Value> =
            named.map(|(name, token)| (name.to_owned(), json!(token))).collect();
        let template = self.values.get(TEMPLATE);
        config.extend(template.map(|it| ("chat_template".to_owned(), it.clone())));
        Ok([tokenizer.to_string(), Value::Object(config).to_string()])
    }

    /// Returns the ids of the tokens and the added tokens among them, as `tokenizer.json` has them.
    fn vocabulary(&self, tokens: &[String]) -> Result<(Map<String, Value>, Vec<Value>)> {
        let kinds = "tokenizer.ggml.token_type";
        let Some((mut source, kind, num)) = self.list(kinds)? else {
            return Err(self.no_tokenizer(format!("key `{kinds}` is missing")));
        };
        if num != tokens.len() as u64 {
            let problem = format!("key `{kinds}` has {num} types for {} tokens", tokens.len());
            return Err(self.no_tokenizer(problem));
        }
        let (mut vocabulary, mut added) = (Map::new(), Vec::new());
        for (id, token) in tokens.iter().enumerate() {
            let kind = source.scalar(kinds, kind)?.as_u64();
            let is_special = matches!(kind, Some(UNKNOWN | CONTROL));
            if is_special || kind == Some(USER_DEFINED) {
                added.push(json!({
                    "id": id,
                    "content": token,
                    "special": is_special,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                }));
            }
            if kind != Some(UNUSED) && vocabulary.insert(token.clone(), id.into()).is_some() {
                return Err(self.no_tokenizer(format!("it has token `{token}` twice")));
            }
        }
        Ok((vocabulary, added))
    }

    fn no_tokenizer(&self, problem: impl std::fmt::Display) -> ModelError {
        let path = self.path.display();
        ModelError::Invalid(format!(
            "the tokenizer of `{path}` cannot be read from the file itself: {problem}; hint: put the model's \
             `tokenizer.json`, chat template and `generation_config.json` beside the file, or name their directory \
             with `--tokenizer` or the recipe's key `models.tokenizer`"
        ))
    }
}

/// Returns the pre-tokenizer of a name in [`KNOWN`].
fn pre_tokenizer(name: &str) -> Value {
    let split = |pattern: String| {
        let pattern = json!({ "Regex": pattern });
        json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false })
    };
    let first = match name {
        "smollm" => json!({ "type": "Digits", "individual_digits": true }),
        "qwen2" => split(WORDS.join("")),
        "llama-bpe" => split(WORDS.join("{1,3}")),
        "tekken" => split(TEKKEN.to_owned()),
        _ => return byte_level(true),
    };
    json!({ "type": "Sequence", "pretokenizers": [first, byte_level(name == "smollm")] })
}

/// Returns the step that turns bytes into characters. `use_regex` splits text as GPT-2 does.
fn byte_level(use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": use_regex,
    })
}

/// Returns the post-processor that adds a token before the text.
fn starts_with(token: &str, id: Option<&Value>) -> Value {
    let special = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let text = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
    json!({
        "type": "TemplateProcessing",
        "single": [special, text("A")],
        "pair": [special, text("A"), text("B")],
        "special_tokens": { token: { "id": token, "ids": [id], "tokens": [token] } },
    })
}
