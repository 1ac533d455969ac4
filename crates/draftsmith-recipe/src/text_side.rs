//! The text side of a target: tokenizer, chat template, and the tokens and strings that end
//! answers. It needs no weights.

use std::sync::Arc;

use anyhow::{Result, ensure};
use draftsmith_data::{
    ChatFormat, DataError, FinishReason, Message, Prompt, StopStrings, TextTokenizer,
};
use draftsmith_decode::Limits;
use draftsmith_theory::TextEnd;

use crate::tool_calls;

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

    /// Finds where decoding would end an answer, after the first `prompt_len` of the tokens `ids`: the length up to
    /// the end of a stop string, or up to an end token if `by_token`. `None` if it ends at neither.
    pub fn end_of(
        &self,
        ids: &[u32],
        prompt_len: usize,
        by_token: bool,
    ) -> Option<(usize, FinishReason)> {
        let stop = self.text_end.as_deref();
        (prompt_len + 1..=ids.len()).find_map(|len| {
            let is_end = by_token && self.eos_token_ids.contains(&ids[len - 1]);
            let is_stopped =
                || stop.is_some_and(|stop| stop.is_reached(&mut ids[..len].iter().rev().copied()));
            match is_end {
                true => Some((len, FinishReason::Eos)),
                false => is_stopped().then_some((len, FinishReason::StopString)),
            }
        })
    }

    /// Encodes a conversation as token ids, up to the start of the next answer.
    pub fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// Encodes a prompt up to the answer of turn `number`, counted from 0, with its own variables of the
    /// chat template. `responses` answer earlier turns.
    ///
    /// # Errors
    /// If the template refuses the messages, or an answer does not call the tools whose results follow.
    pub fn encode_turn(
        &self,
        prompt: &Prompt,
        number: usize,
        responses: &[String],
    ) -> Result<Vec<u32>> {
        let format = self.format_of(prompt)?;
        let messages = prompt.messages(number, &self.contents(prompt, &responses[..number])?);
        Ok(self.tokenizer.encode_chat(&format, &messages)?)
    }

    /// Returns the chat format with a prompt's own variables.
    fn format_of(&self, prompt: &Prompt) -> Result<ChatFormat> {
        let arguments = (*prompt.arguments).clone();
        Ok((*self.chat_format).clone().map(|it| it.with_arguments(arguments))?)
    }

    /// Returns the texts of answers without the calls of tools whose recorded results follow.
    fn contents(&self, prompt: &Prompt, responses: &[String]) -> Result<Vec<String>> {
        let mut contents: Vec<String> = Vec::new();
        for (turn, response) in responses.iter().enumerate() {
            let mut content = Some(response.clone());
            if prompt.calls_tools(turn) {
                let written = self.answer_text((prompt, turn), &contents, "")?;
                let ids = self.tokenizer.encode(&written, false)?;
                content = tool_calls::text_before(&self.tokenizer.decode(&ids, true)?, response);
            }
            contents.push(content.ok_or_else(|| {
                let row = prompt.row_id(turn);
                DataError::Invalid(format!("the answer to `{row}` makes other calls of tools"))
            })?);
        }
        Ok(contents)
    }

    /// Returns an answer with the calls of a turn as the chat template writes it.
    fn answer_text(
        &self,
        (prompt, turn): (&Prompt, usize),
        contents: &[String],
        content: &str,
    ) -> Result<String> {
        let ChatFormat::Template(template) = self.format_of(prompt)? else {
            return Err(DataError::Invalid("calls of tools need a chat template".to_owned()).into());
        };
        let mut messages = prompt.messages(turn, contents);
        let before = template.render(&messages, true)?;
        messages.push(prompt.turns[turn].answer(content));
        let whole = template.render(&messages, false)?;
        // A template may begin an answer that is to come with more, such as an empty thought.
        let same = before.chars().zip(whole.chars()).take_while(|(one, other)| one == other);
        let num_bytes: usize = same.map(|(character, _)| character.len_utf8()).sum();
        Ok(whole[num_bytes..].to_owned())
    }

    /// Returns the file's answer to a turn, with its calls of tools as the chat template writes them.
    /// `responses` answer earlier turns.
    ///
    /// # Errors
    /// If the template refuses the messages, or an earlier answer makes other calls.
    pub fn answer_with_calls(
        &self,
        prompt: &Prompt,
        turn: usize,
        responses: &[String],
    ) -> Result<String> {
        let content = prompt.turns[turn].response.as_deref().unwrap_or_default();
        self.answer_text((prompt, turn), &self.contents(prompt, responses)?, content)
    }

    /// Returns whether a conversation ends after the answers `responses` because the last one does not call the
    /// tools whose results follow.
    pub fn ends_by_call(&self, prompt: &Prompt, responses: &[String]) -> bool {
        let is_call = responses.len().checked_sub(1).is_some_and(|last| prompt.calls_tools(last));
        is_call && self.contents(prompt, responses).is_err()
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
