//! Reads the header of a GGUF file of version 3: its keys, and the places of its tensors.
//!
//! A header is read in one pass. Long texts and lists are cut, and no length that a file claims is
//! allocated before its bytes are there. `config/gguf.rs` and `weights/gguf.rs` decide what the
//! keys and tensors of a model mean.

#[cfg(test)]
pub(crate) mod tests;
mod text;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Take};
use std::path::{Path, PathBuf};

use draftsmith_files::open_file;
use serde_json::{Number, Value};

use crate::error::{ModelError, Result};

/// The greatest size of a header in bytes. The vocabulary takes most of it.
const MAX_HEADER: u64 = 128 << 20;
/// The greatest number of keys and of tensors.
const MAX_ENTRIES: u64 = 1 << 17;
/// The number of tokens that a vocabulary is smaller than.
const MAX_TOKENS: u64 = 1 << 24;
/// The greatest length of a text, and of all lists of numbers together; the rest is skipped.
const MAX_KEPT: usize = 4096;
/// The greatest length of a chat template in bytes.
const MAX_TEMPLATE: usize = 1 << 20;
/// The number of bytes of each type's values: numbers, a text and a list.
const SIZES: [usize; 13] = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];
/// The numbers of the types of texts and lists.
const TEXT: u64 = 8;
const LIST: u64 = 9;
/// The key of the vocabulary.
const TOKENS: &str = "tokenizer.ggml.tokens";
/// The key of the chat template.
const TEMPLATE: &str = "tokenizer.chat_template";
const CUT: &str = "it ends within its header";

/// The header of a GGUF file.
#[derive(Debug)]
pub struct Gguf {
    pub(crate) path: PathBuf,
    /// The value of `general.architecture`; empty without one.
    pub architecture: String,
    /// The values by key. A list of texts is kept as its length, and a long list of numbers as an
    /// empty one.
    pub values: BTreeMap<String, Value>,
    /// The tensors by name.
    pub tensors: BTreeMap<String, GgufTensor>,
    /// The offset of the first tensor's bytes.
    pub(crate) data_start: u64,
    /// The offsets of the lists, by key.
    lists: BTreeMap<String, u64>,
}

/// A tensor's shape, type and place, as the header claims them.
#[derive(Debug)]
pub struct GgufTensor {
    /// The shape, the fastest dimension first.
    pub shape: Vec<u64>,
    /// The number of the type in ggml.
    pub(crate) kind: u64,
    /// The offset from the first tensor's bytes.
    pub(crate) offset: u64,
}

/// Returns whether a path is that of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|it| it.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

impl Gguf {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// If the file cannot be read, or its header is malformed.
    pub fn read(path: &Path) -> Result<Self> {
        let mut source = GgufBytes::open(path, 0)?;
        let (magic, version) = (source.number(4)?.to_le_bytes(), source.number(4)?);
        if !magic.starts_with(b"GGUF") {
            return Err(source.broken("it does not begin with `GGUF`"));
        }
        if version != 3 {
            return Err(source.broken(format!("its version is {version}, expected 3")));
        }
        let [num_tensors, num_keys] = [source.number(8)?, source.number(8)?];
        let num_entries = num_tensors.max(num_keys);
        if num_entries > MAX_ENTRIES {
            return Err(source.broken(format!("it claims {num_entries} entries")));
        }
        let (mut values, mut lists, mut tensors) =
            <(BTreeMap<_, _>, BTreeMap<_, _>, BTreeMap<_, _>)>::default();
        for _ in 0..num_keys {
            let (key, kind) = (source.text(MAX_KEPT)?, source.number(4)?);
            if kind == LIST {
                lists.insert(key.clone(), source.position());
            }
            let value = source.value(&key, kind)?;
            if key == TOKENS {
                let is_list = kind == LIST && value.as_u64().is_some_and(|num| num < MAX_TOKENS);
                if !is_list {
                    return Err(source.broken(format!("key `{TOKENS}` is not a list of tokens")));
                }
            }
            if values.insert(key.clone(), value).is_some() {
                return Err(source.broken(format!("it has key `{key}` twice")));
            }
        }
        for _ in 0..num_tensors {
            let (name, num_dims) = (source.text(MAX_KEPT)?, source.number(4)?);
            if num_dims > 4 {
                return Err(source.broken(format!("tensor `{name}` has {num_dims} dimensions")));
            }
            let shape = (0..num_dims).map(|_| source.number(8)).collect::<Result<_>>()?;
            let tensor = GgufTensor { shape, kind: source.number(4)?, offset: source.number(8)? };
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(source.broken(format!("it has tensor `{name}` twice")));
            }
        }
        let alignment = values.get("general.alignment").map_or(Some(32), Value::as_u64);
        let Some(alignment) = alignment.filter(|it| it.is_power_of_two() && *it <= 1 << 20) else {
            return Err(source.broken("key `general.alignment` is not a power of two"));
        };
        let data_start = source.position().next_multiple_of(alignment);
        let architecture = values.get("general.architecture").and_then(Value::as_str);
        let architecture = architecture.unwrap_or_default().to_owned();
        let path = path.to_path_buf();
        Ok(Self { path, architecture, values, tensors, data_start, lists })
    }

    /// Returns the value of one of the architecture's keys, which begin with its name.
    pub fn own(&self, key: &str) -> Option<&Value> {
        self.values.get(&format!("{}.{key}", self.architecture))
    }

    /// Returns the number of tokens in the vocabulary; `None` without one.
    pub fn num_tokens(&self) -> Option<u64> {
        self.values.get(TOKENS)?.as_u64()
    }

    /// Reads the vocabulary: the texts of the tokens, in the order of their ids. Long texts are cut.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn tokens(&self) -> Result<Vec<String>> {
        self.texts(TOKENS)
    }

    /// Reads a list of texts, which are cut if they are long; empty without one.
    fn texts(&self, key: &str) -> Result<Vec<String>> {
        let Some((mut source, TEXT, num)) = self.list(key)? else { return Ok(Vec::new()) };
        (0..num).map(|_| source.text(MAX_KEPT)).collect()
    }

    /// Opens a list, and returns a reader of its values, their type and their number.
    fn list(&self, key: &str) -> Result<Option<(GgufBytes<'_>, u64, u64)>> {
        let Some(start) = self.lists.get(key) else { return Ok(None) };
        let mut source = GgufBytes::open(&self.path, *start)?;
        let (kind, num) = (source.number(4)?, source.number(8)?);
        Ok(Some((source, kind, num)))
    }

    /// Describes a malformed file.
    pub(crate) fn broken(&self, problem: impl std::fmt::Display) -> ModelError {
        ModelError::gguf(&self.path, problem)
    }

    /// Names one of the architecture's keys and what is wrong with its value.
    pub(crate) fn fail(&self, key: &str, problem: impl std::fmt::Display) -> ModelError {
        ModelError::config(&self.path, &format!("{}.{key}", self.architecture), problem)
    }
}

/// The bytes of a header.
struct GgufBytes<'a> {
    bytes: BufReader<Take<File>>,
    path: &'a Path,
    end: u64,
    /// The number of numbers that lists may still keep.
    num_left: u64,
}

impl<'a> GgufBytes<'a> {
    fn open(path: &'a Path, start: u64) -> Result<Self> {
        let mut file = open_file(path)?;
        file.seek(SeekFrom::Start(start)).map_err(|e| ModelError::io("read", path, e))?;
        let (bytes, end) = (BufReader::new(file.take(MAX_HEADER)), start + MAX_HEADER);
        Ok(Self { bytes, path, end, num_left: MAX_KEPT as u64 })
    }

    fn broken(&self, problem: impl std::fmt::Display) -> ModelError {
        ModelError::gguf(self.path, problem)
    }

    /// Returns the offset of the next byte.
    fn position(&self) -> u64 {
        self.end - self.bytes.get_ref().limit() - self.bytes.buffer().len() as u64
    }

    /// Reads a number of this many bytes.
    fn number(&mut self, num_bytes: usize) -> Result<u64> {
        let mut bytes = [0; 8];
        let read = self.bytes.read_exact(&mut bytes[..num_bytes]);
        read.map_err(|_| self.broken(CUT))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads a text of which at most `most` bytes are kept.
    fn text(&mut self, most: usize) -> Result<String> {
        let (num_bytes, mut kept) = (self.number(8)?, Vec::new());
        let read = (&mut self.bytes).take(num_bytes.min(most as u64)).read_to_end(&mut kept);
        let num_read = read.map_err(|e| ModelError::io("read", self.path, e))?;
        self.skip(num_bytes - num_read as u64)?;
        Ok(String::from_utf8_lossy(&kept).into_owned())
    }

    fn skip(&mut self, mut num_bytes: u64) -> Result<()> {
        while num_bytes > 0 {
            let found = self.bytes.fill_buf().map_err(|e| ModelError::io("read", self.path, e))?;
            let num_skipped = num_bytes.min(found.len() as u64);
            if num_skipped == 0 {
                return Err(self.broken(CUT));
            }
            self.bytes.consume(num_skipped as usize);
            num_bytes -= num_skipped;
        }
        Ok(())
    }

    fn value(&mut self, key: &str, kind: u64) -> Result<Value> {
        if kind == TEXT {
            let most = if key == TEMPLATE { MAX_TEMPLATE } else { MAX_KEPT };
            return Ok(self.text(most)?.into());
        }
        if kind != LIST {
            return self.scalar(key, kind);
        }
        let (kind, num) = (self.number(4)?, self.number(8)?);
        if kind == TEXT {
            for _ in 0..num {
                let num_bytes = self.number(8)?;
                self.skip(num_bytes)?;
            }
            return Ok(num.into());
        }
        if num > self.num_left {
            let num_bytes = num.saturating_mul(self.size(key, kind)? as u64);
            self.skip(num_bytes)?;
            return Ok(Vec::<Value>::new().into());
        }
        self.num_left -= num;
        let kept: Vec<Value> = (0..num).map(|_| self.scalar(key, kind)).collect::<Result<_>>()?;
        Ok(kept.into())
    }

    /// Returns the number of bytes of a number or boolean.
    fn size(&self, key: &str, kind: u64) -> Result<usize> {
        let size = SIZES.get(kind as usize).copied().filter(|size| *size > 0);
        size.ok_or_else(|| self.broken(format!("key `{key}` has the unknown type {kind}")))
    }

    /// Reads a number or a boolean. A number that is not finite becomes `null`.
    fn scalar(&mut self, key: &str, kind: u64) -> Result<Value> {
        let size = self.size(key, kind)?;
        let bits = self.number(size)?;
        // The shortest decimal of an f32 is what was meant: 0.00001, not 0.00000999999974738.
        let decimal = |number: f32| number.to_string().parse().ok().and_then(Number::from_f64);
        let float = |number: Option<Number>| number.map_or(Value::Null, Value::Number);
        Ok(match kind {
            1 => (bits as i8).into(),
            3 => (bits as i16).into(),
            5 => (bits as i32).into(),
            6 => float(decimal(f32::from_bits(bits as u32))),
            7 => (bits != 0).into(),
            11 => (bits as i64).into(),
            12 => float(Number::from_f64(f64::from_bits(bits))),
            _ => bits.into(),
        })
    }
}
