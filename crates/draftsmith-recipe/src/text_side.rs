//! The text side of a target: tokenizer, chat template, and the tokens and strings that end
//! answers. It needs no weights.

use std::sync::Arc;

use anyhow::{Result, ensure};
use draftsmith_data::{ChatFormat, DataError, Message, Prompt, StopStrings, TextTokenizer};
use draftsmith_decode::Limits;

/// A target's tokenizer, chat template and end markers. Clones share memory with the workspace.
#[derive(Debug, Clone)]
pub struct TextSide {
    /// The tokenizer.
    pub tokenizer: Arc<TextTokenizer>,
    /// The chat template, with the markers that it uses.
    pub chat_format: Arc<ChatFormat>,
    /// The tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// The stop strings that end an answer; `None` if there are none.
    pub text_end: Option<Arc<StopStrings>>,
    /// The longest sequence, in tokens, that all loaded models can read.
    pub context: usize,
}

impl TextSide {
    /// Returns the ends of an answer: after `max_new_tokens` tokens, an end token or a stop string.
    pub fn limits(&self, max_new_tokens: usize) -> Limits {
        let text_end = self.text_end.clone().map(|end| end as _);
        Limits { text_end, ..Limits::new(max_new_tokens, self.eos_token_ids.clone()) }
    }

    /// Encodes a conversation as token ids, up to the start of the next answer.
    pub fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// Encodes a prompt up to the answer of turn `number`, counted from 0, with its own variables of the
    /// chat template. `responses` answer earlier turns.
    pub fn encode_turn(
        &self,
        prompt: &Prompt,
        number: usize,
        responses: &[String],
    ) -> Result<Vec<u32>> {
        let messages = prompt.messages(number, responses);
        if prompt.arguments.is_empty() {
            return self.encode(&messages);
        }
        let arguments = (*prompt.arguments).clone();
        let format = (*self.chat_format).clone().map(|it| it.with_arguments(arguments))?;
        Ok(self.tokenizer.encode_chat(&format, &messages)?)
    }

    /// Returns the reason why the chat template refuses a prompt's first turn, such as a system text
    /// that the model does not know; `None` if the template renders it.
    pub fn refusal(&self, prompt: &Prompt) -> Option<DataError> {
        let ChatFormat::Template(template) = &*self.chat_format else { return None };
        let template = template.clone().with_arguments((*prompt.arguments).clone());
        let render = || template?.render(&prompt.messages(0, &[]), true);
        let is_rendered = prompt.turns[0].tokens.is_none();
        is_rendered.then(|| render().err()).flatten()
    }

    /// Returns the token ids of a prompt up to the answer of turn `number`, counted from 0.
    /// `responses` answer earlier turns. Token ids in the prompt's file take precedence.
    pub fn prompt_ids(
        &self,
        prompt: &Prompt,
        number: usize,
        responses: &[String],
    ) -> Result<Vec<u32>> {
        match &prompt.turns[number].tokens {
            Some(given) => Ok(given.prompt_ids.clone()),
            None => self.encode_turn(prompt, number, responses),
        }
    }

    /// Checks that a prompt leaves room for at least one new token in the models' context.
    pub fn check_fits(&self, id: &str, prompt: &[u32]) -> Result<()> {
        let context = self.context;
        ensure!(
            prompt.len() < context,
            "prompt `{id}` has {} tokens, but the models' context holds {context}; \
             hint: shorten it, or remove it from its file",
            prompt.len()
        );
        Ok(())
    }
}

/// End tokens and stop strings that the user chose.
#[derive(Debug, Clone, Default)]
pub struct Ends {
    /// The end tokens that replace the target's; `None` keeps them.
    pub eos_token_ids: Option<Vec<u32>>,
    /// Strings that end an answer.
    pub stop_strings: Vec<String>,
    /// Whether these only end answers, so that heads and adapters may be trained with others.
    pub only_answers: bool,
}

impl Ends {
    /// Returns whether an export may have been trained with another value of the provenance `key`.
    pub fn leave_open(&self, key: &str) -> bool {
        let are_chosen = self.eos_token_ids.is_some() || !self.stop_strings.is_empty();
        self.only_answers && are_chosen && matches!(key, "eos_token_ids" | "stop_strings")
    }
}
