//! Writing safetensors files, whole or not at all. The same tensors give the same bytes.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::Tensor;
use draftsmith_files::{hash_bytes, write_whole};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};

use super::read::WeightReader;
use crate::error::ModelError;

/// The type of weights: in a file, or in a model that computes. As recipes spell it, `f32` or
/// `bf16`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDtype {
    /// 32 bits.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

impl WeightDtype {
    /// Whether it is f32, which files leave unsaid.
    pub fn is_f32(&self) -> bool {
        *self == Self::F32
    }

    /// As recipes and provenance spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// That of weights to be used beside those of a checkpoint: bf16 where its first have 16 bits.
    pub(crate) fn beside(reader: &WeightReader) -> Self {
        match reader.dtype().as_deref() {
            Some("BF16" | "F16") => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// That of weights which a `config.json` says to be of such a type, and bf16 in place of f16.
    pub(crate) fn of_config(name: Option<&str>) -> Self {
        match name {
            Some("bfloat16" | "float16") => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// As `config.json` spells it.
    pub fn config_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// One tensor to be written: name, shape, values row by row.
#[derive(Debug, Clone)]
pub struct NamedTensor {
    /// The name in the file.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The values.
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

/// A list of token ids to be written, as 64-bit integers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamedIds<'a> {
    /// The name in the file.
    pub(crate) name: &'a str,
    pub(crate) ids: &'a [u32],
}

/// Writes a safetensors file, whole or not at all, and returns the SHA-256 of its bytes. The metadata
/// always says `format: pt`, which every transformers release reads.
///
/// # Errors
/// If the file cannot be written.
pub fn write_safetensors(
    path: &Path,
    tensors: &[NamedTensor],
    dtype: WeightDtype,
    metadata: &[(String, String)],
) -> Result<String, ModelError> {
    write_with_ids(path, tensors, &[], dtype, metadata)
}

/// [`write_safetensors`] with lists of ids beside the tensors.
///
/// # Errors
/// As there.
pub(crate) fn write_with_ids(
    path: &Path,
    tensors: &[NamedTensor],
    ids: &[NamedIds<'_>],
    dtype: WeightDtype,
    metadata: &[(String, String)],
) -> Result<String, ModelError> {
    let broken = |problem: String| ModelError::Safetensors { path: path.to_path_buf(), problem };
    let encoded: Vec<Vec<u8>> = tensors
        .iter()
        .map(|t| match dtype {
            WeightDtype::F32 => t.values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            WeightDtype::Bf16 => {
                t.values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
            }
        })
        .collect();
    let stored = match dtype {
        WeightDtype::F32 => Dtype::F32,
        WeightDtype::Bf16 => Dtype::BF16,
    };
    let mut views = Vec::with_capacity(tensors.len());
    for (tensor, bytes) in tensors.iter().zip(&encoded) {
        let view = TensorView::new(stored, tensor.shape.clone(), bytes)
            .map_err(|e| broken(format!("tensor `{}`: {e}", tensor.name)))?;
        views.push((tensor.name.clone(), view));
    }
    let encoded: Vec<Vec<u8>> = ids
        .iter()
        .map(|named| named.ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect())
        .collect();
    for (named, bytes) in ids.iter().zip(&encoded) {
        let view = TensorView::new(Dtype::I64, vec![named.ids.len()], bytes)
            .map_err(|e| broken(format!("tensor `{}`: {e}", named.name)))?;
        views.push((named.name.to_owned(), view));
    }
    let mut info: HashMap<String, String> = metadata.iter().cloned().collect();
    info.insert("format".to_owned(), "pt".to_owned());
    let mut bytes = safetensors::serialize(views, Some(info)).map_err(|e| broken(e.to_string()))?;
    sort_metadata(&mut bytes).map_err(|e| broken(e.to_string()))?;
    write_whole(path, &bytes)?;
    Ok(hash_bytes(&bytes))
}

/// Puts the header's metadata in order: the library writes it from a hash map, and the same tensors
/// should give the same bytes.
fn sort_metadata(bytes: &mut [u8]) -> Result<(), serde_json::Error> {
    let header_len = usize::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    let header = &mut bytes[8..8 + header_len];
    let mut object: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header)?;
    if let Some(serde_json::Value::Object(metadata)) = object.get_mut("__metadata__") {
        metadata.sort_keys();
    }
    let sorted = serde_json::to_vec(&object)?;
    // The same entries take the same room; what is left of the padding stays spaces.
    if sorted.len() <= header.len() {
        header.fill(b' ');
        header[..sorted.len()].copy_from_slice(&sorted);
    }
    Ok(())
}

/// Writes JSON as people read it, whole or not at all.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), ModelError> {
    Ok(write_whole(path, pretty(value).as_bytes())?)
}

/// JSON as people read it, with a newline at the end.
pub(crate) fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}
