//! A reader of prompt sets in their published forms, which turns each record into a [`Prompt`].
//!
//! The form is recognised by content, not by the file's name. `prompts/file.rs` and
//! `prompts/table.rs` split a file into records, `prompts/forms.rs` interprets a record's keys, and
//! `prompts/selection.rs` defines splits and duplicates. The chat template, not this module, turns
//! a prompt into model input.

mod file;
mod forms;
mod given_tokens;
mod record;
mod selection;
mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use self::file::Records;
pub use self::given_tokens::GivenTokens;
use self::record::{PROMPT_FORMS, Problem, Record};
pub use self::selection::{ContentHash, LengthBounds, SourceWeight, SplitRange};
use crate::chat_template::Message;
use crate::error::{DataError, Result};

/// A conversation to respond to, with one user text per turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The id `source#n`, where `n` is the record's index in its file, from 0. A prompt whose
    /// tokens are kept has its `own_id` instead, if there is one.
    pub id: String,
    /// The record's own id under `question_id`, `task_id` or `id`, a number or a string. By it,
    /// answers can be joined with questions.
    pub own_id: Option<serde_json::Value>,
    /// The file's name without `.jsonl`, `.json`, `.parquet`, `.gz` and `.zst`.
    pub source: String,
    /// The record's category, if it has one.
    pub category: Option<String>,
    /// The turns, at least one.
    pub turns: Vec<Turn>,
    /// The system text, if the conversation has one.
    pub system: Option<String>,
    /// The record's own variables of the chat template: its `chat_template_kwargs`, and its `tools`.
    pub arguments: Box<serde_json::Map<String, serde_json::Value>>,
}

/// One user text, or the results of tools, and, if the file has one, the assistant's answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Turn {
    /// The user text; empty only before results.
    pub user: String,
    /// The messages with the results of tools that the answer before called; empty after a user text.
    pub results: Vec<Message>,
    /// The answer in the file; never empty.
    pub response: Option<String>,
    /// The keys of the answer in the file that calls tools: `tool_calls`, and `content` if it is null. Empty
    /// without calls.
    pub calls: serde_json::Map<String, serde_json::Value>,
    /// The turn as token ids; `None` unless the file has them and [`Prompts::keeps_tokens`] is set.
    pub tokens: Option<GivenTokens>,
}

impl Turn {
    /// Returns whether the file has an answer to this turn, as text or as token ids.
    pub fn has_response(&self) -> bool {
        self.response.is_some() || self.tokens.is_some() || !self.calls.is_empty()
    }

    /// Returns the messages before the answer.
    fn opening(&self) -> Vec<Message> {
        match self.results.is_empty() {
            true => vec![Message::user(&self.user)],
            false => self.results.clone(),
        }
    }

    /// Returns the message of an answer with the recorded calls, if there are some.
    pub fn answer(&self, content: &str) -> Message {
        let mut keys = self.calls.clone();
        if !content.is_empty() {
            keys.shift_remove("content");
        }
        Message { keys, ..Message::assistant(content) }
    }
}

/// Returns the source in a row's id of the form `source#n` or `source#n#turn`, which is the stem of
/// the prompt file's name.
pub fn source_of(row_id: &str) -> &str {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut source = row_id;
    while let Some((before, _)) = source.rsplit_once('#').filter(|(_, number)| is_number(number)) {
        source = before;
    }
    source
}

impl Prompt {
    /// Returns the id of a turn's row: the prompt's id for turn 0, `source#n#turn` for later turns.
    pub fn row_id(&self, turn: usize) -> String {
        if turn == 0 { self.id.clone() } else { format!("{}#{turn}", self.id) }
    }

    /// Returns whether the results of tools follow the answer of `turn`.
    pub fn calls_tools(&self, turn: usize) -> bool {
        self.turns.get(turn + 1).is_some_and(|next| !next.results.is_empty())
    }

    /// Returns the messages before the answer of `turn`: the system text, the earlier turns with
    /// `responses` as their answers, and the turn's user text or results. An answer before results gets the
    /// calls of the file, and its response is the text before them.
    ///
    /// # Panics
    /// If `turn` does not exist, or if there are fewer responses than earlier turns.
    pub fn messages(&self, turn: usize, responses: &[String]) -> Vec<Message> {
        assert!(turn < self.turns.len(), "`{}` has no turn {turn}", self.id);
        assert!(responses.len() >= turn, "`{}`: turn {turn} needs {turn} responses", self.id);
        let mut messages: Vec<Message> = self.system.iter().map(Message::system).collect();
        for (at, (earlier, response)) in self.turns[..turn].iter().zip(responses).enumerate() {
            messages.extend(earlier.opening());
            messages.push(match self.calls_tools(at) {
                true => earlier.answer(response),
                false => Message::assistant(response),
            });
        }
        messages.extend(self.turns[turn].opening());
        messages
    }
}

/// The prompts of a file in any of the published forms, read lazily:
///
/// | form | keys of a record |
/// |---|---|
/// | Spec-Bench `question.jsonl` | `turns` (user texts), `category` |
/// | GSM8K and others | `question`, `answer`; `context` precedes the question; `system_prompt` (OpenOrca) is the system text of any plain form |
/// | HumanEval | `task_id`, `prompt`; its `canonical_solution` continues the prompt and is not used as an answer |
/// | plain | `prompt`, and `response`, `answer` or `completion`, and `category` |
/// | SpecDec++ | `prompt` and, if tokens are kept ([`Self::keeps_tokens`]), `prefix`, `tokens`, `draft` and `p_acc` |
/// | Alpaca, Dolly | `instruction`, `input` or `context`, `output`; the prompt is the instruction, followed by `\nInput: ` and the input if there is one |
/// | ShareGPT | `conversations` of `role` and `content`, or of `from` (`human`, `gpt`, `system`) and `value`; `system` beside it is the system text |
/// | chat | `messages` of `role` (`user`, `assistant`, `system`, `tool`) and `content`, and an assistant's `tool_calls` |
///
/// A plain form's answer may also be under another plain form's key. Records are lines of JSON, the
/// elements of one JSON array, or the rows of a Parquet table whose columns have the keys' names. JSON may be compressed with gzip or zstd. A byte-order mark,
/// blank lines and mixed line endings are accepted. The published ShareGPT files were truncated. In
/// these, an answer at the beginning of a conversation is dropped. A conversation without a user
/// text is dropped too, but still counts in the ids of later records. A record has at most 8 MB and
/// 100,000 values.
///
/// # Errors
/// The last item is an error if the file cannot be read or decompressed or holds no prompt, or if a
/// record is not JSON, is too large, has no known form or has an empty user text. The error names
/// the line. With [`Self::skips_malformed`] such records are skipped instead.
pub struct Prompts {
    path: PathBuf,
    /// The file's name without `.jsonl`, `.json`, `.parquet`, `.gz` and `.zst`.
    pub source: String,
    /// Whether malformed records are skipped and counted. A file in which all records are malformed
    /// is still an error. So is a file in which the next record cannot be found, because of
    /// truncated compressed text, a syntax error in a JSON array or a malformed Parquet page.
    pub skips_malformed: bool,
    /// Whether prompts and answers that the file has as token ids are kept.
    pub keeps_tokens: bool,
    /// The malformed records skipped so far.
    pub malformed: Malformed,
    /// The remaining records; `None` after the end or an error.
    records: Option<Records>,
    num_records: usize,
    num_prompts: usize,
}

/// The malformed records of a file that were skipped. They count in the ids of later prompts.
#[derive(Debug, Default)]
pub struct Malformed {
    /// The number of skipped records so far.
    pub num_records: usize,
    /// The errors of the first few skipped records.
    pub first: Vec<DataError>,
    /// The number of skipped records with images or other media.
    pub num_with_media: usize,
    /// The number of records with each key that prompts do not keep, such as `reasoning`.
    pub unrendered: BTreeMap<&'static str, usize>,
}

/// The number of malformed records whose errors are kept.
const MAX_ERRORS: usize = 3;

impl Prompts {
    /// Opens a prompt file.
    ///
    /// # Errors
    /// If the file cannot be read, or is a directory, a pipe or a device.
    pub fn open(path: &Path) -> Result<Self> {
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

    /// Reads the next prompt, skipping records without one.
    fn read_next(&mut self) -> Result<Option<Prompt>> {
        loop {
            let Some(records) = &mut self.records else { return Ok(None) };
            let Some(record) = records.next()? else { break };
            let index = self.num_records;
            self.num_records += 1;
            match record.and_then(|record| self.read_prompt(record, index)) {
                Ok(None) => {}
                Ok(Some(prompt)) => {
                    self.num_prompts += 1;
                    return Ok(Some(prompt));
                }
                Err(error) if self.skips_malformed => {
                    self.malformed.num_records += 1;
                    if self.malformed.first.len() < MAX_ERRORS {
                        self.malformed.first.push(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if self.num_prompts > 0 {
            return Ok(None);
        }
        Err(if self.malformed.first.is_empty() {
            DataError::invalid(format!(
                "`{}` holds no prompts: give one JSON object per line with {PROMPT_FORMS}",
                self.path.display()
            ))
        } else {
            self.malformed.first.remove(0)
        })
    }

    /// Reads the prompt in record `index`; `None` for a conversation that was truncated to nothing.
    fn read_prompt(&mut self, record: Record, index: usize) -> Result<Option<Prompt>> {
        let Record { position, value, unread } = record;
        self.malformed.num_with_media += usize::from(forms::media(&value).is_some());
        let content = forms::read_record(&value, self.keeps_tokens).map_err(|problem| {
            let problem = match (problem, unread) {
                (Problem::Unknown(_), Some((key, problem))) => Problem::key(key, problem),
                (problem, _) => problem,
            };
            problem.at(&self.path, position)
        })?;
        let Some(forms::Content { category, turns, system }) = content else { return Ok(None) };
        for key in forms::unrendered(&value) {
            *self.malformed.unrendered.entry(key).or_default() += 1;
        }
        let arguments = forms::arguments(&value).map_err(|it| it.at(&self.path, position))?;
        let arguments = Box::new(arguments);
        let source = self.source.clone();
        let own_id = forms::own_id(&value);
        let has_tokens = turns.iter().any(|turn| turn.tokens.is_some());
        let id = match own_id.as_ref().filter(|_| has_tokens) {
            Some(serde_json::Value::String(own)) if !own.is_empty() => own.clone(),
            Some(own @ serde_json::Value::Number(_)) => format!("{source}#{own}"),
            _ => format!("{source}#{index}"),
        };
        Ok(Some(Prompt { id, own_id, source, category, turns, system, arguments }))
    }
}

/// Says which keys of an answer were looked for in record `index` of a prompt file that lacks one,
/// and which keys the record has.
pub fn missing_answer(path: &Path, index: usize) -> String {
    let looked_for = forms::RESPONSE_KEYS.map(|key| format!("`{key}`")).join(", ");
    let keys = || {
        let mut records = Records::open(path).ok()?;
        (0..index).try_for_each(|_| records.next().ok()?.map(drop))?;
        Some(forms::list_keys(records.next().ok()??.ok()?.value.as_object()?))
    };
    let found = keys().map_or(String::new(), |keys| format!(", and the record has {keys}"));
    format!(
        "looked for {looked_for}, or an answer to each user text of `messages` or `conversations`{found}"
    )
}

impl fmt::Debug for Prompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prompts").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Iterator for Prompts {
    type Item = Result<Prompt>;

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
