//! The text side of a target: tokenizer, chat template and what ends answers. It needs no weights.

use std::sync::Arc;

use anyhow::{Result, bail};
use draftsmith_data::{ChatFormat, Message, Prompt, StopStrings, TextTokenizer};
use draftsmith_decode::Limits;

/// A target's tokenizer, chat template and ends of answers. Clones share them with the workspace.
#[derive(Debug, Clone)]
pub struct TextSide {
    /// The tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// The chat template with its markers.
    pub chat_format: Arc<ChatFormat>,
    /// The tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings that end one, if there are any.
    pub text_end: Option<Arc<StopStrings>>,
    /// The longest sequence, in tokens, that all loaded models can read.
    pub context: usize,
}

impl TextSide {
    /// Returns the limits of answers: at most `max_new_tokens` tokens, the end tokens and the stop strings.
    pub fn limits(&self, max_new_tokens: usize) -> Limits {
        let text_end = self.text_end.clone().map(|end| end as _);
        Limits { text_end, ..Limits::new(max_new_tokens, self.eos_token_ids.clone()) }
    }

    /// Encodes a conversation up to where the answer begins, as token ids.
    pub fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// Returns the token ids of a prompt up to where the answer of turn `number` begins, with `responses` as
    /// the answers to earlier turns. Ids given in the prompt's file take precedence.
    pub fn prompt_ids(
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
    pub fn check_fits(&self, id: &str, prompt: &[u32]) -> Result<()> {
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

/// End tokens and stop strings that the user chose.
#[derive(Debug, Clone, Default)]
pub struct Ends {
    /// End tokens that replace the target's.
    pub eos_token_ids: Option<Vec<u32>>,
    /// Strings that end an answer.
    pub stop_strings: Vec<String>,
    /// Whether these apply only to answers, so that heads and adapters may have been trained with others.
    pub only_answers: bool,
}

impl Ends {
    /// Returns whether an export may have been trained with another value of this provenance key.
    pub fn leave_open(&self, key: &str) -> bool {
        let are_chosen = self.eos_token_ids.is_some() || !self.stop_strings.is_empty();
        self.only_answers && are_chosen && matches!(key, "eos_token_ids" | "stop_strings")
    }
}
