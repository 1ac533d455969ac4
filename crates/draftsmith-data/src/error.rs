//! The errors of this crate. Each message names the file and the line, key or column, and says what
//! to do about it. Callers pass finished text, so this module uses no other module of the crate.

use std::fmt;
use std::path::{Path, PathBuf};

use draftsmith_files::FileError;

/// An error of reading or writing prompts, tokenizers, chat templates, response files or rollouts.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file, or a line of one, is not JSON.
    #[error("`{path}`, line {line}, column {column}: not JSON: {problem}; fix or remove that line")]
    NotJson {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column in bytes, from 1; 0 if the text ends too early.
        column: usize,
        /// The parser's message.
        problem: String,
    },
    /// A prompt file begins like plain text or CSV.
    #[error(
        "`{path}` looks like plain text or CSV; hint: give prompts as JSON, one `{{\"prompt\": \"...\"}}` per line, or \
         as Parquet"
    )]
    PlainText {
        /// The file.
        path: PathBuf,
    },
    /// The prompt file holds no prompt.
    #[error("`{path}` holds no prompts: give one JSON object per line with {forms}")]
    NoPrompts {
        /// The file.
        path: PathBuf,
        /// The keys of all known forms.
        forms: &'static str,
    },
    /// A prompt file is a directory, a pipe or a device.
    #[error(
        "`{path}` is not a regular file, and prompts are read more than once; \
         hint: write them to a file"
    )]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A prompt record is too large, in no known form, or has a value that cannot be used.
    #[error("`{path}`, {position}: {problem}")]
    Record {
        /// The file.
        path: PathBuf,
        /// The record's position in the file.
        position: RecordPosition,
        /// The key, with what is wrong and what is expected.
        problem: String,
    },
    /// A key of `tokenizer_config.json` cannot be used.
    #[error("`{path}`: key `{key}` {problem}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, dotted.
        key: String,
        /// The problem, and what is expected.
        problem: String,
    },
    /// A chat template is not valid Jinja, or `tokenizer.json` is not a tokenizer, or rendering,
    /// encoding or decoding fails.
    #[error("`{path}`: cannot {action}: {problem}")]
    Text {
        /// The file that holds the template or the tokenizer.
        path: PathBuf,
        /// The failed action: `parse the chat template`, `render these messages`, `load the
        /// tokenizer`, `encode` or `decode`.
        action: &'static str,
        /// The library's message, with the line of a template.
        problem: String,
    },
    /// A model ships no chat template, and none was chosen.
    #[error(
        "`{path}` has no chat template, so the format of a chat is unknown; \
         hint: choose one with `--chat-template` or a recipe's `models.chat_template`: `vicuna`, `llama-2`, \
         `alpaca`, a Jinja file, or `none` to encode only the last user text"
    )]
    NoTemplate {
        /// The model's directory.
        path: PathBuf,
    },
    /// A Parquet file that is compressed by a codec that this build does not have.
    #[error(
        "`{path}` is compressed with {codec}, which this build does not read; hint: write it with zstd, snappy or \
         no compression"
    )]
    Codec {
        /// The file.
        path: PathBuf,
        /// The codec's name.
        codec: String,
    },
    /// A text that is not a date.
    #[error("`{0}` is not a date, expected one such as `2026-01-31`")]
    Date(String),
    /// The chosen chat template is neither built in nor a readable file.
    #[error(
        "cannot read the chat template `{chosen}`: {source}; \
         hint: give `vicuna`, `llama-2`, `alpaca`, `none` or the path of a Jinja file"
    )]
    ChosenTemplate {
        /// The name or path that was chosen.
        chosen: String,
        /// The error from the operating system.
        source: std::io::Error,
    },
    /// A model has its tokenizer only in an older format.
    #[error(
        "`{path}` has `{found}`, but draftsmith needs a `tokenizer.json`; \
         hint: convert it: python -c \"from transformers import AutoTokenizer as T; \
         T.from_pretrained('{path}').save_pretrained('{path}')\" \
         (with the packages transformers, sentencepiece and protobuf)"
    )]
    OldTokenizer {
        /// The model's directory.
        path: PathBuf,
        /// The name of the older file that was found.
        found: &'static str,
    },
    /// A stop string is empty.
    #[error("a stop string is empty and would end every answer before it begins: remove it")]
    EmptyStopString,
    /// The chat has no user message to encode.
    #[error("the chat has no user message, so there is nothing to answer: add one")]
    NoUserMessage,
    /// Target and draft do not share one tokenizer.
    #[error(
        "`{target}` and `{draft}` are different tokenizers: {difference}; \
         a draft must have its target's vocabulary"
    )]
    TokenizersDiffer {
        /// The target's `tokenizer.json`.
        target: PathBuf,
        /// The draft's `tokenizer.json`.
        draft: PathBuf,
        /// The first id or token that differs.
        difference: String,
    },
    /// A response row is invalid.
    #[error("row `{id}`: column `{column}` {problem}")]
    Row {
        /// The row's id.
        id: String,
        /// The column.
        column: &'static str,
        /// The problem, and what is expected.
        problem: String,
    },
    /// A rollout row is invalid, by itself or together with the other rows of its id.
    #[error("rollout `{id}` at {start}: column `{column}` {problem}")]
    Rollout {
        /// The row's id.
        id: String,
        /// The row's `start`.
        start: u32,
        /// The column.
        column: &'static str,
        /// The problem, and what is expected.
        problem: String,
    },
    /// A file holds an invalid row.
    #[error("`{path}`: {source}; build the data again")]
    RowInFile {
        /// The file.
        path: PathBuf,
        /// The error of the row.
        source: Box<DataError>,
    },
    /// A Parquet file is malformed or truncated, or its footer contradicts its pages.
    #[error("`{path}` is not a whole Parquet file: {problem}; build or fetch it again")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The contradiction, or the reader's message.
        problem: String,
    },
    /// Rows could not be encoded as Parquet.
    #[error("cannot encode `{path}` as Parquet: {problem}")]
    ParquetWrite {
        /// The file.
        path: PathBuf,
        /// The encoder's message.
        problem: String,
    },
    /// A column is missing, has the wrong type or holds a wrong value.
    #[error("`{path}`: column `{column}` {problem}; build the data again")]
    Column {
        /// The file.
        path: PathBuf,
        /// The column's name.
        column: &'static str,
        /// The problem, its row, and what is expected.
        problem: String,
    },
    /// A text column has an encoding that is not supported.
    #[error(
        "`{path}`: column `{column}` is encoded as {encoding}, which is not supported; \
         write the file with plain or dictionary encoding"
    )]
    Encoding {
        /// The file.
        path: PathBuf,
        /// The column's path.
        column: String,
        /// The encoding, as Parquet names it.
        encoding: String,
    },
    /// The provenance in a Parquet file is missing or malformed.
    #[error("`{path}`: its provenance cannot be used: {problem}")]
    BadProvenance {
        /// The file.
        path: PathBuf,
        /// The part that is missing, unknown or malformed.
        problem: String,
    },
    /// Two shards of one directory have different provenance.
    #[error(
        "`{first}` and `{second}` were built with different settings: {difference}; \
         keep shards of different runs in different directories"
    )]
    ProvenanceDiffers {
        /// The first file.
        first: PathBuf,
        /// The second file.
        second: PathBuf,
        /// The first key that differs, with both values.
        difference: String,
    },
    /// A file is not the shard that its name claims.
    #[error("`{path}` {problem}; remove it and run build-data again")]
    WrongShard {
        /// The file.
        path: PathBuf,
        /// A description of what the file is instead.
        problem: String,
    },
    /// A file has changed since it was written.
    #[error(
        "`{path}` {problem}: it has changed since it was written; \
         hint: `draftsmith build-data --repair` builds it again"
    )]
    CorruptShard {
        /// The file.
        path: PathBuf,
        /// The file's size or hash, now and when it was written.
        problem: String,
    },
    /// The manifest, or a record next to a shard, is malformed.
    #[error("`{path}` {problem}; hint: `draftsmith build-data --repair` writes it again")]
    CorruptManifest {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        problem: String,
    },
    /// A directory lacks some of its shards.
    #[error("`{path}` is incomplete: of {count} shards it lacks {missing}")]
    MissingShards {
        /// The directory.
        path: PathBuf,
        /// The number of shards when all are built.
        count: usize,
        /// The names of the first missing shards, and how many more are missing.
        missing: String,
    },
    /// Two rows have the same id.
    #[error(
        "row `{id}` is in `{first}` and again in `{second}`; \
         remove the duplicate and run build-data again"
    )]
    DuplicateRow {
        /// The first row's file.
        first: PathBuf,
        /// The second row's file, which may be the same.
        second: PathBuf,
        /// The id of both rows.
        id: String,
    },
    /// A directory holds no response shards.
    #[error("`{path}` holds no `responses-*.parquet`: run build-data first")]
    NoShards {
        /// The directory.
        path: PathBuf,
    },
}

impl DataError {
    /// Adds the action and the file to an I/O error.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        FileError::new(action, path, source).into()
    }

    /// Adds the file to the error of a row.
    pub(crate) fn row_in_file(path: &Path, source: Self) -> Self {
        Self::RowInFile { path: path.to_path_buf(), source: Box::new(source) }
    }

    /// Creates the error for invalid JSON in a text that begins at `line` and `column` of the file,
    /// both from 1. It names the position in the file.
    pub(crate) fn json(
        path: &Path,
        line: usize,
        column: usize,
        source: &serde_json::Error,
    ) -> Self {
        let message = source.to_string();
        let problem =
            message.rsplit_once(" at line ").map_or(message.as_str(), |(problem, _)| problem);
        Self::NotJson {
            path: path.to_path_buf(),
            line: line + source.line().saturating_sub(1),
            column: if source.line() <= 1 { source.column() + column - 1 } else { source.column() },
            problem: problem.to_owned(),
        }
    }
}

/// The position of a record in a prompt file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordPosition {
    /// The line on which the record begins, from 1.
    Line(usize),
    /// An element of a JSON array.
    Item {
        /// The line on which the element begins, from 1.
        line: usize,
        /// The element's number in the array, from 1.
        item: usize,
    },
    /// A row of a table, from 0.
    Row(usize),
}

impl fmt::Display for RecordPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Item { line, item } => write!(f, "line {line} (item {item})"),
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}
