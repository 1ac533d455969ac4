//! The text side of a target: tokenizer, chat template and what ends answers. It needs no weights.

use std::sync::Arc;

use anyhow::{Result, bail};
use draftsmith_data::{ChatFormat, Message, Prompt, TextTokenizer};
use draftsmith_decode::Limits;

use crate::ends::StopText;

/// A target's tokenizer, chat template and ends of answers. Clones share them with the workspace.
#[derive(Debug, Clone)]
pub(crate) struct TextSide {
    pub(crate) tokenizer: Arc<TextTokenizer>,
    pub(crate) chat_format: Arc<ChatFormat>,
    /// The tokens that end an answer.
    pub(crate) eos_token_ids: Vec<u32>,
    /// The stop strings that end one, if there are any.
    pub(crate) text_end: Option<Arc<StopText>>,
    /// The longest sequence, in tokens, that all loaded models can read.
    pub(crate) context: usize,
}

impl TextSide {
    /// The limits of answers of at most `max_new_tokens` tokens.
    pub(crate) fn limits(&self, max_new_tokens: usize) -> Limits {
        let text_end = self.text_end.clone().map(|end| end as _);
        Limits { text_end, ..Limits::new(max_new_tokens, self.eos_token_ids.clone()) }
    }

    /// The token ids of a conversation up to where the answer begins.
    pub(crate) fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// The token ids of a prompt up to where the answer of turn `number` begins, with `responses` as the
    /// answers to earlier turns. Ids given in the prompt's file take precedence.
    pub(crate) fn prompt_ids(
        &self,
        prompt: &Prompt,
        number: usize,
        responses: &[String],
    ) -> Result<Vec<u32>> {
        match &prompt.turns[number].tokens {
            Some(given) => Ok(given.prompt_ids.clone()),
            None => self.encode(&prompt.messages(number, responses)),
        }
    }

    /// Checks that a prompt leaves room for at least one token.
    pub(crate) fn check_fits(&self, id: &str, prompt: &[u32]) -> Result<()> {
        let context = self.context;
        if prompt.len() >= context {
            bail!(
                "prompt `{id}` has {} tokens, but the models' context holds {context}; \
                 hint: shorten it, or remove it from its file",
                prompt.len()
            );
        }
        Ok(())
    }
}
