//! The tokenizer of `tokenizer.json`, which turns text into token ids and back, and the check that
//! two models share a vocabulary.

mod stop_strings;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_files::{hash_bytes, hash_file};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    Tokenizer, TokenizerImpl,
};

use crate::caught::caught;
use crate::chat_format::ChatFormat;
use crate::chat_template::Message;
use crate::error::{DataError, Result};
use crate::text_files::{TOKENIZER_FILE, TextFiles};
use crate::tokenizer_config::TokenizerConfig;

pub use stop_strings::StopStrings;

/// The files of older formats: SentencePiece, GPT-2, BERT and Mistral.
const OLD_FILES: [&str; 4] = ["tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"];

/// The maximum length of a text in `tokenizer.json`, in bytes, which no real token or pattern
/// reaches. The library overflows the stack when it drops longer tokens, because a Unigram model's
/// tree is as deep as its longest token.
const MAX_TEXT_BYTES: usize = 4096;
/// The key of a table, the only text that may be longer.
const TABLE: &[u8] = b"precompiled_charsmap";

/// The character that decoders write for incomplete or invalid bytes.
const REPLACEMENT: char = '\u{fffd}';

/// The maximum number of ids to hold back until their text is complete. A character has at most
/// four bytes, but consecutive tokens may all end inside a character. Text that stays incomplete
/// for longer is emitted unchanged, because each new id decodes all held-back ids again.
const MAX_HELD_BACK: usize = 64;

/// A tokenizer with a BPE model.
type BpeTokenizer = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A model's tokenizer.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
    /// Whether the tokenizer differs from the file at `path`, because `tokenizer_config.json` changes
    /// it or because it was made from another kind of file.
    is_changed: bool,
    /// What the user should know of the files, one sentence each.
    notes: Vec<String>,
}

impl TextTokenizer {
    /// Loads `tokenizer.json` of a checkpoint directory, with what `tokenizer_config.json` adds to
    /// it or changes, as transformers 5 does. Truncation and padding are disabled, the default of
    /// transformers.
    ///
    /// # Errors
    /// If a file cannot be read or is not a tokenizer, or if there is only an older format.
    pub fn from_model_dir(dir: impl Into<TextFiles>) -> Result<Self> {
        let files = dir.into();
        let (path, dir) = (files.path(TOKENIZER_FILE), files.place());
        let text = files.read(TOKENIZER_FILE).map_err(|e| {
            match OLD_FILES.into_iter().find(|old| dir.join(old).is_file()) {
                Some(found) if e.kind() == std::io::ErrorKind::NotFound => {
                    let dir = dir.display();
                    DataError::invalid(format!(
                        "`{dir}` has `{found}`, but draftsmith needs a `tokenizer.json`; hint: convert it: python -c \
                         \"from transformers import AutoTokenizer as T; \
                         T.from_pretrained('{dir}').save_pretrained('{dir}')\" (with the packages transformers, \
                         sentencepiece and protobuf)"
                    ))
                }
                _ => DataError::io("read", &path, e),
            }
        })?;
        if let Some(length) =
            longest_text(text.as_bytes()).filter(|length| *length > MAX_TEXT_BYTES)
        {
            let problem = format!("it has a text of {length} bytes, longer than any token");
            return Err(DataError::text(&path, "load the tokenizer", &problem));
        }
        let config = TokenizerConfig::read(&files)?;
        let mut notes = Vec::new();
        let (tokenizer, is_changed) = guard(&path, "load the tokenizer", || {
            // To find out the type of a model, the library copies its whole vocabulary twice. Most
            // are BPE.
            let mut tokenizer = match serde_json::from_str::<BpeTokenizer>(&text) {
                Ok(tokenizer) => Tokenizer::from(tokenizer),
                Err(_) => Tokenizer::from_bytes(&text)?,
            };
            tokenizer.with_padding(None).with_truncation(None)?;
            let dropout = drop_dropout(&mut tokenizer);
            notes.extend(dropout.map(|dropout| {
                format!(
                    "`{}` has a `dropout` of {dropout}, with which the same text gets other tokens each time; it is not used",
                    path.display()
                )
            }));
            let is_changed =
                config.apply(&mut tokenizer)? || dropout.is_some() || files.made().is_some();
            notes.extend(config.rebuilt_pipeline(&tokenizer));
            Ok((tokenizer, is_changed))
        })?;
        Ok(Self { path, tokenizer, is_changed, notes })
    }

    /// Returns what the user should know of the tokenizer's files, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Encodes a text as token ids. With `add_special_tokens`, the tokenizer adds its special
    /// tokens around the text, often a beginning-of-sequence token. Special tokens spelled out in
    /// the text become their ids, unless the model's `split_special_tokens` is true.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        guard(&self.path, "encode", || {
            let encoding = self.tokenizer.encode_fast(text, add_special_tokens)?;
            Ok(encoding.get_ids().to_vec())
        })
    }

    /// Encodes a chat as token ids, up to the beginning of the assistant's answer. Special tokens
    /// spelled out in a message become their ids, as in transformers, so a user can end their turn.
    ///
    /// # Errors
    /// If the template fails, the user message is missing, or the format is unknown.
    pub fn encode_chat(&self, format: &ChatFormat, messages: &[Message]) -> Result<Vec<u32>> {
        match format {
            ChatFormat::Template(template) => self.encode(&template.render(messages, true)?, false),
            ChatFormat::LastUserText => {
                let last = messages.iter().rfind(|message| message.role == "user");
                let last = last.ok_or_else(|| {
                    DataError::invalid(
                        "the chat has no user message, so there is nothing to answer: add one",
                    )
                })?;
                self.encode(&last.content, true)
            }
            ChatFormat::Unknown(dir) => Err(DataError::invalid(format!(
                "`{}` has no chat template, so the format of a chat is unknown; hint: choose one with \
                 `--chat-template` or a recipe's `models.chat_template`: `vicuna`, `llama-2`, `alpaca`, a Jinja file, \
                 or `none` to encode only the last user text",
                dir.display()
            ))),
        }
    }

    /// Decodes ids to text, without special tokens if `skip_special`. Bytes that are not UTF-8
    /// become U+FFFD. Unknown ids are skipped.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guard(&self.path, "decode", || self.tokenizer.decode(ids, skip_special))
    }

    /// Starts to decode ids one by one, as [`TextStream`] describes.
    pub fn text_stream(&self, skip_special: bool) -> TextStream<'_> {
        TextStream { tokenizer: self, skip_special, window: Vec::new(), num_given: 0 }
    }

    /// Returns one more than the largest token id, including added tokens: the smallest number of
    /// logits that a model must have.
    pub fn vocab_size(&self) -> usize {
        let largest = self.tokenizer.get_vocab(true).into_values().max();
        largest.map_or(0, |id| id as usize + 1)
    }

    /// Computes a SHA-256 of the rules of tokenization and the vocabulary, as hex: the hash of
    /// `tokenizer.json`, or of its form after the changes of `tokenizer_config.json`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn hash(&self) -> Result<String> {
        if !self.is_changed {
            return Ok(hash_file(&self.path)?);
        }
        let rules = guard(&self.path, "write the tokenizer", || self.tokenizer.to_string(false))?;
        let splits = self.tokenizer.get_encode_special_tokens();
        Ok(hash_bytes(format!("{rules}\n{splits}").as_bytes()))
    }

    /// Checks that target and draft have the same vocabulary.
    ///
    /// # Errors
    /// If they differ. The error names both files and the smallest id at which they differ.
    pub fn check_shared(target: &Self, draft: &Self) -> Result<()> {
        let (target_tokens, draft_tokens) = (target.tokens_by_id(), draft.tokens_by_id());
        let different = target_tokens
            .keys()
            .chain(draft_tokens.keys())
            .filter(|&id| target_tokens.get(id) != draft_tokens.get(id))
            .min();
        let Some(id) = different else { return Ok(()) };
        let describe = |token: Option<&String>| match token {
            Some(token) => format!("`{token}`"),
            None => "no token".to_owned(),
        };
        Err(DataError::invalid(format!(
            "`{}` and `{}` are different tokenizers: id {id} is {} in the target's and {} in the draft's; a draft \
             must have its target's vocabulary",
            target.path.display(),
            draft.path.display(),
            describe(target_tokens.get(id)),
            describe(draft_tokens.get(id))
        )))
    }

    /// Checks that `tokens`, the vocabulary of a model's GGUF file at `path`, is the tokenizer's. Converters
    /// write a few tokens in another form.
    ///
    /// # Errors
    /// If more than one in 64 differs.
    pub fn check_tokens(&self, path: &Path, tokens: &[String]) -> Result<()> {
        let own = self.tokens_by_id();
        let both = tokens.iter().enumerate().filter_map(|(id, token)| {
            let own = own.get(&(id as u32))?;
            Some((id, token, own))
        });
        let (num, mut different) = (both.clone().count(), both.filter(|(_, one, two)| one != two));
        let Some((id, token, own)) = different.next() else { return Ok(()) };
        if different.count() < num / 64 {
            return Ok(());
        }
        Err(DataError::invalid(format!(
            "`{}` is not the tokenizer of `{}`: id {id} is `{own}` in the tokenizer and `{token}` in the model",
            self.path.display(),
            path.display()
        )))
    }

    /// Returns the vocabulary by id. If an id has several tokens, the last in sorted order is kept.
    fn tokens_by_id(&self) -> BTreeMap<u32, String> {
        let mut tokens: Vec<_> = self.tokenizer.get_vocab(true).into_iter().collect();
        tokens.sort();
        tokens.into_iter().map(|(token, id)| (id, token)).collect()
    }
}

/// A stream that turns ids into text increments. All increments and the result of [`Self::finish`]
/// together equal the decoding of all ids at once. There is one exception. SentencePiece decoders
/// replace a whole run of byte tokens if its last character is incomplete, but earlier characters
/// of the run have been emitted by then.
///
/// A character may be divided among tokens, and a decoder may treat the first token of a text
/// differently (drop its leading space). So no id is decoded by itself. The increment is the text
/// that new ids add to the text of the ids emitted last.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    skip_special: bool,
    /// The ids whose text was emitted last, up to a whole character, then the held-back ids.
    window: Vec<u32>,
    /// The number of ids in `window` whose text has been emitted.
    num_given: usize,
}

impl<'a> TextStream<'a> {
    /// Takes the next id and returns the text that it completes, if any.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
        self.window.push(id);
        let added = self.added_text()?;
        let is_held_back = added.is_empty() || added.ends_with(REPLACEMENT);
        if is_held_back && self.window.len() - self.num_given < MAX_HELD_BACK {
            return Ok(None);
        }
        self.window.drain(..self.num_given);
        self.num_given = self.window.len();
        Ok(Some(added).filter(|added| !added.is_empty()))
    }

    /// Ends the stream and returns the held-back text, with U+FFFD for an incomplete character.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(self) -> Result<Option<String>> {
        Ok(Some(self.added_text()?).filter(|text| !text.is_empty()))
    }

    /// Decodes the text that the held-back ids add to the text of the ids already emitted.
    fn added_text(&self) -> Result<String> {
        let given = self.tokenizer.decode(&self.window[..self.num_given], self.skip_special)?;
        let mut text = self.tokenizer.decode(&self.window, self.skip_special)?;
        // A decoder may change text that has been emitted and cannot be retracted. Everything after
        // the common prefix counts as added.
        let common = given.chars().zip(text.chars()).take_while(|(a, b)| a == b);
        let common = common.map(|(character, _)| character.len_utf8()).sum();
        Ok(text.split_off(common))
    }
}

/// Removes the dropout of a BPE model, which is left over from training, and returns it.
fn drop_dropout(tokenizer: &mut Tokenizer) -> Option<f32> {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
    let dropout = model.dropout.filter(|dropout| *dropout > 0.0)?;
    let mut model = model.clone();
    model.dropout = None;
    tokenizer.with_model(model);
    Some(dropout)
}

/// Returns the length in bytes of the longest string in JSON, except for the value of the key
/// [`TABLE`]. `None` without strings.
fn longest_text(json: &[u8]) -> Option<usize> {
    let (mut rest, mut last, mut longest) = (json, &json[..0], None);
    while let Some(start) = rest.iter().position(|byte| *byte == b'"') {
        rest = &rest[start + 1..];
        let mut end = 0;
        while end < rest.len() && rest[end] != b'"' {
            end += if rest[end] == b'\\' { 2 } else { 1 };
        }
        let end = end.min(rest.len());
        if last != TABLE {
            longest = longest.max(Some(end));
        }
        last = &rest[..end];
        rest = rest.get(end + 1..).unwrap_or_default();
    }
    longest
}

/// Runs a step of the tokenizer library and names the file in its error. The library (tokenizers
/// 0.23) panics on malformed decoders and normalizers.
fn guard<T>(
    path: &Path,
    action: &'static str,
    step: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T> {
    let problem = match caught(step) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => panic,
    };
    Err(DataError::text(path, action, &problem))
}

#[cfg(test)]
mod tests;
