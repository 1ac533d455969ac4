//! Cutting a prompt file into records: JSON lines or one JSON array, gzipped or not, or a table.

use std::fs;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use super::table;
use crate::error::{DataError, Place};

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const PARQUET_MAGIC: &[u8] = b"PAR1";
const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

/// What a file name may end in without that being part of the source's name.
const SUFFIXES: [&str; 3] = [".jsonl", ".json", ".parquet"];

/// The file's name without its known suffixes: `HumanEval` for `HumanEval.jsonl.gz`.
pub(super) fn source_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name).to_owned()
}

/// Calls `visit` with each record's index, place and value, in the file's order.
///
/// # Errors
/// If the file cannot be read, is not JSON where it must be, or what `visit` returns.
pub(super) fn for_each_record(
    path: &Path,
    mut visit: impl FnMut(usize, Place, Value) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let bytes = fs::read(path).map_err(|e| DataError::io("read", path, e))?;
    if bytes.starts_with(PARQUET_MAGIC) {
        return table::for_each_row(path, visit);
    }
    let bytes = unzip(path, bytes)?;
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&bytes);
    if text.trim_ascii_start().starts_with(b"[") {
        for_each_element(path, text, visit)
    } else {
        for (index, (line, text)) in lines(text).enumerate() {
            let record =
                serde_json::from_slice(text).map_err(|e| DataError::json(path, line, 1, &e))?;
            visit(index, Place::Line(line), record)?;
        }
        Ok(())
    }
}

fn unzip(path: &Path, bytes: Vec<u8>) -> Result<Vec<u8>, DataError> {
    if !bytes.starts_with(GZIP_MAGIC) {
        return Ok(bytes);
    }
    let mut unzipped = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes.as_slice())
        .read_to_end(&mut unzipped)
        .map_err(|e| DataError::io("decompress", path, e))?;
    Ok(unzipped)
}

/// The lines that are not blank, with their numbers from 1. A line ends with `\n`, `\r\n` or `\r`:
/// none of them may stand inside a JSON string.
fn lines(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut rest = text;
    let mut number = 0;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest.iter().position(|&byte| byte == b'\n' || byte == b'\r');
        let line = &rest[..end.unwrap_or(rest.len())];
        let ending = if rest[line.len()..].starts_with(b"\r\n") { 2 } else { 1 };
        rest = rest.get(line.len() + ending..).unwrap_or_default();
        number += 1;
        Some((number, line))
    })
    .filter(|(_, line)| !line.trim_ascii().is_empty())
}

/// Walks a JSON array element by element, so that every element's line is known.
fn for_each_element(
    path: &Path,
    text: &[u8],
    mut visit: impl FnMut(usize, Place, Value) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut cursor = Cursor { text, at: 0, line: 1, line_start: 0 };
    cursor.skip_blanks();
    cursor.advance(1);
    for index in 0.. {
        cursor.skip_blanks();
        match cursor.peek() {
            None => return Err(cursor.error(path, "the array is not closed")),
            Some(b']') => break,
            Some(b',') if index > 0 => {
                cursor.advance(1);
                cursor.skip_blanks();
            }
            Some(_) if index > 0 => return Err(cursor.error(path, "expected `,` or `]`")),
            Some(_) => {}
        }
        if cursor.peek().is_none() {
            return Err(cursor.error(path, "the array is not closed"));
        }
        let place = Place::Line(cursor.line);
        let mut values = serde_json::Deserializer::from_slice(&text[cursor.at..]).into_iter();
        let record = match values.next() {
            Some(Ok(record)) => record,
            Some(Err(e)) => {
                return Err(DataError::json(path, cursor.line, cursor.column(), &e));
            }
            None => return Err(cursor.error(path, "the array is not closed")),
        };
        cursor.advance(values.byte_offset());
        visit(index, place, record)?;
    }
    cursor.advance(1);
    cursor.skip_blanks();
    match cursor.peek() {
        None => Ok(()),
        Some(_) => Err(cursor.error(path, "text after the array")),
    }
}

/// A place in a text that knows its line.
struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
    line: usize,
    line_start: usize,
}

impl Cursor<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn advance(&mut self, num_bytes: usize) {
        let end = (self.at + num_bytes).min(self.text.len());
        for (offset, _) in
            self.text[self.at..end].iter().enumerate().filter(|&(_, &byte)| byte == b'\n')
        {
            self.line += 1;
            self.line_start = self.at + offset + 1;
        }
        self.at = end;
    }

    fn skip_blanks(&mut self) {
        let rest = &self.text[self.at..];
        self.advance(rest.len() - rest.trim_ascii_start().len());
    }

    /// From 1.
    fn column(&self) -> usize {
        self.at - self.line_start + 1
    }

    fn error(&self, path: &Path, problem: &str) -> DataError {
        DataError::NotJson {
            path: path.to_path_buf(),
            line: self.line,
            column: self.column(),
            problem: problem.to_owned(),
        }
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
        check("ShareGPT_V4.3_split.json", "ShareGPT_V4.3_split");
        check("train-00000.parquet", "train-00000");
        check("a.json.jsonl", "a.json");
        check("questions.txt", "questions.txt");
    }

    #[test]
    fn line_endings_mix_and_numbers_count_blank_lines() {
        let found: Vec<_> = lines(b"a\r\n\r\nb\rc\n\n d \n\r").collect();
        let expected: [(usize, &[u8]); 4] = [(1, b"a"), (3, b"b"), (4, b"c"), (6, b" d ")];
        assert_eq!(found, expected);
    }
}
