//! Reading weight files: one safetensors file or a sharded index, tensor by tensor; their metadata;
//! the hash of a checkpoint.
//!
//! A header is believed only as far as the file's length bears it out, and tensors are read one at
//! a time, some rows at once, so that a broken file costs an error and a large one no second copy
//! in memory.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use crate::error::{ModelError, read_json};

/// The file of all weights, and the index of where they are instead.
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Of a tensor so much is read at once.
const READ_BYTES: usize = 1 << 20;

/// The longest header that is read: the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The weights of one checkpoint, open for reading.
#[derive(Debug)]
pub struct WeightReader {
    /// What messages call it: the directory, or the single file.
    path: PathBuf,
    files: Vec<OpenFile>,
    /// Tensor name to file index; shrinks as tensors are taken.
    remaining: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    metadata: Metadata,
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl WeightReader {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// If neither is there, or a file is cut short or breaks the format.
    pub fn open_dir(dir: &Path) -> Result<Self, ModelError> {
        let Some(index) = find_index(dir)? else { return Self::open_file(&dir.join(SINGLE)) };
        let mut files = Vec::new();
        let mut numbers = HashMap::new();
        let mut remaining = BTreeMap::new();
        for (tensor, file_name) in index.weight_map {
            let number = match numbers.get(&file_name) {
                Some(number) => *number,
                None => {
                    files.push(OpenFile::open(&dir.join(&file_name))?);
                    numbers.insert(file_name, files.len() - 1);
                    files.len() - 1
                }
            };
            if files[number].metadata.info(&tensor).is_none() {
                return Err(ModelError::MissingTensor { path: files[number].path.clone(), tensor });
            }
            remaining.insert(tensor, number);
        }
        Ok(Self { path: dir.to_path_buf(), files, remaining })
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// If it cannot be read, is cut short, or breaks the format.
    pub fn open_file(path: &Path) -> Result<Self, ModelError> {
        let file = OpenFile::open(path)?;
        let remaining = file.metadata.tensors().into_keys().map(|name| (name, 0)).collect();
        Ok(Self { path: path.to_path_buf(), files: vec![file], remaining })
    }

    /// The names not taken yet, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.remaining.keys().map(String::as_str)
    }

    /// The shape of a tensor not taken yet.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let file = &self.files[*self.remaining.get(name)?];
        file.metadata.info(name).map(|info| info.shape.as_slice())
    }

    /// The format of a tensor not taken yet.
    pub(crate) fn dtype_of(&self, name: &str) -> Option<Dtype> {
        let file = &self.files[*self.remaining.get(name)?];
        file.metadata.info(name).map(|info| info.dtype)
    }

    /// The storage type of the first tensor, as safetensors spells it; `None` without tensors.
    pub fn dtype(&self) -> Option<String> {
        let (name, number) = self.remaining.iter().next()?;
        self.files[*number].metadata.info(name).map(|info| format!("{:?}", info.dtype))
    }

    /// Takes a tensor, widened to f32, row by row.
    ///
    /// # Errors
    /// If it is missing, has another shape, or is stored in a type that cannot be read.
    pub fn take(&mut self, name: &str, expected: &[usize]) -> Result<Vec<f32>, ModelError> {
        // Before there is room for it: the shape is a `config.json`'s, and may be any.
        self.check(name, expected)?;
        let mut values = Vec::with_capacity(expected.iter().product());
        self.take_rows(name, expected, |_, rows| values.extend_from_slice(rows))?;
        Ok(values)
    }

    /// Takes a tensor a few rows at a time, widened to f32: `each` is given the number of the first
    /// and their values. A row is what lies side by side: all but the first dimension.
    ///
    /// # Errors
    /// As [`WeightReader::take`].
    pub fn take_rows(
        &mut self,
        name: &str,
        expected: &[usize],
        each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        let (number, info) = self.check(name, expected)?;
        self.remaining.remove(name);
        self.files[number].read_rows(name, &info, each)
    }

    /// Checks that a tensor not taken yet is there, and of a shape.
    ///
    /// # Errors
    /// If it is not.
    pub(crate) fn check(
        &self,
        name: &str,
        expected: &[usize],
    ) -> Result<(usize, TensorInfo), ModelError> {
        let number = self.remaining.get(name).copied();
        let info = number.and_then(|number| self.files[number].metadata.info(name));
        let (Some(number), Some(info)) = (number, info) else {
            return Err(ModelError::MissingTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
            });
        };
        if info.shape != expected {
            return Err(ModelError::Shape {
                path: self.files[number].path.clone(),
                tensor: name.to_owned(),
                found: info.shape.clone(),
                expected: expected.to_vec(),
            });
        }
        Ok((number, info.clone()))
    }

    /// Drops tensors that the architecture may do without.
    pub fn ignore(&mut self, is_ignored: impl Fn(&str) -> bool) {
        self.remaining.retain(|name, _| !is_ignored(name));
    }

    /// Ends reading: every tensor must have been taken or ignored.
    ///
    /// # Errors
    /// If one is left.
    pub fn finish(self) -> Result<(), ModelError> {
        let others = self.remaining.len().saturating_sub(1);
        match self.remaining.into_keys().next() {
            Some(tensor) => Err(ModelError::ExtraTensor { path: self.path, tensor, others }),
            None => Ok(()),
        }
    }
}

/// Where a directory's weights are: in [`SINGLE`] if there is no index, or it is not needed.
///
/// # Errors
/// If there are none, or the index is not one or names a file of another directory.
fn find_index(dir: &Path) -> Result<Option<ShardIndex>, ModelError> {
    let path = dir.join(INDEX);
    if dir.join(SINGLE).exists() {
        return Ok(None);
    }
    if !path.exists() {
        return Err(ModelError::NoWeights { path: dir.to_path_buf() });
    }
    let index: ShardIndex = read_json(&path)?;
    match index.weight_map.iter().find(|(_, file)| !is_plain_name(file)) {
        None => Ok(Some(index)),
        Some((tensor, file)) => {
            let (tensor, file) = (tensor.clone(), file.clone());
            Err(ModelError::OutsideDir { path, tensor, file })
        }
    }
}

/// Whether a name is that of a file in a directory, and not of one elsewhere. What it links to is
/// its owner's business: Hugging Face's cache is made of links.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
}

impl OpenFile {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |e| ModelError::io("read", path, e);
        let broken =
            |problem: String| ModelError::Safetensors { path: path.to_path_buf(), problem };
        let mut file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        if file_bytes < 8 {
            return Err(broken(format!("it has {file_bytes} bytes, a header needs at least 8")));
        }
        let mut length = [0_u8; 8];
        file.read_exact(&mut length).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes > file_bytes - 8 {
            return Err(broken(format!(
                "its header claims {header_bytes} bytes, the file has {file_bytes}"
            )));
        }
        let header_len = usize::try_from(header_bytes).map_err(|e| broken(e.to_string()))?;
        let mut header = vec![0_u8; header_len];
        file.read_exact(&mut header).map_err(io)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|e| broken(format!("its header cannot be read: {e}")))?;
        let data_bytes = file_bytes - 8 - header_bytes;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            if end as u64 > data_bytes || start > end {
                return Err(broken(format!(
                    "tensor `{name}` claims bytes {start} to {end} of {data_bytes}"
                )));
            }
            let bits = info
                .shape
                .iter()
                .try_fold(info.dtype.bitsize(), |product, dim| product.checked_mul(*dim));
            if bits != (end - start).checked_mul(8) {
                return Err(broken(format!(
                    "tensor `{name}` of shape {:?} claims {} bytes",
                    info.shape,
                    end - start
                )));
            }
        }
        Ok(Self { path: path.to_path_buf(), file, data_start: 8 + header_bytes, metadata })
    }

    fn read_rows(
        &mut self,
        name: &str,
        info: &TensorInfo,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), ModelError> {
        let io = |e| ModelError::io("read", &self.path, e);
        let width = match info.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => {
                return Err(ModelError::Dtype {
                    path: self.path.clone(),
                    tensor: name.to_owned(),
                    dtype: format!("{other:?}"),
                });
            }
        };
        let (start, end) = info.data_offsets;
        let row_len = info.shape.iter().skip(1).product::<usize>().max(1);
        let rows_at_once = (READ_BYTES / (row_len * width)).max(1);
        let mut bytes = vec![0_u8; (rows_at_once * row_len * width).min(end - start)];
        let mut values = Vec::with_capacity(bytes.len() / width);
        self.file.seek(SeekFrom::Start(self.data_start + start as u64)).map_err(io)?;
        let (mut row, mut num_left) = (0, end - start);
        while num_left > 0 {
            let bytes = &mut bytes[..num_left.min(rows_at_once * row_len * width)];
            self.file.read_exact(bytes).map_err(io)?;
            values.clear();
            match info.dtype {
                Dtype::F16 => values.extend(bytes.as_chunks().0.iter().map(|b| f16_of(*b))),
                Dtype::BF16 => values.extend(bytes.as_chunks().0.iter().map(|b| bf16_of(*b))),
                _ => values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
            }
            each(row, &values);
            row += rows_at_once;
            num_left -= bytes.len();
        }
        Ok(())
    }
}

fn f16_of(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn bf16_of(bytes: [u8; 2]) -> f32 {
    bf16::from_le_bytes(bytes).to_f32()
}

/// The names of the files that a checkpoint's weights are read from: `model.safetensors`, or else the
/// index and every file that it names, sorted.
///
/// # Errors
/// If neither is there, or the index is not one or names a file of another directory.
pub fn weight_files(dir: &Path) -> Result<Vec<String>, ModelError> {
    let Some(index) = find_index(dir)? else { return Ok(vec![SINGLE.to_owned()]) };
    let mut names: Vec<String> = index.weight_map.into_values().collect();
    names.push(INDEX.to_owned());
    names.sort();
    names.dedup();
    Ok(names)
}

/// The hex SHA-256 over the names, lengths and bytes of `config.json` and of all files that the
/// weights are read from, whatever they are called and wherever links lead: what provenance calls
/// the model's hash.
///
/// # Errors
/// If a file cannot be read.
pub fn hash_model_dir(dir: &Path) -> Result<String, ModelError> {
    let mut names = weight_files(dir)?;
    names.insert(0, "config.json".to_owned());
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
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// Bytes as lower-case hex digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The string-to-string metadata of a safetensors file.
///
/// # Errors
/// If the file is not whole.
pub fn read_metadata(path: &Path) -> Result<BTreeMap<String, String>, ModelError> {
    let bytes = std::fs::read(path).map_err(|e| ModelError::io("read", path, e))?;
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| {
        ModelError::Safetensors { path: path.to_path_buf(), problem: e.to_string() }
    })?;
    Ok(metadata.metadata().clone().unwrap_or_default().into_iter().collect())
}
