//! Prompt sets in the forms they are published in, read into one [`Prompt`] each.
//!
//! The form is recognised by content, never by the file's name: `prompts/file.rs` cuts a file into
//! records (JSON lines or a JSON array, gzipped or not, or a Parquet table), `prompts/forms.rs`
//! says what a record's keys mean. What a prompt becomes for a model is the chat template's
//! business.

mod file;
mod forms;
mod record;
mod table;

use std::path::{Path, PathBuf};

use self::file::Records;
use self::forms::Problem;
use self::record::Record;
use crate::chat_template::Message;
use crate::error::DataError;

/// One conversation to be answered: a user text a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// `source#n`, `n` the record's place in its file, from 0.
    pub id: String,
    /// What the record calls itself, a number or a string: `question_id`, `task_id` or `id`, so
    /// that answers can be joined with questions.
    pub own_id: Option<serde_json::Value>,
    /// The file's name without `.jsonl`, `.json`, `.parquet` and `.gz`.
    pub source: String,
    /// The record's own category, where it has one.
    pub category: Option<String>,
    /// The turns, at least one.
    pub turns: Vec<Turn>,
    /// The system text, where the conversation has one.
    pub system: Option<String>,
}

/// One user text and, where the file has one, the assistant's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// What the user says; never empty.
    pub user: String,
    /// The answer that stands in the file; never empty.
    pub response: Option<String>,
}

impl Prompt {
    /// The id of a turn's row: the prompt's own for turn 0, `source#n#turn` later.
    #[must_use]
    pub fn row_id(&self, turn: usize) -> String {
        if turn == 0 { self.id.clone() } else { format!("{}#{turn}", self.id) }
    }

    /// The messages that lead up to the answer of `turn`: the system text, the earlier turns with
    /// `responses` as their answers, and the turn's user text.
    ///
    /// # Panics
    /// If there is no such turn, or fewer responses than earlier turns.
    #[must_use]
    pub fn messages(&self, turn: usize, responses: &[String]) -> Vec<Message> {
        assert!(turn < self.turns.len(), "`{}` has no turn {turn}", self.id);
        assert!(responses.len() >= turn, "`{}`: turn {turn} needs {turn} responses", self.id);
        let mut messages: Vec<Message> = self.system.iter().map(Message::system).collect();
        for (earlier, response) in self.turns[..turn].iter().zip(responses) {
            messages.push(Message::user(&earlier.user));
            messages.push(Message::assistant(response));
        }
        messages.push(Message::user(&self.turns[turn].user));
        messages
    }
}

/// The prompts of a file in any of the published forms, read as they are asked for:
///
/// | form | keys of a record |
/// |---|---|
/// | Spec-Bench `question.jsonl` | `turns` (user texts), `category` |
/// | GSM8K | `question`, `answer` |
/// | HumanEval | `task_id`, `prompt`; its `canonical_solution` continues the prompt and is not taken for an answer |
/// | plain | `prompt`, and `response`, `answer` or `completion`, and `category` |
/// | Alpaca | `instruction`, `input`, `output`; the prompt is the instruction, then `\nInput: ` and the input where there is one |
/// | ShareGPT | `conversations` of `from` (`human`, `gpt`, `system`) and `value` |
/// | chat | `messages` of `role` (`user`, `assistant`, `system`) and `content` |
///
/// Records are lines of JSON, the elements of one JSON array, or the rows of a Parquet table whose
/// text columns carry the keys' names; any of them may be gzipped. A byte-order mark, blank lines
/// and mixed line endings are fine. The published ShareGPT files were cut at a length: an answer
/// that begins a conversation is dropped there, and so is a conversation without a user text
/// (which keeps its number). A record has at most 8 MB and 100,000 values.
///
/// # Errors
/// An item is an error, the last one, if the file cannot be read or decompressed, holds no prompt,
/// or has a record that is not JSON, larger than a prompt may be, in no known form, or with an
/// empty user text; with its line.
#[derive(Debug)]
pub struct Prompts {
    path: PathBuf,
    source: String,
    /// None after the end or an error.
    records: Option<Records>,
    num_records: usize,
    num_prompts: usize,
}

impl Prompts {
    /// Opens a prompt file.
    ///
    /// # Errors
    /// If the file cannot be read, or is a directory, a pipe or a device.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Ok(Self {
            path: path.to_path_buf(),
            source: file::source_name(path),
            records: Some(Records::open(path)?),
            num_records: 0,
            num_prompts: 0,
        })
    }

    /// The file's name without `.jsonl`, `.json`, `.parquet` and `.gz`.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The next prompt, of as many records as it takes.
    fn read_next(&mut self) -> Result<Option<Prompt>, DataError> {
        let Some(records) = &mut self.records else { return Ok(None) };
        while let Some(Record { place, value, unread }) = records.next()? {
            let index = self.num_records;
            self.num_records += 1;
            let content = forms::read_record(&value).map_err(|problem| match (problem, unread) {
                (Problem::Unknown(_), Some((key, problem))) => Problem::key(key, problem),
                (problem, _) => problem,
            });
            let Some(content) = content.map_err(|problem| problem.at(&self.path, place))? else {
                continue;
            };
            self.num_prompts += 1;
            return Ok(Some(Prompt {
                id: format!("{}#{index}", self.source),
                own_id: forms::own_id(&value),
                source: self.source.clone(),
                category: content.category,
                turns: content.turns,
                system: content.system,
            }));
        }
        if self.num_prompts == 0 {
            return Err(DataError::NoPrompts { path: self.path.clone() });
        }
        Ok(None)
    }
}

impl Iterator for Prompts {
    type Item = Result<Prompt, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.read_next().transpose();
        if !matches!(next, Some(Ok(_))) {
            self.records = None;
        }
        next
    }
}

#[cfg(test)]
mod tests;
