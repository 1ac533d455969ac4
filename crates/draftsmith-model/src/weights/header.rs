//! The header of a safetensors file, checked against the file's length.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use draftsmith_files::read_file;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

use super::stored::{Place, StoredTensor};
use crate::error::{ModelError, Result};

/// The maximum length of a header in bytes, set by the format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads the header of a safetensors file, and returns its tensors by name.
pub(super) fn tensors_of(mut file: &File, path: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let io = |e| ModelError::io("read", path, e);
    let broken = |problem: String| ModelError::safetensors(path, problem);
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
    let data_start = 8 + header_bytes;
    let data_bytes = file_bytes - data_start;
    let mut tensors = BTreeMap::new();
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
        let (dtype, shape, start) = (info.dtype, info.shape.clone(), data_start + start as u64);
        tensors.insert(name, StoredTensor::plain(dtype, shape, Place::At(start)));
    }
    Ok(tensors)
}

/// Reads the string-to-string metadata of a safetensors file.
///
/// # Errors
/// If the file is truncated or malformed.
pub fn read_metadata(path: &Path) -> Result<BTreeMap<String, String>> {
    let bytes = read_file(path)?;
    let (_, metadata) =
        SafeTensors::read_metadata(&bytes).map_err(|e| ModelError::safetensors(path, e))?;
    Ok(metadata.metadata().clone().unwrap_or_default().into_iter().collect())
}
