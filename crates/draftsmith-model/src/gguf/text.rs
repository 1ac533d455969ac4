//! Turns the tokenizer and chat template of a GGUF file into `tokenizer.json` and
//! `tokenizer_config.json`.
//!
//! A GGUF file only names the rules that split text before the merges (`tokenizer.ggml.pre`). The
//! rules below are those of the published tokenizers, from which llama.cpp's own differ in rare
//! cases.

use std::collections::HashSet;

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
/// The maximum sum of the squared lengths, in bytes, of the tokens of a vocabulary with scores. It bounds
/// the time to divide them. Gemma's sum is less than a tenth of it.
const MAX_DIVIDED: usize = 1 << 28;
/// The character that Gemma's tokens have for a space.
const SPACE: &str = "\u{2581}";
/// The types of tokens: an unknown one, a special one, one that a user added, one without text, and a
/// byte.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

impl Gguf {
    /// Rebuilds the contents of `tokenizer.json` and `tokenizer_config.json`, with the tokenizer and
    /// the chat template.
    ///
    /// # Errors
    /// If the tokenizer is neither Gemma's nor a byte-level BPE with a known pre-tokenizer.
    pub fn text_files(&self) -> Result<[String; 2]> {
        let key = |key: &str| self.values.get(&format!("tokenizer.ggml.{key}"));
        let name = |name: &str| key(name).and_then(Value::as_str).unwrap_or_default();
        let (model, pre) = (name("model"), name("pre"));
        let adds = |token: &str| key(token).and_then(Value::as_bool);
        let is_gemma = model == "llama"
            && matches!(&*self.architecture, "gemma2" | "gemma3")
            && adds("add_space_prefix") == Some(false);
        if !is_gemma && (model != "gpt2" || !KNOWN.contains(&pre)) {
            let problem = format!("a tokenizer of model `{model}` with pre-tokenizer `{pre}`");
            let known = KNOWN.join("`, `");
            return Err(self.no_tokenizer(format!(
                "it has {problem}, expected model `gpt2` with one of `{known}`, or that of Gemma 2 or 3"
            )));
        }
        if adds("add_eos_token") == Some(true) || adds("add_sep_token") == Some(true) {
            return Err(self.no_tokenizer("its tokenizer adds a token after the text"));
        }
        let mut tokens = self.tokens()?;
        // The converter writes spaces into the tokens that users added to Gemma's.
        for token in tokens.iter_mut().filter(|token| is_gemma && token.contains(' ')) {
            *token = token.replace(' ', SPACE);
        }
        let kinds = self.numbers("tokenizer.ggml.token_type", tokens.len())?;
        let (vocabulary, added) = self.vocabulary(&tokens, &kinds)?;
        let merges = match is_gemma {
            true => self.merges_of_scores(&tokens, &kinds, &vocabulary)?,
            false => self.texts("tokenizer.ggml.merges")?,
        };
        let token = |id: &str| tokens.get(key(id)?.as_u64()? as usize);
        let ignores_merges = matches!(pre, "llama-bpe" | "tekken");
        let adds_bos = adds("add_bos_token").unwrap_or(ignores_merges || is_gemma);
        let bos = token("bos_token_id").filter(|_| adds_bos);
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": match pre {
                _ if is_gemma => replace(" ", SPACE),
                "qwen2" => json!({ "type": "NFC" }),
                _ => Value::Null,
            },
            "pre_tokenizer": (!is_gemma).then(|| pre_tokenizer(pre)),
            "post_processor": bos.map(|bos| starts_with(bos, key("bos_token_id"))),
            "decoder": match is_gemma {
                true => json!({
                    "type": "Sequence",
                    "decoders": [replace(SPACE, " "), { "type": "ByteFallback" }, { "type": "Fuse" }],
                }),
                false => byte_level(true),
            },
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": merges,
                "ignore_merges": ignores_merges,
                "unk_token": is_gemma.then(|| token("unknown_token_id")),
                "fuse_unk": is_gemma,
                "byte_fallback": is_gemma,
            },
        });
        let named = NAMED_TOKENS.into_iter().filter_map(|(name, id)| Some((name, token(id)?)));
        let mut config: Map<String, Value> =
            named.map(|(name, token)| (name.to_owned(), json!(token))).collect();
        let template = self.values.get(TEMPLATE);
        config.extend(template.map(|it| ("chat_template".to_owned(), it.clone())));
        Ok([tokenizer.to_string(), Value::Object(config).to_string()])
    }

    /// Reads a list with a number for each token.
    fn numbers(&self, key: &str, num_tokens: usize) -> Result<Vec<Value>> {
        let Some((mut source, kind, num)) = self.list(key)? else {
            return Err(self.no_tokenizer(format!("key `{key}` is missing")));
        };
        if num != num_tokens as u64 {
            let problem = format!("key `{key}` has {num} numbers for {num_tokens} tokens");
            return Err(self.no_tokenizer(problem));
        }
        (0..num).map(|_| source.scalar(key, kind)).collect()
    }

    /// Lists the merges of a vocabulary with scores, as transformers' converter does: all divisions of
    /// a token into two, first those of the best token and with the longest first part.
    fn merges_of_scores(
        &self,
        tokens: &[String],
        kinds: &[Value],
        vocabulary: &Map<String, Value>,
    ) -> Result<Vec<String>> {
        let scores = self.numbers("tokenizer.ggml.scores", tokens.len())?;
        if tokens.iter().map(|token| token.len().pow(2)).sum::<usize>() > MAX_DIVIDED {
            return Err(self.no_tokenizer("its tokens are too long"));
        }
        let known: HashSet<&str> = vocabulary.keys().map(String::as_str).collect();
        let mut merges = Vec::new();
        for ((token, kind), score) in tokens.iter().zip(kinds).zip(&scores) {
            let score = match kind.as_u64() {
                Some(BYTE | UNUSED) => continue,
                Some(UNKNOWN | CONTROL | USER_DEFINED) => 0.0,
                // The sum turns -0.0 into 0.0; otherwise they would not be equal in the sort.
                _ => score.as_f64().unwrap_or_default() + 0.0,
            };
            for (num_first, (at, _)) in token.char_indices().enumerate().skip(1) {
                let (first, second) = token.split_at(at);
                if known.contains(first) && known.contains(second) {
                    merges.push((score, [num_first, second.chars().count()], first, second));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let merge = |(_, _, first, second)| format!("{first} {second}");
        Ok(merges.into_iter().map(merge).collect())
    }

    /// Returns the ids of the tokens and the added tokens among them, as `tokenizer.json` has them.
    fn vocabulary(
        &self,
        tokens: &[String],
        kinds: &[Value],
    ) -> Result<(Map<String, Value>, Vec<Value>)> {
        let (mut vocabulary, mut added) = (Map::new(), Vec::new());
        for (id, (token, kind)) in tokens.iter().zip(kinds).enumerate() {
            let kind = kind.as_u64();
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

/// Returns the normalizer or decoder step that replaces one text with another.
fn replace(text: &str, by: &str) -> Value {
    json!({ "type": "Replace", "pattern": { "String": text }, "content": by })
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
