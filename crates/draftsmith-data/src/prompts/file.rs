//! A reader that splits a prompt file into records. The file is JSON lines or one JSON array,
//! optionally compressed with gzip or zstd, or a Parquet table. Memory holds only one record at a
//! time, or one page of a table.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use draftsmith_files::with_finite_numbers;

use super::record::{MAX_BYTES, Problem, Record};
use super::table::RecordTable;
use crate::error::{DataError, RecordPosition, Result};

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const PARQUET_MAGIC: &[u8] = b"PAR1";
const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

/// The file suffixes that are not part of the source's name.
const SUFFIXES: [&str; 3] = [".jsonl", ".json", ".parquet"];
const PACKED_SUFFIXES: [&str; 2] = [".gz", ".zst"];

/// The largest number of values in a record, counted by brackets and commas. It bounds the parser's
/// memory, which can reach 90 bytes per byte of the file.
const MAX_VALUES: usize = 100_000;

/// Returns the file's name without its known suffixes, such as `HumanEval` for
/// `HumanEval.jsonl.gz`.
pub(super) fn source_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stripped = |name: &str, suffixes: &[&str]| {
        suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name).to_owned()
    };
    stripped(&stripped(&name, &PACKED_SUFFIXES), &SUFFIXES)
}

/// The reader of a file's records, in order.
pub(super) enum Records {
    Lines(TextReader),
    Array(TextReader, usize),
    Table(Box<RecordTable>),
}

impl Records {
    /// Opens a file.
    ///
    /// # Errors
    /// If the file cannot be read or is not a regular file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let read_error = |e| DataError::io("read", path, e);
        // Check before opening: opening a pipe blocks.
        if !std::fs::metadata(path).map_err(read_error)?.is_file() {
            return Err(DataError::invalid(format!(
                "`{}` is not a regular file, and prompts are read more than once; hint: write them to a file",
                path.display()
            )));
        }
        let mut file = BufReader::new(File::open(path).map_err(read_error)?);
        let beginning = file.fill_buf().map_err(read_error)?;
        if beginning.starts_with(PARQUET_MAGIC) {
            return Ok(Self::Table(Box::new(RecordTable::open(path)?)));
        }
        let mut text = if beginning.starts_with(GZIP_MAGIC) {
            let decoder = flate2::bufread::MultiGzDecoder::new(file);
            TextReader::new(path, "decompress", Box::new(BufReader::new(decoder)))
        } else if beginning.starts_with(ZSTD_MAGIC) {
            let decoder = zstd::Decoder::with_buffer(file)
                .map_err(|e| DataError::io("decompress", path, e))?;
            TextReader::new(path, "decompress", Box::new(BufReader::new(decoder)))
        } else {
            TextReader::new(path, "read", Box::new(file))
        };
        if text.upcoming()?.starts_with(BYTE_ORDER_MARK) {
            text.input.consume(BYTE_ORDER_MARK.len());
        }
        text.skip_blanks()?;
        if text.peek()? == Some(b'[') {
            text.take()?;
            Ok(Self::Array(text, 0))
        } else {
            Ok(Self::Lines(text))
        }
    }

    /// Reads the next record. The inner error concerns this record only. `None` at the end.
    ///
    /// # Errors
    /// If the file itself has an error. Nothing more can be read after it.
    pub(super) fn next(&mut self) -> Result<Option<Result<Record>>> {
        match self {
            Self::Lines(text) => {
                text.leave_long_line()?;
                text.skip_blanks()?;
                let (line, column) = (text.line, text.column);
                let Some(bytes) = text.rest_of_line()? else {
                    let position = RecordPosition::Line(line);
                    return Ok(Some(Err(Problem::long().at(&text.path, position))));
                };
                if bytes.is_empty() {
                    return Ok(None);
                }
                Ok(Some(text.record(&bytes, RecordPosition::Line(line), (line, column))))
            }
            Self::Array(text, index) => {
                text.skip_blanks()?;
                match text.peek()? {
                    Some(b']') => {
                        text.take()?;
                        text.skip_blanks()?;
                        return match text.peek()? {
                            None => Ok(None),
                            Some(_) => Err(text.error("text after the array")),
                        };
                    }
                    Some(b',') if *index > 0 => {
                        text.take()?;
                        text.skip_blanks()?;
                    }
                    Some(_) if *index > 0 => return Err(text.error("expected `,` or `]`")),
                    _ => {}
                }
                if text.peek()?.is_none() {
                    return Err(text.error("the array is not closed"));
                }
                *index += 1;
                let (line, column) = (text.line, text.column);
                let bytes = text.element()?;
                let position = RecordPosition::Item { line, item: *index };
                match text.record(&bytes, position, (line, column)) {
                    // After invalid JSON, the beginning of the next record is unknown.
                    Err(error @ DataError::NotJson(_)) => Err(error),
                    record => Ok(Some(record)),
                }
            }
            Self::Table(rows) => rows.next(),
        }
    }
}

/// A text that is read from front to back, with the current line. A line ends with `\n`, `\r\n` or
/// `\r`, which JSON does not allow inside a string.
pub(super) struct TextReader {
    path: PathBuf,
    /// The action that error messages name, `read` or `decompress`.
    action: &'static str,
    input: Box<dyn BufRead + Send>,
    /// The current line, from 1.
    line: usize,
    /// The current column in bytes, from 1.
    column: usize,
    after_return: bool,
    /// Whether the current line is longer than a record may be and has not been read to its end.
    in_long_line: bool,
}

impl TextReader {
    fn new(path: &Path, action: &'static str, input: Box<dyn BufRead + Send>) -> Self {
        let path = path.into();
        Self { path, action, input, line: 1, column: 1, after_return: false, in_long_line: false }
    }

    /// Returns the next bytes without consuming them. There is at least one, except at the end.
    fn upcoming(&mut self) -> Result<&[u8]> {
        loop {
            match self.input.fill_buf() {
                Ok(_) => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(DataError::io(self.action, &self.path, e)),
            }
        }
        // The buffer is filled; call again only to satisfy the borrow checker.
        self.input.fill_buf().map_err(|e| DataError::io(self.action, &self.path, e))
    }

    fn peek(&mut self) -> Result<Option<u8>> {
        Ok(self.upcoming()?.first().copied())
    }

    fn take(&mut self) -> Result<Option<u8>> {
        let Some(byte) = self.peek()? else { return Ok(None) };
        self.input.consume(1);
        match byte {
            b'\n' if self.after_return => {}
            b'\n' | b'\r' => {
                self.line += 1;
                self.column = 1;
            }
            _ => self.column += 1,
        }
        self.after_return = byte == b'\r';
        Ok(Some(byte))
    }

    fn skip_blanks(&mut self) -> Result<()> {
        let mut num_bytes = 0;
        while self.peek()?.is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.take()?;
            num_bytes += 1;
            if num_bytes > MAX_BYTES {
                let problem = format!("more than {} MB of blanks", MAX_BYTES >> 20);
                return Err(self.error(&problem));
            }
        }
        Ok(())
    }

    /// Reads the rest of the line; `None` if it is longer than a record may be.
    fn rest_of_line(&mut self) -> Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        loop {
            let upcoming = self.upcoming()?;
            let end = upcoming.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let part = &upcoming[..end.unwrap_or(upcoming.len())];
            let num_bytes = part.len();
            if bytes.len() + num_bytes > MAX_BYTES {
                self.in_long_line = true;
                return Ok(None);
            }
            bytes.extend_from_slice(part);
            self.input.consume(num_bytes);
            self.column += num_bytes;
            self.after_return &= num_bytes == 0;
            if end.is_some() || num_bytes == 0 {
                return Ok(Some(bytes));
            }
        }
    }

    /// Skips the rest of a line that is too long.
    fn leave_long_line(&mut self) -> Result<()> {
        self.after_return &= !self.in_long_line;
        while self.in_long_line {
            let upcoming = self.upcoming()?;
            let end = upcoming.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let num_bytes = end.unwrap_or(upcoming.len());
            self.input.consume(num_bytes);
            self.column += num_bytes;
            self.in_long_line = end.is_none() && num_bytes > 0;
        }
        Ok(())
    }

    /// Reads an array element, up to its closing bracket or quote or the end of a number.
    fn element(&mut self) -> Result<Vec<u8>> {
        let line = self.line;
        let (mut bytes, mut scan) = (Vec::new(), Scan::default());
        while let Some(byte) = self.peek()? {
            let ends = byte.is_ascii_whitespace() || matches!(byte, b',' | b']');
            match bytes.first() {
                Some(b'{' | b'[' | b'"') if scan.is_closed() => break,
                Some(_) if scan.is_closed() && ends => break,
                _ => {}
            }
            scan.feed(byte);
            if bytes.len() == MAX_BYTES {
                return Err(Problem::long().at(&self.path, RecordPosition::Line(line)));
            }
            bytes.push(byte);
            self.take()?;
        }
        Ok(bytes)
    }

    fn record(
        &self,
        bytes: &[u8],
        position: RecordPosition,
        (line, column): (usize, usize),
    ) -> Result<Record> {
        let mut scan = Scan::default();
        bytes.iter().for_each(|&byte| scan.feed(byte));
        if scan.num_values > MAX_VALUES {
            let problem = format!("holds more than {MAX_VALUES} values");
            return Err(Problem::Large(problem).at(&self.path, position));
        }
        let value = serde_json::from_slice(bytes);
        // Null, as pandas reads them.
        let with_nulls = || with_finite_numbers(bytes, |_| "null".to_owned());
        let value = value.or_else(|e| serde_json::from_slice(&with_nulls()).map_err(|_| e));
        let value = value.map_err(|e| {
            let is_json_like = bytes.first().is_none_or(|byte| b"{[\"".contains(byte));
            match (line, column) == (1, 1) && !is_json_like {
                true => DataError::invalid(format!(
                    "`{}` looks like plain text or CSV; hint: give prompts as JSON, one `{{\"prompt\": \"...\"}}` per \
                     line, or as Parquet",
                    self.path.display()
                )),
                false => DataError::json(&self.path, line, column, &e),
            }
        })?;
        Ok(Record { position, value, unread: None })
    }

    fn error(&self, problem: &str) -> DataError {
        DataError::not_json(&self.path, self.line, self.column, problem)
    }
}

/// A scanner that tracks the nesting of brackets and quotes.
#[derive(Debug, Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
    num_values: usize,
}

impl Scan {
    fn feed(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            _ if self.in_string => {}
            b'{' | b'[' => {
                self.depth += 1;
                self.num_values += 1;
            }
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            b',' => self.num_values += 1,
            _ => {}
        }
    }

    fn is_closed(&self) -> bool {
        self.depth == 0 && !self.in_string
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_names_lose_only_known_suffixes() {
        let check = |name: &str, expected: &str| {
            assert_eq!(source_name(&Path::new("some/where").join(name)), expected);
        };
        check("HumanEval.jsonl.gz", "HumanEval");
        check("HumanEval.jsonl.zst", "HumanEval");
        check("ShareGPT_V4.3_split.json", "ShareGPT_V4.3_split");
        check("train-00000.parquet", "train-00000");
        check("a.json.jsonl", "a.json");
        check("questions.txt", "questions.txt");
    }

    #[test]
    fn line_endings_mix_and_numbers_count_blank_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set.jsonl");
        std::fs::write(&path, "1\r\n\r\n2\r3\n\n 4 \n\r").unwrap();
        let mut records = Records::open(&path).unwrap();
        let mut found = Vec::new();
        while let Some(record) = records.next().unwrap() {
            let record = record.unwrap();
            found.push(format!("{} {}", record.position, record.value));
        }
        assert_eq!(found, ["line 1 1", "line 3 2", "line 4 3", "line 6 4"]);
    }
}
