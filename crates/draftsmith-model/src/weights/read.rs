//! Reads weight files tensor by tensor (safetensors or `torch.save`, single or sharded, or GGUF), and
//! hashes checkpoints.
//!
//! A header is checked against the length of its file. Tensors are read one at a time, a few rows
//! at once. So a broken file causes an error, not a large allocation, and a large file is never in
//! memory twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use draftsmith_files::{hex, open_file};
use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::files::{WeightFiles, is_in_layer, weight_files};
use super::stored::{StoredFormat, StoredRows, StoredTensor};
use super::{gguf, header, torch};
use crate::error::{ModelError, Result};
use crate::gguf::is_gguf;
use crate::spec::{ModelNames, NamedNorm, NormForm};

/// The bound of weights' magnitudes: products of two fit in an f32.
const LARGEST: f32 = 1e18;

/// An open checkpoint.
#[derive(Debug)]
pub struct WeightReader {
    /// The directory or single file, for messages.
    pub(crate) path: PathBuf,
    files: Vec<OpenFile>,
    /// For each tensor, the index of its file and its place in that file.
    tensors: BTreeMap<String, (usize, StoredTensor)>,
    /// The names of the tensors that were taken, whole or in part.
    taken: BTreeSet<String>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
}

impl WeightReader {
    /// Opens `model.safetensors`, the shards of `model.safetensors.index.json`, or
    /// `pytorch_model.bin` and its index. Instead of a directory, `dir` may be a GGUF file.
    ///
    /// # Errors
    /// If there is none, or a file is cut short or malformed.
    pub fn open_dir(dir: &Path) -> Result<Self> {
        Self::open_dir_of(dir, |_| true)
    }

    /// Opens a directory as [`WeightReader::open_dir`] does, for only the tensors that are
    /// `wanted`. Files with no wanted tensor may be absent.
    ///
    /// # Errors
    /// As [`WeightReader::open_dir`].
    pub(crate) fn open_dir_of(dir: &Path, wanted: impl Fn(&str) -> bool) -> Result<Self> {
        let of_file = |path: &Path| {
            let mut reader = Self::open_file(path)?;
            reader.ignore(|name| !wanted(name));
            Ok(reader)
        };
        if is_gguf(dir) {
            return of_file(dir);
        }
        let mut file_of = match WeightFiles::of_dir(dir)? {
            WeightFiles::Single(name) => return of_file(&dir.join(name)),
            WeightFiles::Sharded { file_of, .. } => file_of,
        };
        file_of.retain(|tensor, _| wanted(tensor));
        let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
        for name in file_of.values().collect::<BTreeSet<_>>() {
            let path = dir.join(name);
            let (file, mut stored) = OpenFile::open(&path)?;
            for (tensor, _) in file_of.iter().filter(|(_, of_tensor)| *of_tensor == name) {
                // An index may name a tensor that no file has, such as a tied LM head. A tensor
                // that the model needs is missed when it is read.
                if let Some(stored) = stored.remove(tensor) {
                    tensors.insert(tensor.clone(), (files.len(), stored));
                }
            }
            files.push(file);
        }
        Ok(Self { path: dir.to_path_buf(), files, tensors, taken: BTreeSet::new() })
    }

    /// Opens a directory as [`WeightReader::open_dir`] does, for only the embeddings, the final norm
    /// and the LM head, and gives them these names. In the files they may have any prefix.
    ///
    /// # Errors
    /// As [`WeightReader::open_dir`], or if the embeddings are missing or not unique.
    pub(crate) fn open_ends(dir: &Path, names: &ModelNames) -> Result<Self> {
        let last = |name: &'static str| name.rsplit('.').next().unwrap_or(name);
        let is = |tensor: &str, end: &str| {
            let mut parts = tensor.rsplit('.');
            matches!(parts.next(), Some("weight" | "bias")) && parts.next() == Some(end)
        };
        let ends = [names.embedding, names.norm, names.lm_head].map(last);
        let [embedding, norm, head] = ends;
        let mut reader = Self::open_dir_of(dir, |tensor| {
            !is_in_layer(tensor) && ends.iter().any(|end| is(tensor, end))
        })?;
        let found = reader.names().filter(|tensor| is(tensor, embedding)).map(str::to_owned);
        let [found] = <[String; 1]>::try_from(found.collect::<Vec<_>>()).map_err(|found| {
            let num = found.len();
            let problem = format!("it has {num} tensors `{embedding}.weight`, expected one");
            ModelError::safetensors(dir, problem)
        })?;
        // A vision model may have a norm of the same name, but not beside these embeddings.
        let stem = found.trim_end_matches("weight").trim_end_matches('.');
        let stem = stem.strip_suffix(embedding).unwrap_or_default();
        let norm = format!("{stem}{norm}");
        reader.ignore(|tensor| {
            tensor != found && !tensor.starts_with(&format!("{norm}.")) && !is(tensor, head)
        });
        let of_head = reader.names().find(|tensor| is(tensor, head));
        let of_head =
            of_head.and_then(|tensor| tensor.rsplit_once('.')).map(|(own, _)| own.to_owned());
        reader = reader.with_prefix(&format!("{stem}{embedding}"), names.embedding)?;
        reader = reader.with_prefix(&norm, names.norm)?;
        match of_head {
            Some(own) => reader.with_prefix(&own, names.lm_head),
            None => Ok(reader),
        }
    }

    /// Opens one file: from `torch.save` if its name ends in `.bin` or `.pt`, a model if it ends in `.gguf`,
    /// otherwise safetensors. The tensors of a GGUF file get their names in a Hugging Face checkpoint.
    ///
    /// # Errors
    /// If it cannot be read, is cut short or malformed.
    pub fn open_file(path: &Path) -> Result<Self> {
        let (file, tensors) = OpenFile::open(path)?;
        let tensors = tensors.into_iter().map(|(name, stored)| (name, (0, stored))).collect();
        let taken = BTreeSet::new();
        Ok(Self { path: path.to_path_buf(), files: vec![file], tensors, taken })
    }

    /// Removes `prefix` from all tensor names, if every name has it.
    pub fn without_prefix(mut self, prefix: &str) -> Self {
        if self.tensors.keys().all(|name| name.starts_with(prefix)) {
            let tensors = std::mem::take(&mut self.tensors).into_iter();
            let short = tensors.map(|(name, stored)| (name[prefix.len()..].to_owned(), stored));
            self.tensors = short.collect();
        }
        self
    }

    /// Adds the prefix of the base model to all names, if the embeddings have none.
    pub(crate) fn with_base(mut self, names: &ModelNames) -> Self {
        if self.shape(&format!("{}.weight", names.embedding)).is_none() {
            let tensors = std::mem::take(&mut self.tensors).into_iter();
            let whole = tensors.map(|(name, stored)| (names.with_base(&name), stored));
            self.tensors = whole.collect();
        }
        self
    }

    /// Renames tensors: replaces the prefix `from` of their names by `to`.
    ///
    /// # Errors
    /// If a tensor has both names.
    pub(crate) fn with_prefix(mut self, from: &str, to: &str) -> Result<Self> {
        for (name, stored) in std::mem::take(&mut self.tensors) {
            let renamed = name.strip_prefix(from).map(|rest| format!("{to}{rest}"));
            let now = renamed.unwrap_or_else(|| name.clone());
            if self.tensors.insert(now.clone(), stored).is_some() {
                let problem = format!("it has both `{from}{}` and `{now}`", &now[to.len()..]);
                return Err(ModelError::safetensors(&self.path, problem));
            }
        }
        Ok(self)
    }

    /// Lists the names of the tensors that have not been taken yet, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().filter(|name| !self.taken.contains(*name)).map(String::as_str)
    }

    /// Returns a tensor's shape; `None` for an unknown name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(_, stored)| stored.shape.as_slice())
    }

    /// Returns a tensor's number format; `None` for an unknown name.
    pub(crate) fn format_of(&self, name: &str) -> Option<StoredFormat> {
        self.tensors.get(name).map(|(_, stored)| stored.format)
    }

    /// Returns the storage type of most weights, as safetensors or ggml spells it.
    pub fn dtype(&self) -> Option<String> {
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        for (_, stored) in
            self.tensors.iter().filter(|(name, _)| self.is_weights(name)).map(|it| it.1)
        {
            let num = stored.shape.iter().fold(1_usize, |num, size| num.saturating_mul(*size));
            let total = sizes.entry(stored.format.to_string()).or_default();
            *total = total.saturating_add(num);
        }
        sizes.into_iter().max_by_key(|(_, num)| *num).map(|(format, _)| format)
    }

    /// Returns whether a tensor contains weights, not ids or a mask.
    pub fn is_weights(&self, name: &str) -> bool {
        let is_float = |format| {
            !matches!(
                format,
                StoredFormat::Plain(
                    Dtype::BOOL
                        | Dtype::U8
                        | Dtype::I8
                        | Dtype::I16
                        | Dtype::U16
                        | Dtype::I32
                        | Dtype::U32
                        | Dtype::I64
                        | Dtype::U64
                )
            )
        };
        self.format_of(name).is_some_and(is_float)
    }

    /// Takes a tensor, widened to f32, row by row.
    ///
    /// # Errors
    /// If it is missing, has another shape, or a type that we cannot read.
    pub fn take(&mut self, name: &str, expected: &[usize]) -> Result<Vec<f32>> {
        // Check before allocating: the shape comes from a `config.json`.
        self.check(name, expected)?;
        let mut values = Vec::with_capacity(expected.iter().product());
        let all = 0..expected.first().copied().unwrap_or(1);
        self.take_rows(name, expected, [all], |_, rows| values.extend_from_slice(rows))?;
        Ok(values)
    }

    /// Takes a tensor as [`WeightReader::take`] does, and checks that products with its numbers fit in
    /// an f32.
    ///
    /// # Errors
    /// As [`WeightReader::take`], or if a number is not finite or too large.
    pub(crate) fn take_finite(&mut self, name: &str, expected: &[usize]) -> Result<Vec<f32>> {
        let numbers = self.take(name, expected)?;
        match numbers.iter().find(|number| number.is_nan() || number.abs() >= LARGEST) {
            None => Ok(numbers),
            Some(number) => Err(ModelError::Invalid(format!(
                "`{}`: tensor `{name}` holds {number}, and weights are finite numbers below 1e18; hint: take a \
                 checkpoint from before its training failed",
                self.path.display()
            ))),
        }
    }

    /// Takes a norm's weights with the spec's offset added, and its biases if it is a LayerNorm.
    ///
    /// # Errors
    /// As [`WeightReader::take`].
    pub(crate) fn take_norm(
        &mut self,
        norm: NamedNorm<'_>,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
        let NamedNorm { width, spec, .. } = norm;
        if norm.is_absent() {
            return Ok((vec![1.0; width], None));
        }
        let name = norm.name();
        let mut weight = self.take(&format!("{name}.weight"), &[width])?;
        weight.iter_mut().for_each(|weight| *weight += spec.offset());
        let mut bias = None;
        if spec.form == NormForm::Layer {
            bias = Some(self.take(&format!("{name}.bias"), &[width])?);
        }
        Ok((weight, bias))
    }

    /// Takes some rows of a tensor, widened to f32, and passes them to `each` a few at a time.
    /// `each` also gets the index of its first row among the rows taken. A row spans all but the
    /// first dimension.
    ///
    /// # Errors
    /// As [`WeightReader::take`].
    pub(crate) fn take_rows(
        &mut self,
        name: &str,
        expected: &[usize],
        rows: impl IntoIterator<Item = Range<usize>>,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let mut values = Vec::new();
        let offset = self.check(name, expected)?.1.offset;
        self.take_stored_rows(name, expected, rows, |row, stored| {
            values.clear();
            stored.widen_into(&mut values);
            if offset != 0.0 {
                values.iter_mut().for_each(|value| *value += offset);
            }
            each(row, &values);
        })
    }

    /// Takes rows as [`WeightReader::take_rows`] does, in the format in which they are stored. Only
    /// norms may have an offset, which is not added here.
    ///
    /// # Errors
    /// As [`WeightReader::take`].
    pub(crate) fn take_stored_rows(
        &mut self,
        name: &str,
        expected: &[usize],
        rows: impl IntoIterator<Item = Range<usize>>,
        mut each: impl FnMut(usize, StoredRows<'_>),
    ) -> Result<()> {
        let (OpenFile { path, file }, stored) = self.check(name, expected)?;
        let mut bytes = stored.open(file).map_err(|e| ModelError::io("read", path, e))?;
        let mut first = 0;
        for rows in rows {
            let num_rows = rows.len();
            stored.read_rows(&mut bytes, path, name, rows, |row, rows| each(first + row, rows))?;
            first += num_rows;
        }
        drop(bytes);
        self.taken.insert(name.to_owned());
        Ok(())
    }

    /// Takes a list of token ids, stored as 64-bit integers.
    ///
    /// # Errors
    /// If it is missing, does not have `len` numbers, or a number is not an id below `vocab_size`.
    pub fn take_ids(&mut self, name: &str, len: usize, vocab_size: usize) -> Result<Vec<u32>> {
        let ids = self.take_integers(name, len)?;
        if let Some(id) = ids.iter().find(|id| !(0..vocab_size as i64).contains(*id)) {
            return Err(ModelError::safetensors(
                &self.check(name, &[len])?.0.path,
                format!("tensor `{name}` has {id}, expected ids below {vocab_size}"),
            ));
        }
        Ok(ids.into_iter().map(|id| id as u32).collect())
    }

    /// Takes a list of 64-bit integers.
    ///
    /// # Errors
    /// If it is missing or does not have `len` numbers.
    pub fn take_integers(&mut self, name: &str, len: usize) -> Result<Vec<i64>> {
        let (OpenFile { path, file }, stored) = self.check(name, &[len])?;
        let numbers = stored.read_ids(file, path, name)?;
        self.taken.insert(name.to_owned());
        Ok(numbers)
    }

    /// Finds a tensor and checks its shape.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    fn check(&self, name: &str, expected: &[usize]) -> Result<(&OpenFile, &StoredTensor)> {
        let Some((number, stored)) = self.tensors.get(name) else {
            return Err(self.missing(name));
        };
        let file = &self.files[*number];
        if stored.shape != expected {
            return Err(ModelError::Shape(format!(
                "`{}`: tensor {} has shape {:?}, {} implies {expected:?}",
                file.path.display(),
                self.named(name),
                stored.shape,
                self.keys()
            )));
        }
        Ok((file, stored))
    }

    /// Checks a tensor's shape, so that the caller can allocate memory for it.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub(crate) fn check_shape(&self, name: &str, expected: &[usize]) -> Result<()> {
        self.check(name, expected).map(|_| ())
    }

    /// Drops tensors that the architecture does not need, so that [`Self::finish`] accepts them.
    pub fn ignore(&mut self, is_ignored: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !is_ignored(name));
    }

    /// Describes the lack of a tensor that the architecture needs.
    pub(crate) fn missing(&self, tensor: &str) -> ModelError {
        let (path, tensor, keys) = (self.path.display(), self.named(tensor), self.keys());
        ModelError::Invalid(format!(
            "`{path}` has no tensor {tensor}: the checkpoint does not match its {keys}"
        ))
    }

    /// Names a tensor in messages. The tensors of a GGUF file have other names in the file.
    fn named(&self, tensor: &str) -> String {
        let note =
            if is_gguf(&self.path) { " (its name in a Hugging Face checkpoint)" } else { "" };
        format!("`{tensor}`{note}")
    }

    /// Names the source of the expected shapes.
    fn keys(&self) -> &'static str {
        if is_gguf(&self.path) { "header" } else { "config.json" }
    }

    /// Ends reading. Every tensor must have been taken or ignored by then.
    ///
    /// # Errors
    /// If a tensor was neither taken nor ignored.
    pub fn finish(self) -> Result<()> {
        let mut left = self.names();
        let Some(tensor) = left.next() else { return Ok(()) };
        let others = match left.count() {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        Err(ModelError::Invalid(format!(
            "`{}` has an unexpected tensor {}{others}: models of its `model_type` do not have it",
            self.path.display(),
            self.named(tensor)
        )))
    }
}

impl OpenFile {
    fn open(path: &Path) -> Result<(Self, BTreeMap<String, StoredTensor>)> {
        let file = open_file(path)?;
        let tensors = match path.extension() {
            Some(extension) if extension == "bin" || extension == "pt" => torch::tensors_of(path)?,
            _ if is_gguf(path) => gguf::tensors_of(path)?,
            _ => header::tensors_of(&file, path)?,
        };
        Ok((Self { path: path.to_path_buf(), file }, tensors))
    }
}

/// Checks that all numbers in a directory's weights are finite and not too large to compute with.
///
/// # Errors
/// If a number is not (the error names its tensor), or a file cannot be read.
pub fn check_finite(dir: &Path) -> Result<()> {
    let mut reader = WeightReader::open_dir(dir)?;
    let names: Vec<String> =
        reader.names().filter(|name| reader.is_weights(name)).map(str::to_owned).collect();
    for tensor in names {
        let shape = reader.shape(&tensor).unwrap_or_default().to_vec();
        reader.take_finite(&tensor, &shape)?;
    }
    Ok(())
}

/// Reads lists of token ids below `vocab_size` from a file that contains only the lists `names`.
///
/// # Errors
/// If the file is missing or broken, lacks a list, contains anything else, or an id is out of
/// range.
pub fn read_id_lists<const N: usize>(
    path: &Path,
    names: [&str; N],
    vocab_size: usize,
) -> Result<[Vec<u32>; N]> {
    let mut reader = WeightReader::open_file(path)?;
    let mut lists: [Vec<u32>; N] = std::array::from_fn(|_| Vec::new());
    for (list, name) in lists.iter_mut().zip(names) {
        let len = reader.shape(name).and_then(|shape| shape.first().copied());
        *list = reader.take_ids(name, len.unwrap_or(0), vocab_size)?;
    }
    reader.finish()?;
    Ok(lists)
}

/// Hashes a model: hex SHA-256 over the names, lengths and bytes of `config.json` and all weight
/// files, or of a GGUF file. `observe` gets the number of bytes read so far and in total.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_model_dir(dir: &Path, observe: &mut dyn FnMut(u64, u64)) -> Result<String> {
    hash_files(dir, weight_files(dir)?, observe)
}

/// Hashes a model as [`hash_model_dir`] does, but skips missing weight files. This suits a model of
/// which only the first layers are needed.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_first_layers(dir: &Path, observe: &mut dyn FnMut(u64, u64)) -> Result<String> {
    let mut names = weight_files(dir)?;
    names.retain(|name| is_gguf(dir) || dir.join(name).exists());
    hash_files(dir, names, observe)
}

fn hash_files(
    dir: &Path,
    mut names: Vec<String>,
    observe: &mut dyn FnMut(u64, u64),
) -> Result<String> {
    let mut files: Vec<(&str, PathBuf)> = Vec::new();
    if is_gguf(dir) {
        files.push(("model.gguf", dir.to_path_buf()));
    } else {
        names.insert(0, "config.json".to_owned());
        files.extend(names.iter().map(|name| (&**name, dir.join(name))));
    }
    let sizes = files.iter().filter_map(|(_, path)| path.metadata().ok());
    let (mut num_read, all) = (0, sizes.map(|file| file.len()).sum());
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 20];
    for (name, path) in files {
        let io = |e| ModelError::io("read", &path, e);
        let mut file = open_file(&path)?;
        hasher.update(name.as_bytes());
        hasher.update(file.metadata().map_err(io)?.len().to_le_bytes());
        loop {
            let read = file.read(&mut buffer).map_err(io)?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
            num_read += read as u64;
            observe(num_read, all);
        }
    }
    Ok(hex(&hasher.finalize()))
}
