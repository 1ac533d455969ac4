//! Chat templates, the Jinja programs that turn messages into one text in the model's format.
//!
//! Rendering follows transformers: `trim_blocks` and `lstrip_blocks`, Python's string methods,
//! `raise_exception`, a `tojson` without HTML escapes, `tools` and `documents` set to none unless they
//! are arguments, and the special tokens of `tokenizer_config.json` as variables. Unlike there, `strftime_now` writes a
//! fixed date, because a prompt that depends on the day is not reproducible.
//!
//! A template comes with a model and is an untrusted program: `program.rs` runs it on a separate
//! stack, within an [`Allowance`] of steps, bytes and time that exceeds the needs of any real chat.

mod allowance;
mod methods;
mod operations;
mod printed;
mod program;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use chrono::{NaiveDate, NaiveTime};
use draftsmith_files::hash_bytes;
use minijinja::value::{Serde, Value};
use minijinja::{Error, ErrorKind};
use serde_json::{Map, Value as Json};

use self::allowance::Allowance;
use crate::error::{DataError, Result};
use crate::text_files::TextFiles;
use crate::tokenizer_config::TokenizerConfig;

/// The file that holds only the template (transformers 5).
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The largest number of characters of a template's message that an error repeats.
const MAX_PROBLEM_CHARS: usize = 400;

/// One message of a chat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The author: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text of the message.
    pub content: String,
    /// Further keys of the message, such as `tool_calls`. A `content` among them replaces the text.
    pub keys: Map<String, Json>,
}

impl Message {
    /// Creates a system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".to_owned(), content: content.into(), ..Self::default() }
    }

    /// Creates a user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".to_owned(), content: content.into(), ..Self::default() }
    }

    /// Creates an assistant message.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant".to_owned(), content: content.into(), ..Self::default() }
    }
}

/// A model's chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    /// The file that holds the source.
    path: PathBuf,
    source: String,
    special_tokens: BTreeMap<&'static str, String>,
    /// Today, for `strftime_now`.
    date: NaiveDate,
    /// Further variables of the template.
    arguments: Map<String, Json>,
}

/// The variables that no argument can replace.
const RESERVED: [&str; 2] = ["messages", "add_generation_prompt"];

/// Today for templates that write the date, unless another is chosen: the date that Llama 3's templates write by
/// default. A fixed date makes the same prompts on every day.
const DATE: NaiveDate = NaiveDate::from_ymd_opt(2024, 7, 26).expect("a date");

impl ChatTemplate {
    /// Reads the chat template of a checkpoint directory, if there is one. It is in
    /// `chat_template.jinja`, or else under the key `chat_template` of `tokenizer_config.json`.
    /// That key holds a text, or a list of `{"name": …, "template": …}` with one named `default`.
    ///
    /// # Errors
    /// If a file cannot be read, `tokenizer_config.json` is not JSON or has a key of the wrong
    /// type, or the template is not valid Jinja or is too large.
    pub fn from_model_dir(dir: impl Into<TextFiles>) -> Result<Option<Self>> {
        let files = dir.into();
        let config = TokenizerConfig::read(&files)?;
        let (path, source) = match files.read_if_present(TEMPLATE_FILE)? {
            Some(source) => (files.path(TEMPLATE_FILE), source),
            None => match config.template()? {
                Some((path, source)) => (path.to_path_buf(), source),
                None => return Ok(None),
            },
        };
        Self::new(path, source, config).map(Some)
    }

    /// Builds a template from `source`, with the special tokens of a model.
    ///
    /// # Errors
    /// As for [`Self::from_model_dir`].
    pub(crate) fn with_tokens_of(files: &TextFiles, path: &Path, source: String) -> Result<Self> {
        Self::new(path.to_path_buf(), source, TokenizerConfig::read(files)?)
    }

    fn new(path: PathBuf, source: String, config: TokenizerConfig) -> Result<Self> {
        program::check(&plain_source(&source))
            .map_err(|e| DataError::text(&path, "parse the chat template", &describe(&e)))?;
        let special_tokens = config.special_tokens;
        Ok(Self { path, source, special_tokens, date: DATE, arguments: Map::new() })
    }

    /// Sets today for a template that writes the date (`strftime_now`), as `YYYY-MM-DD`. It is 2024-07-26 by default,
    /// so that prompts are the same on every day.
    ///
    /// # Errors
    /// If the text is not a date.
    pub fn with_date(self, date: &str) -> Result<Self> {
        let date = date.parse().map_err(|_| {
            let expected = "is not a date, expected one such as `2026-01-31`";
            DataError::invalid(format!("`{date}` {expected}"))
        })?;
        Ok(Self { date, ..self })
    }

    /// Adds variables of the template, such as `enable_thinking` or `tools`, as the arguments of
    /// `apply_chat_template` in transformers.
    ///
    /// # Errors
    /// If a name is that of the messages or of the generation prompt.
    pub fn with_arguments(mut self, arguments: Map<String, Json>) -> Result<Self> {
        if let Some(name) = RESERVED.iter().find(|name| arguments.contains_key(**name)) {
            let problem = format!("`{name}` is set for each prompt; hint: remove it");
            return Err(DataError::invalid(problem));
        }
        self.arguments.extend(arguments);
        Ok(self)
    }

    /// Renders a chat as text. The text includes special tokens, so encode it without adding any.
    /// With `add_generation_prompt`, the text ends where the assistant's answer begins.
    ///
    /// # Errors
    /// If the template raises an error, fails, or exceeds its allowance.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let len = |keys: &Map<String, Json>| Json::Object(keys.clone()).to_string().len();
        let num_bytes = messages.iter().map(|it| it.content.len() + len(&it.keys)).sum::<usize>();
        let allowance = Allowance::new(messages.len(), num_bytes + len(&self.arguments));
        let messages = messages.iter().map(|Message { role, content, keys }| {
            let own = [("role", Value::from(&**role)), ("content", Value::from(&**content))];
            let own = own.into_iter().filter(|(name, _)| !keys.contains_key(*name));
            Value::from_pairs(
                own.chain(keys.iter().map(|(name, it)| (&**name, Value::from(Serde(it))))),
            )
        });
        let mut context = vec![
            ("messages", messages.collect::<Value>()),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        let special_tokens = self.special_tokens.iter();
        context.extend(special_tokens.map(|(name, token)| (*name, Value::from(token.as_str()))));
        let arguments = self.arguments.iter();
        context.extend(arguments.map(|(name, it)| (name.as_str(), Value::from(Serde(it)))));
        let source = plain_source(&self.source);
        let date = self.date.and_time(NaiveTime::MIN);
        program::run(&source, Value::from_pairs(context), allowance, date)
            .map_err(|e| DataError::text(&self.path, "render these messages", &describe(&e)))
    }

    /// Yields the special tokens that the template can use, with their names.
    pub fn special_tokens(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.special_tokens.iter().map(|(name, token)| (*name, token.as_str()))
    }

    /// Computes the SHA-256 of the template's source, as hex. Arguments, and a chosen date of a template that
    /// writes it, belong to the source.
    pub fn hash(&self) -> String {
        let mut source = self.source.clone();
        if self.date != DATE && self.source.contains("strftime_now") {
            source += &format!("\n{}", self.date);
        }
        if !self.arguments.is_empty() {
            source += &format!("\n{}", Json::Object(self.arguments.clone()));
        }
        hash_bytes(source.as_bytes())
    }
}

/// Describes an error in one line of text, with its line number in the template. The template's own
/// message is untrusted, so control characters are removed.
fn describe(error: &Error) -> String {
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (ErrorKind::OutOfFuel, _) => "it runs for more steps than any chat needs".to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let mut characters = what.chars().map(|c| if c.is_whitespace() { ' ' } else { c });
    let mut message: String =
        characters.by_ref().filter(|c| !c.is_control()).take(MAX_PROBLEM_CHARS).collect();
    if characters.next().is_some() {
        message.push('…');
    }
    match error.line() {
        Some(line) => format!("{message} (line {line} of the template)"),
        None => message,
    }
}

/// Rewrites a source where Jinja and the engine differ. Lines end in `\n`. `{% generation %}` …
/// `{% endgeneration %}`, with which transformers marks assistant text and which renders to its
/// contents, becomes a condition that is always true. Escapes `\U0001F600` in texts become
/// characters.
fn plain_source(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut plain = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(start) = rest.find('{') {
        let tag = &rest[start..];
        let close = match tag.as_bytes().get(1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => "#}",
            _ => {
                plain.push_str(&rest[..=start]);
                rest = &rest[start + 1..];
                continue;
            }
        };
        let Some(length) = tag_length(tag, close) else { break };
        plain.push_str(&rest[..start]);
        let tag = &tag[..length];
        let inside = tag[2..length - 2].trim_matches(['-', '+']).trim();
        match (close, inside) {
            ("%}", "generation") => plain += &tag.replacen("generation", "if true", 1),
            ("%}", "endgeneration") => plain += &tag.replacen("endgeneration", "endif", 1),
            // Jinja keeps the newline after this tag.
            ("%}", "raw") if !tag.ends_with("-%}") => plain += &tag.replacen("%}", "+%}", 1),
            ("#}", _) => plain += tag,
            _ => plain += &with_characters(tag),
        }
        rest = &rest[start + length..];
        if (close, inside) == ("%}", "raw") {
            let end = rest.find("endraw").unwrap_or(0);
            plain += &rest[..end];
            rest = &rest[end..];
        }
    }
    plain + rest
}

/// Returns the length of the tag that a text begins with, or `None` if nothing closes it. A text in
/// quotes inside the tag closes nothing; comments have no quotes.
fn tag_length(tag: &str, close: &str) -> Option<usize> {
    if close == "#}" {
        return tag[2..].find(close).map(|end| end + 4);
    }
    let (mut quote, mut is_escaped) = (None, false);
    for (at, c) in tag.char_indices().skip(2) {
        match quote {
            Some(_) if is_escaped => is_escaped = false,
            Some(_) if c == '\\' => is_escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if tag[at..].starts_with(close) => return Some(at + 2),
            None if c == '"' || c == '\'' => quote = Some(c),
            None => {}
        }
    }
    None
}

/// Replaces escapes `\U` with eight hexadecimal digits by their characters.
fn with_characters(tag: &str) -> String {
    let mut plain = String::with_capacity(tag.len());
    let mut rest = tag;
    while let Some(at) = rest.find('\\') {
        plain += &rest[..at];
        let escape = &rest[at..];
        let number = escape.strip_prefix("\\U").and_then(|digits| digits.get(..8));
        let character = number.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let (character, mut length) = match escape.as_bytes().get(1) {
            Some(b'a') => (Some('\x07'), 2),
            Some(b'v') => (Some('\x0b'), 2),
            _ => (character.and_then(char::from_u32), 10),
        };
        match character {
            Some(character) => plain.push(character),
            None => {
                length = 1 + escape[1..].chars().next().map_or(0, char::len_utf8);
                plain += &escape[..length];
            }
        }
        rest = &escape[length..];
    }
    plain + rest
}

#[cfg(test)]
mod tests;
