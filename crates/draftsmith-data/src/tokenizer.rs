//! `tokenizer.json`: text to token ids and back, and whether two models share one.

mod stop_strings;
mod text_stream;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_files::hash_file;
use tokenizers::Tokenizer;

use crate::caught::caught;
use crate::chat_format::ChatFormat;
use crate::chat_template::Message;
use crate::error::DataError;

pub use stop_strings::StopStrings;
pub use text_stream::TextStream;

/// The file of a checkpoint directory that holds the tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// What a directory may hold instead: SentencePiece's model, GPT-2's, BERT's and Mistral's files.
const OLD_FILES: [&str; 4] = ["tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"];

/// More bytes than a token or a pattern has. The library overflows the stack while it drops a token
/// of many (a Unigram model's tree is as deep as it is long).
const MOST_TEXT_BYTES: usize = 4096;
/// The key of the one text that is longer: a table.
const TABLE: &[u8] = b"precompiled_charsmap";

/// A model's tokenizer.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
}

impl TextTokenizer {
    /// Loads `tokenizer.json` of a checkpoint directory. Truncation and padding that it asks for
    /// are switched off: they belong to batches of training text, and transformers ignores them
    /// too unless told otherwise.
    ///
    /// # Errors
    /// If the file cannot be read or is not a tokenizer, or only an older form of one is there.
    pub fn from_model_dir(dir: &Path) -> Result<Self, DataError> {
        let path = dir.join(TOKENIZER_FILE);
        let bytes = std::fs::read(&path).map_err(|e| {
            match OLD_FILES.into_iter().find(|old| dir.join(old).is_file()) {
                Some(found) if e.kind() == std::io::ErrorKind::NotFound => {
                    DataError::OldTokenizer { path: dir.to_path_buf(), found }
                }
                _ => DataError::io("read", &path, e),
            }
        })?;
        if let Some(length) = longest_text(&bytes).filter(|length| *length > MOST_TEXT_BYTES) {
            let problem = format!("it has a text of {length} bytes, which no token has");
            return Err(DataError::Tokenizer { path, action: "load the tokenizer", problem });
        }
        let tokenizer = guard(&path, "load the tokenizer", || {
            let mut tokenizer = Tokenizer::from_bytes(&bytes)?;
            tokenizer.with_padding(None).with_truncation(None)?;
            Ok(tokenizer)
        })?;
        Ok(Self { path, tokenizer })
    }

    /// The ids of a text; with `add_special_tokens`, those that the tokenizer puts around a text
    /// (often a beginning-of-sequence token) are added. Special tokens spelled out in the text
    /// become their ids either way.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, DataError> {
        guard(&self.path, "encode", || {
            let encoding = self.tokenizer.encode_fast(text, add_special_tokens)?;
            Ok(encoding.get_ids().to_vec())
        })
    }

    /// The ids of a chat up to where the assistant's answer begins. Control tokens that are spelled
    /// out in what somebody says become their ids, as in transformers: a user can end their turn.
    ///
    /// # Errors
    /// If the template refuses the messages, there is no user message, or the format is unknown.
    pub fn encode_chat(
        &self,
        format: &ChatFormat,
        messages: &[Message],
    ) -> Result<Vec<u32>, DataError> {
        match format {
            ChatFormat::Template(template) => self.encode(&template.render(messages, true)?, false),
            ChatFormat::LastUserText => {
                let last = messages.iter().rfind(|message| message.role == "user");
                self.encode(&last.ok_or(DataError::NoUserMessage)?.content, true)
            }
            ChatFormat::Unknown(dir) => Err(DataError::NoTemplate { path: dir.clone() }),
        }
    }

    /// The text of ids; with `skip_special`, special tokens are left out. Bytes that are not UTF-8
    /// become U+FFFD, ids that are not in the vocabulary nothing.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, DataError> {
        guard(&self.path, "decode", || self.tokenizer.decode(ids, skip_special))
    }

    /// Starts turning ids into text as they come. See [`TextStream`].
    #[must_use]
    pub fn text_stream(&self, skip_special: bool) -> TextStream<'_> {
        TextStream::new(self, skip_special)
    }

    /// One more than the largest token id, added tokens included: as many logits as a model must
    /// have at least.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        let largest = self.tokenizer.get_vocab(true).into_values().max();
        largest.map_or(0, |id| id as usize + 1)
    }

    /// The SHA-256 of `tokenizer.json`, as hex: how text is cut into tokens enters, not only what they
    /// are called.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn hash(&self) -> Result<String, DataError> {
        Ok(hash_file(&self.path)?)
    }

    /// Checks that target and draft have the same token → id map.
    ///
    /// # Errors
    /// [`DataError::TokenizersDiffer`] with both files and the smallest id at which they differ.
    pub fn check_shared(target: &Self, draft: &Self) -> Result<(), DataError> {
        let (target_tokens, draft_tokens) = (target.tokens_by_id(), draft.tokens_by_id());
        let different = target_tokens
            .keys()
            .chain(draft_tokens.keys())
            .filter(|&id| target_tokens.get(id) != draft_tokens.get(id))
            .min();
        let Some(id) = different else { return Ok(()) };
        let told = |token: Option<&String>| match token {
            Some(token) => format!("`{token}`"),
            None => "no token".to_owned(),
        };
        Err(DataError::TokenizersDiffer {
            target: target.path.clone(),
            draft: draft.path.clone(),
            difference: format!(
                "id {id} is {} in the target's and {} in the draft's",
                told(target_tokens.get(id)),
                told(draft_tokens.get(id))
            ),
        })
    }

    /// The vocabulary by id. An id with several tokens, which no trained tokenizer has, keeps the
    /// one that sorts last.
    fn tokens_by_id(&self) -> BTreeMap<u32, String> {
        let mut tokens: Vec<_> = self.tokenizer.get_vocab(true).into_iter().collect();
        tokens.sort();
        tokens.into_iter().map(|(token, id)| (id, token)).collect()
    }
}

/// The bytes of the longest text in JSON, apart from a table.
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

/// Runs a step of the tokenizer library, naming the file in its error. The library (tokenizers
/// 0.23) panics on decoders and normalizers that it cannot make sense of.
fn guard<T>(
    path: &Path,
    action: &'static str,
    step: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T, DataError> {
    let problem = match caught(step) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => panic,
    };
    Err(DataError::Tokenizer { path: path.to_path_buf(), action, problem })
}

#[cfg(test)]
mod tests;
