//! Prompt sets in the forms they are published in, read into one [`Prompt`] each.
//!
//! The form is recognised by content, never by the file's name: `prompts/file.rs` cuts a file into
//! records (JSON lines or a JSON array, packed by gzip or zstd or not, or a Parquet table),
//! `prompts/forms.rs` says what a record's keys mean. What a prompt becomes for a model is the chat
//! template's business. `prompts/content.rs` tells prompts by what they say.

mod choice;
mod content;
mod file;
mod forms;
mod given_tokens;
mod record;
mod table;

use std::path::{Path, PathBuf};

pub use self::choice::{LengthBounds, SourceWeight};
pub use self::content::{ContentHash, SplitRange};
use self::file::Records;
pub use self::given_tokens::GivenTokens;
use self::record::{Problem, Record};
use crate::chat_template::Message;
use crate::error::DataError;

/// One conversation to be answered: a user text a turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// `source#n`, `n` the record's place in its file, from 0; of one whose tokens are kept, what it calls
    /// itself, if it does.
    pub id: String,
    /// What the record calls itself, a number or a string: `question_id`, `task_id` or `id`, so
    /// that answers can be joined with questions.
    pub own_id: Option<serde_json::Value>,
    /// The file's name without `.jsonl`, `.json`, `.parquet`, `.gz` and `.zst`.
    pub source: String,
    /// The record's own category, where it has one.
    pub category: Option<String>,
    /// The turns, at least one.
    pub turns: Vec<Turn>,
    /// The system text, where the conversation has one.
    pub system: Option<String>,
}

/// One user text and, where the file has one, the assistant's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// What the user says; never empty.
    pub user: String,
    /// The answer that stands in the file; never empty.
    pub response: Option<String>,
    /// The same as token ids, where the file has those and they are kept.
    pub tokens: Option<GivenTokens>,
}

impl Turn {
    /// Whether the file has an answer.
    #[must_use]
    pub fn has_response(&self) -> bool {
        self.response.is_some() || self.tokens.is_some()
    }
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
/// | SpecDec++ | `prompt`, and, where tokens are kept ([`Self::keeping_tokens`]), `prefix`, `tokens`, `draft` and `p_acc` |
/// | Alpaca | `instruction`, `input`, `output`; the prompt is the instruction, then `\nInput: ` and the input where there is one |
/// | ShareGPT | `conversations` of `from` (`human`, `gpt`, `system`) and `value` |
/// | chat | `messages` of `role` (`user`, `assistant`, `system`) and `content` |
///
/// Records are lines of JSON, the elements of one JSON array, or the rows of a Parquet table whose
/// text columns carry the keys' names; JSON may be packed by gzip or zstd. A byte-order mark, blank lines
/// and mixed line endings are fine. The published ShareGPT files were cut at a length: an answer
/// that begins a conversation is dropped there, and so is a conversation without a user text
/// (which keeps its number). A record has at most 8 MB and 100,000 values.
///
/// # Errors
/// An item is an error, the last one, if the file cannot be read or decompressed, holds no prompt,
/// or has a record that is not JSON, larger than a prompt may be, in no known form, or with an
/// empty user text; with its line. Such records may also be skipped ([`Self::skipping_malformed`]).
#[derive(Debug)]
pub struct Prompts {
    path: PathBuf,
    source: String,
    /// None after the end or an error.
    records: Option<Records>,
    num_records: usize,
    num_prompts: usize,
    skips_malformed: bool,
    keeps_tokens: bool,
    malformed: Malformed,
}

/// The records of a file that are no prompts and were skipped. They keep their numbers in the ids of
/// those behind them.
#[derive(Debug, Default)]
pub struct Malformed {
    /// How many there were so far.
    pub num_records: usize,
    /// What is wrong with the first of them, a few at most.
    pub first: Vec<DataError>,
}

/// Of malformed records so many are told in full.
const MALFORMED_TOLD: usize = 3;

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
            skips_malformed: false,
            keeps_tokens: false,
            malformed: Malformed::default(),
        })
    }

    /// The same, which skips and counts records that are no prompts. A file in which all are malformed
    /// is an error, and so is one that breaks where the next record cannot be found: packed text that
    /// was cut, a JSON array that is no JSON, a broken Parquet page.
    #[must_use]
    pub fn skipping_malformed(self) -> Self {
        Self { skips_malformed: true, ..self }
    }

    /// The same, which keeps prompts and answers that the file has as token ids.
    #[must_use]
    pub fn keeping_tokens(self) -> Self {
        Self { keeps_tokens: true, ..self }
    }

    /// What was skipped so far.
    #[must_use]
    pub fn malformed(&self) -> &Malformed {
        &self.malformed
    }

    /// What was skipped, when there is nothing more to read.
    #[must_use]
    pub fn into_malformed(self) -> Malformed {
        self.malformed
    }

    /// The file's name without `.jsonl`, `.json`, `.parquet`, `.gz` and `.zst`.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The next prompt, of as many records as it takes.
    fn read_next(&mut self) -> Result<Option<Prompt>, DataError> {
        let Some(records) = &mut self.records else { return Ok(None) };
        while let Some(record) = records.next()? {
            let index = self.num_records;
            self.num_records += 1;
            let id = || format!("{}#{index}", self.source);
            let prompt = record.and_then(|record| {
                read_prompt(record, &self.path, &self.source, id, self.keeps_tokens)
            });
            match prompt {
                Ok(None) => {}
                Ok(Some(prompt)) => {
                    self.num_prompts += 1;
                    return Ok(Some(prompt));
                }
                Err(error) if self.skips_malformed => {
                    self.malformed.num_records += 1;
                    if self.malformed.first.len() < MALFORMED_TOLD {
                        self.malformed.first.push(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if self.num_prompts > 0 {
            return Ok(None);
        }
        let path = self.path.clone();
        Err(if self.malformed.first.is_empty() {
            DataError::NoPrompts { path }
        } else {
            self.malformed.first.remove(0)
        })
    }
}

/// The prompt that a record is; none of a conversation that was cut down to nothing.
fn read_prompt(
    record: Record,
    path: &Path,
    source: &str,
    id: impl Fn() -> String,
    keeps_tokens: bool,
) -> Result<Option<Prompt>, DataError> {
    let Record { place, value, unread } = record;
    let content =
        forms::read_record(&value, keeps_tokens).map_err(|problem| match (problem, unread) {
            (Problem::Unknown(_), Some((key, problem))) => Problem::key(key, problem),
            (problem, _) => problem,
        });
    let content = content.map_err(|problem| problem.at(path, place))?;
    let own_id = forms::own_id(&value);
    let id = |content: &forms::Content| {
        let has_tokens = content.turns.iter().any(|turn| turn.tokens.is_some());
        match own_id.as_ref().filter(|_| has_tokens) {
            Some(serde_json::Value::String(own)) if !own.is_empty() => own.clone(),
            Some(own @ serde_json::Value::Number(_)) => format!("{source}#{own}"),
            _ => id(),
        }
    };
    Ok(content.map(|content| Prompt {
        id: id(&content),
        own_id: own_id.clone(),
        source: source.to_owned(),
        category: content.category,
        turns: content.turns,
        system: content.system,
    }))
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
