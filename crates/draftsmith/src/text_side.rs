//! The text side of a target: what makes token ids of conversations and text of ids, and what ends
//! answers. It needs no weights.

use std::sync::Arc;

use anyhow::{Result, bail};
use draftsmith_data::{ChatFormat, Message, Prompt, TextTokenizer};
use draftsmith_decode::Limits;

use crate::ends::StopText;

/// Tokenizer, chat template and ends of answers, shared with the workspace that they are from.
#[derive(Debug, Clone)]
pub(crate) struct TextSide {
    pub(crate) tokenizer: Arc<TextTokenizer>,
    pub(crate) chat_format: Arc<ChatFormat>,
    /// The tokens that end an answer.
    pub(crate) eos_token_ids: Vec<u32>,
    /// What else ends one.
    pub(crate) text_end: Option<Arc<StopText>>,
    /// The longest sequence that every model at work can read.
    pub(crate) context: usize,
}

impl TextSide {
    /// When answers of up to so many tokens end.
    pub(crate) fn limits(&self, max_new_tokens: usize) -> Limits {
        let text_end = self.text_end.clone().map(|end| end as _);
        Limits { text_end, ..Limits::new(max_new_tokens, self.eos_token_ids.clone()) }
    }

    /// The ids of a conversation up to where the answer begins.
    pub(crate) fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// The ids of a prompt up to where the answer of turn `number` begins, behind `responses`: those
    /// that its file has, or else its messages'.
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
                 hint: shorten it, or take it out of its file",
                prompt.len()
            );
        }
        Ok(())
    }
}
