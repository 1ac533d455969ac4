//! `tokenizer_config.json` and the older files beside it, which change what `tokenizer.json` says.
//!
//! The rules are those of transformers 5: with `added_tokens_decoder`, the file says everything.
//! Without it, `special_tokens_map.json` has precedence over the file, and `added_tokens.json` adds
//! tokens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer};

use crate::error::{DataError, Result};
use crate::text_files::{CONFIG_FILE, TextFiles};

/// The file that holds special tokens in transformers 4. For some models only this file has them.
pub(crate) const SPECIAL_TOKENS_FILE: &str = "special_tokens_map.json";
/// The file that holds the ids of added tokens in transformers 4.
const ADDED_TOKENS_FILE: &str = "added_tokens.json";
/// The special tokens that have a name, which templates can use.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// The lists of special tokens without a name: the key of transformers 4, then of 5.
const UNNAMED_TOKENS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The settings of a tokenizer beside `tokenizer.json`. All are empty for a directory without them.
#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    /// `tokenizer_config.json`, present or not.
    path: PathBuf,
    keys: Map<String, Value>,
    /// The special tokens that have a name.
    pub special_tokens: BTreeMap<&'static str, String>,
    /// The special tokens without a name.
    unnamed_tokens: Vec<String>,
    /// The added tokens, by the id that the file names.
    added_tokens: BTreeMap<u32, AddedToken>,
}

/// An added token as the files write it; the defaults are those of transformers.
#[derive(Deserialize)]
struct WrittenToken {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl TokenizerConfig {
    /// Reads the files that exist.
    ///
    /// # Errors
    /// If a file cannot be read, is not JSON, or has a token of the wrong form.
    pub(crate) fn read(files: &TextFiles) -> Result<Self> {
        let (path, keys) = read_object(files, CONFIG_FILE)?;
        let special_tokens = named_tokens(&path, &keys)?;
        let unnamed_tokens = unnamed_tokens(&path, &keys)?;
        let added_tokens = added_tokens(&path, &keys)?;
        let is_whole = keys.contains_key("added_tokens_decoder");
        let mut config = Self { path, keys, special_tokens, unnamed_tokens, added_tokens };
        if !is_whole {
            config.read_older_files(files)?;
        }
        Ok(config)
    }

    fn read_older_files(&mut self, files: &TextFiles) -> Result<()> {
        let (path, keys) = read_object(files, SPECIAL_TOKENS_FILE)?;
        self.special_tokens.extend(named_tokens(&path, &keys)?);
        self.unnamed_tokens.extend(unnamed_tokens(&path, &keys)?);
        let (path, keys) = read_object(files, ADDED_TOKENS_FILE)?;
        for (content, id) in keys {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| error(&path, &content, "must be a token id"))?;
            let is_special = self.named_and_unnamed().any(|token| *token == content);
            self.added_tokens.insert(id, AddedToken::from(content, is_special));
        }
        Ok(())
    }

    /// Reads whether a key is true.
    fn is_true(&self, key: &str) -> bool {
        self.keys.get(key).and_then(Value::as_bool) == Some(true)
    }

    fn named_and_unnamed(&self) -> impl Iterator<Item = &String> {
        self.special_tokens.values().chain(&self.unnamed_tokens)
    }

    /// Returns the chat template of the file, under the key `chat_template`: a text, or a list of
    /// `{"name": …, "template": …}` with one named `default`.
    ///
    /// # Errors
    /// If the key has another form.
    pub(crate) fn template(&self) -> Result<Option<(&Path, String)>> {
        let error = |problem| error(&self.path, "chat_template", problem);
        let source = match self.keys.get("chat_template") {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(source)) => source,
            Some(Value::Array(named)) => {
                let default = named.iter().find(|entry| entry["name"] == "default");
                match default.map(|entry| &entry["template"]) {
                    Some(Value::String(source)) => source,
                    _ => {
                        return Err(error("is a list without a template named `default`: add one"));
                    }
                }
            }
            Some(_) => return Err(error("must be a template, or a list of named templates")),
        };
        Ok(Some((&self.path, source.clone())))
    }

    /// Changes a tokenizer as the files say, and returns whether that made a difference to it.
    ///
    /// # Errors
    /// If the library refuses a token.
    pub(crate) fn apply(&self, tokenizer: &mut Tokenizer) -> tokenizers::Result<bool> {
        let num_added = tokenizer.add_tokens(self.added_tokens.values().cloned())?;
        let known = tokenizer.get_added_vocabulary().get_vocab().clone();
        let unknown = self.named_and_unnamed().filter(|token| !known.contains_key(*token));
        let special = unknown.map(|token| AddedToken::from(token.as_str(), true));
        let num_special = tokenizer.add_tokens(special.collect::<Vec<_>>())?;

        let splits = self.is_true("split_special_tokens");
        tokenizer.set_encode_special_tokens(splits);
        let class = self.keys.get("tokenizer_class").and_then(Value::as_str);
        let is_llama = matches!(class, Some("LlamaTokenizer" | "LlamaTokenizerFast"))
            && prepends_always(tokenizer.get_normalizer())
            && tokenizer.get_pre_tokenizer().is_none();
        if is_llama {
            let scheme = match self.is_true("legacy") {
                true => PrependScheme::Always,
                false => PrependScheme::First,
            };
            tokenizer.with_normalizer(None::<NormalizerWrapper>)?;
            tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', scheme, false)));
        }
        Ok(num_added + num_special > 0 || splits || is_llama)
    }

    /// Says that transformers 5 builds another pipeline for the tokenizer's class than its file has;
    /// `None` if it doesn't.
    pub(crate) fn rebuilt_pipeline(&self, tokenizer: &Tokenizer) -> Option<String> {
        let class = self.keys.get("tokenizer_class")?.as_str()?;
        let name = class.trim_end_matches("Fast");
        let [normalizer, pre_tokenizer] =
            [kind_of(&tokenizer.get_normalizer()), kind_of(&tokenizer.get_pre_tokenizer())];
        let found = format!("{name} {normalizer} {pre_tokenizer}");
        let is_of_class = |own: &&str| own.split(' ').next() == Some(name);
        let is_other = OWN_PIPELINES.iter().any(is_of_class) && !OWN_PIPELINES.contains(&&*found);
        is_other.then(|| {
            format!(
                "`{}` names the class `{class}`, for which transformers 5 builds another normalizer or pre-tokenizer than \
                 `tokenizer.json` has; the file is followed, as in transformers 4",
                self.path.display()
            )
        })
    }
}

/// The classes for which transformers 5 builds the pipeline itself, each with the types of its
/// normalizer and pre-tokenizer.
const OWN_PIPELINES: [&str; 8] = [
    "LlamaTokenizer null Metaspace",
    "CodeLlamaTokenizer null Metaspace",
    "GemmaTokenizer Replace null",
    "GemmaTokenizer Replace Split",
    "GPT2Tokenizer null ByteLevel",
    "GPTNeoXTokenizer null ByteLevel",
    "GPTNeoXTokenizer NFC ByteLevel",
    "Qwen2Tokenizer NFC Sequence",
];

/// Returns the kind of a part of a tokenizer.
fn kind_of(part: &impl serde::Serialize) -> String {
    let part = serde_json::to_value(part).unwrap_or_default();
    part["type"].as_str().unwrap_or("null").to_owned()
}

/// Reads whether a normalizer is the one that transformers 4 wrote for Llama: `▁` before every
/// stretch of text between special tokens, and `▁` for each space.
fn prepends_always(normalizer: Option<&NormalizerWrapper>) -> bool {
    let Some(NormalizerWrapper::Sequence(sequence)) = normalizer else { return false };
    let [first, second] = sequence.as_ref() else { return false };
    matches!(first, NormalizerWrapper::Prepend(prepend) if prepend.prepend == "▁")
        && matches!(second, NormalizerWrapper::Replace(replace) if replace.content == "▁")
}

/// Reads a file that is a JSON object. It has no keys if it does not exist or is null.
fn read_object(files: &TextFiles, name: &str) -> Result<(PathBuf, Map<String, Value>)> {
    let path = files.path(name);
    let Some(text) = files.read_if_present(name)? else { return Ok((path, Map::new())) };
    let keys: Option<_> =
        serde_json::from_str(&text).map_err(|e| DataError::json(&path, 1, 1, &e))?;
    Ok((path, keys.unwrap_or_default()))
}

fn named_tokens(path: &Path, keys: &Map<String, Value>) -> Result<BTreeMap<&'static str, String>> {
    let present = NAMED_TOKENS.iter().filter(|name| keys.get(**name).is_some_and(|v| !v.is_null()));
    present.map(|name| Ok((*name, token_text(path, name, &keys[*name])?))).collect()
}

fn unnamed_tokens(path: &Path, keys: &Map<String, Value>) -> Result<Vec<String>> {
    let tokens = UNNAMED_TOKENS.into_iter().flat_map(|key| {
        let tokens: Vec<&Value> = match keys.get(key) {
            Some(Value::Array(listed)) => listed.iter().collect(),
            Some(Value::Object(named)) => named.values().collect(),
            _ => Vec::new(),
        };
        tokens.into_iter().map(move |token| token_text(path, key, token))
    });
    tokens.collect()
}

fn added_tokens(path: &Path, keys: &Map<String, Value>) -> Result<BTreeMap<u32, AddedToken>> {
    let key = "added_tokens_decoder";
    let Some(Value::Object(by_id)) = keys.get(key) else { return Ok(BTreeMap::new()) };
    let parse = |(id, token): (&String, &Value)| {
        let written = WrittenToken::deserialize(token);
        let problem = "must map token ids to objects with the string `content`";
        let (Ok(id), Ok(token)) = (id.parse(), written) else {
            return Err(error(path, key, problem));
        };
        let added = AddedToken {
            normalized: token.normalized.unwrap_or(!token.special),
            content: token.content,
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            special: token.special,
        };
        Ok((id, added))
    };
    by_id.iter().map(parse).collect()
}

/// Reads a token that is a text, or an object with the text under `content`.
fn token_text(path: &Path, key: &str, token: &Value) -> Result<String> {
    let text = token.as_str().or_else(|| token.get("content").and_then(Value::as_str));
    let problem = "must be a string, or an object with the string `content`";
    text.map(str::to_owned).ok_or_else(|| error(path, key, problem))
}

fn error(path: &Path, key: &str, problem: &str) -> DataError {
    DataError::invalid(format!("`{}`: key `{key}` {problem}", path.display()))
}
