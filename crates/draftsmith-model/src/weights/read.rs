//! Reading weight files: one file or a sharded index, safetensors or what `torch.save` writes, tensor
//! by tensor; the hash of a checkpoint.
//!
//! What a file says of itself is believed only as far as its length bears it out, and tensors are
//! read one at a time, some rows at once, so that a broken file costs an error and a large one no
//! second copy in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use draftsmith_files::hex;
use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::files::{WeightFiles, weight_files};
use super::stored::{StoredRows, StoredTensor};
use super::{header, torch};
use crate::error::ModelError;

/// The weights of one checkpoint, open for reading.
#[derive(Debug)]
pub struct WeightReader {
    /// What messages call it: the directory, or the single file.
    path: PathBuf,
    files: Vec<OpenFile>,
    /// Tensor name to file index.
    tensors: BTreeMap<String, usize>,
    /// The names of those that were taken, whole or in part.
    taken: BTreeSet<String>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, StoredTensor>,
}

impl WeightReader {
    /// Opens `model.safetensors`, the shards that `model.safetensors.index.json` lists, or
    /// `pytorch_model.bin` and its like.
    ///
    /// # Errors
    /// If none is there, or a file is cut short or breaks its format.
    pub fn open_dir(dir: &Path) -> Result<Self, ModelError> {
        Self::open_dir_of(dir, |_| true)
    }

    /// The same of those tensors alone that are `wanted`, by name: files of others need not be there.
    ///
    /// # Errors
    /// As [`WeightReader::open_dir`].
    pub(crate) fn open_dir_of(
        dir: &Path,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Self, ModelError> {
        let mut file_of = match WeightFiles::of_dir(dir)? {
            WeightFiles::Single(name) => {
                let mut reader = Self::open_file(&dir.join(name))?;
                reader.ignore(|name| !wanted(name));
                return Ok(reader);
            }
            WeightFiles::Sharded { file_of, .. } => file_of,
        };
        file_of.retain(|tensor, _| wanted(tensor));
        let mut files = Vec::new();
        let mut numbers = HashMap::new();
        let mut tensors = BTreeMap::new();
        for (tensor, file_name) in file_of {
            let number = match numbers.get(&file_name) {
                Some(number) => *number,
                None => {
                    files.push(OpenFile::open(&dir.join(&file_name))?);
                    numbers.insert(file_name, files.len() - 1);
                    files.len() - 1
                }
            };
            if !files[number].tensors.contains_key(&tensor) {
                return Err(ModelError::MissingTensor { path: files[number].path.clone(), tensor });
            }
            tensors.insert(tensor, number);
        }
        Ok(Self { path: dir.to_path_buf(), files, tensors, taken: BTreeSet::new() })
    }

    /// Opens one file: what `torch.save` wrote if its name ends in `.bin`, or else safetensors.
    ///
    /// # Errors
    /// If it cannot be read, is cut short, or breaks the format.
    pub fn open_file(path: &Path) -> Result<Self, ModelError> {
        let file = OpenFile::open(path)?;
        let tensors = file.tensors.keys().map(|name| (name.clone(), 0)).collect();
        let taken = BTreeSet::new();
        Ok(Self { path: path.to_path_buf(), files: vec![file], tensors, taken })
    }

    /// The same with names without `prefix`, where every name begins with it.
    pub(crate) fn without_prefix(mut self, prefix: &str) -> Self {
        if self.tensors.keys().all(|name| name.starts_with(prefix)) {
            let short = |name: &String| name[prefix.len()..].to_owned();
            self.tensors = self.tensors.iter().map(|(name, file)| (short(name), *file)).collect();
            for file in &mut self.files {
                let tensors = std::mem::take(&mut file.tensors);
                let named = tensors.into_iter().filter(|(name, _)| name.starts_with(prefix));
                file.tensors = named.map(|(name, stored)| (short(&name), stored)).collect();
            }
        }
        self
    }

    /// The file or directory that was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The names not taken yet, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().filter(|name| !self.taken.contains(*name)).map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let file = &self.files[*self.tensors.get(name)?];
        file.tensors.get(name).map(|stored| stored.shape.as_slice())
    }

    /// The format of a tensor.
    pub(crate) fn dtype_of(&self, name: &str) -> Option<Dtype> {
        let file = &self.files[*self.tensors.get(name)?];
        file.tensors.get(name).map(|stored| stored.dtype)
    }

    /// The storage type of the first weights, as safetensors spells it; `None` without any.
    pub fn dtype(&self) -> Option<String> {
        let name = self.tensors.keys().find(|name| self.is_weights(name))?;
        self.dtype_of(name).map(|dtype| format!("{dtype:?}"))
    }

    /// Whether a tensor has weights, and not ids.
    pub fn is_weights(&self, name: &str) -> bool {
        self.dtype_of(name).is_some_and(|dtype| dtype != Dtype::I64)
    }

    /// Takes a tensor, widened to f32, row by row.
    ///
    /// # Errors
    /// If it is missing, has another shape, or is stored in a type that cannot be read.
    pub fn take(&mut self, name: &str, expected: &[usize]) -> Result<Vec<f32>, ModelError> {
        // Before there is room for it: the shape is a `config.json`'s, and may be any.
        self.check(name, expected)?;
        let mut values = Vec::with_capacity(expected.iter().product());
        let all = 0..expected.first().copied().unwrap_or(1);
        self.take_rows(name, expected, [all], |_, rows| values.extend_from_slice(rows))?;
        Ok(values)
    }

    /// Takes some rows of a tensor, a few at a time, widened to f32: `each` is given the number of
    /// the first, counted from the first that is taken, and their values. A row is what lies side by
    /// side: all but the first dimension.
    ///
    /// # Errors
    /// As [`WeightReader::take`].
    pub(crate) fn take_rows(
        &mut self,
        name: &str,
        expected: &[usize],
        rows: impl IntoIterator<Item = Range<usize>>,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        let mut values = Vec::new();
        self.take_stored_rows(name, expected, rows, |row, stored| {
            values.clear();
            stored.widen_into(&mut values);
            each(row, &values);
        })
    }

    /// As [`WeightReader::take_rows`], with the rows as the file has them.
    ///
    /// # Errors
    /// As [`WeightReader::take`].
    pub(crate) fn take_stored_rows(
        &mut self,
        name: &str,
        expected: &[usize],
        rows: impl IntoIterator<Item = Range<usize>>,
        mut each: impl FnMut(usize, StoredRows<'_>),
    ) -> Result<(), ModelError> {
        let (OpenFile { path, file, .. }, stored) = self.check(name, expected)?;
        let mut first = 0;
        for rows in rows {
            let num_rows = rows.len();
            stored.read_rows(file, path, name, rows, |row, rows| each(first + row, rows))?;
            first += num_rows;
        }
        self.taken.insert(name.to_owned());
        Ok(())
    }

    /// Takes a list of token ids, stored as 64-bit integers.
    ///
    /// # Errors
    /// If it is missing, has not `len` numbers, or one of them is no id of `vocab_size`.
    pub fn take_ids(
        &mut self,
        name: &str,
        len: usize,
        vocab_size: usize,
    ) -> Result<Vec<u32>, ModelError> {
        let (OpenFile { path, file, .. }, stored) = self.check(name, &[len])?;
        let ids = stored.read_ids(file, path, name)?;
        if let Some(id) = ids.iter().find(|id| !(0..vocab_size as i64).contains(*id)) {
            return Err(ModelError::Safetensors {
                path: path.clone(),
                problem: format!("tensor `{name}` has {id}, expected ids below {vocab_size}"),
            });
        }
        self.taken.insert(name.to_owned());
        Ok(ids.into_iter().map(|id| id as u32).collect())
    }

    /// Checks that a tensor is there, and of a shape.
    ///
    /// # Errors
    /// If it is not.
    fn check(
        &self,
        name: &str,
        expected: &[usize],
    ) -> Result<(&OpenFile, &StoredTensor), ModelError> {
        let file = self.tensors.get(name).map(|number| &self.files[*number]);
        let stored = file.and_then(|file| file.tensors.get(name));
        let (Some(file), Some(stored)) = (file, stored) else {
            return Err(ModelError::MissingTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
            });
        };
        if stored.shape != expected {
            return Err(ModelError::Shape {
                path: file.path.clone(),
                tensor: name.to_owned(),
                found: stored.shape.clone(),
                expected: expected.to_vec(),
            });
        }
        Ok((file, stored))
    }

    /// Checks that a tensor is there, and of a shape, before there is room for it.
    ///
    /// # Errors
    /// If it is not.
    pub(crate) fn check_shape(&self, name: &str, expected: &[usize]) -> Result<(), ModelError> {
        self.check(name, expected).map(|_| ())
    }

    /// Drops tensors that the architecture may do without.
    pub fn ignore(&mut self, is_ignored: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !is_ignored(name));
    }

    /// Ends reading: every tensor must have been taken or ignored.
    ///
    /// # Errors
    /// If one is left.
    pub fn finish(self) -> Result<(), ModelError> {
        let mut left = self.names();
        let Some(tensor) = left.next().map(str::to_owned) else { return Ok(()) };
        let others = left.count();
        Err(ModelError::ExtraTensor { path: self.path, tensor, others })
    }
}

impl OpenFile {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let file = File::open(path).map_err(|e| ModelError::io("read", path, e))?;
        let tensors = match path.extension() {
            Some(extension) if extension == "bin" => torch::tensors_of(&file, path)?,
            _ => header::tensors_of(&file, path)?,
        };
        Ok(Self { path: path.to_path_buf(), file, tensors })
    }
}

/// The hex SHA-256 over the names, lengths and bytes of `config.json` and of all files that the
/// weights are read from, whatever they are called and wherever links lead: what provenance calls
/// the model's hash. `observe` is told how many bytes were read, of how many.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_model_dir(dir: &Path, observe: &mut dyn FnMut(u64, u64)) -> Result<String, ModelError> {
    hash_files(dir, weight_files(dir)?, observe)
}

/// The same of those files that are there, where a model's first layers are enough.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_first_layers(
    dir: &Path,
    observe: &mut dyn FnMut(u64, u64),
) -> Result<String, ModelError> {
    let mut names = weight_files(dir)?;
    names.retain(|name| dir.join(name).exists());
    hash_files(dir, names, observe)
}

fn hash_files(
    dir: &Path,
    mut names: Vec<String>,
    observe: &mut dyn FnMut(u64, u64),
) -> Result<String, ModelError> {
    names.insert(0, "config.json".to_owned());
    let sizes = names.iter().filter_map(|name| dir.join(name).metadata().ok());
    let (mut num_read, all) = (0, sizes.map(|file| file.len()).sum());
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 20];
    for name in names {
        let path = dir.join(&name);
        let io = |e| ModelError::io("read", &path, e);
        let mut file = File::open(&path).map_err(io)?;
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
