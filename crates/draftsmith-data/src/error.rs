//! Errors of prompts, templates, tokenizers, response files and rollouts. Every message names the file,
//! and the line, key or column, and says what to do.

use std::fmt;
use std::path::{Path, PathBuf};

use draftsmith_files::FileError;

/// The forms of prompt files in messages.
const PROMPT_FORMS: &str = "`turns` (Spec-Bench), `question`/`answer` (GSM8K), `prompt` (HumanEval and others), \
     `instruction`/`input`/`output` (Alpaca), `conversations` (ShareGPT) or `messages` (chat)";

/// An error of reading or writing prompts, tokenizers, chat templates, response files or rollouts.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file could not be read or written.
    #[error("cannot {action} `{path}`: {source}")]
    Io {
        /// What was being done: `read`, `write`, `create`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file, or a line of one, is not JSON.
    #[error(
        "`{path}`, line {line}, column {column}: not JSON: {problem}; mend or remove that line"
    )]
    NotJson {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, in bytes from 1; 0 where the text ends too early.
        column: usize,
        /// What the parser said.
        problem: String,
    },
    /// The prompt file holds no prompt.
    #[error("`{path}` holds no prompts: give one JSON object a line with {PROMPT_FORMS}")]
    NoPrompts {
        /// The file.
        path: PathBuf,
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
    /// A prompt record is larger than any prompt.
    #[error(
        "`{path}`, {place}: the record {problem}, more than a prompt may; shorten or remove it"
    )]
    LargeRecord {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// What there is too much of.
        problem: String,
    },
    /// A prompt record is in none of the known forms.
    #[error("`{path}`, {place}: the record has {found}, but a prompt needs {PROMPT_FORMS}")]
    UnknownRecord {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// The keys that are there, or what is there instead of an object.
        found: String,
    },
    /// A prompt record is in a known form, but one of its values cannot be used.
    #[error("`{path}`, {place}: key `{key}` {problem}")]
    BadRecord {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// The key, dotted and indexed.
        key: String,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A key of `tokenizer_config.json` cannot be used.
    #[error("`{path}`: key `{key}` {problem}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, dotted.
        key: String,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A chat template is not valid Jinja.
    #[error("`{path}` holds a chat template that does not parse: {problem}")]
    TemplateSyntax {
        /// The file that holds the template.
        path: PathBuf,
        /// What is wrong, with the template's line.
        problem: String,
    },
    /// A chat template refuses the messages, or fails on them.
    #[error("the chat template of `{path}` cannot render these messages: {problem}")]
    TemplateRender {
        /// The file that holds the template.
        path: PathBuf,
        /// What it raised, with the template's line.
        problem: String,
    },
    /// A model ships no chat template, and none was chosen.
    #[error(
        "`{path}` has no chat template, which says how a chat is written for the model; \
         hint: choose one by `models.chat_template` or `--chat-template`: `vicuna`, `llama-2`, \
         `alpaca`, a Jinja file, or `none` for the last user text alone"
    )]
    NoTemplate {
        /// The model's directory.
        path: PathBuf,
    },
    /// The chat template that was chosen is neither built in nor a file that can be read.
    #[error(
        "cannot read the chat template `{chosen}`: {source}; \
         hint: give `vicuna`, `llama-2`, `alpaca`, `none` or the path of a Jinja file"
    )]
    ChosenTemplate {
        /// What was chosen.
        chosen: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A model has a tokenizer in an older form only.
    #[error(
        "`{path}` has `{found}`, but no `tokenizer.json`, which is what draftsmith reads; \
         hint: make it: python -c \"from transformers import AutoTokenizer as T; \
         T.from_pretrained('{path}').save_pretrained('{path}')\" \
         (with the packages transformers, sentencepiece and protobuf)"
    )]
    OldTokenizer {
        /// The model's directory.
        path: PathBuf,
        /// The file that is there.
        found: &'static str,
    },
    /// A stop string that every text has.
    #[error("a stop string is empty, and would end every answer before it begins: leave it out")]
    EmptyStopString,
    /// There were no messages to encode.
    #[error("the chat has no user message: add one, there is nothing to answer")]
    NoUserMessage,
    /// `tokenizer.json` cannot be used, or a text or id cannot be converted by it.
    #[error("`{path}`: cannot {action}: {problem}")]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What was being done: `load the tokenizer`, `encode`, `decode`.
        action: &'static str,
        /// What the tokenizer said.
        problem: String,
    },
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
    /// A response row breaks its own rules.
    #[error("row `{id}`: column `{column}` {problem}")]
    Row {
        /// The row's id.
        id: String,
        /// The column.
        column: &'static str,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A rollout row breaks its own rules, or those among the rows of its id.
    #[error("rollout `{id}` at {start}: column `{column}` {problem}")]
    Rollout {
        /// The row's id.
        id: String,
        /// The row's `start`.
        start: u32,
        /// The column.
        column: &'static str,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A file holds a row that breaks its own rules.
    #[error("`{path}`: {source}; build the data again")]
    RowInFile {
        /// The file.
        path: PathBuf,
        /// The broken rule.
        source: Box<DataError>,
    },
    /// A Parquet file breaks its own format, is cut short, or its footer lies.
    #[error("`{path}` is not a whole Parquet file: {problem}; build or fetch it again")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What does not add up.
        problem: String,
    },
    /// Rows could not be encoded as Parquet.
    #[error("cannot encode `{path}` as Parquet: {problem}")]
    ParquetWrite {
        /// The file.
        path: PathBuf,
        /// What the encoder said.
        problem: String,
    },
    /// A Parquet file lacks a column.
    #[error(
        "`{path}` has no column `{column}`: draftsmith did not write it, or another version did; \
         build the data again"
    )]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// The column's name.
        column: &'static str,
    },
    /// A column has another type than the schema says.
    #[error("`{path}`: column `{column}` is {found}, it must be {expected}; build the data again")]
    ColumnType {
        /// The file.
        path: PathBuf,
        /// The column's name.
        column: &'static str,
        /// The type in the file.
        found: String,
        /// The type that is needed.
        expected: String,
    },
    /// Texts of a column are encoded in a way that is not read.
    #[error(
        "`{path}`: column `{column}` is encoded as {encoding}, which is not read; \
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
    /// A value is null, or not one of those that may be.
    #[error("`{path}`: row {row}, column `{column}` {problem}; build the data again")]
    ColumnValue {
        /// The file.
        path: PathBuf,
        /// The row, from 0.
        row: usize,
        /// The column's name.
        column: &'static str,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A Parquet file does not say where it came from, or not in a form that can be read.
    #[error("`{path}`: its provenance cannot be used: {problem}")]
    BadProvenance {
        /// The file.
        path: PathBuf,
        /// What is missing, unknown or not as it must be.
        problem: String,
    },
    /// Two shards of one directory were made differently.
    #[error(
        "`{first}` and `{second}` were made differently: {difference}; \
         keep shards of different runs in different directories"
    )]
    ProvenanceDiffers {
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
        /// The first key that differs, with both values.
        difference: String,
    },
    /// A file is not the shard that its name says.
    #[error("`{path}` {problem}; remove it and run build-data again")]
    WrongShard {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        problem: String,
    },
    /// A file has changed since it was written.
    #[error(
        "`{path}` {problem}: it has changed since; hint: `draftsmith build-data` builds it again with `--repair`"
    )]
    CorruptShard {
        /// The file.
        path: PathBuf,
        /// What is not as it was.
        problem: String,
    },
    /// What was written of shards cannot be read.
    #[error("`{path}` {problem}; hint: `draftsmith build-data` makes it anew with `--repair`")]
    CorruptManifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A directory holds some of its shards.
    #[error("`{path}` is incomplete: of {count} shards it lacks {}", told_missing(first, *num_missing))]
    MissingShards {
        /// The directory.
        path: PathBuf,
        /// Shards when all are built.
        count: usize,
        /// How many of them are not there.
        num_missing: usize,
        /// The names of the first.
        first: Vec<String>,
    },
    /// Two rows have one id.
    #[error(
        "{}; remove what is there twice and run build-data again",
        told_twice(first, second, id)
    )]
    DuplicateRow {
        /// The one row's file.
        first: PathBuf,
        /// The other's.
        second: PathBuf,
        /// Their id.
        id: String,
    },
    /// A directory holds no response shards.
    #[error("`{path}` holds no `responses-*.parquet`: run build-data first")]
    NoShards {
        /// The directory.
        path: PathBuf,
    },
}

impl From<FileError> for DataError {
    fn from(FileError { action, path, source }: FileError) -> Self {
        Self::Io { action, path, source }
    }
}

impl DataError {
    /// Wraps an I/O error with what was done to which file.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Wraps a broken rule of a row with the file that holds the row.
    pub(crate) fn row_in_file(path: &Path, source: Self) -> Self {
        Self::RowInFile { path: path.to_path_buf(), source: Box::new(source) }
    }

    /// Wraps a parser's error about a text that begins at `line` and `column` (both from 1) of the
    /// file.
    pub(crate) fn json(
        path: &Path,
        line: usize,
        column: usize,
        source: &serde_json::Error,
    ) -> Self {
        let told = source.to_string();
        let problem = told.rsplit_once(" at line ").map_or(told.as_str(), |(problem, _)| problem);
        Self::NotJson {
            path: path.to_path_buf(),
            line: line + source.line().saturating_sub(1),
            column: if source.line() <= 1 { source.column() + column - 1 } else { source.column() },
            problem: problem.to_owned(),
        }
    }
}

/// The first names, and how many more there are.
fn told_missing(first: &[String], num_missing: usize) -> String {
    let told: Vec<String> = first.iter().map(|name| format!("`{name}`")).collect();
    match num_missing - told.len() {
        0 => told.join(", "),
        more => format!("{} and {more} more", told.join(", ")),
    }
}

fn told_twice(first: &Path, second: &Path, id: &str) -> String {
    if first == second {
        format!("`{}` has two rows with the id `{id}`", first.display())
    } else {
        format!("`{}` and `{}` both have a row `{id}`", first.display(), second.display())
    }
}

/// The position of a record in a prompt file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The line that the record begins on, from 1.
    Line(usize),
    /// An element of a JSON array, from 1, and the line that it begins on.
    Item {
        /// The line, from 1.
        line: usize,
        /// Which one, from 1.
        item: usize,
    },
    /// The row of a table, from 0.
    Row(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Item { line, item } => write!(f, "line {line} (item {item})"),
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}
