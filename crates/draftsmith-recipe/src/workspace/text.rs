//! The text side of a workspace: the target's tokenizer, chat template and ends of answers, and their identity in
//! provenance.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use draftsmith_data::{ChatFormat, StopStrings, TextTokenizer};
use serde::Serialize;

use super::model_dir::{ModelDir, get_or_read};
use super::models::Models;
use crate::text_side::{Ends, TextSide};

/// Where the target's text side comes from.
#[derive(Default)]
pub struct TextSource {
    /// What the user chose to end answers.
    pub ends: Ends,
    /// A chat template that replaces the target's.
    pub(super) chat_template: Option<String>,
    /// Today for a template that writes the date; the template's default if `None`.
    pub(crate) date: Option<String>,
    target: OnceLock<TextSide>,
    identity: OnceLock<TextIdentity>,
}

/// Everything that shapes and ends text, for provenance.
#[derive(Debug, Clone, Serialize)]
pub struct TextIdentity {
    /// Hash of the tokenizer's file.
    pub tokenizer: String,
    /// Hash of the chat template, if there is one.
    pub chat_template: Option<String>,
    /// The special tokens that the chat template may name.
    pub special_tokens: BTreeMap<String, String>,
    /// The tokens that end a response: the chosen ones, or else those in `generation_config.json`, or else
    /// in `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
}

/// The most tokens without embeddings that a model's own tokenizer has.
const MOST_UNEMBEDDED: usize = 64;

impl TextSource {
    /// Returns the target's text side, read at the first call.
    ///
    /// # Errors
    /// If a file of the text side is missing or broken.
    pub fn of_target(&self, models: &Models) -> Result<&TextSide> {
        get_or_read(&self.target, || {
            let dir = &models.target.dir;
            models.target.check()?;
            models.watch.reads("tokenizer");
            let tokenizer = Arc::new(TextTokenizer::from_model_dir(dir)?);
            let mut chat_format = ChatFormat::choose(dir, self.chat_template.as_deref())?;
            if let Some(date) = &self.date {
                chat_format = chat_format.with_date(date).context("key `models.date`")?;
            }
            let chat_format = Arc::new(chat_format);
            let shape = models.target_shape()?;
            let (known, embedded) = (tokenizer.vocab_size(), shape.vocab_size);
            // Some models have a few tokens without embeddings, such as Gemma 3's image token. A prompt with such a
            // token is refused by itself.
            if known > embedded + MOST_UNEMBEDDED {
                bail!(
                    "`{}` has {known} tokens, but the model has embeddings for {embedded}: the \
                     tokenizer does not belong to this model",
                    dir.join("tokenizer.json").display()
                );
            }
            let chosen = self.ends.eos_token_ids.as_ref();
            let eos_token_ids = chosen.unwrap_or(&shape.eos_token_ids).clone();
            if let Some(id) = eos_token_ids.iter().find(|id| **id as usize >= embedded) {
                bail!(
                    "end token {id} is not in the target's vocabulary of {embedded} tokens; hint: see \
                     `models.eos_token_ids` or `--eos-token-id`"
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

    /// Checks that a model's tokenizer is the target's.
    pub(super) fn check_tokenizer(&self, models: &Models, model: &ModelDir) -> Result<()> {
        let tokenizer = self.tokenizer(models)?;
        model.check()?;
        Ok(TextTokenizer::check_shared(tokenizer, &TextTokenizer::from_model_dir(&model.dir)?)?)
    }

    /// Returns the target's tokenizer, read with its text side at the first call.
    ///
    /// # Errors
    /// If a file of the text side is missing or broken.
    pub fn tokenizer(&self, models: &Models) -> Result<&TextTokenizer> {
        Ok(&self.of_target(models)?.tokenizer)
    }

    /// Returns the identity of the text side in provenance: everything that shapes and ends text.
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
