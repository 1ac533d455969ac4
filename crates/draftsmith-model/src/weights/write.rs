//! Writes safetensors files atomically. The same tensors give the same bytes.

mod torch;

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::Tensor;
use draftsmith_files::{hash_bytes, hash_file, write_json, write_whole};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(crate) use self::torch::write_torch;
use super::read::WeightReader;
use crate::error::{ModelError, Result, read_json_key};

/// A float type, for weights in a file or for a model's computations. Recipes spell it `f32` or
/// `bf16`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDtype {
    /// A float of 32 bits.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// A float of 16 bits with 10 for the fraction: of weights in files only.
    #[serde(skip)]
    F16,
}

impl WeightDtype {
    /// Returns whether the type is f32, the default, which files do not mention.
    pub fn is_f32(&self) -> bool {
        *self == Self::F32
    }

    /// Returns the spelling in recipes and provenance.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Chooses the type for weights that are stored beside a checkpoint: bf16 if its first tensor
    /// has at most 16 bits per number, otherwise f32.
    pub(crate) fn beside(reader: &WeightReader) -> Self {
        match reader.dtype().as_deref() {
            None | Some("F32" | "F64") => Self::F32,
            Some(_) => Self::Bf16,
        }
    }

    /// Reads the type that a `config.json` names. Any type of more bits, or none, becomes f32.
    pub(crate) fn of_config(name: Option<&str>) -> Self {
        match name {
            Some("bfloat16") => Self::Bf16,
            Some("float16") => Self::F16,
            _ => Self::F32,
        }
    }

    /// Returns the spelling in `config.json`.
    pub fn config_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }
}

/// A tensor to write.
#[derive(Debug, Clone)]
pub struct NamedTensor {
    /// The tensor's name in the file.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The values, row by row.
    pub values: Vec<f32>,
}

impl NamedTensor {
    /// Copies a tensor from its device.
    pub fn from_tensor<const D: usize>(name: &str, tensor: Tensor<D>) -> Self {
        let shape = tensor.dims().to_vec();
        let data = tensor.into_data().convert::<f32>();
        let values = data.try_into_vec().expect("converted to f32 above");
        Self { name: name.to_owned(), shape, values }
    }
}

/// Writes a safetensors file atomically and returns the SHA-256 of its bytes. The metadata always
/// includes `format: pt`, which transformers requires.
///
/// # Errors
/// If the file cannot be written.
pub fn write_safetensors(
    path: &Path,
    tensors: &[NamedTensor],
    dtype: WeightDtype,
    metadata: &[(String, String)],
) -> Result<String> {
    write_with_ids(path, tensors, &[], dtype, metadata)
}

/// Writes tensors as [`write_safetensors`] does, and lists of ids besides.
///
/// # Errors
/// If the file cannot be written.
pub fn write_with_ids(
    path: &Path,
    tensors: &[NamedTensor],
    ids: &[(&str, Vec<i64>)],
    dtype: WeightDtype,
    metadata: &[(String, String)],
) -> Result<String> {
    let broken = |problem: String| ModelError::safetensors(path, problem);
    let floats = tensors.iter().map(|tensor| {
        let values = tensor.values.iter();
        let (stored, bytes) = match dtype {
            WeightDtype::F32 => (Dtype::F32, values.flat_map(|v| v.to_le_bytes()).collect()),
            WeightDtype::Bf16 => {
                (Dtype::BF16, values.flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect())
            }
            WeightDtype::F16 => {
                (Dtype::F16, values.flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect())
            }
        };
        (tensor.name.as_str(), stored, tensor.shape.clone(), bytes)
    });
    let ids = ids.iter().map(|(name, ids)| {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        (*name, Dtype::I64, vec![ids.len()], bytes)
    });
    let encoded: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)> = floats.chain(ids).collect();
    let mut views = Vec::with_capacity(encoded.len());
    for (name, dtype, shape, bytes) in &encoded {
        let view = TensorView::new(*dtype, shape.clone(), bytes)
            .map_err(|e| broken(format!("tensor `{name}`: {e}")))?;
        views.push(((*name).to_owned(), view));
    }
    let mut info: HashMap<String, String> = metadata.iter().cloned().collect();
    info.insert("format".to_owned(), "pt".to_owned());
    let mut bytes = safetensors::serialize(views, Some(info)).map_err(|e| broken(e.to_string()))?;
    sort_metadata(&mut bytes).map_err(|e| broken(e.to_string()))?;
    write_whole(path, &bytes)?;
    Ok(hash_bytes(&bytes))
}

/// Writes named lists of ids, as 64-bit integers, and metadata to a safetensors file, atomically.
///
/// # Errors
/// If the file cannot be written.
pub fn write_id_lists(
    path: &Path,
    lists: &[(&str, &[u32])],
    metadata: &[(String, String)],
) -> Result<()> {
    let wide = |ids: &[u32]| ids.iter().map(|id| i64::from(*id)).collect::<Vec<i64>>();
    let lists: Vec<(&str, Vec<i64>)> = lists.iter().map(|(name, ids)| (*name, wide(ids))).collect();
    write_with_ids(path, &[], &lists, WeightDtype::F32, metadata).map(drop)
}

/// Sorts the header's metadata. The library writes it from a hash map, but the same tensors should
/// give the same bytes.
fn sort_metadata(bytes: &mut [u8]) -> Result<(), serde_json::Error> {
    let header_len = usize::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let header = &mut bytes[8..8 + header_len];
    let mut object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header)?;
    if let Some(serde_json::Value::Object(metadata)) = object.get_mut("__metadata__") {
        metadata.sort_keys();
    }
    let sorted = serde_json::to_vec(&object)?;
    // Sorting keeps the length; the header's padding stays spaces.
    if sorted.len() <= header.len() {
        header.fill(b' ');
        header[..sorted.len()].copy_from_slice(&sorted);
    }
    Ok(())
}

/// Writes an export's `config.json` with the SHA-256 of its weight file.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn write_config(dir: &Path, mut config: Value, weights_hash: String) -> Result<()> {
    config["weights_hash"] = weights_hash.into();
    Ok(write_json(&dir.join("config.json"), &config)?)
}

/// Writes `model.safetensors` in f32, with the given metadata, then `config.json` with the checksum of
/// the weights.
///
/// # Errors
/// If a file cannot be written.
///
/// # Panics
/// If the configuration is not a JSON object.
pub fn write_network(
    dir: &Path,
    tensors: &[NamedTensor],
    metadata: &[(String, String)],
    config: &impl Serialize,
) -> Result<()> {
    let path = dir.join("model.safetensors");
    let hash = write_safetensors(&path, tensors, WeightDtype::F32, metadata)?;
    write_config(dir, json!(config), hash)
}

/// Checks an export's weights. Exports from other programs have no checksum and pass.
///
/// # Errors
/// If the weights have changed since they were exported, or a file cannot be read.
pub(crate) fn check_weights(dir: &Path) -> Result<()> {
    let hash: Option<String> = read_json_key(&dir.join("config.json"), "weights_hash")?;
    let Some(expected) = hash else { return Ok(()) };
    let path = dir.join("model.safetensors");
    if hash_file(&path)? == expected {
        return Ok(());
    }
    Err(ModelError::Invalid(format!(
        "`{}` was changed since it was exported: its checksum differs from `weights_hash` in config.json; hint: copy \
         the whole directory again, or delete it and train again",
        path.display()
    )))
}
