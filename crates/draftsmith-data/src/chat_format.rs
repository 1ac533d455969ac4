//! The format of a chat for a model: the model's own chat template, a chosen template, or none.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use draftsmith_files::read_text;

use crate::chat_template::ChatTemplate;
use crate::error::{DataError, Result};
use crate::text_files::TextFiles;

/// Templates for models that were published without one, by name.
const BUILT_IN: [(&str, &str); 3] = [
    ("vicuna", include_str!("chat_template/built_in/vicuna.jinja")),
    ("llama-2", include_str!("chat_template/built_in/llama-2.jinja")),
    ("alpaca", include_str!("chat_template/built_in/alpaca.jinja")),
];
/// The name that chooses no template.
const NONE: &str = "none";

/// The format of a chat.
#[derive(Debug, Clone)]
pub enum ChatFormat {
    /// The format of a chat template.
    Template(Box<ChatTemplate>),
    /// A text without template: only the last user text, with the special tokens that the tokenizer
    /// adds.
    LastUserText,
    /// An unknown format: the model in this directory has no template, and none was chosen.
    Unknown(PathBuf),
}

impl ChatFormat {
    /// Chooses the format for the model in `dir`. `chosen` is `vicuna`, `llama-2`, `alpaca` or the
    /// path of a Jinja file for a template, `none` to encode only the last user text, and `None`
    /// for the model's own template. Special tokens are always those of the model.
    ///
    /// # Errors
    /// If a file is missing or malformed.
    pub fn choose(dir: impl Into<TextFiles>, chosen: Option<&str>) -> Result<Self> {
        let files = dir.into();
        let Some(chosen) = chosen else {
            let place = files.place().to_path_buf();
            let own = ChatTemplate::from_model_dir(files)?;
            return Ok(own.map_or(Self::Unknown(place), |own| Self::Template(own.into())));
        };
        if chosen == NONE {
            return Ok(Self::LastUserText);
        }
        let path = Path::new(chosen);
        let source = match BUILT_IN.iter().find(|(name, _)| *name == chosen) {
            Some((_, source)) => (*source).to_owned(),
            None => read_text(path).map_err(|source| {
                DataError::invalid(format!(
                    "cannot read the chat template `{chosen}`: {source}; hint: give `vicuna`, `llama-2`, `alpaca`, \
                     `none` or the path of a Jinja file"
                ))
            })?,
        };
        Ok(Self::Template(ChatTemplate::with_tokens_of(&files, path, source)?.into()))
    }

    /// Changes the template, if there is one.
    ///
    /// # Errors
    /// If `change` fails.
    pub fn map(self, change: impl FnOnce(ChatTemplate) -> Result<ChatTemplate>) -> Result<Self> {
        match self {
            Self::Template(template) => Ok(Self::Template(change(*template)?.into())),
            Self::LastUserText | Self::Unknown(_) => Ok(self),
        }
    }

    /// Computes the SHA-256 of the template's source, as hex; `None` without a template.
    pub fn hash(&self) -> Option<String> {
        match self {
            Self::Template(template) => Some(template.hash()),
            Self::LastUserText | Self::Unknown(_) => None,
        }
    }

    /// Returns the special tokens that the template can use, by name; empty without a template.
    pub fn special_tokens(&self) -> BTreeMap<String, String> {
        let Self::Template(template) = self else { return BTreeMap::new() };
        let tokens = template.special_tokens();
        tokens.map(|(name, token)| (name.to_owned(), token.to_owned())).collect()
    }
}
