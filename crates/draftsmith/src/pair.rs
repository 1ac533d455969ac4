//! A target and, where there is one, its draft, with the text side they share.

use std::sync::Arc;

use anyhow::{Result, bail};
use draftsmith_data::{ChatFormat, Message, TextTokenizer};
use draftsmith_decode::Limits;
use draftsmith_model::CausalLm;

use crate::ends::StopText;

/// Models that belong together. Weights are shared with the workspace that they are from.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) target: CausalLm,
    pub(crate) draft: Option<CausalLm>,
    pub(crate) tokenizer: Arc<TextTokenizer>,
    pub(crate) chat_format: Arc<ChatFormat>,
    /// The tokens that end an answer.
    pub(crate) eos_token_ids: Vec<u32>,
    /// What else ends one.
    pub(crate) text_end: Option<Arc<StopText>>,
}

/// How text becomes tokens, without any model's weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TextSide<'a> {
    pub(crate) tokenizer: &'a TextTokenizer,
    pub(crate) chat_format: &'a ChatFormat,
    /// The longest sequence that every model can read.
    pub(crate) context: usize,
}

impl TextSide<'_> {
    /// The ids of a conversation up to where the answer begins.
    pub(crate) fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(self.chat_format, messages)?)
    }
}

impl Pair {
    /// The same with another draft.
    pub(crate) fn with_draft(&self, draft: CausalLm) -> Self {
        Self {
            target: self.target.clone(),
            draft: Some(draft),
            tokenizer: self.tokenizer.clone(),
            chat_format: self.chat_format.clone(),
            eos_token_ids: self.eos_token_ids.clone(),
            text_end: self.text_end.clone(),
        }
    }

    /// When answers of up to so many tokens end.
    pub(crate) fn limits(&self, max_new_tokens: usize) -> Limits {
        let text_end = self.text_end.clone().map(|end| end as _);
        Limits { text_end, ..Limits::new(max_new_tokens, self.eos_token_ids.clone()) }
    }

    /// The ids of a conversation up to where the answer begins.
    pub(crate) fn encode(&self, messages: &[Message]) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_chat(&self.chat_format, messages)?)
    }

    /// The longest sequence that every model of the pair can read.
    pub(crate) fn context(&self) -> usize {
        let draft = self.draft.iter().map(|draft| draft.shape().context);
        draft.fold(self.target.shape().context, usize::min)
    }

    /// Checks that a prompt leaves room for at least one token.
    pub(crate) fn check_fits(&self, id: &str, prompt: &[u32]) -> Result<()> {
        let context = self.context();
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
