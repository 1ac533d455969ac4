//! The text side of a workspace's target: tokenizer, chat template, end tokens and stop strings,
//! and their identity in provenance.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail, ensure};
use draftsmith_data::{ChatFormat, StopStrings, TextFiles, TextTokenizer};
use draftsmith_model::{Gguf, ModelError, is_gguf, text_dir};
use serde::Serialize;
use serde_json::{Map, Value};

use super::model_dir::{ModelDir, get_or_read};
use super::models::Models;
use crate::text_side::{Ends, TextSide};

/// The source of the target's tokenizer, chat template and end markers.
#[derive(Default)]
pub struct TextSource {
    /// The end tokens and stop strings that the user chose.
    pub ends: Ends,
    /// The directory of the tokenizer, chat template and end tokens; the target's if `None`.
    pub dir: Option<PathBuf>,
    /// The chat template that replaces the target's; `None` keeps it.
    pub(super) chat_template: Option<String>,
    /// Today for a template that writes the date; the template's default if `None`.
    pub(crate) date: Option<String>,
    /// Further variables of the template.
    pub(crate) template_arguments: Map<String, Value>,
    target: OnceLock<TextSide>,
    identity: OnceLock<TextIdentity>,
}

/// Everything that determines how text is encoded and where answers end, for provenance.
#[derive(Debug, Clone, Serialize)]
pub struct TextIdentity {
    /// The hash of the tokenizer's file.
    pub tokenizer: String,
    /// The hash of the chat template; `None` if there is no template.
    pub chat_template: Option<String>,
    /// The special tokens that the chat template can use, by name.
    pub special_tokens: BTreeMap<String, String>,
    /// The ids of the tokens that end a response: the user's choice, else from
    /// `generation_config.json`, else from `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings; omitted from provenance if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
}

/// The most tokens without embeddings that a model's own tokenizer has.
const MOST_UNEMBEDDED: usize = 64;

impl TextSource {
    /// Returns the target's text side. Reads it at the first call.
    ///
    /// # Errors
    /// If a tokenizer or template file is missing or broken.
    pub fn of_target(&self, models: &Models) -> Result<&TextSide> {
        get_or_read(&self.target, || {
            models.target.check()?;
            let files = self.files(models)?;
            models.watch.reads("tokenizer");
            let tokenizer = Arc::new(TextTokenizer::from_model_dir(files.clone())?);
            // A tokenizer made from the target has its tokens.
            if files.place() != models.target_dir() {
                check_gguf(&tokenizer, &models.target)?;
            }
            tokenizer.notes().iter().for_each(|note| models.watch.note(note.clone()));
            let mut chat_format = ChatFormat::choose(files.clone(), self.chat_template.as_deref())?;
            if let Some(date) = &self.date {
                chat_format =
                    chat_format.map(|it| it.with_date(date)).context("key `models.date`")?;
            }
            let arguments = || self.template_arguments.clone();
            chat_format = chat_format
                .map(|it| it.with_arguments(arguments()))
                .context("key `models.template_arguments`")?;
            let chat_format = Arc::new(chat_format);
            let mut config = models.target_config()?.clone();
            if files.made().is_none() && (is_gguf(models.target_dir()) || self.dir.is_some()) {
                config.read_end_tokens(files.place())?;
            }
            let shape = &config.shape;
            let (known, embedded) = (tokenizer.vocab_size(), shape.vocab_size);
            // Some models have a few tokens without embeddings, such as Gemma 3's image token. A prompt with such a
            // token is refused by itself.
            ensure!(
                known <= embedded + MOST_UNEMBEDDED,
                "the tokenizer in `{}` has {known} tokens, but the model has embeddings for {embedded}: the \
                 tokenizer does not belong to this model",
                files.place().display()
            );
            let chosen = self.ends.eos_token_ids.as_ref();
            let eos_token_ids = chosen.unwrap_or(&shape.eos_token_ids).clone();
            if let Some(id) = eos_token_ids.iter().find(|id| **id as usize >= embedded) {
                bail!(
                    "end token {id} is not in the target's vocabulary of {embedded} tokens; hint: see \
                     `eos_token_id` in its `config.json`, or the end tokens that you chose (`--eos-token-id`, or `models.eos_token_ids` in a recipe)"
                );
            }
            let strings = &self.ends.stop_strings;
            let text_end = (!strings.is_empty())
                .then(|| StopStrings::new(strings, &tokenizer).map(Arc::new))
                .transpose()?;
            let context = shape.context;
            Ok(TextSide { tokenizer, chat_format, eos_token_ids, text_end, context })
        })
    }

    /// Returns the files of the target's tokenizer and chat template.
    ///
    /// # Errors
    /// As for [`text_files`].
    pub fn files(&self, models: &Models) -> Result<TextFiles> {
        Ok(text_files(self.dir.as_deref().unwrap_or(models.target_dir()))?)
    }

    /// Checks that a model's tokenizer equals the target's.
    pub(super) fn check_tokenizer(&self, models: &Models, model: &ModelDir) -> Result<()> {
        let tokenizer = self.tokenizer(models)?;
        model.check()?;
        if is_gguf(&model.dir) {
            return check_gguf(tokenizer, model);
        }
        Ok(TextTokenizer::check_shared(tokenizer, &TextTokenizer::from_model_dir(&model.dir)?)?)
    }

    /// Returns the target's tokenizer. Reads it with the rest of the text side at the first call.
    ///
    /// # Errors
    /// If a tokenizer or template file is missing or broken.
    pub fn tokenizer(&self, models: &Models) -> Result<&TextTokenizer> {
        Ok(&self.of_target(models)?.tokenizer)
    }

    /// Returns the identity of the target's text side in provenance.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn identity(&self, models: &Models) -> Result<&TextIdentity> {
        get_or_read(&self.identity, || {
            let TextSide { tokenizer, chat_format, eos_token_ids, .. } = self.of_target(models)?;
            models.watch.reads("hash of the tokenizer");
            Ok(TextIdentity {
                tokenizer: tokenizer.hash()?,
                chat_template: chat_format.hash(),
                special_tokens: chat_format.special_tokens(),
                eos_token_ids: eos_token_ids.clone(),
                stop_strings: self.ends.stop_strings.clone(),
            })
        })
    }
}

/// Returns the files of a model's tokenizer and chat template. Those of a GGUF file are in its directory; if
/// there is no tokenizer, they are made from the file.
///
/// # Errors
/// If they cannot be made from a GGUF file.
pub fn text_files(model: &Path) -> Result<TextFiles, ModelError> {
    let files = TextFiles::from(text_dir(model));
    if !is_gguf(model) || files.has_tokenizer() {
        return Ok(files);
    }
    Ok(TextFiles::made_from(model, Gguf::read(model)?.text_files()?))
}

/// Checks that a tokenizer has the vocabulary of a model, if that is a GGUF file with one.
fn check_gguf(tokenizer: &TextTokenizer, model: &ModelDir) -> Result<()> {
    match is_gguf(&model.dir) {
        true => Ok(tokenizer.check_tokens(&model.dir, &Gguf::read(&model.dir)?.tokens()?)?),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests;
